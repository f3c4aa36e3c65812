"""Faults between sites that are applications of their own: cut links, killed drivers, routers and instances.

    site_program.py   the program of one site, which obeys commands
    site_process.py   one such program from outside
    proxy.py          a link between sites that can be slow, stalled or cut
    run.py            the faults, the load and the verdict

Called by `tiercel chaos --applications 2` and by tests.
"""
