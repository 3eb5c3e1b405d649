"""A pool as files: what `wide launch` writes, and a pool that has the keys and the invite in them. Whether Kubernetes
takes them: engines/test_manifests.py; whether Slurm does: engines/test_slurm.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat

import pytest

from tests.processes import PATIENCE_S, ROOT, result_of, started, wide
from wide.errors import UsageError
from wide.launch import premade
from wide.launch.writing import quoted
from wide.store.rundb import create
from wide.wire.invite import parse

pytestmark = pytest.mark.processes
DIGITS = ROOT / "examples" / "digits.py"
EVIL = """it's "a": $HOME $(id) {{name}} \\ # – 😀"""


def launched(kind, *words, cwd):
    code, out, err = wide("launch", kind, *words, cwd=cwd)
    assert code == 0, err
    return out


@pytest.mark.parametrize("kind", ["slurm", "k8s", "compose"])
def test_what_is_secret_is_readable_by_its_owner_alone(tmp_path, kind):
    launched(kind, DIGITS, "--out", tmp_path / "files", cwd=tmp_path)
    assert stat.S_IMODE((tmp_path / "files").stat().st_mode) == 0o700
    files = [path for path in (tmp_path / "files").rglob("*") if path.is_file()]
    assert len(files) > 1
    for file in files:
        text = file.read_text()
        if "wide1_" in text or "PRIVATE KEY" in text:
            assert kind != "slurm"
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("mine")
    code, _, err = wide("launch", "k8s", DIGITS, "--out", tmp_path, cwd=tmp_path)
    assert (code, err) == (2, f"wide: {tmp_path} is not empty: choose another folder with --out\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("k8s", "nowhere.py"), "nowhere.py: no such file"),
        (("nomad", DIGITS), "invalid choice: 'nomad'"),
        (("slurm", DIGITS, "--nodes", "0"), "--nodes 0: a pool without nodes"),
        (("slurm", DIGITS, "--partition", "a b"), "--partition 'a b'"),
        (("compose", DIGITS, "--cpus-per-node", "0"), "--cpus-per-node 0: must be at least 1"),
    ],
)
def test_what_cannot_be_launched_is_refused_on_one_line(tmp_path, words, said):
    code, _, err = wide("launch", *words, cwd=tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err
    assert list(tmp_path.iterdir()) == []


def test_code_that_no_configmap_holds_is_refused(tmp_path):
    (tmp_path / "job.py").write_text(f"{DIGITS.read_text()}\n# {'x' * (1 << 20)}\n")
    code, _, err = wide("launch", "k8s", "job.py", cwd=tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "(1 files, 1.0 MiB) does not fit into a ConfigMap, which holds 1 MiB" in err


def test_what_the_job_is_told_reaches_the_coordinator_as_it_was(tmp_path):
    job = DIGITS.read_text().replace("job = wide.Job(", "def job(note='', lr=0.1):\n    return wide.Job(")
    (tmp_path / "job.py").write_text(job)
    words = ("job.py", "--set", f"note={EVIL}", "--out", tmp_path / "files", "--", EVIL)
    launched("slurm", *words, cwd=tmp_path)
    script = (tmp_path / "files" / "coordinator.sbatch").read_text()
    line = next(line for line in script.splitlines() if " serve " in line)
    serve = shlex.split(line.removesuffix("&"))
    assert serve[-4:] == ["--set", f"note={EVIL}", "--", EVIL]
    assert "--hide-invite" in serve


@pytest.mark.parametrize(
    "text",
    [
        EVIL,
        "",
        "a\nb",
        "\x85\u2028\x7f\x00",
        "yes",
        "- 1",
        "*a",
        "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    ],
)
def test_any_text_is_one_line_of_yaml(text):
    shown = quoted(text)
    assert shown.isprintable()
    assert json.loads(re.sub(r"\\U0000(....)", r"\\u\1", shown)) == text


def test_a_pool_is_served_with_the_keys_and_joined_by_the_invite_that_were_written(tmp_path):
    """As a container does it: the code behind the links of a ConfigMap, keys that may only be read."""
    launched("compose", DIGITS, "--out", tmp_path / "files", cwd=tmp_path)
    keys, code = tmp_path / "files" / "keys", tmp_path / "job"
    (code / "..2026_11_18").mkdir(parents=True)
    (code / "..2026_11_18" / "digits.py").write_bytes((tmp_path / "files" / "code" / "digits.py").read_bytes())
    (code / "..data").symlink_to("..2026_11_18")
    (code / "digits.py").symlink_to("..data/digits.py")
    premade.make(keys, (("127.0.0.1", port := free_port()),))  # the name that compose gives it means nothing here
    invite = (keys / "invite").read_text()
    for key in keys.iterdir():
        key.chmod(0o440)
    where = ("--port", port, "--address", f"127.0.0.1:{port}", "--out", tmp_path / "pool", "--resume", "auto")
    words = ("serve", f"{code / 'digits.py'}:job", "--keys", keys, *where, "--epochs", 20, "--json")
    with started(*words, cwd=tmp_path) as pool:
        homes = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}
        code_, _, told = wide("join", f"@{keys / 'invite'}", "--allow-code", "any", cwd=tmp_path, **homes)
        out, err = pool.communicate(timeout=PATIENCE_S)
    assert (code_, pool.returncode) == (0, 0), told + err
    assert "wide1_" not in err + told
    assert (tmp_path / "pool" / "invite").read_text() == invite
    plain = result_of("run", DIGITS, "--nodes", 0, "--epochs", 20, cwd=tmp_path)
    assert json.loads(out)["weights_sha256"] == plain["weights_sha256"]


def test_keys_of_another_pool_are_refused(tmp_path):
    for name in ("run", "one", "other"):
        (tmp_path / name).mkdir()
    create(tmp_path / "run" / "run.db")
    premade.make(tmp_path / "one", (("pool", 1),))
    premade.make(tmp_path / "other", (("pool", 1),))
    premade.adopt(tmp_path / "run", tmp_path / "one")
    premade.adopt(tmp_path / "run", tmp_path / "one")  # as whoever is started again does
    with pytest.raises(UsageError, match="not those of the pool"):
        premade.adopt(tmp_path / "run", tmp_path / "other")
    os.unlink(tmp_path / "one" / "secret")
    with pytest.raises(UsageError, match="wide launch"):
        premade.adopt(tmp_path / "run", tmp_path / "one")
    assert parse((tmp_path / "run" / "invite").read_text()).addresses == (("pool", 1),)


def free_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


@pytest.mark.parametrize("file", ["key.pem", "secret", "invite"])
def test_a_damaged_file_among_the_keys_is_named_and_leaves_the_run_as_it_was(tmp_path, file):
    run, keys = tmp_path / "run", tmp_path / "keys"
    run.mkdir()
    keys.mkdir()
    create(run / "run.db")
    premade.make(keys, (("127.0.0.1", 9433),))
    good = (keys / file).read_text()
    (keys / file).write_text("nonsense")
    with pytest.raises(UsageError, match=f"--keys {keys}"):
        premade.adopt(run, keys)
    (keys / file).write_text(good)
    premade.adopt(run, keys)
    assert (run / "invite").read_text() == (keys / "invite").read_text()
