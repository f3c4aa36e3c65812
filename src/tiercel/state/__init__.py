"""Keyed state behind one contract: memory, RocksDB, backup."""
