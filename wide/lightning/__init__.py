"""`wide.lightning.job(module, data)`: what a LightningModule would train, as a Job. Loads nothing of it by itself."""
