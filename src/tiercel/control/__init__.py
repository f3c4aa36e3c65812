"""The controller: takes plans and scale requests, and sees each move through to its end.

It is never in the path of a row and decides no move; the log of the source router does. Drivers and the Spark
side call `Controller`; it speaks to routers by messages of core.messages.
"""
