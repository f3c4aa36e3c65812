"""Faults of every kind on real Spark, at random, and a judge of every row that went through them."""
