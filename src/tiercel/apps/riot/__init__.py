"""RIoTBench: messages of sensors, and the dataflows ETL, STATS and PRED.

`generator.py` has the messages, `tasks.py` what is done with them, `oracle.py` the batch jobs that say what
must come out, `app.py` makes an application of it. Only `catalogue.py` names it.
"""
