"""Lending a machine by one pasted line: real commands, in folders of their own."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import psutil
import pytest

from tests.processes import environment, relatives, result_of, started, until, wide
from tests.test_run import SLOW_LOSS, a_job
from tests.test_serve import invited, query, rejects
from wide.store.access import Access
from wide.wire.invite import parse

pytestmark = pytest.mark.processes

BESIDE = "from helper import shift\n" + SLOW_LOSS
READ_TOO = "import pathlib\ndef data():\n    assert pathlib.Path('data.txt').exists()\n    return points()\n"


def places(tmp_path, who="node"):
    """Where this user keeps keys and code."""
    return {"XDG_STATE_HOME": str(tmp_path / who / "state"), "XDG_CACHE_HOME": str(tmp_path / who / "cache")}


@contextmanager
def pool(tmp_path, *options, changes="steps=120, loss=loss", body=SLOW_LOSS, out="here", **env):
    """A pool that waits for machines: its process and its invite."""
    job = a_job(tmp_path, changes, body)
    with started("serve", job, "--port", 0, "--out", out, "--json", *options, cwd=tmp_path, **env) as process:
        process.where, process.invite = invited(process)
        yield process
        if process.poll() is None:
            process.terminate()


def alone(tmp_path, steps):
    return result_of("run", "small.py", "--nodes", 0, "--steps", steps, cwd=tmp_path)["weights_sha256"]


def elsewhere(tmp_path, name="empty"):
    """A folder in which nothing of the job is."""
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    return folder


def finished(process):
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return json.loads(out), err


def test_one_pasted_line_is_enough(tmp_path):
    (tmp_path / "helper.py").write_text("def shift(x):\n    return x\n")
    (tmp_path / "unused.py").write_text("secret = 'not sent'\n")
    with pool(tmp_path, changes="steps=30, loss=loss", body=BESIDE) as serving:
        code, _, err = wide(
            *("join", serving.invite, "--allow-code", "any", "--name", "laptop"),
            cwd=elsewhere(tmp_path),
            **places(tmp_path),
        )
        assert code == 0, err
        result, said = finished(serving)
    assert result["weights_sha256"] == alone(tmp_path, 30)
    assert [node["name"] for node in result["nodes"]] == ["laptop"]
    assert "the pool sends its code: helper.py, small.py (2 files" in err
    assert "this node gave 110 batches (830 samples)" in err
    assert "came by invite" in said
    found = sorted(path.name for path in (tmp_path / "node" / "cache").rglob("*.py"))
    assert found == ["helper.py", "small.py"]
    for path in [
        *(tmp_path / "node").rglob("*.json"),
        *(tmp_path / "here").glob("*e*t"),
        tmp_path / "here" / "key.pem",
    ]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE((tmp_path / "here").stat().st_mode) == 0o700


@pytest.mark.parametrize("way", ["@file", "-", "WIDE_INVITE"])
def test_an_invite_can_be_given_without_showing_it(tmp_path, way):
    with pool(tmp_path, changes="steps=4, loss=loss") as serving:
        (tmp_path / "invite").write_text(serving.invite + "\n")
        target = {"@file": ["@invite"], "-": ["-"], "WIDE_INVITE": []}[way]
        env = environment(**places(tmp_path), **({"WIDE_INVITE": serving.invite} if way == "WIDE_INVITE" else {}))
        command = [sys.executable, "-m", "wide", "join", *target, "--allow-code", "any"]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, input=serving.invite + "\n", capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "shell's history" not in done.stderr
        finished(serving)


def test_without_an_invite_one_is_asked_for_and_not_shown(tmp_path):
    with pool(tmp_path, changes="steps=4, loss=loss") as serving:
        parent, child = pty.openpty()
        env = environment(**places(tmp_path))
        command = [sys.executable, "-m", "wide", "join"]
        process = subprocess.Popen(command, cwd=tmp_path, env=env, stdin=child, stdout=child, stderr=child)
        os.close(child)
        screen = ""

        def shows(word):
            nonlocal screen
            with suppress(OSError):
                screen += os.read(parent, 65536).decode(errors="replace")
            return word in screen

        assert until(lambda: shows("not shown"))
        os.write(parent, serving.invite.encode() + b"\n")
        assert until(lambda: shows("Run it? [y/N"))
        assert "Look at it: " in screen
        os.write(parent, b"y\n")
        assert until(lambda: shows("gave"))
        assert process.wait(30) == 0
        os.close(parent)
        assert serving.invite not in screen
        finished(serving)


def test_code_runs_only_with_consent_and_is_asked_about_again_when_it_changes(tmp_path):
    with pool(tmp_path) as serving:
        join = ("join", serving.invite)
        options = {"cwd": elsewhere(tmp_path), **places(tmp_path)}
        code, _, err = wide(*join, **options)
        assert code == 77
        (digest,) = re.findall(r"--allow-code ([0-9a-f]{16}) says yes", err)
        code, _, err = wide(*join, "--allow-code", "0" * 16, **options)
        assert (code, "it has changed; look at it again" in err) == (77, True)
        code, _, err = wide(*join, "--allow-code", digest[:5], **options)
        assert (code, "expected 16 letters or more" in err) == (2, True)
        with started(*join, "--allow-code", digest, **options) as node:
            assert until(lambda: query(tmp_path, "SELECT * FROM ledger"))
            node.send_signal(signal.SIGTERM)
            assert node.wait(20) == 143
        with started(*join, **options) as node:  # it was allowed once
            before = len(query(tmp_path, "SELECT * FROM ledger"))
            assert until(lambda: len(query(tmp_path, "SELECT * FROM ledger")) > before)
            node.kill()
        assert query(tmp_path, "SELECT count(*) FROM machines") == [(1,)], "it is enrolled once"
        serving.terminate()
        serving.communicate(timeout=30)
    job = tmp_path / "small.py"
    job.write_text(job.read_text() + "\n# another line\n")
    with started("serve", job, "--resume", "here", cwd=tmp_path) as again:
        where, invite = invited(again)
        assert (where, invite) == (serving.where, serving.invite), "it is served where it was"
        code, _, err = wide("join", invite, **options)
        assert (code, "nobody is here to be asked" in err) == (77, True)
        again.terminate()


def test_a_cache_that_was_tampered_with_is_not_run(tmp_path):
    with pool(tmp_path, changes="steps=200, loss=loss") as serving:
        options = {"cwd": elsewhere(tmp_path), **places(tmp_path)}
        wide("join", serving.invite, **options)  # not allowed, but put down to be looked at
        (cached,) = (tmp_path / "node" / "cache").rglob("small.py")
        cached.write_text("raise SystemExit('evil')\n")
        with started("join", serving.invite, "--allow-code", "any", **options) as node:
            assert until(lambda: query(tmp_path, "SELECT * FROM ledger"))
            node.kill()
        assert "evil" not in cached.read_text()


def test_data_that_a_machine_has_not_is_streamed_and_both_ends_say_so(tmp_path):
    (tmp_path / "data.txt").write_text("here")
    with pool(tmp_path, changes="steps=20, loss=loss, dataset=data", body=READ_TOO + SLOW_LOSS) as serving:
        join = ("join", serving.invite, "--allow-code", "any")
        code, _, err = wide(*join, cwd=elsewhere(tmp_path), **places(tmp_path))
        assert (code, "the pool streams its data to this machine" in err) == (0, True), err
        result, said = finished(serving)
    assert "batches are streamed to it" in said
    assert result["weights_sha256"] == alone(tmp_path, 20)


def test_arguments_travel_with_the_code(tmp_path):
    body = "import sys\nrate = float(sys.argv[2])\n" + SLOW_LOSS
    changes = "steps=12, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=rate)"
    job = a_job(tmp_path, changes, body)
    own = ("--", "--rate", "0.7")
    with started("serve", job, "--port", 0, "--out", "here", "--json", *own, cwd=tmp_path) as serving:
        _, invite = invited(serving)
        join = ("join", invite, "--allow-code", "any")
        code, _, err = wide(*join, cwd=elsewhere(tmp_path), **places(tmp_path))
        assert code == 0, err
        result, _ = finished(serving)
    for nodes in (0, 2):
        code, out, err = wide("run", job, "--nodes", nodes, "--json", *own, cwd=tmp_path)
        assert code == 0, err
        assert json.loads(out)["weights_sha256"] == result["weights_sha256"]
    assert json.loads((tmp_path / "here" / "run.json").read_text())["sessions"][0]["job"]["arguments"] == list(own[1:])


def test_a_node_that_was_sent_the_code_follows_when_it_changes(tmp_path):
    """Another line beside the job, and other arguments: it looks again, and runs that."""
    (tmp_path / "helper.py").write_text("print('the first helper')\n")
    body = "import helper, sys\nrate = float((sys.argv + ['0.1'])[1])\n" + SLOW_LOSS
    changes = "steps=40, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=rate)"
    with pool(tmp_path, changes=changes, body=body) as serving:
        join = ("join", serving.invite, "--allow-code", "any")
        with started(*join, cwd=elsewhere(tmp_path), **places(tmp_path)) as node:
            assert until(lambda: query(tmp_path, "SELECT * FROM ledger"))
            serving.terminate()
            serving.communicate(timeout=30)
            (tmp_path / "helper.py").write_text("print('the second helper')\n")
            words = ("serve", "small.py", "--resume", "here", "--json")
            with started(*words, "--", "0.7", cwd=tmp_path) as again:
                result, said = finished(again)
            assert "the job's arguments are not as they were" in said
            out, told = node.communicate(timeout=20)
            assert (node.returncode, "the pool trains other code by now" in told) == (0, True)
            assert "the second helper" in out + told, "nothing of the old code is used"
    assert result["steps"] == 40
    code, _, err = wide("serve", "small.py", "--resume", "here", cwd=tmp_path)
    assert (code, "are not as they were" in err) == (0, False), "the last ones are remembered"


def test_a_node_with_its_own_copy_is_told_nothing_but_what_its_owner_says(tmp_path):
    body = "import sys\nwords = sys.argv[1:]\n" + SLOW_LOSS
    job = a_job(tmp_path, "steps=8, loss=loss", body)
    with started("serve", job, "--port", 0, "--out", "here", "--json", "--", "--out", "x", cwd=tmp_path) as serving:
        _, invite = invited(serving)
        join = ("join", invite, "--job", job)
        code, _, err = wide(*join, cwd=tmp_path, **places(tmp_path))
        assert (code, "other arguments than yours (--out x)" in err) == (77, True), err
        code, _, err = wide(*join, "--", "--out", "x", cwd=tmp_path, **places(tmp_path))
        assert code == 0, err
        finished(serving)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("where", ["import", "model"])
def test_whoever_is_told_to_leave_leaves_whatever_its_code_is_doing(tmp_path, nodes, where):
    """A slow import, or code that catches every exception while it builds its model."""
    nap = "try:\n{0}    open('asleep', 'w'); time.sleep(6)\n{0}except Exception:\n{0}    pass\n"
    slow = (
        nap.format("")
        if where == "import"
        else "def net():\n    " + nap.format("    ") + "    return nn.Linear(6, 3)\n"
    )
    body = f"import os\nif os.environ.get('SLOW'):\n    {slow.replace(chr(10), chr(10) + '    ')}\nelse:\n    net = lambda: nn.Linear(6, 3)\n"
    body += SLOW_LOSS
    changes = "steps=4000, loss=loss" + (", model=net" if where == "model" else "")
    with pool(tmp_path, changes=changes, body=body) as serving:
        join = ("join", serving.invite, "--allow-code", "any", "--nodes", nodes)
        with started(*join, cwd=elsewhere(tmp_path), SLOW="1", **places(tmp_path)) as node:
            assert until((tmp_path / "empty" / "asleep").exists)
            node.terminate()
            assert node.wait(10) == 143
            assert "Traceback" not in node.stderr.read()
        assert serving.poll() is None


@pytest.mark.parametrize("after_s", [0.8, 2.0])
def test_whoever_leaves_while_its_nodes_are_started_leaves_nobody_behind(tmp_path, after_s):
    with pool(tmp_path, changes="steps=4000, loss=loss") as serving:
        join = ("join", serving.invite, "--allow-code", "any", "--nodes", 2)
        with started(*join, cwd=elsewhere(tmp_path), **places(tmp_path)) as node:
            then = time.monotonic() + after_s
            assert until(lambda: time.monotonic() > then)
            os.killpg(node.pid, signal.SIGINT)
            assert node.wait(20) == 130
        assert serving.poll() is None  # and `started` has seen that nobody is left


def test_a_port_that_is_taken_leaves_no_folder_behind(tmp_path):
    with pool(tmp_path) as serving:
        port = serving.where.rpartition(":")[2]
        code, _, err = wide("serve", "small.py", "--port", port, "--out", "other", cwd=tmp_path)
        assert (code, "choose another with --port" in err) == (2, True)
        assert not (tmp_path / "other").exists()
        code, _, err = wide("serve", "small.py", "--host", "192.0.2.1", "--out", "other", cwd=tmp_path)
        assert (code, "choose another with --host" in err) == (2, True)


def test_a_machine_that_comes_before_its_pool_waits_and_one_that_was_in_need_not_join_again(tmp_path):
    first = a_job(tmp_path, "steps=60, loss=loss", SLOW_LOSS)
    options = {"cwd": elsewhere(tmp_path), **places(tmp_path)}
    with started("serve", first, "--port", 0, "--out", "here", cwd=tmp_path) as process:
        where, invite = invited(process)
        process.terminate()
        process.communicate(timeout=30)
    with started("join", invite, "--allow-code", "any", **options) as node:
        for line in node.stderr:
            if "waiting for it" in line:
                break
        port = where.rpartition(":")[2]
        with started("serve", first, "--port", port, "--resume", "here", "--json", cwd=tmp_path) as process:
            assert invited(process)[1] == invite, "the same keys, the same invite"
            assert until(lambda: query(tmp_path, "SELECT * FROM ledger"))
            process.kill()
            process.communicate()
        with started("serve", first, "--port", port, "--resume", "here", "--json", cwd=tmp_path) as process:
            result, _ = finished(process)
        assert node.wait(20) == 0
    assert query(tmp_path, "SELECT count(*) FROM machines") == [(1,)]
    assert result["weights_sha256"] == alone(tmp_path, 60)


def test_invites_are_made_listed_used_up_and_revoked(tmp_path):
    with pool(tmp_path, changes="steps=9000, loss=loss") as serving:
        assert until(lambda: (tmp_path / "here" / "checkpoints").exists() or query(tmp_path, "SELECT * FROM invites"))
        code, out, _ = wide("invite", "here", "--uses", 1, "--expires", "90m", "--name", "for Ada", cwd=tmp_path)
        assert code == 0
        invite = out.split()[-1]
        known = parse(invite)
        assert 0 < known.expires_at - time.time() < 91 * 60
        join = ("join", invite, "--allow-code", "any", "--log", "silent")
        ada, eve = ({"cwd": elsewhere(tmp_path), **places(tmp_path, who)} for who in ("ada", "eve"))
        with started(*join, "--name", "ada", **ada) as node:
            assert until(lambda: query(tmp_path, "SELECT * FROM ledger"))
            code, _, err = wide(*join, **eve)
            assert (code, "used up (1 machine)" in err) == (77, True)
            code, out, _ = wide("invites", "here", cwd=tmp_path)
            assert re.search(rf"invite {known.id}  used up .*1 of 1 machines  for Ada", out)
            assert re.search(r"machine [0-9a-f]{16}  ada  from 127.0.0.1:\d+  since", out)
            code, _, err = wide("revoke", "here", parse(serving.invite).id, cwd=tmp_path)
            assert (code, "is revoked" in err) == (0, True)
            code, _, err = wide("join", serving.invite, "--allow-code", "any", **eve)
            assert (code, "this invite was revoked" in err) == (77, True)
            assert node.poll() is None, "members stay"
            assert wide("revoke", "here", "ada", cwd=tmp_path)[0] == 0
            assert node.wait(10) == 77
        code, _, err = wide(*join, **ada)
        assert (code, "has revoked it" in err) == (77, True)
        _, out, _ = wide("invite", "here", "--uses", 1, cwd=tmp_path)
        with started(
            "join", out.split()[-1], "--allow-code", "any", "--name", "ada", **ada
        ) as node:  # it may come again
            before = len(query(tmp_path, "SELECT * FROM ledger"))
            assert until(lambda: len(query(tmp_path, "SELECT * FROM ledger")) > before)
            assert len(query(tmp_path, "SELECT * FROM machines")) == 2
            node.kill()
        with started("join", out.split()[-1], "--allow-code", "any", "--name", "ada", **ada) as node:  # with a key
            before = len(query(tmp_path, "SELECT * FROM ledger"))
            assert until(lambda: len(query(tmp_path, "SELECT * FROM ledger")) > before)
            node.kill()
        assert set(rejects(tmp_path)) == {"refused"}
        code, out, _ = wide("invite", "here", "--expires", "1s", cwd=tmp_path)
        late = out.split()[-1]
        access = Access(tmp_path / "here" / "run.db")
        assert until(lambda: access.invites()[-1][3] < time.time())
        code, _, err = wide("join", late, "--allow-code", "any", **eve)
        assert (code, "has expired" in err) == (77, True)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("join", "wide1_aeaq"), 2, "the invite is cut"),
        (("join", "wide1_0"), 2, "was misread"),
        (("join", "wide9_abc"), 2, "of kind 9"),
        (("join", "@nowhere"), 2, "@nowhere: No such file"),
        (("join",), 2, "no invite"),
        (("join", "127.0.0.1:9", "--until", "25:00"), 2, "--until 25:00: expected a time such as 18:30"),
        (("join", "127.0.0.1:9", "--nodes", "0"), 2, "--nodes 0: expected a whole number from 1"),
        (("join", "127.0.0.1:9", "--max-rate", "-1"), 2, "--max-rate -1: expected a number of megabits"),
        (("join", "127.0.0.1:9", "--max-memory", "much"), 2, "--max-memory much: expected a size"),
        (("join", "127.0.0.1:9", "--threads", "x"), 2, "--threads x: expected a whole number"),
        (("invite", "nowhere"), 2, "has no pool's secret"),
        (("invites", "nowhere"), 2, "there is no run in it"),
        (("revoke", "nowhere", "1"), 2, "has no pool's secret"),
        (("serve", "small.py", "--address", "a:b:c:d:99999999"), 2, "--address"),
        (("doctor", "wide1_x"), 2, "the invite is cut"),
    ],
)
def test_wrong_words_are_answered_in_one_line(tmp_path, arguments, code, words):
    a_job(tmp_path)
    done = wide(*arguments, cwd=tmp_path, WIDE_TOKEN="t", **places(tmp_path))
    assert done[0] == code, done
    assert words in done[2], done[2]
    assert "Traceback" not in done[2]


def test_folders_that_cannot_be_written_are_named_and_keys_are_done_without(tmp_path):
    with pool(tmp_path, changes="steps=4, loss=loss") as serving:
        (tmp_path / "file").write_text("")
        state = {"XDG_STATE_HOME": str(tmp_path / "file"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        cache = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "file")}
        join = ("join", serving.invite, "--allow-code", "any")
        code, _, err = wide(*join, cwd=elsewhere(tmp_path), **cache)
        assert (code, "cannot be written" in err, "--job FILE" in err) == (2, True, True)
        code, _, err = wide(*join, cwd=elsewhere(tmp_path), **state)
        assert (code, "next time this machine joins as a new one" in err) == (0, True), err
        finished(serving)


def test_a_machine_lends_several_nodes_and_takes_them_back(tmp_path):
    with pool(tmp_path, changes="steps=400, loss=loss") as serving:
        join = (
            "join",
            serving.invite,
            "--allow-code",
            "any",
            "--nodes",
            2,
            "--name",
            "box",
            "--nice",
            "--max-rate",
            50,
        )
        with started(*join, cwd=elsewhere(tmp_path), **places(tmp_path)) as node:
            assert until(lambda: len(query(tmp_path, "SELECT DISTINCT node FROM ledger")) == 2)
            assert {name for (name,) in query(tmp_path, "SELECT name FROM nodes")} == {"box", "box-2"}
            assert all(process.nice() >= 10 for process in relatives(node.mark))
            node.send_signal(signal.SIGINT)
            _, err = node.communicate(timeout=30)
            assert node.returncode == 130
            assert err.count("this node gave") == 2
        assert serving.poll() is None
        whys = {why for (why,) in query(tmp_path, "SELECT why FROM nodes")}
        assert whys == {"it was told to leave"}


def test_more_memory_than_was_lent_ends_the_loan_politely(tmp_path):
    with pool(tmp_path, changes="steps=400, loss=loss") as serving:
        join = ("join", serving.invite, "--allow-code", "any", "--max-memory", "10M")
        code, _, err = wide(*join, cwd=elsewhere(tmp_path), **places(tmp_path))
        assert (code, "more than --max-memory allows" in err) == (77, True), err
        assert serving.poll() is None


def test_the_doctor_says_what_is_wrong_and_how_wide_the_way_is(tmp_path):
    with pool(tmp_path) as serving:
        code, out, err = wide("doctor", serving.invite, cwd=tmp_path, **places(tmp_path))
        assert re.search(r"ok    Python: ", out), out + err
        assert re.search(r"ok    the pool: 127.0.0.1:\d+ answers", out)
        assert re.search(r"ok    bandwidth: (about \d+ Mbit/s|more than 1 Gbit/s)", out)
        assert code in (0, 1)
        assert query(tmp_path, "SELECT count(*) FROM machines") == [(0,)], "whoever only looks is not enrolled"
        assert ("nothing is in the way" in out) == (code == 0)
        invite = serving.invite
        serving.kill()
        serving.communicate()
    code, out, err = wide("doctor", invite, cwd=tmp_path, **places(tmp_path))
    assert (code, "MEND  the pool: " in out) == (1, True), out + err


def test_no_secret_is_where_it_should_not_be(tmp_path):
    """In run folder (but for its own files), logs, argv and environment of every process, while a pool trains."""
    token = "5ecret" * 6
    (tmp_path / "token").write_text(token)
    serve = ("--nodes", 1, "--log", "verbose", "--token-file", "token")
    with pool(tmp_path, *serve, changes="steps=4000, loss=loss, evaluate=lambda m: {'x': 1.0}") as serving:
        join = ("join", serving.invite, "--allow-code", "any", "--nodes", 2, "--log", "verbose")
        log = open(tmp_path / "node.log", "w")  # noqa: SIM115
        with started(*join, cwd=elsewhere(tmp_path), stderr=log, **places(tmp_path)) as node:
            assert until(lambda: len(query(tmp_path, "SELECT DISTINCT node FROM ledger")) == 3)
            root = (tmp_path / "here" / "secret").read_text().strip()
            (memory,) = (tmp_path / "node" / "state").rglob("*.json")
            key = json.loads(memory.read_text())["secret"]
            secrets = [root, serving.invite, serving.invite[-40:], key, token, parse(serving.invite).secret.hex()]
            kept = {"secret", "invite", "token", "key.pem"}
            files = [path for path in (tmp_path / "here").rglob("*") if path.is_file() and path.name not in kept]
            files += [tmp_path / "node.log"]
            files += [path for path in (tmp_path / "node" / "cache").rglob("*") if path.is_file()]
            assert len(files) > 5
            for path in files:
                data = path.read_bytes()
                assert not any(secret.encode() in data for secret in secrets), path
            for process in [*relatives(serving.mark), *relatives(node.mark)]:
                with suppress(psutil.NoSuchProcess):
                    shown = " ".join([*process.cmdline(), *(f"{k}={v}" for k, v in process.environ().items())])
                    assert not any(secret in shown for secret in secrets), process
            node.terminate()
            assert node.wait(30) == 143
        log.close()
