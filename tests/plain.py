"""Synchronous training as a plain PyTorch program, without a line of ours: what every pool must equal, bit for bit."""

import random

import numpy as np
import torch
from torch.utils.data import default_collate


def seed_all(*path):
    seed = path[0]
    for part in path[1:]:
        seed = (seed * 1_000_003 + part) % 2**63
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed % 2**32)
    return seed


def seed_own(generators, *path):
    seed = path[0]
    for part in path[1:]:
        seed = (seed * 1_000_003 + part) % 2**63
    for i, generator in enumerate(generators, 1):
        mine = (seed * 1_000_003 + i) % 2**63
        if isinstance(generator, torch.Generator):
            generator.manual_seed(mine)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(mine).state
        else:
            generator.seed(mine % 2**32)


def add(left, right):  # lists of tensors; None: had no gradient
    zero = lambda a, b: torch.zeros_like(b) if a is None else a  # noqa: E731
    return [None if a is None and b is None else zero(a, b) + zero(b, a) for a, b in zip(left, right, strict=True)]


def tree_sum(leaves):
    if len(leaves) == 1:
        return leaves[0]
    middle = (len(leaves) + 1) // 2
    return add(tree_sum(leaves[:middle]), tree_sum(leaves[middle:]))


def train(job, steps, own=lambda model, dataset: []):  # own: generators that the job keeps for itself
    torch.set_num_threads(job.threads)
    seed_all(job.seed)
    dataset, collate = job.dataset(), job.collate or default_collate
    seed_all(job.seed)
    model = job.model()
    if not model.training:
        model.train()
    optimizer = job.optimizer(list(model.parameters()))
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    parameters, epoch, done = list(model.parameters()), 0, 0
    while done < steps:
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed_all(job.seed, epoch)))
        batches = order.split(job.batch_size)
        for first in range(0, len(batches), job.batches_per_step):
            step = batches[first : first + job.batches_per_step]
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            values = [(p.detach().clone(), p.requires_grad) for p in parameters]
            gradients, changes = [], []
            for number, ids in enumerate(step):
                weight = len(ids) / sum(map(len, step))
                seed_all(job.seed, done, number)
                seed_own(own(model, dataset), job.seed, done, number)
                batch = collate([dataset[i] for i in ids.tolist()])
                seed_all(job.seed, done, number)
                seed_own(own(model, dataset), job.seed, done, number)
                for p, (value, is_trained) in zip(parameters, values, strict=True):
                    p.data = value.clone()
                    p.requires_grad_(is_trained)
                for name, buffer in model.named_buffers():
                    buffer.copy_(before[name])
                model.zero_grad(set_to_none=True)
                (job.loss(model, batch) * weight).backward()
                gradients.append([None if p.grad is None else p.grad.to_dense().clone() for p in parameters])
                moved = lambda now, old: torch.where(now == old, 0, now - old) * weight  # noqa: B023, E731
                floats = [(b, before[n]) for n, b in model.named_buffers() if b.is_floating_point()]
                changes.append([moved(now, old).detach() for now, old in floats])
                if number == 0:
                    left = [(p.detach().clone(), p.requires_grad) for p in parameters]
                    counters = {name: buffer.clone() for name, buffer in model.named_buffers()}
            for p, (value, is_trained), gradient in zip(parameters, left, tree_sum(gradients), strict=True):
                p.data = value  # as the step's first batch has left it: most often, as it was
                p.requires_grad_(is_trained)
                p.grad = gradient
            change = iter(tree_sum(changes))
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name] + next(change) if buffer.is_floating_point() else counters[name])
            if job.clip_norm:
                torch.nn.utils.clip_grad_norm_(parameters, job.clip_norm)
            seed_all(job.seed, done)
            optimizer.step()
            if scheduler:
                scheduler.step()
            done += 1
            if done == steps:
                break
        epoch += 1
    return model
