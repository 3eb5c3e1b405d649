"""Tensors to bytes and back. Knows no network and no training."""
