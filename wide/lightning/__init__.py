"""`wide.lightning.job(module, data)`: what a LightningModule would train, as a Job. Loads nothing of it by itself: the
module that is given brings its library along.
"""

from __future__ import annotations

from wide.lightning.checkpoint import save
from wide.lightning.making import job

__all__ = ["job", "save"]
