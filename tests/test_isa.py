"""Instruction sets: what machines have in common, who is let in with which, and pools of unlike ones."""

from __future__ import annotations

import json
import re

import pytest

from tests.greet import introduced
from tests.jobs import make
from tests.processes import result_of, started, until, wide
from tests.test_run import a_job
from tests.test_serve import invited, query
from tests.twin import TOKEN, Twin
from wide.config import Options, resolve
from wide.errors import OtherSet, Refused, UsageError
from wide.exchange.likeness import Likeness
from wide.job import isa
from wide.job.isa import ANY, NATIVE, OWN, Isa, best, common, in_use, of_cpu, parse, wanted
from wide.launch.instructions import chosen
from wide.transport.introduction import error_of
from wide.wire import messages as say

INTEL = Isa("x86", "intel", "avx512", NATIVE)
AMD = Isa("x86", "amd", "avx512", NATIVE)
OLD = Isa("x86", "intel", "avx2", NATIVE)
ANCIENT = Isa("x86", "intel", "default", NATIVE)
ARM = Isa("arm64", ANY, "default", NATIVE)
DEFAULT = Isa("x86", ANY, "default")
AVX2 = Isa("x86", "intel", "avx2")


# ── the ladder ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (INTEL, OLD, AVX2),
        (INTEL, INTEL, Isa("x86", "intel", "avx512")),
        (INTEL, AMD, Isa("x86", ANY, "avx512")),
        (AMD, OLD, Isa("x86", ANY, "avx2")),
        (AMD, ANCIENT, DEFAULT),
        (INTEL, ANCIENT, DEFAULT),
        (INTEL, ARM, None),
    ],
)
def test_two_machines_have_the_lower_rung_in_common(one, other, both):
    assert common(one, other) == common(other, one) == both
    if both is not None:
        assert one.has(both)
        assert other.has(both)


def test_a_machine_has_what_is_below_its_best_but_not_another_makers_branches():
    assert INTEL.has(INTEL)
    assert INTEL.has(AVX2)
    assert INTEL.has(Isa("x86", ANY, "avx512"))
    assert not INTEL.has(AMD)
    assert not AMD.has(AVX2)
    assert not OLD.has(Isa("x86", "intel", "avx512"))
    assert not OLD.has(ARM)


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "found"),
    [
        ("x86_64", "vendor_id\t: GenuineIntel\nflags\t\t: sse2 fma avx2 avx512f\n", OLD),
        ("x86_64", "vendor_id : AuthenticAMD\nflags : fma avx2 avx512f avx512bw avx512vl avx512dq", AMD),
        ("x86_64", "vendor_id : GenuineIntel\nflags : sse2 avx2\n", ANCIENT),  # torch wants fma, too
        ("AMD64", "", None),
        ("aarch64", "", ARM),
        ("arm64", "Features : asimd", ARM),
    ],
)
def test_a_cpu_is_known_by_what_the_kernel_says_of_it(machine, cpuinfo, found):
    assert of_cpu(machine, cpuinfo) == found


@pytest.mark.parametrize(
    ("environ", "used", "most"),
    [
        ({}, INTEL, INTEL),
        ({"ATEN_CPU_CAPABILITY": "avx512"}, INTEL, INTEL),
        ({"ATEN_CPU_CAPABILITY": "avx2"}, Isa("x86", "intel", "avx2", OWN), AVX2),
        ({"ATEN_CPU_CAPABILITY": "default"}, Isa("x86", "intel", "default", OWN), DEFAULT),
        ({"MKL_CBWR": "COMPATIBLE"}, Isa("x86", "intel", "default", OWN), DEFAULT),
        ({"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"}, Isa("x86", "intel", "avx2", OWN), AVX2),
        ({"MKL_CBWR": "BRANCH=AUTO,STRICT"}, Isa("x86", "intel", "avx512", OWN), Isa("x86", "intel", "avx512")),
        (AVX2.variables, AVX2, AVX2),
        (AVX2.variables | {isa.BEST: str(INTEL)}, AVX2, INTEL),
        (DEFAULT.variables, DEFAULT, DEFAULT),
    ],
)
def test_what_the_user_has_set_is_respected(environ, used, most):
    assert in_use(environ, INTEL) == used
    assert best(environ, INTEL) == most
    assert parse(str(used)) == used


def test_a_process_that_begins_again_knows_what_its_machine_can_do(monkeypatch):
    monkeypatch.setattr(isa, "cpu", lambda: INTEL)
    environ = {"ATEN_CPU_CAPABILITY": "avx2", "HOME": "/"}
    isa.use(DEFAULT, environ)
    assert (in_use(environ, INTEL), best(environ, INTEL)) == (DEFAULT, AVX2)
    isa.use(INTEL, environ)
    assert environ == {"HOME": "/", isa.BEST: str(AVX2)}, "what is native is not told"


def test_what_a_cpu_has_not_is_refused_in_words():
    assert wanted("avx2", INTEL) == AVX2
    assert wanted("avx2-any", AMD).variables["MKL_CBWR"] == "COMPATIBLE"
    with pytest.raises(UsageError, match=r"--isa avx512: this CPU \(x86\) has no avx512; it has default, avx2"):
        wanted("avx512", OLD)
    with pytest.raises(UsageError, match="arm64"):
        wanted("avx2", ARM)


# ── the door ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def hear(likeness, used, most=None, device="cpu", is_first=True, is_alike=False):
    hello = say.Hello("", b"", "node", "", "", 1, "", isa=str(used), best=str(most or used), device=device)
    likeness.check(hello, is_alike, is_first)


def a_pool(used=INTEL, may_settle=True, is_exact=True, has_begun=False):
    return Likeness(used, INTEL, may_settle, lambda: is_exact, lambda: has_begun)


def test_who_uses_the_same_set_comes_in():
    hear(a_pool(), INTEL)
    hear(a_pool(AVX2), AVX2, INTEL)
    hear(a_pool(Isa("x86", "intel", "avx2", OWN)), Isa("x86", "intel", "avx2", OWN), AVX2, is_alike=True)


def test_a_better_machine_is_told_to_use_less():
    with pytest.raises(OtherSet, match="uses avx2") as told:
        hear(a_pool(AVX2, has_begun=True), INTEL)
    assert parse(told.value.isa) == AVX2


def test_a_pool_that_has_not_begun_settles_on_what_all_have():
    pool = a_pool()
    with pytest.raises(OtherSet, match="settles on avx2"):
        hear(pool, OLD)
    with pytest.raises(OtherSet, match="settles on default"):
        hear(pool, Isa("x86", "intel", "default", OWN), DEFAULT)
    with pytest.raises(OtherSet, match="uses default"):
        hear(pool, OLD)
    assert pool.wanted == DEFAULT
    assert parse(pool.offered) == DEFAULT


@pytest.mark.parametrize(("begun", "why"), [(True, "has begun with them"), (False, "was told to use them")])
def test_a_pool_that_cannot_settle_says_why_and_what_to_do(begun, why):
    pool = a_pool(may_settle=begun, has_begun=begun)
    with pytest.raises(Refused, match=f"{why}; this machine has only avx2, .*--isa avx2, or with --strategy local"):
        hear(pool, OLD)
    with pytest.raises(Refused, match="has only amd's avx512, .*--isa avx512-any"):
        hear(pool, AMD)
    with pytest.raises(Refused, match="arm64 rounds differently"):
        hear(pool, ARM)
    assert pool.wanted is None


def test_another_kind_of_device_is_refused_before_training_starts():
    pool = a_pool()
    hear(pool, INTEL)
    with pytest.raises(Refused, match="computes on cpu, exactly, and cuda rounds differently: join with --device cpu"):
        hear(pool, INTEL, device="cuda", is_first=False)
    hear(pool, ANCIENT, device="cuda")  # nobody else is there
    with pytest.raises(Refused, match="--device cuda"):
        hear(pool, INTEL, is_first=False)


def test_in_async_and_local_anybody_may_come():
    pool = a_pool(is_exact=False)
    for machine in (OLD, AMD, ARM):
        hear(pool, machine)
    hear(pool, INTEL, device="cuda")
    assert (pool.wanted, pool.offered) == (None, "")


def test_at_the_door_a_node_hears_which_set_it_should_use():
    twin = Twin(make(), likeness=a_pool(AVX2, may_settle=False))

    def says(**hello):
        connection = introduced(twin.call(), twin.turn, token=TOKEN, build="another", **hello)
        return [message for message in connection.poll() if not isinstance(message, say.Known | say.Probe)]

    (stop,) = says(isa=str(INTEL), best=str(INTEL), device="cpu")
    assert (stop.exit_code, parse(stop.isa), type(error_of(stop))) == (75, AVX2, OtherSet)
    assert not twin.rejects(), "it comes again in a moment"
    assert isinstance(says(isa=str(AVX2), best=str(INTEL), device="cpu")[0], say.Welcome)
    (stop,) = says(isa=str(ANCIENT), best=str(ANCIENT), device="cpu")
    assert (stop.exit_code, stop.isa, "has only default" in stop.why) == (77, "", True)
    (stop,) = says(isa=str(AVX2), best=str(AVX2), device="cuda")
    assert (stop.exit_code, "cuda rounds differently" in stop.why) == (77, True)
    assert isinstance(says()[0], say.Welcome), "one that is a release behind says nothing of it"


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────

needs_two = pytest.mark.skipif(isa.cpu().family != "x86" or isa.cpu().height == 0, reason="this CPU has one set only")


def test_wrong_words_are_the_users():
    assert resolve({}, {"WIDE_ISA": "avx2"}).isa == "avx2"
    with pytest.raises(UsageError, match="--isa mmx: expected auto or default"):
        resolve({"isa": "mmx"}, {})


def test_a_run_goes_on_with_the_set_that_it_had_settled_on(tmp_path, monkeypatch):
    monkeypatch.setattr(isa, "cpu", lambda: INTEL)
    for before, then in ((AVX2, AVX2), (INTEL, None), (Isa("x86", "amd", "avx2"), None), ("?", None)):
        (tmp_path / "run.json").write_text(json.dumps({"sessions": [{"machine": {"isa": str(before)}}]}))
        assert chosen(Options(), tmp_path) == then
    assert chosen(Options(isa="default"), tmp_path) == DEFAULT, "whoever says so has another one"
    assert chosen(Options(), None) is None


@needs_two
@pytest.mark.processes
def test_a_mixed_pool_has_the_bits_of_the_common_set(tmp_path):
    """One machine can do as it likes, one is held back by its owner: the pool settles, and nobody is asked anything."""
    places = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    job = a_job(tmp_path, "steps=30")
    with started("serve", job, "--port", 0, "--out", "here", "--json", cwd=tmp_path, **places) as pool:
        _, invite = invited(pool)
        joining = ("join", invite, "--allow-code", "any")
        with started(*joining, cwd=tmp_path, ATEN_CPU_CAPABILITY="default", **places) as one:
            out, err = pool.communicate(timeout=100)
            assert (pool.returncode, one.wait(30)) == (0, 0), err
    assert "the pool settles on default instructions" in err
    assert "nothing was trained yet" in err
    alone = [
        result_of("run", job, "--nodes", 0, "--isa", which, cwd=tmp_path, **places) for which in ("default", "auto")
    ]
    assert json.loads(out)["weights_sha256"] == alone[0]["weights_sha256"]
    sessions = json.loads((tmp_path / "here" / "run.json").read_text())["sessions"]
    assert [parse(session["machine"]["isa"]) for session in sessions] == [DEFAULT, DEFAULT]


@needs_two
@pytest.mark.processes
def test_a_better_machine_lowers_itself_and_a_worse_one_is_refused(tmp_path):
    places = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    job = a_job(tmp_path, "steps=400")
    rungs = isa.RUNGS[: isa.cpu().height + 1]
    options = ("--port", 0, "--out", "here", "--isa", "avx2", "--json")
    with started("serve", job, *options, cwd=tmp_path, **places) as pool:
        address, _ = invited(pool)
        joining = (
            "join",
            address,
            "--job",
            job,
            "--token-file",
            "here/token",
        )  # without an invite nothing is looked at
        code, _, err = wide(*joining, cwd=tmp_path, ATEN_CPU_CAPABILITY="default", **places)
        assert code == 77
        assert re.search("was told to use them; this machine has only default.*--isa default", err)
        with started(*joining, cwd=tmp_path, **places) as better:
            out, err = pool.communicate(timeout=100)
            assert pool.returncode == 0, err
            _, said = better.communicate(timeout=30)
            assert better.returncode == 0, said
    assert "the pool uses avx2 instructions, so that all compute the same bits" in said
    assert rungs[-1] == "avx2" or "avx2 instead of avx512 costs" in said
    alone = result_of("run", job, "--nodes", 2, "--isa", "avx2", cwd=tmp_path, **places)
    assert json.loads(out)["weights_sha256"] == alone["weights_sha256"]
    assert until(lambda: query(tmp_path, "SELECT reason FROM rejects") == [("refused",)], seconds=5)
