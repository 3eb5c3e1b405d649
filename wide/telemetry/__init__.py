"""Numbers and words about a run, on their way to people."""
