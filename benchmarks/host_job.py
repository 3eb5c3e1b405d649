"""Jobs for one host: the models of host_model.py, an update after as many batches as the name says: `small_2`,
`small_16`, `middle_4`, `large_4`, …
"""

from functools import partial

from torch import nn

import wide
from benchmarks import host_model


def make(size: str, batches_per_step: int) -> wide.Job:
    return wide.Job(
        model=partial(host_model.model, host_model.WIDTHS[size]),
        dataset=host_model.points,
        loss=wide.supervised(nn.CrossEntropyLoss()),
        optimizer=host_model.optimizer,
        batch_size=host_model.BATCH_SIZE,
        batches_per_step=batches_per_step,
        steps=10**9,
    )


globals().update({f"{size}_{count}": make(size, count) for size in host_model.WIDTHS for count in (2, 4, 10, 16, 64)})
