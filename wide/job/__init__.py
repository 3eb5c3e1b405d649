"""What to train: the user's Job, the file it lives in, and which samples make which batch."""
