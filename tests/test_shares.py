"""Who did how much of a run; a statement of it that a pool signs, and everybody can check."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from dataclasses import replace

import pytest

from tests.processes import started, until, wide
from tests.test_joining import elsewhere, places, pool
from tests.test_serve import query
from wide.cli.main import main
from wide.launch.keys import CERTIFICATE, keys_in
from wide.launch.shares import FILE, check, shares_of, signed
from wide.store.rundb import RunDb

ROWS = {
    "nodes": [
        (n, name, host, 1.0, None, None) for n, name, host in ((1, "a", "hostA"), (2, "b", "hostB"), (3, "c", ""))
    ],
    "invites": [("i1", "anna", 0.0, 9e9, 100, None), ("i2", "first", 0.0, 9e9, 100, None)],
    "machines": [("m1", "laptop", "1.2.3.4", "i1", 0.0, None), ("m2", "tower", "1.2.3.5", "i2", 0.0, None)],
    "visits": [(1, "m1", "1.2.3.4", 1.0), (3, "m2", "1.2.3.5", 1.0)],
    "ledger": [(0, 0, 1, 1, 60, 0.5, 1, 1.0, 5), (0, 2, 2, 2, 30, 0.5, 1, 1.0, 6), (0, 3, 3, 3, 10, 0.5, 1, 1.0, 7)],
    "verified": [(1, 20)],
}


@pytest.fixture
def run(tmp_path):
    db = RunDb(tmp_path / "run.db")
    for table, rows in ROWS.items():
        db.insert(table, rows)
    db.close()
    return tmp_path


@pytest.fixture
def file(run):
    keys_in(run)
    return run / signed(shares_of(run)).file


def test_an_owner_is_whom_the_invite_was_for_and_never_what_a_machine_calls_itself(run, capsys):
    assert [(share.owner, share.machine) for share in shares_of(run).shares] == [
        *(("anna", "laptop"), ("", "hostB"), ("", "tower"))
    ]
    assert main(["shares", str(run)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:4] == [
        ["anna", "laptop", "1", "60", "20", "60.0%"],
        ["hostB", "1", "30", "0", "30.0%"],
        ["tower", "1", "10", "0", "10.0%"],
    ]
    assert lines[4:] == [["100", "samples,", "20", "of", "them", "verified"], *list(lines[5:])]
    assert lines[5][:2] == ["not", "signed:"]


def test_a_run_without_a_certificate_is_not_signed(run, capsys):
    assert main(["shares", str(run), "--sign"]) == 2
    assert "has no certificate" in capsys.readouterr().err
    assert not (run / FILE).exists()


def test_a_statement_holds_and_says_who_signed_it(run, file, capsys):
    assert main(["shares", "--check", str(file), "--certificate", str(run / CERTIFICATE), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["holds"], found["signed_by"]) == (True, keys_in(run).shown)
    assert found["statement"]["verified_samples"] == 20
    assert main(["shares", "--check", str(file)]) == 0
    assert "is it the one that `wide serve` showed?" in capsys.readouterr().out


def tampered(file, **changes):
    told = json.loads(file.read_text())
    told["statement"] |= changes
    file.write_text(json.dumps(told))


@pytest.mark.parametrize("changes", [{"samples": 101}, {"shares": []}, {"pool": "00"}, {"more": 1}])
def test_a_statement_that_was_changed_does_not_hold(file, changes, capsys):
    tampered(file, **changes)
    assert main(["shares", "--check", str(file)]) == 1
    assert "does not hold" in capsys.readouterr().out


def test_another_pools_certificate_is_told_apart(run, file, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    keys = keys_in(other)
    found = check(file, other / CERTIFICATE)
    assert (found.holds, keys.shown in found.words) == (False, True)
    told = json.loads(file.read_text()) | {"certificate": (other / CERTIFICATE).read_text()}
    file.write_text(json.dumps(told))
    assert not check(file, None).holds, "who signed it had another key"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"statement": 1, "certificate": "x", "signature": "!"}', "\xff"]
)
def test_what_is_no_statement_is_explained_in_one_line(tmp_path, text, capsys):
    (tmp_path / "x.json").write_text(text, encoding="latin-1")
    assert main(["shares", "--check", str(tmp_path / "x.json")]) == 2
    said = capsys.readouterr().err
    assert "is not a statement of shares" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "there is no run in it"),
        ([], "which run?"),
        (["--check", "nowhere.json"], "is not a statement"),
        (["RUN", "--check", "x"], "needs nothing else"),
        (["RUN", "--certificate", "x"], "belongs to --check"),
    ],
)
def test_wrong_words_are_explained(run, words, said, capsys):
    assert main(["shares", *(str(run) if word == "RUN" else word for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_a_certificate_that_is_none_is_told_of(run, file, capsys):
    (run / "x.pem").write_text("nothing")
    assert main(["shares", "--check", str(file), "--certificate", str(run / "x.pem")]) == 2
    assert "has no certificate in PEM form" in capsys.readouterr().err


def test_a_run_of_an_older_version_has_shares_too(run):
    with sqlite3.connect(run / "run.db") as db:
        db.execute("DROP TABLE verified")
        db.execute("ALTER TABLE ledger DROP COLUMN digest")
    assert [(share.owner, share.samples, share.verified_samples) for share in shares_of(run).shares] == [
        *(("anna", 60, 0), ("", 30, 0), ("", 10, 0))
    ]


@pytest.mark.parametrize("made_at", ["soon", 10**30, 1e30, float("nan"), [1], None, True, -1])
def test_a_statement_that_was_made_at_no_time_is_none(run, made_at, capsys):
    """Even if its pool has signed it."""
    keys_in(run)
    shares = shares_of(run)
    file = run / signed(replace(shares, statement=shares.statement | {"made_at": made_at})).file
    assert main(["shares", "--check", str(file)]) == 2
    said = capsys.readouterr().err
    assert "made_at is no time" in said
    assert said.count("\n") == 1


@pytest.mark.processes
def test_the_node_that_sent_one_wrong_bit_is_named_and_the_pools_shares_are_signed(tmp_path):
    """Of two machines, one flips a bit of its fourth update, which is merged."""
    with pool(tmp_path, changes="steps=4000, loss=loss") as serving:
        code, out, err = wide("invite", "here", "--name", "anna", cwd=tmp_path)
        assert code == 0, err
        (annas,) = re.findall("wide1_[a-z2-7]+", out)
        join = ("--allow-code", "any", "--name")
        honest = {"cwd": elsewhere(tmp_path, "one"), **places(tmp_path, "one")}
        spoilt = {"cwd": elsewhere(tmp_path, "two"), **places(tmp_path, "two"), "WIDE_FAILPOINTS": "node.update=flip:4"}
        with started("join", serving.invite, *join, "tower", **honest) as one:
            assert until(lambda: query(tmp_path, "SELECT * FROM ledger"))
            with started("join", annas, *join, "laptop", **spoilt) as two:
                its = "SELECT count(*) FROM ledger JOIN nodes USING (node) WHERE name = 'laptop'"
                assert until(lambda: query(tmp_path, its)[0][0] >= 6)
                serving.terminate()
                assert serving.wait(30) == 143
                one.terminate()
                two.terminate()
    code, out, err = wide("blame", "here", cwd=tmp_path)
    assert code == 1, (out, err)
    assert re.match(r"node \d+ \(laptop, 127.0.0.1\) merged batch", out), out
    assert "its update is not what these batches give" in out
    code, out, err = wide("shares", "here", "--sign", cwd=tmp_path)
    assert (code, "anna" in out and "tower" in out) == (0, True), err
    shutil.copy(tmp_path / "here" / FILE, tmp_path / "statement.json")
    code, out, err = wide("shares", "--check", "statement.json", "--certificate", "here/certificate.pem", cwd=tmp_path)
    assert (code, "statement.json holds" in out) == (0, True), err
