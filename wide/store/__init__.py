"""What stays on disk: run.db and the trained weights."""
