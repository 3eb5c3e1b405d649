"""One run, from options to result, in the process that coordinates it (or, without nodes, does all the work)."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch

from wide import __version__
from wide.codec.batch import fingerprints
from wide.codec.digest import Digest
from wide.codec.encoders import Encoders
from wide.codec.layout import unbind
from wide.config import Options, check_robust, idle_audit, usable_cores
from wide.coordinator import assembly, resume
from wide.coordinator.assembly import Course
from wide.coordinator.checkpoints import FileWriter
from wide.coordinator.judging import Judge
from wide.coordinator.master import Master
from wide.coordinator.resume import Start
from wide.coordinator.run import Run
from wide.dashboard.terminal import Post, watching
from wide.errors import Interrupted, ParametersMoved, StartsAgain, TrainingFailed, UsageError, WideError
from wide.exchange.common import Common
from wide.exchange.door import Door
from wide.exchange.feed import Feed
from wide.exchange.likeness import Likeness
from wide.job import isa
from wide.job.definition import Job
from wide.job.hands import Hands
from wide.job.here import Here
from wide.job.model import begun, build_model
from wide.job.opened import open_ahead
from wide.job.program import program_of
from wide.job.samples import Samples
from wide.job.schedule import Schedule
from wide.job.settings import build
from wide.job.spec import arguments_of, split_spec, title_of, told_words
from wide.job.wholeness import remark
from wide.launch import dashboard, own_loops, track
from wide.launch import story as story_of
from wide.launch.alone import Alone
from wide.launch.code import code_of
from wide.launch.crew import Crew
from wide.launch.dashboard import shown_on_page
from wide.launch.folder import CHECKPOINTS, LOG, RunFolder
from wide.launch.keys import digests_key, new_digests_key
from wide.launch.length import length, wanted
from wide.launch.loop import Loop
from wide.launch.result import Result
from wide.launch.signals import BEFORE, on_signals, stopping
from wide.launch.story import Story
from wide.launch.track import tracking
from wide.launch.without import before
from wide.node import selfcheck
from wide.node.greeting import pick_device
from wide.node.workers import why_not
from wide.store import checkpoint, wishes
from wide.store.reading import DATABASE
from wide.store.rundb import RunDb
from wide.store.state_dict import unpack
from wide.store.tensorboard import EventFile
from wide.store.weights import weights_sha256
from wide.store.wishes import Wishes
from wide.strategy.catalogue import EXACT
from wide.telemetry.log import log, logging_to
from wide.telemetry.process import give_back_free_memory
from wide.telemetry.snapshot import Window
from wide.telemetry.totals import NodeTotals
from wide.transport.hub import TcpHub
from wide.wire.messages import Offer


@dataclass(frozen=True)
class Origin:
    """Who wants this run: the command line that began it, its job's file (`file.py:name`) if it has one, and whether
    `wide.run` did it. `end`, if this is a process of our own: says why, and ends it. `post`, if somebody else shows
    pictures of the run. `values`: what the job's function was called with. `may_start_again`: as a new process, should
    the pool need another instruction set.
    """

    command: list[str]
    spec: str = ""
    is_python: bool = False
    end: Callable[[int, str], NoReturn] | None = None
    post: Post | None = None
    variable: str = "job"  # what the caller calls it
    values: dict[str, Any] = field(default_factory=dict)
    may_start_again: bool = False

    @property
    def file(self) -> Path | None:
        return split_spec(self.spec)[0] if self.spec else None

    def resume(self, folder: Path) -> str:
        """How to go on, in the caller's language."""
        return f'wide.run({self.variable}, resume="{folder}")' if self.is_python else f"--resume {folder}"


class Training:
    """One run: its folder, its job, its numbers."""

    def __init__(self, job: Job, name: str, options: Options, origin: Origin) -> None:
        self.job, self._origin, self._name = job, origin, name
        track.check(options.track)
        if options.without is not None and options.resume is None:
            raise UsageError("--without is for --resume: a new run has had no nodes")
        self.options = own_loops.checked(job, options)
        if options.resume is None:  # a run remembers its strategy
            check_robust(self.options)
        self._place = dashboard.check(options)
        self.folder = RunFolder(options.out, options.resume, name, origin.file)
        self.dir = self.folder.path
        self._run: Run | None = None  # once there is one
        self._common: Common  # memory that nodes on this machine see too
        self._hands: Hands  # that make the optimizer's step
        self._asked_before: dict[str, Any] = {}
        self._moved: set[str] = set()  # what the loss has been seen to move: parameters, and buffers
        self._stop_reason = ""
        self._received: list[int] = []  # signals
        self.plan_words = ""  # the plan as JSON, if that is all that was wanted
        self.loop: Callable[[Job, Course, Samples, torch.device, bool], Loop] = Alone  # what trains without a crew

    def open_ahead(self) -> bool:
        """The data set, so that nodes that are forked from here have it: may they be? Should the run turn out to have
        another seed, each opens its own.
        """
        asked = story_of.asked(self.dir) if self.folder.holds_run else {}
        given = self.options.seed if self.options.seed is not None else asked.get("seed")
        return open_ahead(self.job, given if given is not None else self.job.seed)

    def train(self, gather: Callable[[], Crew] | None) -> Result:
        """Train to the end, with whoever comes in by the crew's door; without a crew, all alone. The crew is gathered
        once the run has a story, and before there are threads.
        """
        with contextlib.closing(self.folder), logging_to(self.options.log, self.dir / LOG):
            self._asked_before = story_of.asked(self.dir)
            origin = self._origin
            story = Story(self.dir, origin.command, origin.spec, self.options, __version__, origin.values)
            if self._origin.end is not None:
                on_signals(lambda number, frame: self._give_up(story, number))
            wishes.forget(self.dir)
            crew = self._gathered(gather, story)
            tells = self.options.log != "silent"
            with tracking(self.options.track, self.dir), shown_on_page(self._place, self.dir, tells):
                try:
                    result = self._train(crew)
                except BaseException as error:
                    story.failed(error)
                    raise
                story.ended(result.summary())
            return result

    def _gathered(self, gather: Callable[[], Crew] | None, story: Story) -> Crew | None:
        try:
            return gather() if gather is not None else None
        except BaseException as error:
            story.failed(error)
            raise

    def _give_up(self, story: Story, number: int) -> None:
        """A signal, while data and model are built: the user's code has no say in it."""
        with contextlib.suppress(OSError):
            story.failed(Interrupted(self._interrupted, number))
        assert self._origin.end is not None
        self._origin.end(number, self._interrupted)

    def _train(self, crew: Crew | None) -> Result:
        if self.job.own_loop is not None:
            self._begin_loops(crew)
        workers = self.job.workers if self.options.workers is None else self.options.workers
        if workers and (words := why_not() if crew is not None else "--nodes 0 fetches its batches without workers"):
            log.info("%s", words)
        with contextlib.ExitStack() as stack:
            db = stack.enter_context(contextlib.closing(RunDb(self.dir / DATABASE, log.error)))
            self._common = stack.enter_context(contextlib.closing(Common(is_wanted=crew is not None)))
            # While a step is made, this machine's nodes wait for it: their cores are free.
            self._hands = stack.enter_context(contextlib.closing(Hands(usable_cores() if crew is not None else 1)))
            stack.enter_context(_threads(self.job.threads))
            points = EventFile(self.dir, db.beside, log.warning)
            stack.callback(points.close)
            window = Window()
            stack.enter_context(watching(window, self.options.log != "silent", self.options.plain, self._origin.post))
            asked = stack.enter_context(contextlib.closing(Wishes(self.dir / DATABASE, db.write)))
            try:
                course, nodes = self._until_nothing_moves(db, points, crew, window, asked)
            except WideError as error:
                if self._origin.end is not None and not isinstance(error, StartsAgain):
                    on_signals(signal.SIG_IGN)  # why it failed is told, whoever ends it now
                if not isinstance(error, TrainingFailed):
                    raise
                steps = len(self._run.record.losses) if self._run is not None else 0
                kept = f"; what was trained until step {steps} is in {self.dir}" if steps else ""
                raise TrainingFailed(f"{error}{kept}", error.details) from None
            if self._origin.end is not None:
                on_signals(signal.SIG_IGN)  # all is written; only the answer is left to be said
            result = self._result(course, nodes)
            if self._received and self._was_stopped:
                raise Interrupted(self._interrupted, self._received[0])
            return result

    def _begin_loops(self, crew: Crew | None) -> None:
        if crew is None:
            raise UsageError("--nodes 0 trains with the job's loss, and this one has a loop instead: give it a node")
        if self.job.own_loop and self.job.own_loop.every:
            log.warning("%s", own_loops.NOT_EXACT)

    @property
    def _was_stopped(self) -> bool:
        """Or was it at its end anyway?"""
        end = self._run.ended if self._run is not None else None
        return end is None or end.why == self._stop_reason

    @property
    def _interrupted(self) -> str:
        """What is true of this run, should it end right now."""
        if self._run is None:
            return BEFORE
        return f"interrupted after step {len(self._run.record.losses)}; go on with {self._origin.resume(self.dir)}"

    def _until_nothing_moves(
        self, db: RunDb, points: EventFile, crew: Crew | None, window: Window, asked: Wishes
    ) -> tuple[Course, list[NodeTotals]]:
        """If the loss turns out to move parameters, the run goes on from its last whole version, with room for them."""
        while True:
            course, samples = self._course(db, window, is_own_process=crew is not None)
            writer = FileWriter(self.dir / CHECKPOINTS, self.options.keep, db)
            try:
                with stopping(self._stop, self._received), contextlib.closing(writer):
                    course = replace(course, points=points, asked=asked, stop=self._asked_to_stop)
                    course = course if self.options.only_plans else replace(course, writer=writer)
                    return course, self._alone(course, samples) if crew is None else self._pool(course, samples, crew)
            except ParametersMoved as error:
                if self._received:
                    raise Interrupted(self._interrupted, self._received[0]) from None
                names = ", ".join(error.names[:3]) + (f" and {len(error.names) - 3} more" if error.names[3:] else "")
                log.info("%s: moved by the loss, or by after_step; their values travel with every update", names)
                self._moved |= set(error.names)
                self.folder.holds_run = True

    def _course(self, db: RunDb, window: Window, is_own_process: bool) -> tuple[Course, Samples]:
        """What was asked for, and, if this run was begun before, where it is."""
        found = self._find_checkpoint()
        where = str(self.dir)
        if self.folder.holds_run:
            asked = found[1].state["asked"] if found is not None else self._asked_before
            self.options = resume.remembered(self.options, asked, where)
        check_robust(self.options)
        if words := idle_audit(self.options):
            log.warning("%s", words)
        seed = self.options.seed if self.options.seed is not None else self.job.seed
        window.enter("opening the data set")
        samples = Samples(self.job, seed)
        schedule = self._schedule(samples, seed)
        data = {str(number): digest for number, digest in fingerprints(samples.probes(seed))}
        data["build"] = build(torch.device("cpu"), self.job.threads)
        window.enter("building the model")
        with _collector_paused(is_own_process):
            model = begun(build_model(self.job, seed), self.job.init)
            moves = self._moves(model, found[1] if found is not None else None)
            steps = length(self.options, self.job, schedule)
            allocate = self._common.allocate if is_own_process else None
            here = functools.partial(_here, schedule, steps)
            master = Master(self.job, model, seed, moves, allocate, here, self._hands)
        if found is None and self.options.check and self.job.own_loop is None:
            self._tell_of_pieces(model, samples, seed, schedule)
        if found is None and (question := master.descent.question(self._wanted[1], schedule.steps_per_epoch)):
            log.warning("%s", question)
        give_back_free_memory()
        start = Start(is_resumed=self.folder.holds_run)
        if found is not None:
            start = resume.restore(found[1], schedule, master, where)
            if self.options.check:
                resume.check_data(found[1], data, where)
            self._forget_newer(found[0])
            stream = unpack(found[1].state.get("stream"), found[1].others)
            if again := samples.go_on_from(schedule, start.position.steps, stream):
                log.info("%d samples of the stream were read again, to get to where the run was", again)
        window.enter("")
        steps = resume.length(steps, start.position, schedule, where)
        judge = Judge(self.job, master.descent, start.state.get("judged")) if self.job.is_judged else None
        if start.is_resumed:
            log.info("going on from step %d of %s", start.position.steps, self.dir)
        return Course(
            *(self.options, schedule, master, steps, db, None, start),
            window=window,
            data=data,
            name=self._name,
            judge=judge,
            samples=samples,
            own_loop=self.job.own_loop,
            digest=self._digest(db),
        ), samples

    def _digest(self, db: RunDb) -> Digest:
        """With one key, whoever coordinates this run. Where it is lost, older digests are of no use."""
        if (key := digests_key(self.dir)) is None:
            key = new_digests_key(self.dir)
            db.forget_digests()
        return Digest(key, self.job.goes_by)

    def _tell_of_pieces(self, model: torch.nn.Module, samples: Samples, seed: int, schedule: Schedule) -> None:
        if words := remark(self.job, model, samples, seed, schedule.batches_per_step):
            log.warning("%s", words)

    def _schedule(self, samples: Samples, seed: int) -> Schedule:
        job = self.job
        if samples.stream is not None and self._wanted[1] is not None:
            log.info("reading the data set once, to see how long it is (has it no end? Give Job(steps=…))")
        samples.measure(self._wanted[1] is not None, samples.batch_size * (job.batches_per_step or 1))
        kind = (samples.batch_size, job.batches_per_step, seed, samples.order, samples.drop_last, job.evaluate_every)
        schedule = Schedule(len(samples), *kind)
        if schedule.remark:
            log.info("%s", schedule.remark)
        return schedule

    def _moves(self, model: torch.nn.Module, saved: checkpoint.Checkpoint | None) -> dict[str, bool]:
        """Parameters that the loss is known to move, and whether they are trained."""
        before: dict[str, bool] = saved.state.get("moved", {}) if saved is not None else {}
        tensors = [*model.named_parameters(), *model.named_buffers()]
        flags = {name: tensor.requires_grad for name, tensor in tensors}
        if self.job.own_loop is not None and self.job.own_loop.every:  # nobody would notice when it changes one
            self._moved |= {name for name, _ in model.named_buffers()}
        return {name: flags[name] for name in self._moved if name in flags} | before

    def _find_checkpoint(self) -> tuple[Path, checkpoint.Checkpoint] | None:
        """The one to go on from, if there is one."""
        folder = self.dir / CHECKPOINTS
        if not self.folder.holds_run or not checkpoint.is_any(folder):
            return None
        most = before(self.dir, self.options.without) if self.options.without is not None else math.inf
        try:
            path, saved, problems = checkpoint.newest(folder, most)
        except TrainingFailed:
            if most == math.inf:
                raise
            raise UsageError(
                f"--without {self.options.without}: its work is in every checkpoint of {self.dir} that was kept "
                f"(it began in step {most}): begin a new run"
            ) from None
        for problem in problems:
            log.error("%s", problem)
        return path, saved

    def _forget_newer(self, path: Path) -> None:
        folder = self.dir / CHECKPOINTS
        try:
            checkpoint.forget_after(folder, path)
        except OSError as error:
            raise TrainingFailed(
                f"{folder} cannot be written ({error.strerror}): free some room, then try again"
            ) from None

    @property
    def _wanted(self) -> tuple[int | None, float | None]:
        """Steps and epochs."""
        return wanted(self.options, self.job)

    def _alone(self, course: Course, samples: Samples) -> list[NodeTotals]:
        if self.options.audit:
            log.warning("--audit %g: with one process there is no second one that could check it", self.options.audit)
        loop = self.loop(self.job, course, samples, pick_device(self.options.device), self.options.check)
        self._began(loop.run)
        loop.train()
        self._tell_end()
        return loop.totals()

    def _pool(self, course: Course, samples: Samples, crew: Crew) -> list[NodeTotals]:
        here = build(pick_device(self.options.device), self.job.threads)
        seed = course.schedule.seed
        # Nodes of our own have the very same files, and looking through all modules would copy memory that is shared.
        program = program_of(self._origin.spec) if crew.is_open and self._origin.spec else {}
        options, moved = self.options, tuple(course.master.moves)
        if samples.stream is not None and options.data == "local":
            raise UsageError(
                "--data local: this data set is read by the coordinator alone, and streamed (leave it out)"
            )
        data = options.data if samples.stream is None else "stream"
        offer, code = self._offer(course, samples) if crew.is_open else (None, b"")
        likeness = self._likeness()
        door = Door(
            guests=crew.guests,
            seed=seed,
            data=data,
            compress=options.codecs,
            build=here,
            program=program,
            moved=moved,
            checks=options.check and self.job.own_loop is None,
            is_open=crew.is_open,
            offer=offer,
            code=code,
            steps=course.steps,
            every=self.job.own_loop.every if self.job.own_loop is not None else None,
            likeness=likeness,
        )

        def watch() -> str:
            if likeness.wanted is not None:
                words = f"the pool settles on {likeness.wanted.name} instructions"
                raise StartsAgain(words, str(likeness.wanted), str(self.dir))
            if self.job.own_loop is not None and crew.are_done():
                if not self.job.own_loop.every:
                    return "each node's loop was left before the run was over"
                self._stop("each node's loop has come to its end")
                return ""
            return crew.trouble()

        is_streamed = samples.stream is None and (data == "stream" or (crew.is_open and data == "auto"))
        if options.check and is_streamed and (problem := selfcheck.of_data(samples, samples.batch_size, seed)):
            raise TrainingFailed(problem)
        feed, encoders = Feed(samples, course.schedule, course.steps), Encoders()
        evaluates = self.job.evaluate is not None and not self.options.only_plans
        hub, common = TcpHub(*crew.listeners), self._common
        server = assembly.server(course, hub, door, feed, encoders, crew.is_open, evaluates, common=common)
        self._began(server.run)
        try:
            server.serve(watch, crew.is_evaluator_gone)
        finally:
            encoders.close()
            server.close()
            feed.close()
        self._tell_end()
        self.plan_words = server.plan_words
        return server.totals()

    def _likeness(self) -> Likeness:
        may_settle = self._origin.may_start_again and self.options.isa == "auto"
        is_exact = lambda: self._run is not None and self._run.strategy is EXACT  # noqa: E731
        has_begun = lambda: self._run is not None and bool(self._run.record.losses)  # noqa: E731
        return Likeness(isa.now(), isa.best_here(), may_settle, is_exact, has_begun)

    def _offer(self, course: Course, samples: Samples) -> tuple[Offer, bytes]:
        """What whoever thinks of joining is shown, and the code that it would run."""
        spec, values = self._origin.spec, self._origin.values
        code = code_of(spec, values) if spec else None
        told = Offer("", 0, 0, arguments=arguments_of(spec), values=list(told_words(values)))
        offer, payload = code.offer if code is not None else (told, b"")
        parameters = sum(parameter.numel() for parameter in course.master.model.parameters())
        name = title_of(split_spec(spec)[0])
        return msgspec.structs.replace(offer, job=name, parameters=parameters, samples=len(samples)), bytes(payload)

    def _began(self, run: Run) -> None:
        self._run = run
        if self.job.own_loop is not None and self.job.own_loop.every and not self.folder.holds_run:
            run.record.journal.tell("note", None, own_loops.NOT_EXACT)  # for the report
        run.stop_reason = self._stop_reason or run.stop_reason  # a signal may have come before

    def _stop(self, reason: str) -> None:
        self._stop_reason = reason
        if self._run is not None:
            self._run.stop_reason = reason

    def _asked_to_stop(self) -> None:
        """By the run's owner, who is somewhere else: the same as a signal."""
        self._received.append(signal.SIGTERM)
        self._stop("stopped by its owner")

    def _tell_end(self) -> None:
        end = self._run.ended if self._run is not None else None
        if end is not None and end.failure:
            raise TrainingFailed(end.failure, end.details)
        log.info("%s", end.why if end is not None else "")

    def _result(self, course: Course, nodes: list[NodeTotals]) -> Result:
        assert self._run is not None
        record, model = self._run.record, course.master.model
        record.flush(force=True)
        course.master.rest()
        unbind(model)
        seconds = max(record.seconds, 1e-9)
        tenth = max(1, len(record.losses) // 10)
        first, last = record.losses[:tenth], record.losses[-tenth:]
        return Result(
            run_dir=str(self.dir),
            strategy=self._run.strategy.name,
            steps=len(record.losses),
            epochs=record.batches / course.schedule.batches_per_epoch,
            batches=record.batches,
            samples=record.samples,
            seconds=record.seconds,
            batches_per_s=record.batches / seconds,
            samples_per_s=record.samples / seconds,
            loss_first=sum(first) / tenth if first else None,
            loss_last=sum(last) / tenth if last else None,
            weights_sha256=weights_sha256(model),
            metrics={name: value if math.isfinite(value) else None for name, value in record.metrics.items()},
            nodes=nodes,
            set=self._origin.values,
            build=lambda: model,
        )


def _here(schedule: Schedule, steps: int | None, step: int) -> Here:
    return Here(step, schedule.step(step).epoch, 0, steps)


@contextlib.contextmanager
def _collector_paused(is_own_process: bool) -> Iterator[None]:
    """What is built here stays: the collector need not look through it now, and in a process of our own not later."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_own_process:
            gc.freeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Reductions round differently with other thread counts, so the coordinator uses the job's too."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
