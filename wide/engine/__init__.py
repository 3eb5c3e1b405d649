"""The same job on torch.distributed: `torchrun --nproc-per-node 4 -m wide.engine job.py`."""
