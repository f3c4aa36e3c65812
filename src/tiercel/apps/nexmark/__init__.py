"""NEXMark: persons, auctions and bids, and ten queries over them.

`generator.py` has the events, `queries.py` connects operators, `processors.py` has those not ready-made,
`oracle.py` says in SQL what must come out, `app.py` makes an application of it. Only `catalogue.py` names it.
"""
