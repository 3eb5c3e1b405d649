"""The command `wide`."""
