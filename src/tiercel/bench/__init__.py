"""Scenarios, measuring, plots."""
