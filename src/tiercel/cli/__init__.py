"""The command line: one module per command, and main.py, which puts them together.

A command checks its options, shows progress on stderr and results on stdout, and sets the exit code. Spark
and the laboratory (bench, chaos, demo) are imported only by the command that needs them. docs/cli.md is made
of the help texts.
"""
