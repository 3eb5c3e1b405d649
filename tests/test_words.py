"""Text from a peer: whatever it says, what is shown is printable, short, and on one line."""

from __future__ import annotations

from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.front import Front
from wide.exchange import happenings as happened
from wide.wire import messages as say
from wide.wire import words
from wide.wire.words import DETAILS_CHARS, LINE_CHARS, NAME_CHARS

EVIL = {
    "an escape sequence": "\x1b[2J\x1b[31mred",
    "another kind of escape": "\x9b31mred",
    "the terminal's title": "\x1b]0;owned\x07",
    "a newline": "all is well\nwide: training failed",
    "a return": "training failed\rall is well   ",
    "what only some call a newline": "one\u2028two\u2029three\x85four\x0bfive\x0csix",
    "right to left": "user\u202egpj.exe",
    "an isolate": "a\u2066b\u2069c",
    "a bell and a backspace": "\x07\x08\x7f",
    "a zero": "a\x00b",
    "a lone surrogate": "a\ud800b",
    "invisible": "a\u200bb\ufeffc",
}


@pytest.mark.parametrize("text", EVIL.values(), ids=EVIL)
def test_what_could_fool_a_reader_or_a_terminal_is_replaced(text):
    for shown in (words.name(text), words.line(text)):
        assert shown.isprintable()
        assert len(shown) == len(text), "character by character"
    assert words.details(text).replace("\n", "").isprintable()


def test_ordinary_words_stay_as_they_are():
    for text in ("atlas", "far <b>", "größte Maschine 🖥", "ValueError: bad batch (job.py:8 in loss)"):
        assert words.name(text) == words.line(text) == words.details(text) == text


def test_a_line_has_no_newline_and_a_traceback_keeps_its_own():
    trace = "Traceback (most recent call last):\n  File 'job.py', line 8\nValueError: \x1b[31mbad\r\n"
    assert "\n" not in words.line(trace)
    assert words.details(trace) == trace.replace("\x1b", "?").replace("\r", "?")


def test_a_peer_without_a_name_is_called_so():
    assert words.name("") == "unnamed"


@pytest.mark.parametrize("letter", ["x", "\x1b", "é"])
def test_nobody_can_go_on_for_ever(letter):
    endless = letter * 10_000_000
    assert len(words.name(endless)) == NAME_CHARS
    assert len(words.line(endless)) == LINE_CHARS
    assert len(words.details(endless)) == DETAILS_CHARS


@given(st.text())
def test_whatever_it_is_it_can_be_shown(text):
    assert words.name(text).isprintable()
    assert words.line(text).isprintable()
    assert all(part.isprintable() for part in words.details(text).split("\n"))


def test_nothing_that_a_peer_says_is_told_as_it_came():
    evil = "\x1b[2J\n\u202e" * 1000
    with closing(Front()) as front:
        node = front.member(name=evil[:300], host=evil[:300])
        node.send(say.Failed(1, 0, evil, evil))
        node.send(say.Leaving(evil))
        front.turn()
        joined, failed, left = front.happened(happened.Joined, happened.Failed, happened.Left)
    assert joined.name == left.name == joined.host == words.name(evil)
    assert failed.problem == left.why == words.line(evil)
    assert failed.details == words.details(evil)
