"""`wide.hf.job(trainer)`: what a transformers.Trainer would train, as a Job. Loads nothing by itself."""
