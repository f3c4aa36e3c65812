"""What the benchmarks compare Tiercel with: floors that no deployment can beat, and Spark itself.

Called by bench/scenarios.
"""
