"""A run's folder tells its story: what was started, with which program, on which machine, and how it ended."""

from __future__ import annotations

import json

import pytest

import wide
from tests.jobs import make


def told(folder):
    return json.loads((folder / "run.json").read_text())["sessions"]


def last_line(folder):
    return json.loads((folder / "log.jsonl").read_text().splitlines()[-1])


def test_a_run_that_is_done_names_command_versions_machine_and_result(tmp_path):
    wide.run(make(), nodes=0, steps=2, out=tmp_path / "r", log="silent")
    (session,) = told(tmp_path / "r")
    assert session["state"] == "done"
    assert session["why"].startswith("2 steps, ")
    assert session["command"]
    assert session["options"]["steps"] == 2
    assert session["versions"]["wide"] == wide.__version__
    assert session["machine"]["cores"] >= 1


def broken(model, batch):
    raise ValueError("bad batch")


def test_a_run_that_failed_says_why_and_where_without_being_run_again(tmp_path):
    with pytest.raises(wide.TrainingFailed):
        wide.run(make(loss=broken), nodes=0, steps=2, out=tmp_path / "r", log="silent")
    (session,) = told(tmp_path / "r")
    assert session["state"] == "failed"
    assert "step 0, batch 0" in session["why"]
    assert "ValueError: bad batch (test_story.py:" in session["why"]
    assert "Traceback" in session["details"]
    assert "in broken" in session["details"]
    line = last_line(tmp_path / "r")
    assert (line["level"], line["text"], line["details"]) == ("error", session["why"], session["details"])


def test_a_run_that_goes_on_adds_to_its_story(tmp_path):
    wide.run(make(), nodes=0, steps=2, out=tmp_path / "r", log="silent")
    wide.run(make(), nodes=0, steps=4, resume=tmp_path / "r", log="silent")
    assert [session["options"]["steps"] for session in told(tmp_path / "r")] == [2, 4]


def test_a_story_that_cannot_be_read_is_begun_anew(tmp_path):
    wide.run(make(), nodes=0, steps=2, out=tmp_path / "r", log="silent")
    (tmp_path / "r" / "run.json").write_text("{half")
    wide.run(make(), nodes=0, steps=4, resume=tmp_path / "r", log="silent")
    assert len(told(tmp_path / "r")) == 1
