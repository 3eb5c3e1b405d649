"""A job that is a function: which values it is called with, where they travel, and what is wrong with them."""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import json
import sys
import types
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import pytest
import torch

import wide as package
from tests.jobs import make
from tests.processes import python, started, wide
from tests.test_joining import elsewhere, finished, places
from tests.test_run import SLOW_LOSS
from tests.test_serve import invited
from wide.cli.main import main
from wide.dashboard.runs import listed, told
from wide.errors import ProtocolError, UsageError
from wide.job.kinds import check, kind_of, parse, plain
from wide.job.loading import load, values_of
from wide.job.loading import make as made
from wide.job.program import difference, program_of
from wide.job.spec import PYTHON, TEXT, Given, split_spec, values_in, with_arguments, with_set, with_told
from wide.launch.code import Code, code_of, offered, put_down
from wide.launch.join import _own_job
from wide.wire.messages import Offer

processes = pytest.mark.processes


class Colour(enum.Enum):
    RED = 1


# ── types ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("default", "text", "value"),
    [
        (False, "yes", True),
        (True, "0", False),
        (True, "Off", False),
        (128, "64", 64),
        (128, "-1", -1),
        (0.1, "1", 1.0),
        (0.1, "3e-4", 3e-4),
        ("relu", "gelu", "gelu"),
        ("relu", "3", "3"),
        ("relu", "", ""),
        ("relu", "a=b", "a=b"),
        ("relu", "größe\n\x1f\x1e\x1d\0", "größe\n\x1f\x1e\x1d\0"),
        (None, "0.5", 0.5),
        (None, "(1, 2)", (1, 2)),
        (None, "None", None),
        (None, "adam", "adam"),
        (None, "'3'", "3"),
        (None, "{1, 2}", "{1, 2}"),
        ((1, 2), "3, 4, 5", (3, 4, 5)),
        ((0.9, 0.999), "[1, 0.5]", (1.0, 0.5)),
        ([1, 2], "(3,)", [3]),
        (("a", "b"), "('c',)", ("c",)),
        (Path("data"), "/tmp/x", Path("/tmp/x")),
    ],
)
def test_text_becomes_what_the_default_is(default, text, value):
    found = parse(text, kind_of(object(), default, True))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (int | None, "3", 3),
        (int | None, "none", None),
        (str | None, "3", "3"),
        (str | None, "None", None),
        (float | str, "0.5", 0.5),
        (str | float, "0.5", 0.5),
        (str | float, "auto", "auto"),
        (float, "1", 1.0),
        (Literal["sgd", "adam"], "adam", "adam"),
        (Annotated[int, "wide"], "7", 7),
        (tuple[int, ...], "(1, 2)", (1, 2)),
        (list[float] | None, "[1]", [1.0]),
    ],
)
def test_an_annotation_says_more_than_a_default(annotation, text, value):
    for default in (None, 1):
        found = parse(text, kind_of(annotation, default, True))
        assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("default", "text"),
    [
        *((True, "maybe"), (True, "2"), (128, "0.5"), (128, "true"), (128, "9" * 30), (128, "9" * 5000), (128, "")),
        *((0.1, "nan"), (0.1, "-inf"), (0.1, "1e999"), (0.1, "fast"), ((1, 2), "3"), ((1, 2), "(1, 0.5)")),
        *(((1, 2), "("), ((1, 2), "f()"), ({}, "{}"), (torch.relu, "gelu"), (Colour.RED, "RED"), (None, "1e999")),
    ],
)
def test_what_is_of_another_type_is_refused(default, text):
    with pytest.raises(ValueError):  # noqa: PT011
        parse(text, kind_of(object(), default, True))


def test_objects_are_checked_against_the_type_of_the_default():
    good = [(1, 0.1), (np.int64(3), 3), (np.float32(0.5), 0.1), ([1, 2], (3,)), (None, None), ("x", Path()), (max, min)]
    for value, default in good:
        check(value, kind_of(object(), default, True))
    for value, default in [(True, 3), (1, True), ("1", 1), (float("nan"), 0.1), (0.5, 3), (10**400, 0.1), (3, "x")]:
        with pytest.raises(ValueError):  # noqa: PT011
            check(value, kind_of(object(), default, True))


def test_values_are_recorded_as_json_has_them():
    values = {"a": (1, (2.5, None)), "b": Path("x"), "c": max, "d": float("inf"), "e": Colour.RED, "f": 10**30, "g": {}}
    found = {name: plain(value) for name, value in values.items()}
    assert json.loads(json.dumps(found)) == found
    assert found["a"] == [1, [2.5, None]]
    assert (found["c"], found["d"], found["e"]) == ("max", "inf", "Colour.RED")


# ── functions ────────────────────────────────────────────────────────────────────────────────────────────────────


def job(lr=0.1, width=128) -> package.Job:
    return make(seed=width, clip_norm=lr)


def named(first, /, second: int = 2, *rest, third="x", **others) -> package.Job:
    assert not rest
    assert not others
    return make(seed=second)


@functools.wraps(job)
def wrapped(*values, **names):
    return job(*values, **names)


class Maker:
    def __call__(self, width: int | None = None):
        return make(seed=width or 5)

    def method(self, width=4):
        return make(seed=width)


class OtherJob(package.Job, frozen=True, kw_only=True):
    note: str = ""


def filled(function, option="--set", **texts):
    given = {name: Given(value, TEXT if option == "--set" else PYTHON) for name, value in texts.items()}
    found, values = made(function, given, "job.py" if option == "--set" else "")
    return found.seed, values


def test_a_function_is_called_with_its_defaults_and_what_is_given():
    assert filled(job) == (128, {"lr": 0.1, "width": 128})
    assert filled(job, width="64") == (64, {"lr": 0.1, "width": 64})
    assert filled(job, "set=", lr=1, width=3) == (3, {"lr": 1.0, "width": 3})


@pytest.mark.parametrize(
    ("function", "usual"),
    [
        (wrapped, 128),
        (functools.partial(job, 0.5), 128),
        (functools.partial(job, width=9), 9),
        (Maker(), 5),
        (Maker().method, 4),
    ],
    ids=["decorated", "a place is taken", "another default", "an object", "a method"],
)
def test_whatever_can_be_called_and_names_its_parameters_will_do(function, usual):
    assert filled(function)[0] == usual
    assert filled(function, width="64")[0] == 64


def test_parameters_of_every_kind_are_filled():
    assert filled(named, first="1", third="y") == (2, {"first": "1", "second": 2, "third": "y"})


@pytest.mark.parametrize(
    ("function", "texts", "words"),
    [
        (job, {"lrr": "1"}, r"^job.py: job\(\) has no lrr; did you mean lr\? it has lr=0.1, width=128$"),
        (job, {"colour": "1"}, r"job\(\) has no colour; it has lr=0.1, width=128$"),
        (job, {"width": "0.5"}, r"^--set width=0.5: expected a whole number \(job.py: job\(width=128\)\)$"),
        (job, {"width": "9" * 25}, "expected a whole number of at most 64 bits"),
        (job, {"lr": "a\nb"}, r"^--set lr='a\\nb': expected a finite number"),
        (job, {"lr": "x" * 3000}, r"^--set lr=x{79}…: expected"),
        (named, {}, r"named\(\) needs first: say --set first=…"),
        (named, {"first": "1", "others": "2"}, r"named\(\) has no others; it has first=…, second=2, third=x"),
        (lambda *a, **k: make(), {"lr": "1"}, "it names no parameters .a decorator needs functools.wraps"),
        (lambda lr=0.1: None, {}, r"^test_values.py:\d+: <lambda>\(\) returned nothing: return wide.Job"),
        (lambda lr=0.1: 3, {}, r"returned a int: return wide.Job"),
        (lambda lr=0.1: 1 / 0, {}, r"<lambda>\(lr=0.1\) failed: ZeroDivisionError: .* \(test_values.py:\d+ in"),
        (lambda lr=0.1: sys.exit("no"), {}, "failed: SystemExit: no .test_values.py"),
        (lambda n=0: make(batch_size=n), {}, "must be a whole number of at least 1"),
        (
            lambda act=torch.relu: make(),
            {"act": "gelu"},
            "expected a builtin_function_or_method, which Python can give",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(function, texts, words):
    with pytest.raises(UsageError, match=words) as error:
        filled(function, **texts)
    assert "\n" not in str(error.value)


def test_from_python_the_words_are_pythons():
    with pytest.raises(UsageError, match=r"^set={'lr': high}: expected a finite number"):
        filled(job, "set=", lr="high")
    with pytest.raises(UsageError, match=r"did you mean width"):
        filled(job, "set=", widht=3)


# ── on their way ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("pair", ["lr", "=3", "a b=3", "l\nr=3", "", "\ud800=3", "note=\udc80", "note=" + "x" * 5000])
def test_what_is_no_name_and_value_is_refused(pair):
    with pytest.raises(UsageError, match="^--set .*: expected"):
        with_set("job.py", [pair])


def test_a_value_is_given_once():
    with pytest.raises(UsageError, match="--set lr: it is given twice, as 0.3 and as 0.5"):
        with_set("job.py", ["lr=0.3", "width=3", "lr=0.5"])


def test_a_spec_carries_any_value_and_any_argument():
    text = "a=b:=c\x1f\x1e\x1d\n\0\u202eü"
    spec = with_set(with_arguments("my job.py:big", ["--lr", "x=y"]), [f"note={text}", "lr=0.3"])
    assert spec.replace("\x1f", "").replace("\x1e", "").isprintable()
    assert [str(part) for part in split_spec(spec)] == ["my job.py", "big"]
    assert values_in(spec)["note"] == Given(text, TEXT)
    more = values_in(with_told(spec, {"lr": 5, "width": [1, None]}))
    assert more["lr"] == Given("0.3", TEXT), "what a person gives comes first"
    assert more["width"].value == [1, None]


def a_function(folder, name="job.py", body="", more=""):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"import sys, time\nimport torch\nfrom torch import nn\nimport wide\nfrom tests.jobs import make\n{more}\n{SLOW_LOSS}\n"
        f"def job(lr=0.1, clip: float | None = None, act='relu') -> wide.Job:\n    {body or 'pass'}\n"
        "    return make(steps=6, loss=loss, clip_norm=clip, optimizer=lambda p: torch.optim.SGD(p, lr=lr))\n"
    )
    return path


def test_values_are_part_of_a_program_and_of_its_hash(tmp_path):
    path = a_function(tmp_path)
    programs, codes = [], []
    for pairs in ([], ["lr=0.10"], ["lr=0.2"], ["act=gelu"]):
        spec = with_set(str(path), pairs)
        load(spec)
        programs.append(program_of(spec))
        codes.append(code_of(spec, values_of(spec)))
    assert difference(programs[1], programs[0]) == "", "the same number"
    assert difference(programs[2], programs[0]) == "your job's lr is not the pool's: give the same value with --set"
    assert "your job's act is not" in difference(programs[3], programs[0])
    assert [len({code.digest for code in codes}), codes[0].digest == codes[1].digest] == [3, True]
    assert "with lr=0.2, clip=None, act=relu" in codes[2].words


def test_whoever_is_sent_the_code_makes_the_same_job(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = with_set(str(a_function(tmp_path / "own")), ["lr=0.3", "act=ü\n"])
    load(spec)
    arrived = put_down(offered(*code_of(spec, values_of(spec)).offer))
    load(arrived)
    assert values_of(arrived) == values_of(spec) == {"lr": 0.3, "clip": None, "act": "ü\n"}


@pytest.mark.parametrize("word", ["lr", "lr=0.3", "a b:=3", "lr:=", "lr:={", "lr:=" + "[" * 100_000, "lr:='\n'"])
def test_values_that_nobody_could_have_told_are_refused(word):
    offer = Offer("job", 1, 1, [("job.py", 0)], "job.py:job", values=[word])
    with pytest.raises(ProtocolError):
        offered(offer, memoryview(b""))


def test_one_value_twice_is_refused():
    with pytest.raises(ProtocolError):
        offered(Offer("job", 1, 1, [("job.py", 0)], "job.py:job", values=["lr:=1", "lr:=2"]), memoryview(b""))


def test_without_values_a_hash_is_what_it_always_was():
    files = [("job.py", hashlib.sha256(b"a").digest())]
    before = hashlib.sha256(msgspec.msgpack.encode(("job.py:job", (), files))).hexdigest()
    assert Code((("job.py", b"a"),), "job.py:job").digest == before


def test_a_machines_own_copy_has_the_pools_numbers_but_not_its_words():
    offer = Offer("job", 1, 1, values=["lr:=0.3", 'act:="evil"', "sizes:=[1, null]", 'acts:=["evil"]', "width:=5"])
    spec = _own_job(with_set("job.py", ["width=3"]), types.SimpleNamespace(offer=offer))
    assert {name: one.value for name, one in values_in(spec).items()} == {"width": "3", "lr": 0.3, "sizes": [1, None]}


def test_what_is_no_function_takes_no_values(tmp_path):
    path = tmp_path / "job.py"
    path.write_text("from tests.jobs import make\njob = make()\n")
    with pytest.raises(
        UsageError, match="^--set lr=0.3: job in .*job.py is a wide.Job, not a function: write `def job.lr"
    ):
        load(with_set(str(path), ["lr=0.3"]))
    assert isinstance(load(with_told(str(path), {"lr": 0.3})), package.Job), (
        "a run that goes on with a file that changed"
    )


def test_names_are_read_as_python_reads_them():
    decomposed = "gro\u0308\u00dfe=3"
    assert list(values_in(with_set("job.py", [decomposed]))) == ["gr\u00f6\u00dfe"]


def test_a_file_may_name_its_function_and_says_which_it_has(tmp_path):
    path = tmp_path / "job.py"
    path.write_text("import wide\nfrom tests.jobs import make\ndef big(seed=3) -> wide.Job: return make(seed=seed)\n")
    assert load(with_set(f"{path}:big", ["seed=4"])).seed == 4
    with pytest.raises(UsageError, match="it has big: say .*job.py:big"):
        load(str(path))


def test_a_function_sees_its_own_arguments_and_draws_the_same(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(
        "import sys, random\nfrom tests.jobs import make\n"
        "def job(n=1):\n    return make(seed=int(sys.argv[1]) + random.randrange(10**6))\n"
    )
    seeds = {load(with_set(with_arguments(str(path), ["7"]), [f"n={n}"])).seed for n in (1, 2, 3)}
    assert len(seeds) == 1


# ── wide.run ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_function_is_trained_from_python(tmp_path):
    options = {"nodes": 0, "steps": 2, "log": "silent"}
    result = package.run(job, set={"width": 3}, out=tmp_path / "r", **options)
    assert result.set == {"lr": 0.1, "width": 3}
    assert package.load(tmp_path / "r", make()).set == result.set
    assert package.load(tmp_path / "r", job).model is not None, "by the function, with the run's values"
    again = package.run(job, set={"lr": 0.5}, resume=tmp_path / "r", **(options | {"steps": 3}))
    assert again.set == {"lr": 0.5, "width": 3}, "what is not given is as it was"
    assert package.run(make(), out=tmp_path / "s", **options).set == {}


@pytest.mark.parametrize(
    ("what", "values", "words"),
    [
        (make(), {"lr": 1}, "this job is made already; give the function"),
        (package.Job, None, "wide.run needs a wide.Job, or a function that returns one"),
        (3, None, "or a function that returns one, got int"),
        (job, {"width": 0.5}, r"^set={'width': 0.5}: expected a whole number \(test_values.py:\d+: job\(width=128\)\)"),
        (job, ["lr"], "expected names and values"),
        (job, {3: 4}, "expected names and values"),
    ],
)
def test_from_python_wrong_values_are_explained(what, values, words):
    with pytest.raises(UsageError, match=words):
        package.run(what, set=values, nodes=0, log="silent")


def test_a_job_of_a_class_of_its_own_is_a_job():
    one = make()
    fields = {name: getattr(one, name) for name in one.__struct_fields__}
    assert made(lambda: OtherJob(**fields), {}, "job.py")[0].batch_size == one.batch_size


@pytest.mark.parametrize(
    "words", [("runs", "--set", "lr=1"), ("join", "x:1", "--set", "lr=1"), ("plan", "x:1", "--set", "lr=1")]
)
def test_values_are_for_a_job(capsys, words):
    with contextlib.suppress(SystemExit):
        assert main(list(words)) == 2
    assert "--set" in capsys.readouterr().err


@processes
def test_the_values_of_a_run_are_recorded_and_remembered(tmp_path):
    a_function(tmp_path, body="assert sys.argv[1:] == ['--x']")
    words = ("run", "job", "--nodes", 2, "--out", "r", "--set", "lr=0.3", "--set", "act=a=b", "--json", "--", "--x")
    code, out, err = wide(*words, cwd=tmp_path)
    assert code == 0, err
    assert json.loads(out)["set"] == {"lr": 0.3, "clip": None, "act": "a=b"}
    assert json.loads((tmp_path / "r" / "run.json").read_text())["sessions"][0]["set"] == json.loads(out)["set"]
    words = ("run", "job.py", "--nodes", 0, "--resume", "r", "--steps", 8, "--set", "clip=9", "--json")
    code, out, err = wide(*words, cwd=tmp_path)
    assert (code, "the job's values are not as they were" in err) == (0, True), err
    assert json.loads(out)["set"] == {"lr": 0.3, "clip": 9.0, "act": "a=b"}
    assert "set      lr=0.3, clip=9.0, act=a=b" in told(tmp_path / "r")
    assert "lr=0.3, clip=9.0, act=a=b" in listed(tmp_path)


@processes
def test_values_travel_with_a_package_to_a_machine_that_joins(tmp_path):
    for folder in ("deep", "deep/er"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "deep" / "near.py").write_text("from . import near\nN = 1\n")
    (tmp_path / "beside.py").write_text("B = 1\n")
    a_function(tmp_path, "deep/er/train.py", "assert sys.argv[1:] == ['--x']", "from ..near import N\nimport beside\n")
    words = ("serve", "deep.er.train", "--port", 0, "--out", "here", "--json", "--set", "lr=0.3", "--", "--x")
    with started(*words, cwd=tmp_path) as serving:
        _, invite = invited(serving)
        own = ("join", invite, "--job", "deep.er.train", "--set", "lr=0.4", "--", "--x")
        code, _, err = wide(*own, cwd=tmp_path, **places(tmp_path, "other"))
        assert (code, "your job's lr is not the pool's" in err) == (77, True), err
        code, _, err = wide("join", invite, "--allow-code", "any", cwd=elsewhere(tmp_path), **places(tmp_path))
        assert (code, "with lr=0.3, clip=None, act=relu, with the arguments '--x'" in err) == (0, True), err
        assert "deep/er/train.py, deep/near.py (5 files" in err
        result, _ = finished(serving)
    assert result["set"] == {"lr": 0.3, "clip": None, "act": "relu"}
    words = ("run", "deep/er/train.py", "--nodes", 0, "--json", "--set", "lr=0.3", "--", "--x")
    _, out, err = wide(*words, cwd=tmp_path)
    assert json.loads(out)["weights_sha256"] == result["weights_sha256"], err


@processes
def test_a_script_trains_its_function_in_other_processes(tmp_path):
    a_function(tmp_path, body="assert sys.argv[1:] == ['--y']")
    with (tmp_path / "job.py").open("a") as file:
        file.write(
            "if __name__ == '__main__':\n    print(wide.run(job, nodes=2, set={'lr': 0.3}, log='silent').to_json())\n"
        )
    done = python("job.py", "--y", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["set"] == {"lr": 0.3, "clip": None, "act": "relu"}
