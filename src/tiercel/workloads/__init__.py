"""Generators and applications, shared by simulator, benchmarks and examples."""
