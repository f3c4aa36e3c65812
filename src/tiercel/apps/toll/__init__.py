"""Linear Road: cars on expressways that pay tolls, and accidents.

`rules.py` has the rules, `generator.py` the traffic, `processors.py` the operators, `oracle.py` the batch job
that says what must come out, `app.py` makes an application of it. Only `catalogue.py` names it.
"""
