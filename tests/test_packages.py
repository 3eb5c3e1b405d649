"""Jobs in packages: found as `python -m` would find them, run as such, and sent with all that is theirs."""

from __future__ import annotations

import sys

import pytest

from wide.errors import UsageError
from wide.job.loading import load
from wide.job.place import located, place_of
from wide.job.program import difference, files_of, program_of
from wide.job.spec import parts, split_spec, title_of, with_arguments, with_set
from wide.launch.code import code_of, folder_of, offered, put_down
from wide.launch.lent import _loaded

JOB = "from tests.jobs import make\nfrom .near import N\nfrom ..far import F\njob = make(seed=N + F)\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with packages, where somebody works; what is imported there is forgotten."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path / "work"
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__path__", getattr(sys.modules[name], "__file__", ""))):
            del sys.modules[name]


def write(folder, **files):
    for name, text in files.items():
        path = folder / (name.replace("__", "/").replace("/init", "/__init__").replace("/main", "/__main__") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def a_package(folder, job=JOB):
    write(folder, pa__init="", pa__far="F = 2\n", pa__sub__init="", pa__sub__near="N = 1\n", pa__sub__train=job)


@pytest.mark.parametrize("spec", ["pa.sub.train", "pa.sub.train:job", "pa/sub/train.py", "./pa/sub/train.py:job"])
def test_a_module_of_a_package_imports_its_relatives(here, spec):
    a_package(here)
    assert load(spec).seed == 3
    assert place_of(located(spec)).module == "pa.sub.train"
    assert sys.modules["pa.sub.train"].__package__ == "pa.sub"


def test_its_neighbours_can_be_imported_by_bare_names_too(here):
    a_package(
        here, "from tests.jobs import make\nimport near\ndef late():\n    import later\njob = make(seed=near.N)\n"
    )
    write(here, pa__sub__later="")
    assert load("pa/sub/train.py").seed == 1
    assert {"pa/sub/near.py", "pa/sub/later.py"} <= set(files_of("pa/sub/train.py"))


def test_folders_need_no_init(here):
    write(
        here,
        loose__train="from tests.jobs import make\nfrom .near import N\njob = make(seed=N)\n",
        loose__near="N = 4\n",
    )
    spec = located("loose.train")
    assert load(spec).seed == 4
    assert (split_spec(spec)[0].as_posix(), parts(spec).module) == ("loose/train.py", "loose.train")
    assert sorted(files_of(spec)) == ["loose/near.py", "loose/train.py"]


def test_a_package_is_its_main_or_itself(here):
    write(here, pb__init="from tests.jobs import make\njob = make(seed=5)\n")
    assert (load("pb").seed, title_of(split_spec(located("pb"))[0])) == (5, "pb")
    write(
        here,
        pc__init="",
        pc__main="from tests.jobs import make\nfrom . import x\njob = make(seed=x.X)\n",
        pc__x="X = 6\n",
    )
    assert (load("pc").seed, title_of(split_spec(located("pc"))[0])) == (6, "pc")
    for spec, file in (("pb", "pb/__init__.py"), ("pc", "pc/__main__.py")):
        assert place_of(located(spec)).file == file
        arrived = place_of(put_down(offered(*code_of(located(spec)).offer)))
        assert (arrived.file, arrived.module) == (file, place_of(located(spec)).module)


def test_a_module_that_lies_in_no_package_is_a_file(here):
    write(here, train="from tests.jobs import make\njob = make(seed=7)\n")
    assert (located("train"), parts(located("train:big")).place) == ("train.py:job", "train.py:big")
    assert load("train").seed == 7


def test_what_python_finds_elsewhere_is_found(here, monkeypatch):
    a_package(here / "elsewhere")
    monkeypatch.syspath_prepend(str(here / "elsewhere"))
    assert load("pa.sub.train").seed == 3
    a_package(here, JOB.replace("N + F", "N + F + 10"))
    assert split_spec(located("pa.sub.train"))[0].as_posix() == "pa/sub/train.py", "but the current folder comes first"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("pa.sub.trian", r"^pa.sub.trian: there is no module trian in pa.sub; did you mean pa.sub.train\?$"),
        ("pa.sab.train", r"there is no module sab in pa; did you mean pa.sub\?"),
        ("paa.sub.train", r"^paa: no such file, and no such module \(looked for in .*\); did you mean pa\?"),
        (
            "nothing_here",
            "no such file, and no such module .*; give the Python file that holds your wide.Job, or package",
        ),
        ("pa.far.more", "pa.far is a module, not a package"),
        ("pa/sub/train", r"no such file .*; did you mean pa/sub/train.py\?"),
        ("pa.sub.train.py", "pa.sub.train.py: no such file"),
        ("math", "it is no Python file; give"),
        ("loose", "it is a folder; give"),
        ("pa.sub.train:big", "there is no wide.Job called 'big' in it; it has job: say pa/sub/train.py:job"),
    ],
)
def test_a_module_that_is_not_there_is_explained(here, spec, words):
    a_package(here)
    (here / "loose").mkdir()
    with pytest.raises(UsageError, match=words):
        load(spec)


def test_a_name_that_python_uses_for_something_else_is_explained(here):
    write(here, tests__init="", tests__train="")
    with pytest.raises(
        UsageError, match=r"importing it failed: .*tests.train|Python has another module called tests.train"
    ):
        load("tests/train.py")


def test_a_package_is_sent_with_what_it_imports_and_nothing_else(here):
    a_package(here, JOB + "import beside\n")
    write(here, beside="", unused="", pa__unused="", pa__sub__unused="", other__init="", other__x="")
    spec = located("pa.sub.train")
    load(spec)
    own = ["beside.py", "pa/__init__.py", "pa/far.py", "pa/sub/__init__.py", "pa/sub/near.py", "pa/sub/train.py"]
    assert sorted(files_of(spec)) == own
    assert set(program_of(spec)) == {"", "--", *own[:-1]}
    code = code_of(spec)
    assert (code.main, [name for name, _ in code.files]) == ("pa/sub/train.py:job", own)


def test_an_installed_package_is_sent_without_those_beside_it(here, monkeypatch):
    folder = here / "lib" / "site-packages"
    a_package(folder, JOB + "import strange\n")
    write(folder, strange="")
    monkeypatch.syspath_prepend(str(folder))
    spec = located("pa.sub.train")
    load(spec)
    found = sorted(files_of(spec))
    assert found == ["pa/__init__.py", "pa/far.py", "pa/sub/__init__.py", "pa/sub/near.py", "pa/sub/train.py"]
    write(folder, single="from tests.jobs import make\nimport strange\njob = make()\n")
    assert list(files_of(located("single"))) == ["single.py"]


def test_whoever_is_sent_a_package_runs_it_and_the_next_one_too(here):
    a_package(here)
    arrived = []
    for number in ("1", "5"):
        write(here, pa__sub__near=f"N = {number}\n")
        spec = with_arguments("pa/sub/train.py", ["--x"])
        code = offered(*code_of(spec).offer)
        arrived.append((put_down(code), folder_of(code)))
    for (spec, folder), seed in zip(arrived, (3, 7), strict=True):
        assert _loaded(spec).seed == seed, "nothing of the other one is used"
        assert (place_of(spec).root, parts(spec).arguments) == (folder.resolve(), ("--x",))
    assert not any(str(arrived[0][1]) in path for path in sys.path)


def test_the_same_package_elsewhere_is_the_same_program(here, tmp_path):
    programs = []
    for name in ("one", "two"):
        a_package(tmp_path / name, JOB)
        programs.append(program_of(str(tmp_path / name / "pa" / "sub" / "train.py")))
    assert difference(*programs) == ""
    write(tmp_path / "two", pa__far="F = 3\n")
    changed = program_of(str(tmp_path / "two" / "pa" / "sub" / "train.py"))
    assert difference(changed, programs[0]) == "pa/far.py is not the pool's: line 1 differs"


def test_a_link_to_a_package_is_followed(here, tmp_path):
    a_package(tmp_path / "real")
    (here / "linked").symlink_to(tmp_path / "real" / "pa")
    assert place_of(located("linked.sub.train")).module == "pa.sub.train"
    assert load("linked.sub.train").seed == 3


def test_a_function_in_a_package_takes_values(here):
    a_package(here, JOB.replace("job = make(seed=N + F)", "def job(more=1):\n    return make(seed=N + F + more)\n"))
    assert load(with_set(located("pa.sub.train"), ["more=40"])).seed == 43
