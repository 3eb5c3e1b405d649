"""`wide run JOB --on torchrun --nodes N`: the same job on torch.distributed, by torchrun's own launcher, on this
machine. Knows its command line and its end; what a rank does is wide/engine's. Does not import torch.

Here nobody comes in by an invite, and nobody may leave: a process that ends, ends the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType

import msgspec

from wide.config import Options
from wide.errors import BY_EXIT_CODE, Interrupted, TrainingFailed, UsageError
from wide.job.place import located
from wide.job.spec import arguments_of, parts, values_in, with_arguments
from wide.launch.environment import add_wishes
from wide.launch.result import Result, from_json
from wide.launch.signals import STARTER, on_signals

PASSED_ON = ("steps", "epochs", "seconds", "seed", "out", "resume", "track", "dashboard")  # if they are given
ALWAYS = ("checkpoint_every", "keep", "log", "device")
QUIET = {  # what torchrun and Gloo say of themselves at every start
    "OMP_NUM_THREADS": "1",  # the job's `threads` decide
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),  # all ranks are here
}
GO_ON = "if it had made a checkpoint, --resume auto goes on from there"
GRACE_S = 45.0  # torchrun gives its ranks 30 to end


def run(spec: str, options: Options, address: str) -> Result:
    """The result carries no model: `wide.load` has it."""
    check(options)
    command = [sys.executable, "-m", "wide.engine.agent", str(options.node_count), *words(spec, options)]
    environment = os.environ | QUIET | {name: os.environ[name] for name in QUIET if name in os.environ}
    add_wishes(environment)
    environment[STARTER] = str(os.getpid())
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as agent:
        try:
            with _passing_on(agent) as received:
                assert agent.stdout is not None
                said = agent.stdout.read()  # rank 0's answer, at the end
                agent.wait()
        finally:
            _end(agent)
    return _result(said, agent.returncode, received)


def check(options: Options) -> None:
    """Options that mean nothing to torch.distributed are refused, not ignored."""
    if options.strategy not in (None, "sync"):
        raise UsageError(f"--strategy {options.strategy} is a pool's: torch.distributed makes one step after the other")
    if options.compress not in (None, "lossless", "none"):
        raise UsageError(f"--compress {options.compress} is a pool's: torch.distributed sends gradients as they are")
    if options.robust is not None:
        raise UsageError(f"--robust {options.robust} is a pool's: torch.distributed adds gradients up as they are")
    if options.data == "stream":
        raise UsageError("--data stream is a pool's: every process of torch.distributed opens the data set itself")
    if options.workers:
        raise UsageError("--workers is a pool's: processes of torch.distributed fetch their batches themselves")
    if options.partition is not None or options.gpus_per_node or options.cpus_per_node != 1:
        raise UsageError("--partition, --cpus-per-node, --gpus-per-node: torch.distributed has its processes here")
    if options.control:
        raise UsageError("--control needs wide run on a pool; --dashboard shows this run, too")


def words(spec: str, options: Options) -> list[str]:
    """The job and its options, as `python -m wide.engine` takes them."""
    found = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in ALWAYS]
    given = {name: getattr(options, name) for name in PASSED_ON}
    found += [f"--{name}={value}" for name, value in given.items() if value is not None]
    found += ["--plain"] * options.plain + ["--no-check"] * (not options.check)
    found += [f"--set={name}={one.value}" for name, one in values_in(spec).items()]
    place = parts(located(with_arguments(spec, []))).place
    behind = ["--", *arguments_of(spec)] if arguments_of(spec) else []
    return [place, "--answer", *found, *behind]


def _result(said: bytes, code: int, received: list[int]) -> Result:
    answer = msgspec.json.decode(said.splitlines()[-1]) if said.strip() else None
    if answer is None:
        if received:
            raise Interrupted(f"interrupted; {GO_ON}", received[0])
        words = f"rank 0 is gone without a word (torchrun's exit code is {code})"
        raise TrainingFailed(f"{words}; {GO_ON}")
    if answer[0] == "result":
        return from_json(msgspec.json.encode(answer[1]))
    _, code, words, details = answer
    if received or code > 128:
        raise Interrupted(words, received[0] if received else code - 128)
    raise BY_EXIT_CODE.get(code, TrainingFailed)(words, details)


def _end(agent: subprocess.Popen[bytes]) -> None:
    """Nothing is left behind, whatever happened here: ranks end with their launcher."""
    if agent.poll() is None:
        agent.terminate()
        try:
            agent.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            agent.kill()


@contextlib.contextmanager
def _passing_on(agent: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM end all ranks, politely and once: torchrun, asked twice, would leave some behind."""
    received: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1 and agent.poll() is None:
            agent.terminate()

    before = on_signals(handler)
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)
