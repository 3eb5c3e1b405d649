"""`wide launch slurm|k8s|compose JOB`: a pool as files, to be read, changed and applied. Knows what stands in them, and
asks no engine for anything; what they look like is in the folder `files`.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wide import __version__
from wide.config import Options
from wide.errors import UsageError
from wide.job.loading import load
from wide.job.place import located
from wide.job.spec import arguments_of, split_spec, title_of
from wide.launch import premade
from wide.launch.code import Code, code_of
from wide.launch.engines import NEVER_AGAIN, join_words
from wide.launch.invites import FIRST
from wide.launch.keys import CERTIFICATE, KEY, ROOT, write_secret
from wide.launch.places import private
from wide.launch.slurm import LOGS, NODES, Staying, asked_lines, log_of, nodes_script, plain_name
from wide.launch.templates import filled
from wide.telemetry.log import logging_to

IMAGE = f"wiiiiide:{__version__}"
PORT = 9433
USER = 10001  # in the image
MOST_CODE_NBYTES = 1 << 20  # that a ConfigMap holds
POD_SECURITY = (
    f"{{runAsNonRoot: true, runAsUser: {USER}, runAsGroup: {USER}, fsGroup: {USER}, "
    "seccompProfile: {type: RuntimeDefault}}"
)
CONTAINER_SECURITY = "{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}"


@dataclass(frozen=True)
class Wanted:
    """What `wide launch` was told. `pairs` are the words behind --set."""

    spec: str
    options: Options
    pairs: tuple[str, ...] = ()
    image: str = IMAGE
    tag: str = field(default_factory=lambda: secrets.token_hex(3))

    @property
    def title(self) -> str:
        return f"wide-{plain_name(title_of(split_spec(located(self.spec))[0]))}"

    @property
    def name(self) -> str:
        """Of this pool, and of no other."""
        return f"{self.title}-{self.tag}"

    @property
    def nodes(self) -> int:
        return self.options.nodes or NODES

    def serve_words(self, job: str, *more: str) -> list[str]:
        """How the coordinator is called, for the job that it finds there; the job's own arguments last."""
        told = [word for pair in self.pairs for word in ("--set", pair)]
        own = arguments_of(self.spec)
        return ["serve", job, *more, "--host", "0.0.0.0", "--resume", "auto", *told, *(["--", *own] if own else [])]

    def join_words(self) -> list[str]:
        return [*join_words("", self.options)[3:], "@/pool/invite"]


def launch(kind: str, wanted: Wanted) -> str:
    """Writes the files; says what is there now, and what to do with it."""
    if wanted.options.nodes == 0:
        raise UsageError("--nodes 0: a pool without nodes trains nothing")
    spec = located(wanted.spec)
    load(spec)  # a job that cannot be loaded here is not worth a cluster's time
    folder = wanted.options.out or Path(f"{wanted.title}-{kind}")
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty: choose another folder with --out")
        return {"slurm": _slurm, "k8s": _kubernetes, "compose": _compose}[kind](wanted, spec, folder.absolute())
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror}): choose a folder with --out") from None


def _slurm(wanted: Wanted, spec: str, folder: Path) -> str:
    name, logs = wanted.name, folder / "logs"
    words = wanted.serve_words(_job_on_disk(spec), "--port", "0", "--out", str(folder / "run"), "--hide-invite")
    names = {"nodes_name": name, "coordinator_name": f"{name}-coordinator"}
    coordinator = filled(
        "coordinator.sbatch",
        asked=asked_lines(wanted.options.partition),
        log=log_of(logs / "coordinator.log"),
        cwd=shlex.quote(str(Path.cwd())),
        serve=shlex.join([sys.executable, "-m", "wide", *words]),
        **names,
    )
    # A coordinator that was moved is found by its new invite only, so a node looks ten minutes, and then comes again.
    staying = Staying(patience_s=600, retry_s=600, again=(69, 75), restarts=50)
    nodes = nodes_script(wanted.options, wanted.nodes, name, folder / "run" / FIRST, logs / LOGS, staying)
    private(folder)
    private(logs / LOGS)
    for file, text in (
        ("coordinator.sbatch", coordinator),
        ("nodes.sbatch", nodes),
        ("submit.sh", filled("submit.sh", **names)),
    ):
        (folder / file).write_text(text, encoding="utf-8")
    (folder / "submit.sh").chmod(0o700)
    return f"{folder}: coordinator.sbatch, nodes.sbatch. Read them, then: {shlex.quote(str(folder / 'submit.sh'))}"


def _job_on_disk(spec: str) -> str:
    path, name = split_spec(spec)
    return f"{path.absolute()}:{name}"


def _kubernetes(wanted: Wanted, spec: str, folder: Path) -> str:
    code = _code(spec)
    if (size := sum(len(data) for _, data in code.files)) > MOST_CODE_NBYTES:
        raise UsageError(
            f"the job's code ({len(code.files)} files, {size / (1 << 20):.1f} MiB) does not fit into a ConfigMap, "
            "which holds 1 MiB: take what is not code out of it, or put the job into the image"
        )
    gpus, memory = wanted.options.gpus_per_node, "memory: 4Gi"
    items = [(f"file{number}", name) for number, (name, _) in enumerate(code.files)]
    listed = ", ".join(f"{{key: {key}, path: {quoted(name)}}}" for key, name in items)
    pool = filled(
        "kubernetes.yaml",
        name=wanted.name,
        secrets_file="secrets.yaml",
        pool_file="pool.yaml",
        port=PORT,
        nodes=wanted.nodes,
        backoff=20 + 2 * wanted.nodes,
        never=list(NEVER_AGAIN),
        cpus=wanted.options.cpus_per_node,
        limits=f"{{{memory}, nvidia.com/gpu: {gpus}}}" if gpus else f"{{{memory}}}",
        image=quoted(wanted.image),
        serve=_listed(_served(wanted, code), "$", "$$"),
        join=_listed(wanted.join_words(), "$", "$$"),
        code=_code_lines(code),
        items=f"[{listed}]",
        pod_security=POD_SECURITY,
        container_security=CONTAINER_SECURITY,
    )
    with tempfile.TemporaryDirectory() as place:
        premade.make(Path(place), ((wanted.name, PORT),))
        texts = {name: quoted((Path(place) / name).read_text()) for name in premade.FILES}
    named = {"certificate": texts[CERTIFICATE], "key": texts[KEY], "root": texts[ROOT], "invite": texts[FIRST]}
    private(folder)
    write_secret(folder / "secrets.yaml", filled("secrets.yaml", name=wanted.name, **named))
    (folder / "pool.yaml").write_text(pool, encoding="utf-8")
    apply = f"kubectl apply --server-side -f {shlex.quote(str(folder))}"
    return (
        f"{folder}: pool.yaml, and secrets.yaml, which is one. The invite is good for 30 days. Read them, then: {apply}"
    )


def _compose(wanted: Wanted, spec: str, folder: Path) -> str:
    code = _code(spec)
    private(folder)
    keys, run = private(folder / "keys"), private(folder / "run")
    premade.make(keys, (("coordinator", PORT),))
    for name, data in code.files:
        (folder / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "code" / name).write_bytes(data)
    for path in ((folder / "code"), *(folder / "code").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)  # the containers' user is another one
    user, group = (os.getuid(), os.getgid()) if hasattr(os, "getuid") else (USER, USER)
    if user == 0:  # nothing in the containers is root's
        user = group = USER
        for path in (keys, run, *keys.iterdir()):
            os.chown(path, USER, USER)
    gpus = wanted.options.gpus_per_node
    devices = f"        reservations:\n          devices: [{{driver: nvidia, count: {gpus}, capabilities: [gpu]}}]"
    text = filled(
        "compose.yaml",
        name=wanted.name,
        image=quoted(wanted.image, "$", "$$"),
        serve=_listed(_served(wanted, code, "coordinator"), "$", "$$"),
        join=_listed(wanted.join_words(), "$", "$$"),
        user=quoted(f"{user}:{group}"),
        port=PORT,
        nodes=wanted.nodes,
        cpus=wanted.options.cpus_per_node,
        gpus=devices if gpus else "",
    )
    (folder / "compose.yaml").write_text(text, encoding="utf-8")
    up = f"docker compose -f {shlex.quote(str(folder / 'compose.yaml'))} up"
    return (
        f"{folder}: compose.yaml, code, and keys, which are secret. The invite is good for 30 days. Read it, then: {up}"
    )


def _code(spec: str) -> Code:
    with logging_to("normal"):
        code = code_of(spec)
    if code is None:
        raise UsageError("without the job's code there is nothing to launch")
    return code


def _served(wanted: Wanted, code: Code, host: str = "") -> list[str]:
    """The coordinator's words in a container."""
    address = ("--address", f"{host or wanted.name}:{PORT}", "--port", str(PORT))
    return wanted.serve_words(f"/job/{code.main}", "--keys", "/keys", "--out", "/run/wide/pool", *address)


def _listed(words: Sequence[str], old: str, new: str) -> str:
    """A list for YAML, in which a program that fills in variables finds none."""
    return f"[{', '.join(quoted(word, old, new) for word in words)}]"


def _code_lines(code: Code) -> str:
    """The files as a ConfigMap holds them."""
    texts, others = [], []
    for number, (_, data) in enumerate(code.files):
        try:
            texts.append(f"  file{number}: {_readable(data.decode())}")
        except UnicodeDecodeError:
            others.append(f"  file{number}: {base64.b64encode(data).decode()}")
    return "\n".join((["data:", *texts] if texts else []) + (["binaryData:", *others] if others else []))


def _readable(text: str) -> str:
    """As lines that a person can read, if YAML gives back the same."""
    lines = text.split("\n")
    is_plain = text.endswith("\n") and all(line.isprintable() for line in lines) and text.strip("\n ") != ""
    return "|2+\n" + "\n".join(f"    {line}" if line else "" for line in lines[:-1]) if is_plain else quoted(text)


def quoted(text: str, old: str = "", new: str = "") -> str:
    """Any text as YAML has it between double quotes, which is JSON but for what neither shows."""
    text = json.dumps(text.replace(old, new) if old else text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
