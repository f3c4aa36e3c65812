"""Policies on made-up loads: how many changes, how much latency and how many instances a policy costs.

A model of one operator stands in for a deployment: instances with a capacity, slots with a load, rows that
wait. The policies, the governor and the planner by load are the real ones. `tiercel policy simulate` calls
this.
"""
