"""Backups: the files of a process in a location, their upload, restore, and whole deployments.

Called by `process` (uploads), `recovery` (restores), `admin` and spark/ (past states).
"""
