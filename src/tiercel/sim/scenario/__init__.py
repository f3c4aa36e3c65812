"""What one simulated run tries: a scenario as data, drawn from a seed, and the deployment that runs it.

scenario.py draws sites, operators, traffic, moves and faults. features.py adds optional features, each from
its own random stream. deployment.py starts the processes and performs the script. large.py is one fixed
scenario of fifty sites. Called by explore/ and by the command line.
"""
