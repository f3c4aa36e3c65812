"""Policies: functions from a view of the load to proposals, each with its reason.

A policy has no clock, no IO and no memory of its own. What it remembers it returns, and gets back with the
next view. `named` makes the shipped ones; a user's function over a view is a policy too. The governor
calls them.
"""
