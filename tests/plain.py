"""Synchronous training as a plain PyTorch program, without a line of ours: what every pool must equal, bit for bit."""

import inspect
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


def cut(job, epoch, samples):  # the batches of each step
    generator = torch.Generator().manual_seed(seed_all(job.seed, epoch))
    order = job.order(epoch, generator) if job.order else torch.randperm(samples, generator=generator)
    batches = list(order.split(job.batch_size) if isinstance(order, torch.Tensor) else map(torch.tensor, order))
    if job.batches_per_step is None:  # what one update sees, in eight pieces
        return [batch.tensor_split(max(1, min(8, len(batch) // 2))) for batch in batches]
    return [batches[i : i + job.batches_per_step] for i in range(0, len(batches), job.batches_per_step)]


def train(job, steps, own=lambda model, dataset: []):  # own: generators that the job keeps for itself
    torch.set_num_threads(job.threads)
    seed_all(job.seed)
    dataset, collate = job.dataset(), job.collate or default_collate
    seed_all(job.seed)
    model = job.model()
    if not model.training:
        model.train()
    turns = job.phases or [job]
    asks = [inspect.signature(turn.optimizer).parameters for turn in turns]
    made = [t.optimizer(model if "model" in a else list(model.parameters())) for t, a in zip(turns, asks, strict=True)]
    made = [each if isinstance(each, list) else [each] for each in made]
    optimizers = [optimizer for each in made for optimizer in each]
    is_by_epoch = hasattr(job.scheduler, "build")
    build = job.scheduler.build if is_by_epoch else job.scheduler
    schedulers = build(optimizers if len(optimizers) > 1 else optimizers[0]) if build else []
    schedulers = schedulers if isinstance(schedulers, list) else [schedulers]
    parameters, epoch, done = list(model.parameters()), 0, 0
    while done < steps:
        for step in cut(job, epoch, len(dataset)):
            turn, mine = turns[done % len(turns)], made[done % len(turns)]
            trained = {id(p) for optimizer in mine for group in optimizer.param_groups for p in group["params"]}
            samples, counts = sum(map(len, step)), []
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            values = [(p.detach().clone(), p.requires_grad) for p in parameters]
            gradients, changes = [], []
            for number, ids in enumerate(step):
                weight = len(ids) / samples
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
                loss = turn.loss(model, batch)
                if hasattr(loss, "count"):
                    (loss.sum * (weight / len(ids))).backward()
                    counts.append(float(loss.count) * (weight / len(ids)))
                else:
                    (loss * weight).backward()
                for p in parameters if len(turns) > 1 else []:
                    p.grad = p.grad if id(p) in trained else None
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
                p.grad = gradient * (1 / sum(counts)) if counts and gradient is not None else gradient
            change = iter(tree_sum(changes))
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name] + next(change) if buffer.is_floating_point() else counters[name])
            if job.clip_norm:
                torch.nn.utils.clip_grad_norm_(parameters, job.clip_norm)
            seed_all(job.seed, done)
            for optimizer in mine:
                optimizer.step()
            for scheduler in [] if is_by_epoch else schedulers:
                scheduler.step()
            if job.after_step:
                job.after_step(model, None)
            done += 1
            if done == steps:
                return model
        epoch += 1
        for scheduler in schedulers if is_by_epoch else []:
            scheduler.step()
    return model
