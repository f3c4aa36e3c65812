"""Deciding what moves where, pure: view, policies, planner, controller."""
