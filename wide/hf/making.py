"""From a constructed trainer to a Job: each of its parts is asked of the trainer itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from wide.errors import UsageError
from wide.hf import refusals
from wide.hf.evaluation import Evaluate, Patience, every, metric_of, strategy
from wide.hf.finish import Finish
from wide.hf.light import Light
from wide.hf.loss import Loss, Pace
from wide.hf.models import Model
from wide.hf.order import Batches, Given, batches_of
from wide.hf.recording import forget
from wide.hf.steps import Optimizer, Scheduler, scheduled
from wide.job.definition import Job


def made(trainer: Any) -> Job:
    refusals.check(trainer)
    forget(trainer.model)
    args = trainer.args
    stopping, others = refusals.callbacks(trainer)
    with torch.random.fork_rng(devices=[]):
        loader = trainer.get_train_dataloader()
        order = batches_of(loader)
        pace = _pace(args, loader)
        light, model = Light(trainer), Model(trainer)
        loss = Loss(light, pace)
        loss.find_out(model(), _first_batches(loader, order))
    metric = metric_of(args)
    if stopping is not None and metric is None:
        others.append(refusals.STOPPING)
    refusals.tell(trainer, others)
    optimizer, scheduler = Optimizer(trainer, light), Scheduler(trainer, light, pace.max_steps)
    is_passes = order is None and args.max_steps <= 0  # a stream that says how long it is: then passes have an end
    return Job(
        model=_Prepared(model, loss),
        dataset=Given(loader.dataset),
        loss=loss,
        optimizer=optimizer,
        scheduler=scheduled(trainer, scheduler, metric[0] if metric is not None else None),
        collate=loader.collate_fn,
        order=order,
        batch_size=getattr(loader, "batch_size", None) or args.per_device_train_batch_size,
        batches_per_step=args.gradient_accumulation_steps,
        steps=None if is_passes else pace.max_steps,
        epochs=float(args.num_train_epochs) if is_passes else None,
        clip_norm=args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None,
        seed=args.seed,
        workers=args.dataloader_num_workers,
        evaluate=Evaluate(trainer, light, model, pace) if strategy(args.eval_strategy) != "no" else None,
        evaluate_every=every(args, "eval", pace.max_steps),
        best=_best(args, metric),
        stop_when=_patience(stopping, metric),
        finish=Finish(trainer, pace, optimizer, scheduler),
    )


class _Prepared:
    """The model for a node, and the trainer whose model it is: before anybody looks at what the loss keeps."""

    def __init__(self, model: Model, loss: Loss) -> None:
        self._model, self._loss = model, loss

    def __call__(self) -> Any:
        model = self._model()
        self._loss.prepare(model)
        return model


def _pace(args: Any, loader: Any) -> Pace:
    """As the trainer reckons: an epoch's last step may have fewer batches."""
    try:
        batches = len(loader)
    except TypeError:  # a stream: the trainer takes all of the training for an epoch
        per_step, steps = args.gradient_accumulation_steps, args.max_steps
        return Pace(steps, steps * per_step, per_step, steps)
    if not batches:
        raise UsageError(
            "wide.hf.job: train_dataset gives no batch: it is empty, or dataloader_drop_last leaves nothing"
        )
    steps = math.ceil(batches / args.gradient_accumulation_steps)
    most = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps)
    return Pace(steps, batches, args.gradient_accumulation_steps, most)


def _first_batches(loader: Any, order: Batches | None) -> Iterator[Any]:
    """Of the first epoch, made here."""
    data, collate = loader.dataset, loader.collate_fn
    if order is None:
        size, samples = loader.batch_size or 1, iter(data)
        while some := list(itertools.islice(samples, size)):
            yield collate(some)
        return
    for ids in order(0, None):
        many = getattr(data, "__getitems__", None)
        yield collate(list(many(ids)) if many is not None else [data[i] for i in ids])


def _best(args: Any, metric: tuple[str, bool] | None) -> str | None:
    if metric is None or not (args.load_best_model_at_end or strategy(args.save_strategy) == "best"):
        return None
    name, is_greater_better = metric
    return name if is_greater_better else f"-{name}"


def _patience(stopping: Any, metric: tuple[str, bool] | None) -> Patience | None:
    if stopping is None or metric is None:
        return None
    return Patience(*metric, stopping.early_stopping_patience, stopping.early_stopping_threshold or 0.0)
