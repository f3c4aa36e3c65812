"""The demonstration: a speed monitor on Spark, a live move, a scale-out, and an audit of every output.

run.py is the run, traffic.py its cars, speed_monitor.py its operator, audit.py the comparison of outputs with
inputs, plots.py the picture and the page. Installed with `pip install 'tiercel[lab]'`. Called by `tiercel
demo`.
"""
