"""Who may come in, and how many: pure, on a clock that only moves when told."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from tests.front import Front
from tests.greet import KNOCK, NONCES, a_hello, introduced
from wide.errors import ProtocolError, Refused
from wide.exchange import happenings as happened
from wide.exchange import switchboard
from wide.exchange.complaints import ROWS_BURST, SUMMED_UP_S, Complaints
from wide.exchange.gate import ALL_BURST, HOST_BURST, HOST_PER_S, Gate, neighbourhood
from wide.exchange.guests import Book, Guests, InviteRow, book_of
from wide.exchange.patience import GREETING_S, VISIT_S
from wide.transport.memory import MemoryStream
from wide.wire import messages as say
from wide.wire.proof import derived, proof

ROOT = bytes(32)


class Pool:
    """Guests, and what is written about them."""

    def __init__(self, **row):
        self.rows = [
            InviteRow(**{"id": "aa", "expires_at": 100.0, "uses": 2, "is_revoked": False, "machines": 0} | row)
        ]
        self.revoked = []
        self.guests = Guests("token", "evaluator's", ROOT, lambda: book_of(self.rows, self.revoked))

    def admit(self, credential="invite aa", secret=None, wall=50.0, binding=b"", **changes):
        kind, _, name = credential.partition(" ")
        secret = secret or (derived(ROOT, kind, name) if name else b"token")
        hello = a_hello(secret, credential=credential, **changes)
        return self.guests.admit(hello, NONCES, binding, wall)


def test_an_invite_lets_so_many_machines_in_and_each_has_a_key_of_its_own():
    pool = Pool()
    machines = []
    for _ in range(2):
        assert pool.admit().name == "invite aa"
        machines.append(pool.guests.enrol("aa"))
    assert machines[0] != machines[1]
    with pytest.raises(Refused, match=r"used up \(2 machines\)"):
        pool.admit()
    for machine in machines:
        assert pool.admit(machine.name, machine.secret, wall=1e9) == machine, "whatever became of the invite"


def test_machines_that_are_written_down_are_counted_once():
    pool = Pool(uses=3)
    pool.guests.enrol("aa")
    pool.guests.enrol("aa")
    pool.rows = [InviteRow("aa", 100.0, 3, False, 2)]
    pool.guests.look(1.0)
    pool.admit()
    pool.guests.enrol("aa")
    with pytest.raises(Refused, match="used up"):
        pool.admit()


@pytest.mark.parametrize(
    ("row", "wall", "words"),
    [
        ({}, 100.0, "has expired"),
        ({"is_revoked": True}, 50.0, "was revoked"),
        ({"id": "bb"}, 50.0, "does not know this invite any more"),
        ({"uses": 0}, 50.0, "used up"),
    ],
)
def test_what_is_wrong_with_an_invite_is_told_to_who_has_it_and_to_nobody_else(row, wall, words):
    pool = Pool(**row)
    with pytest.raises(Refused, match=words):
        pool.admit(wall=wall)
    with pytest.raises(Refused, match="secret is not the pool's"):
        pool.admit(secret=b"guess", wall=wall)


def test_what_was_revoked_a_moment_ago_is_revoked():
    pool = Pool()
    machine = pool.guests.enrol("aa")
    pool.guests.look(1.0)
    pool.rows = [InviteRow("aa", 100.0, 2, True, 1)]
    pool.revoked.append(machine.name.partition(" ")[2])
    for credential, secret in (("invite aa", None), (machine.name, machine.secret)):
        with pytest.raises(Refused, match="revoked"):
            pool.admit(credential, secret)


def test_an_invite_that_was_made_a_moment_ago_is_known():
    pool = Pool()
    pool.rows.append(InviteRow("new", 100.0, 1, False, 0))
    assert pool.admit("invite new").name == "invite new"


@pytest.mark.parametrize(
    "changes",
    [
        {"secret": b"guess"},
        {"credential": "token", "secret": b"guess"},
        {"credential": "token x"},
        {"credential": "invite"},
        {"credential": ""},
        {"credential": "machine 00", "secret": b"guess"},
        {"credential": "viewer", "secret": derived(ROOT, "viewer")},
        {"credential": "admin", "secret": derived(ROOT, "admin")},
        {"binding": b"another certificate"},
        {"credential": "evaluator", "secret": b"evaluator's"},  # as a node
        {"role": "evaluator"},
    ],
)
def test_nobody_else_comes_in(changes):
    with pytest.raises(Refused):
        Pool().admit(**changes)


def test_a_pool_without_a_root_has_no_invites_and_an_empty_token_is_none():
    for guests, credential in ((Guests("t", "e"), "invite aa"), (Guests("", "e"), "token")):
        with pytest.raises(Refused):
            guests.admit(a_hello(b"", credential=credential), NONCES, b"", 0.0)


def test_a_hello_without_a_knock_proves_nothing():
    with pytest.raises(Refused, match="first knock"):
        Guests("token", "e").admit(a_hello(), None, b"", 0.0)


def test_a_revoked_machine_is_told_of_once_and_comes_no_more():
    pool = Pool()
    machine = pool.guests.enrol("aa")
    assert pool.guests.look(1.0) == frozenset()
    pool.revoked.append(name := machine.name.partition(" ")[2])
    assert pool.guests.look(2.0) == {name}
    assert pool.guests.look(3.0) == frozenset()
    with pytest.raises(Refused, match="revoked it"):
        pool.admit(machine.name, machine.secret)


def test_a_new_invite_does_not_hide_a_revocation_and_nobody_is_counted_twice():
    pool = Pool(uses=2)
    machine = pool.guests.enrol("aa")
    pool.rows = [InviteRow("aa", 100.0, 2, False, 1), InviteRow("new", 100.0, 1, False, 0)]
    pool.revoked.append(name := machine.name.partition(" ")[2])
    pool.admit("invite new")  # the book is read in between
    assert pool.guests.look(1.0) == {name}
    pool.admit()


def test_looking_into_the_book_is_not_done_at_every_turn():
    looks = []
    guests = Guests("t", "e", ROOT, lambda: looks.append(1) or Book())
    for i in range(1000):
        guests.look(i * 0.01)
    assert len(looks) < 60


# ── at the exchange ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def pool():
    return Pool(expires_at=1e6, uses=100)


@pytest.fixture
def front(pool):
    with contextlib.closing(Front(guests=pool.guests)) as front:
        yield front


def by_invite(front, **changes):
    caller = front.call()
    introduced(caller, front.turn, **{"token": derived(ROOT, "invite", "aa"), "credential": "invite aa"} | changes)
    return caller, caller.wait()


def test_a_machine_that_comes_by_an_invite_is_enrolled_and_shown_that_the_pool_knows_the_secret(front):
    caller, known = by_invite(front)
    (enrolled,) = front.happened(happened.Enrolled)
    assert (enrolled.machine, enrolled.invite, enrolled.name) == (known.machine, "aa", "atlas")
    assert known.secret == derived(ROOT, "machine", known.machine)
    assert len(known.proof) == 32
    assert isinstance(caller.wait(), say.Welcome)


def test_with_its_own_key_a_machine_is_no_newcomer(front):
    _, known = by_invite(front)
    front.happened()
    caller = front.call()
    introduced(caller, front.turn, token=known.secret, credential=f"machine {known.machine}")
    assert caller.wait() == say.Known(caller_proof(front, caller, known))
    assert not front.happened(happened.Enrolled)


def caller_proof(front, caller, known):
    peer = next(peer for peer in front.exchange._board.peers.values() if peer.connection.stream is caller.line)
    return proof(known.secret, "pool", f"machine {known.machine}", peer.nonces, b"")


def test_who_is_revoked_is_gone_within_a_moment_and_the_others_stay(front, pool):
    (one, first), (two, _) = by_invite(front), by_invite(front, name="other")
    pool.revoked.append(first.machine)
    front.tick(front.now + 1.0)
    front.turn()
    stop = one.heard()[-1]
    assert (type(stop), stop.exit_code) == (say.Stop, 77)
    assert not any(isinstance(message, say.Stop) for message in two.heard())
    assert [it.reason for it in front.happened(happened.Rejected)] == ["refused"]


def test_two_machines_of_one_name_are_told_apart(front):
    names = []
    for _ in range(2):
        by_invite(front)
        names += [it.name for it in front.happened(happened.Joined)]
    assert names == ["atlas", "atlas-2"]


def test_a_node_keeps_its_name_and_number_when_it_comes_back(front):
    _, known = by_invite(front, key="mine")
    (first,) = front.happened(happened.Joined)
    introduced(front.call(), front.turn, token=known.secret, credential=f"machine {known.machine}", key="mine")
    (again,) = front.happened(happened.Joined)
    assert (first.node, first.name) == (again.node, again.name)


def test_another_machine_cannot_take_a_nodes_place_by_its_key(front):
    by_invite(front, key="mine")
    by_invite(front, key="mine", name="thief")
    first, second = front.happened(happened.Joined)
    assert first.node != second.node


def test_who_only_visits_may_say_nothing_but_probes_and_not_for_ever(front):
    offer = say.Offer("job", 10, 83, [("job.py", 4)], "job.py:job")
    reception = front.exchange._reception
    reception._door = dataclasses.replace(reception._door, offer=offer, code=b"pass")
    visitor, _ = by_invite(front, role="visitor")
    offer = visitor.wait()
    assert (offer.job, bytes(visitor.last), offer.at) == ("job", b"pass", front.now)
    for i in range(16):
        visitor.send(say.Probe())
        front.turn()
        assert isinstance(visitor.wait(), say.Probe)
        assert bool(visitor.last) == (i >= 8)
    visitor.send(say.Probe())
    front.turn()
    assert [it.reason for it in front.happened(happened.Rejected)] == ["out of order"]
    for message in (say.Update(1, [], b"", 0.0, 0.0, 0.0, 0), say.Ready([], 1), say.Alive(), say.Leaving("x")):
        other = front.call()
        introduced(other, front.turn, token="token", role="visitor")
        other.send(message)
        front.turn()
        assert [it.reason for it in front.happened(happened.Rejected)] == ["out of order"], message
    idle = front.call()
    introduced(idle, front.turn, token="token", role="visitor")
    front.tick(front.now + VISIT_S + 1)
    assert idle.line.is_closed


def test_who_hangs_up_before_it_hears_the_answer_leaves_nothing_behind(front):
    for role in ("node", "visitor", "guest", "planner"):
        for _ in range(70):
            front.now += 0.05
            caller = front.call()
            caller.send(KNOCK)
            front.turn()
            nonces = (NONCES[0], caller.wait().nonce)
            caller.send(a_hello(nonces=nonces, role=role))
            caller.line.is_over = True  # it reads what was said, and cannot answer any more
            front.turn()
    assert not front.exchange.nodes
    assert not front.exchange._board.visitors
    assert not front.exchange.is_checking
    by_invite(front)
    assert len(front.exchange.nodes) == 1


def test_one_machine_cannot_bring_nodes_without_end(front):
    _, known = by_invite(front)
    brought = 0
    for i in range(400):
        front.now += 0.03
        caller = front.call()
        introduced(caller, front.turn, token=known.secret, credential=f"machine {known.machine}", key=f"k{i}")
        brought += isinstance(caller.wait(), say.Known) and isinstance(caller.wait(), say.Welcome)
        caller.close()
        front.turn()
    assert 200 < brought < 300


def test_a_guest_looks_around_and_takes_nobodys_place(front, pool):
    offer = say.Offer("job", 10, 83, [("job.py", 4)], "job.py:job")
    reception = front.exchange._reception
    reception._door = dataclasses.replace(reception._door, offer=offer, code=b"pass")
    for _ in range(5):
        guest, known = by_invite(front, role="guest")
        assert (known.machine, known.secret) == ("", b"")
        assert isinstance(guest.wait(), say.Offer)
    assert not front.happened(happened.Enrolled)


# ── floods ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_address_that_calls_too_often_is_sent_away_and_others_are_not():
    gate = Gate(0.0)
    assert sum(gate.may_come("10.0.0.1", 0.0) for _ in range(1000)) == HOST_BURST
    assert gate.may_come("10.0.0.2", 0.0)
    assert sum(gate.may_come("10.0.0.1", 1.0) for _ in range(1000)) == HOST_PER_S


def test_beyond_what_all_may_the_gate_is_closed_and_opens_again():
    gate = Gate(0.0)
    for i in range(int(ALL_BURST)):
        assert gate.is_open(0.0)
        gate.may_come(f"10.0.{i // 256}.{i % 256}", 0.0)
    assert not gate.is_open(0.0)
    assert gate.is_open(0.1)


def test_addresses_are_forgotten_and_those_of_one_ipv6_network_are_one():
    gate = Gate(0.0)
    for i in range(10_000):
        gate.may_come(f"10.0.{i // 256}.{i % 256}", float(i))
    assert len(gate._hosts) <= 4096
    assert neighbourhood("2001:db8::1") == neighbourhood("2001:db8::ffff") != neighbourhood("2001:db8:1::1")


def test_a_few_refusals_have_a_row_each_and_a_flood_has_few():
    rows, now = [], 0.0
    complaints = Complaints(rows.append, lambda: now)
    for i in range(100_000):
        complaints.of("10.0.0.1", f"10.0.0.1:{i}", ProtocolError("not wide", "x"))
    assert len(rows) == ROWS_BURST
    now = SUMMED_UP_S
    complaints.sum_up()
    assert (rows[-1].reason, rows[-1].detail) == (
        "not wide",
        f"10.0.0.1: {100_000 - int(ROWS_BURST):,} more such callers",
    )
    complaints.sum_up(is_last=True)
    assert len(rows) == ROWS_BURST + 1, "nothing is told twice"


def test_a_flood_from_everywhere_takes_no_more_room():
    rows = []
    complaints = Complaints(rows.append, lambda: 0.0)
    for i in range(10_000):
        complaints.of(f"10.{i // 65536}.{i // 256 % 256}.{i % 256}", "x:1", Refused("no"))
    complaints.sum_up(is_last=True)
    assert len(rows) < 400


def test_silent_callers_of_one_address_make_room_for_each_other_and_members_stay(front):
    member, _ = by_invite(front)
    lines = [front.call() for _ in range(switchboard.MOST_OF_HOST + 10)]
    open_ones = [line for line in lines if not line.line.is_closed]
    assert len(open_ones) <= switchboard.MOST_OF_HOST
    assert not member.line.is_closed
    front.tick(front.now + GREETING_S + 1)
    assert all(line.line.is_closed for line in lines)
    assert not front.exchange._board._strangers
    assert not front.exchange._board._of_host


def test_in_one_turn_only_so_many_callers_are_answered(front):
    for i in range(200):
        front.hub.call(MemoryStream(), f"10.1.0.{i}:1")
    front.exchange.turn(0.0)
    assert len(front.hub._callers) >= 200 - switchboard.MOST_AT_ONCE
