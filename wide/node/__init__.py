"""The side that computes."""
