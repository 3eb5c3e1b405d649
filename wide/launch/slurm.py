"""Slurm's words: the scripts that it is given, and what its commands answer. Starts nothing."""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from wide.config import Options
from wide.errors import UsageError
from wide.launch.engines import join_words
from wide.launch.templates import filled

LOGS = "nodes"  # the folder of their logs, in the run's
NODES = 4  # unless somebody says how many, or there is less room
SEEN_FORMAT = "%P|%N|%c|%G"
NOT_OVER = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING"}
NOT_OVER |= {"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "STAGE_OUT", "RESV_DEL_HOLD", "REVOKED"}
LAUNCH_FAILED = "0:53"  # how Slurm says that it could not open a task's log


@dataclass(frozen=True)
class Machine:
    """One that Slurm knows, in one of its partitions."""

    partition: str
    is_default: bool
    name: str
    cpus: int
    gpus: int


@dataclass(frozen=True)
class Task:
    """One of an array, or those of it that still wait."""

    state: str
    exit_code: str
    reason: str


@dataclass(frozen=True)
class Staying:
    """How long a node waits for its invite, and for a pool that went away; which exit codes mean that it comes again,
    and how often.
    """

    patience_s: int = 60
    retry_s: int = 3600
    again: tuple[int, ...] = (75,)
    restarts: int = 1000


def machines_of(answer: str) -> list[Machine]:
    """What `sinfo --Node --format=SEEN_FORMAT` says."""
    found = []
    for line in answer.splitlines():
        partition, name, cpus, gres = line.strip().split("|", 3)
        gpus = sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres))
        found.append(Machine(partition.rstrip("*"), partition.endswith("*"), name, int(cpus.rstrip("+")), gpus))
    return found


def node_count(machines: list[Machine], options: Options) -> int:
    """How many nodes are asked for: as many as the user says, if there can ever be room for them."""
    names = sorted({machine.partition for machine in machines})
    if options.partition is not None and options.partition not in names:
        raise UsageError(f"--partition {options.partition}: this cluster has {', '.join(names) or 'no partition'}")
    wanted = options.partition
    here = [one for one in machines if (one.partition == wanted if wanted is not None else one.is_default)]
    if not here and wanted is None:
        raise UsageError(f"this cluster has no default partition: say --partition {'|'.join(names)}")
    cpus, gpus = options.cpus_per_node, options.gpus_per_node
    rooms = [min(one.cpus // cpus, one.gpus // gpus if gpus else one.cpus) for one in here]
    room, most = sum(rooms), max(here, key=lambda one: (one.gpus, one.cpus))
    each = f"{cpus} core{'s' * (cpus != 1)}" + (f" and {gpus} GPU{'s' * (gpus != 1)}" if gpus else "")
    if room < (options.nodes or 1):
        raise UsageError(
            f"--nodes {options.nodes or 1}, each with {each}: partition {here[0].partition} has room for {room} "
            f"({len(here)} machine{'s' * (len(here) != 1)}, up to {most.cpus} cores and {most.gpus} GPUs); ask for less"
        )
    return options.nodes or min(NODES, room)


def tasks_of(answer: str) -> list[Task]:
    """What `scontrol --oneliner show job ARRAY` says."""
    lines = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in answer.splitlines()]
    return [
        Task(line["JobState"], line.get("ExitCode", ""), line.get("Reason", "")) for line in lines if "JobState" in line
    ]


def why_over(tasks: list[Task], folder: Path) -> str:
    """Why no node will come any more; empty, if one may."""
    if any(task.state in NOT_OVER for task in tasks):
        return ""
    if tasks and all(task.exit_code == LAUNCH_FAILED for task in tasks):
        return f"Slurm's machines do not see {folder}: choose a folder that all of them share, with --out DIR"
    ends = Counter(_end(task) for task in tasks)
    words = (
        ", ".join(f"{count} {end}" if count > 1 else end for end, count in ends.items()) or "Slurm has forgotten them"
    )
    return f"Slurm will start no node any more ({words}); see {folder}/{LOGS}"


def _end(task: Task) -> str:
    code, _, number = task.exit_code.partition(":")
    told = f" with {code}" if code not in ("", "0") else f" by signal {number}" if number not in ("", "0") else ""
    return f"{task.state.lower()}{told}"


def why_waiting(tasks: Iterable[Task]) -> str:
    """What Slurm says of tasks that have not begun."""
    return ", ".join(sorted({task.reason for task in tasks if task.state == "PENDING"} - {"None", "Priority", ""}))


def nodes_script(options: Options, count: int, name: str, invite: Path, logs: Path, stays: Staying) -> str:
    """The job array, as sbatch reads it."""
    words = [*join_words("{python}", options), f"@{invite}", "--retry", str(stays.retry_s)]
    return filled(
        "nodes.sbatch",
        nodes_name=name,
        nodes=count,
        cpus=options.cpus_per_node,
        asked=asked_lines(options.partition, options.gpus_per_node),
        log=log_of(logs / "%a.log"),
        invite=shlex.quote(str(invite)),
        python=shlex.quote(sys.executable),
        patience=stays.patience_s,
        join=shlex.join(words).replace("'{python}'", '"$python"'),
        again="|".join(map(str, stays.again)),
        restarts=stays.restarts,
    )


def asked_lines(partition: str | None, gpus: int = 0) -> str:
    """What was asked for, or how one would."""
    if partition is not None and not re.fullmatch(r"[\w.+-]+", partition):
        raise UsageError(f"--partition {partition!r}: a partition's name has letters, digits and . _ + -")
    lines = [f"#SBATCH --partition={partition}" if partition else "##SBATCH --partition=NAME"]
    return "\n".join([*lines, *([f"#SBATCH --gres=gpu:{gpus}"] if gpus else [])])


def log_of(path: Path) -> str:
    """A log's name, as sbatch reads it: %a is the task's number, a quoted name may have spaces."""
    folder = str(path.parent)
    if re.search(r"[\x00-\x1f\x7f\"\\]", folder):
        raise UsageError(
            f"{folder!r}: Slurm takes no quotes, backslashes or line ends in a log's name; choose --out DIR"
        )
    return '"' + folder.replace("%", "%%") + f'/{path.name}"'


def plain_name(title: str) -> str:
    """A job's title in letters that no program misreads."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:30].strip("-") or "job"
