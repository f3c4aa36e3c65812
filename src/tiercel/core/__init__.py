"""The protocol, pure: no I/O, no clock, no randomness."""
