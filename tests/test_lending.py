"""Code on its way, consent, what a machine remembers, and when its owner wants it back: without processes."""

from __future__ import annotations

import datetime
import os
import stat
import sys
import types

import pytest

from wide.errors import ProtocolError, Refused, UsageError
from wide.job.program import files_of, program_of
from wide.job.spec import arguments_of, split_spec, with_arguments
from wide.launch import guard, memories
from wide.launch.code import Code, check_consent, code_of, folder_of, offered, put_down
from wide.launch.guard import BUSY_S, Busy, Guard, Load, Terms, TimeIsUp, until_of
from wide.launch.invites import addresses_of, seconds_of
from wide.launch.memories import Memory
from wide.telemetry.log import log, logging_to
from wide.wire.messages import Offer


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def a_folder(tmp_path, files):
    for name, text in files.items():
        path = tmp_path / "job" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "job" / "job.py"


# ── which files ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_modules_that_the_job_imports_are_found_wherever_it_imports_them(tmp_path):
    job = a_folder(
        tmp_path,
        {
            "job.py": "import data\nfrom nets import big\ndef loss():\n    from nets.parts.small import x\n    import late\n",
            "data.py": "import os, torch, json\n",
            "late.py": "",
            "unused.py": "",
            "nets/__init__.py": "",
            "nets/big.py": "from . import other\nfrom .parts import small\n",
            "nets/other.py": "",
            "nets/unused.py": "",
            "nets/parts/__init__.py": "from ..other import y\n",
            "nets/parts/small.py": "x = 1\n",
            "data.csv": "1,2\n",
            ".secret.py": "",
        },
    )
    assert sorted(files_of(job)) == [
        *("data.py", "job.py", "late.py", "nets/__init__.py", "nets/big.py", "nets/other.py"),
        *("nets/parts/__init__.py", "nets/parts/small.py"),
    ]
    assert "" in program_of(job), "the job's own file, whatever it is called"


def test_nothing_outside_the_jobs_folder_is_sent(tmp_path):
    (tmp_path / "outside.py").write_text("secret = 1\n")
    job = a_folder(tmp_path, {"job.py": "import outside, linked, sneaky\nfrom .. import outside\n"})
    (job.parent / "linked.py").symlink_to(tmp_path / "outside.py")
    (job.parent / "sneaky").symlink_to(tmp_path)
    assert list(files_of(job)) == ["job.py"]


def test_code_that_is_too_large_to_be_only_code_is_not_sent(tmp_path):
    job = a_folder(tmp_path, {"job.py": "import big\n", "big.py": "x = 1\n" * 2_000_000})
    assert code_of(str(job)) is None


# ── on its way ───────────────────────────────────────────────────────────────────────────────────────────────────


def an_offer(files=(("job.py", b"pass\n"),), main="job.py:job", **changes):
    offer = Offer("job", 1, 1, [(name, len(data)) for name, data in files], main, **changes)
    return offer, memoryview(b"".join(data for _, data in files))


def test_what_a_pool_sends_is_what_arrives(tmp_path):
    job = a_folder(tmp_path, {"job.py": "import data\n", "data.py": "x = 1\n"})
    sent = code_of(with_arguments(str(job), ["--lr", "0.3"]))
    arrived = offered(*an_offer(sent.files, sent.main, arguments=list(sent.arguments)))
    assert (arrived, arrived.digest) == (sent, sent.digest)
    spec = put_down(arrived)
    assert split_spec(spec)[0].read_text() == "import data\n"
    assert arguments_of(spec) == ["--lr", "0.3"]
    assert stat.S_IMODE(folder_of(arrived).parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "name",
    [
        "../job.py",
        "/etc/job.py",
        "a/../../job.py",
        "a\\b.py",
        "c:job.py",
        "job.txt",
        "",
        ".",
        "./job.py",
        "a//b.py",
        "x\n.py",
        "b/.py/",
        "~/\0.py",
    ],
)
def test_a_file_that_would_land_elsewhere_is_refused(name):
    with pytest.raises(ProtocolError):
        offered(*an_offer((("job.py", b""), (name, b"evil"))))


@pytest.mark.parametrize(
    "wrong",
    [
        an_offer(main="other.py:job"),
        an_offer((("job.py", b""), ("JOB.py", b""))),
        (an_offer()[0], memoryview(b"")),
        (an_offer()[0], memoryview(b"pass\n and more")),
        an_offer(arguments=["a\x1fb"]),
        (Offer("job", 1, 1, [("job.py", -5)], "job.py:job"), memoryview(b"")),
        an_offer(tuple((f"f{i}.py", b"") for i in range(2000))),
    ],
)
def test_an_offer_that_is_not_what_it_says_is_refused(wrong):
    with pytest.raises(ProtocolError):
        offered(*wrong)


def test_a_hash_is_of_names_contents_job_and_arguments():
    one = Code((("job.py", b"a"),), "job.py:job")
    others = [
        Code((("job.py", b"b"),), "job.py:job"),
        Code((("jab.py", b"a"),), "job.py:job"),
        Code((("job.py", b"a"),), "job.py:other"),
        Code((("job.py", b"a"),), "job.py:job", ("--lr",)),
        Code((("job.py", b"a"), ("x.py", b"")), "job.py:job"),
    ]
    assert len({code.digest for code in (one, *others)}) == 6


def test_no_two_programs_have_one_hash():
    evil = b"evil()\n"
    one = Code((("job.py", b"good"), ("z.py", b"# notes\0" + b"1\0job.py\0" + b"7\0" + evil)), "job.py:job")
    other = Code(
        (("job.py", evil),), "job.py:job", ("2", "job.py", "4", "goodz.py", str(len(one.files[1][1])), "# notes")
    )
    assert one.digest != other.digest


def test_a_job_behind_a_link_is_sent_under_its_own_name(tmp_path):
    job = a_folder(tmp_path, {"job.py": "x = 1\n"})
    (tmp_path / "link.py").symlink_to(job)
    assert code_of(str(tmp_path / "link.py")).main == "job.py:job"


def test_a_python_that_is_installed_in_the_jobs_folder_is_not_sent(tmp_path, monkeypatch):
    job = a_folder(tmp_path, {"job.py": "import json, mine\n", "env/lib/json.py": "", "mine.py": "", "json.py": ""})
    monkeypatch.setattr("wide.job.program.PYTHONS", {job.parent / "env" / "lib"})
    monkeypatch.setitem(sys.modules, "some.json", types.SimpleNamespace(__file__=str(job.parent / "env/lib/json.py")))
    assert sorted(files_of(job)) == ["job.py", "json.py", "mine.py"]


def test_names_that_would_fool_a_reader_are_refused():
    for name in ("x\x9b31m.py", "a\u202eyp.py"):
        with pytest.raises(ProtocolError):
            offered(*an_offer((("job.py", b""), (name, b""))))


def test_without_consent_nothing_runs():
    code = Code((("job.py", b"a"),), "job.py:job")
    with pytest.raises(Refused, match=f"--allow-code {code.digest[:16]} says yes"):
        check_consent(code, None, ())
    for allowed, remembered in (("any", ()), (code.digest[:16], ()), (None, (code.digest,)), (code.digest.upper(), ())):
        check_consent(code, allowed, remembered)
    with pytest.raises(Refused, match="it has changed"):
        check_consent(code, "0" * 64, (code.digest,))  # who names a hash means that one
    with pytest.raises(Refused, match="it has changed"):
        check_consent(code, "0" * 64, ())
    with pytest.raises(UsageError):
        check_consent(code, code.digest[:15], ())


# ── what is remembered ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_machine_remembers_its_key_and_what_it_allowed():
    pin = bytes(20)
    assert memories.recall(pin) == Memory()
    memories.remember(pin, Memory("id", b"secret", "invite"))
    memories.allow(pin, "a" * 64)
    memories.allow(pin, "a" * 64)
    assert memories.recall(pin) == Memory("id", b"secret", "invite", ("a" * 64,))
    assert memories.recall(b"1" * 20) == Memory()
    assert stat.S_IMODE(memories._path(pin).stat().st_mode) == 0o600


@pytest.mark.parametrize("text", [b'{"machine": "\xff"}', b"", b"{", b"[]", b'{"machine": 7}', bytes(100)])
def test_a_memory_that_cannot_be_read_is_none(text):
    memories.remember(bytes(20), Memory("id", b"s"))
    memories._path(bytes(20)).write_bytes(text)
    assert memories.recall(bytes(20)) == Memory()


def test_no_invite_gets_into_a_log(tmp_path):
    with logging_to("silent", tmp_path / "log.jsonl"):
        log.info("%s cannot be read", "@wide1_aeaqcaibae")
    assert "aeaqcaibae" not in (tmp_path / "log.jsonl").read_text()
    assert "@wide1_… cannot be read" in (tmp_path / "log.jsonl").read_text()


# ── whose machine it is ──────────────────────────────────────────────────────────────────────────────────────────


def test_until_is_today_or_tomorrow():
    noon = datetime.datetime(2026, 11, 17, 12, 0)
    assert until_of("12:30", noon) - noon.timestamp() == 1800
    assert until_of("11:30", noon) - noon.timestamp() == 23.5 * 3600
    for wrong in ("25:00", "12", "a:b", "12:60", ""):
        with pytest.raises(ValueError, match=r".*"):
            until_of(wrong, noon)


def test_a_guard_says_why_nodes_have_to_go(monkeypatch):
    monkeypatch.setattr(guard, "own_memory", lambda: 100 << 20)
    assert isinstance(Guard(Terms(until=50.0), lambda: None).look(50.0), TimeIsUp)
    assert Guard(Terms(until=50.0), lambda: None).look(49.0) is None
    assert isinstance(Guard(Terms(most_memory=99 << 20), lambda: None).look(0.0), Refused)
    assert Guard(Terms(most_memory=101 << 20), lambda: None).look(0.0) is None


def test_only_other_programs_count_and_only_if_they_go_on(monkeypatch):
    shares = iter([None, 0.9, 0.1, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9])
    load = Load()
    monkeypatch.setattr(load, "share", lambda now: next(shares))
    wanted = [load.is_wanted_by_others(float(now)) for now in range(9)]
    assert wanted == [False] * 8 + [True]
    assert BUSY_S == 5.0
    guarded = Guard(Terms(only_idle=True), lambda: None)
    monkeypatch.setattr(guarded._load, "is_wanted_by_others", lambda now: True)
    assert isinstance(guarded.look(0.0), Busy)


def test_what_this_process_computes_is_not_others():
    load = Load()
    now, spent = 0.0, 0
    load.share(now)
    while spent < 3_000_000:
        spent += 1
    share = load.share(1e3)
    assert share is not None
    assert 0 <= share < 0.5


def test_a_machine_gives_only_the_cores_that_it_was_told():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system does not tell")
    before = os.sched_getaffinity(0)
    try:
        Terms(cores=1).take_a_back_seat()
        assert len(os.sched_getaffinity(0)) == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("24h", 86400), ("7d", 604800), ("1.5h", 5400), ("10s", 10)]
)
def test_times_are_read(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "1y", "1e9h", "0s", "999999999d"])
def test_wrong_times_are_refused(text):
    with pytest.raises(UsageError, match="--expires"):
        seconds_of(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pool.lab", (("pool.lab", 9),)),
        ("pool.lab:80", (("pool.lab", 80),)),
        ("10.0.0.1, [::1]:7", (("10.0.0.1", 9), ("::1", 7))),
        ("2001:db8::1", (("2001:db8::1", 9),)),
        ("[::1]", (("::1", 9),)),
    ],
)
def test_addresses_are_read(text, found):
    assert addresses_of(text, 9) == found


@pytest.mark.parametrize(
    "text",
    ["", ",", "a:b", "a:99999", "a:0", "1.2.3", "a b", "x" * 300, "x" * 70, "a..b", "::g", ",".join("abcdefghi")],
)
def test_wrong_addresses_are_refused(text):
    with pytest.raises(UsageError):
        addresses_of(text, 9)
