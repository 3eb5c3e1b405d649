"""The side that owns the model and hands out work."""
