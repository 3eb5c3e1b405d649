"""The invite: one string, which says so if it was cut or misread."""

from __future__ import annotations

import base64
import binascii
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wide.errors import UsageError
from wide.wire.invite import PIN_NBYTES, PREFIX, Invite, parse
from wide.wire.proof import Credential, derived, is_proven, proof

INVITE = Invite("0a0b0c0d", 29_900_000, (("192.168.1.20", 9433),), bytes(range(20)), bytes(range(16)))

hosts = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.from_regex(r"\A[a-z]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]{2,9})?\Z"),
)
invites = st.builds(
    Invite,
    st.binary(min_size=4, max_size=4).map(bytes.hex),
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(hosts, st.integers(1, 65535)), min_size=1, max_size=8).map(tuple),
    st.binary(min_size=PIN_NBYTES, max_size=PIN_NBYTES),
    st.binary(min_size=16, max_size=16),
)


@given(invites)
def test_what_was_put_in_comes_out(invite):
    assert parse(invite.encode()) == invite


@given(invites, st.data())
def test_an_invite_of_which_an_end_is_missing_is_cut(invite, data):
    text = invite.encode()
    with pytest.raises(UsageError, match="cut: its end is missing|begins with wide1_"):
        parse(text[: data.draw(st.integers(0, len(text) - 2))])


@given(invites, st.data())
def test_one_letter_that_was_misread_is_noticed(invite, data):
    text = invite.encode()
    place = data.draw(st.integers(len(PREFIX), len(text) - 1))
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz234567").filter(lambda c: c != text[place]))
    changed = text[:place] + letter + text[place + 1 :]
    with contextlib.suppress(UsageError):  # it was noticed; or
        assert parse(changed) == invite, "it makes no difference: these bits are behind the last byte"
        assert place == len(text) - 1


@given(st.text(max_size=300))
def test_whatever_is_pasted_is_answered_in_words(text):
    with pytest.raises(UsageError):
        parse(text)


def test_line_breaks_and_capitals_do_not_matter():
    text = INVITE.encode()
    assert parse(f"  {text[:30].upper()}\n  {text[30:]}\r\n") == INVITE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wide2_aaaa", "of kind 2, this version knows kind 1: update wide"),
        ("192.168.1.20:9433", "this is no invite"),
        ("wide1_0l", "'0' is in no invite"),
        ("wide1_", "cut"),
    ],
)
def test_what_is_wrong_with_an_invite_is_said(text, words):
    with pytest.raises(UsageError, match=words):
        parse(text)


@pytest.mark.parametrize("host", [b"a..b", b".a", b"x" * 70, b"\xff", b"a b", b"\0wide", b""])
def test_a_name_that_is_none_is_misread(host):
    packed = bytes((1, 0)) + bytes(8) + bytes((1, 1, len(host))) + host + b"\x24\xd9" + bytes(36)
    packed += binascii.crc_hqx(packed, 0).to_bytes(2, "big")
    with pytest.raises(UsageError, match="misread"):
        parse("wide1_" + base64.b32encode(packed).decode().rstrip("=").lower())


def test_one_address_makes_a_line_that_fits_on_a_screen():
    assert len(f"wide join {INVITE.encode()}") < 120


def test_no_secret_shows_in_what_is_logged_of_it():
    for thing in (INVITE, Credential("token", b"secret")):
        assert "secret" not in repr(thing)
        assert INVITE.secret.hex() not in repr(thing)


def test_a_proof_is_of_one_side_one_name_one_conversation_and_one_certificate():
    said = (b"secret", "node", "token", (bytes(16), bytes(16)), b"certificate")
    others = [
        (b"guess", *said[1:]),
        (said[0], "pool", *said[2:]),
        (*said[:2], "evaluator", *said[3:]),
        (*said[:3], (bytes(16), b"1" * 16), said[4]),
        (*said[:3], (b"1" * 16, bytes(16)), said[4]),
        (*said[:4], b""),
    ]
    assert is_proven(proof(*said), proof(*said))
    assert all(not is_proven(proof(*other), proof(*said)) for other in others)
    assert not is_proven(b"", proof(*said))


def test_every_secret_of_a_pool_is_another_one():
    root = bytes(32)
    kinds = [("invite", "a"), ("machine", "a"), ("invite", "b"), ("viewer", ""), ("admin", "")]
    assert len({derived(root, *kind) for kind in kinds}) == len(kinds)
    assert derived(root, "invite", "a") == derived(root, "invite", "a")
