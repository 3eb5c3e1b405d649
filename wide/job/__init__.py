"""What to train: the user's Job, the file it lives in, and which samples make which batch."""

from wide.job.definition import Job, supervised

__all__ = ["Job", "supervised"]
