"""Exploration: one run, campaigns of many, a death at every crash point, mutants, and shrinking of failures.

Called by `tiercel sim`, by tests, and by docs/generate.py for the tables of crash points and mutants.
"""
