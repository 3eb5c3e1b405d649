"""Going on as if a node had never been there."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from wide.errors import UsageError
from wide.launch.without import before
from wide.store.reading import DATABASE
from wide.store.rundb import create


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create(tmp_path / DATABASE)
    with sqlite3.connect(tmp_path / DATABASE) as db:
        db.executemany("INSERT INTO nodes VALUES (?, ?, '', 0, NULL, NULL)", [(1, "desk"), (2, "laptop"), (3, "idle")])
        rows = [(4, 0, 0, 1, 8, 1.0, 5, 0.0, None), (7, 0, 0, 2, 8, 1.0, 8, 0.0, None)]
        db.executemany("INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    return tmp_path


def test_by_number_or_by_name(folder: Path):
    assert (before(folder, "2"), before(folder, "laptop"), before(folder, "desk")) == (7, 7, 4)


def test_a_node_that_calls_itself_like_anothers_number_is_not_meant_by_it(folder: Path):
    with sqlite3.connect(folder / DATABASE) as db:
        db.execute("INSERT INTO nodes VALUES (5, '2', '', 0, NULL, NULL)")
        db.execute("INSERT INTO ledger VALUES (1, 0, 0, 5, 8, 1.0, 2, 0.0, NULL)")
    assert (before(folder, "2"), before(folder, "5")) == (7, 1)


@pytest.mark.parametrize(("node", "words"), [("9", "no node of that number"), ("idle", "nothing of its work")])
def test_what_cannot_be_left_out_is_said(folder: Path, node: str, words: str):
    with pytest.raises(UsageError, match=words):
        before(folder, node)
