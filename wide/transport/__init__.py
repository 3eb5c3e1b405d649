"""Bytes between two ends: TCP, and an in-memory twin for tests. OSError stops here."""
