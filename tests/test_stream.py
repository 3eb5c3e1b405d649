"""Readers of the dashboard: those who read are told once, those who do not cost nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading

import pytest

from tests.dashboards import a_server
from wide.dashboard.serving import Limited
from wide.dashboard.stream import Stream


class Reader:
    """Takes what it is sent, until it hangs up; or takes nothing at all."""

    def __init__(self, messages=2, reads=True):
        self._left, self._reads = messages, reads
        self.said, self._gone = [], asyncio.Event()

    async def receive(self):
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if not self._reads:
            await asyncio.Event().wait()
        if message.get("body", b"").startswith(b"data: "):
            self.said.append(json.loads(message["body"][6:]))
            if len(self.said) == self._left:
                self._gone.set()


def test_many_readers_are_told_what_was_found_once(monkeypatch):
    monkeypatch.setattr("wide.dashboard.stream.EVERY_S", 0.01)
    looks = []

    async def main():
        stream = Stream(lambda: looks.append(threading.get_ident()) or [{"run": len(looks)}])
        readers = [Reader() for _ in range(50)]
        stuck = [asyncio.create_task(stream.tell(r.receive, r.send, lambda: True)) for r in [Reader(reads=False)] * 20]
        await asyncio.gather(*(stream.tell(reader.receive, reader.send, lambda: True) for reader in readers))
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        assert all(reader.said[0] == readers[0].said[0] for reader in readers)
        assert stream._listeners == 0
        await stream._task

    asyncio.run(main())
    assert 2 <= len(looks) < 20
    assert threading.get_ident() not in looks  # the loop never reads a database


def test_a_reader_that_is_stuck_is_let_go_of(monkeypatch):
    monkeypatch.setattr("wide.dashboard.stream.STUCK_S", 0.01)

    async def main():
        reader = Reader(reads=False)
        await asyncio.wait_for(Stream(list).tell(reader.receive, reader.send, lambda: True), 10)

    asyncio.run(main())


def test_who_may_not_look_any_more_hears_nothing_more(monkeypatch):
    monkeypatch.setattr("wide.dashboard.stream.EVERY_S", 0.01)

    async def main():
        reader, may = Reader(messages=1000), [True, True, False]
        await asyncio.wait_for(Stream(list).tell(reader.receive, reader.send, lambda: may.pop(0)), 10)
        assert len(reader.said) <= 3

    asyncio.run(main())


def test_last_words_reach_everybody(monkeypatch):
    monkeypatch.setattr("wide.dashboard.stream.EVERY_S", 100.0)

    async def main():
        stream, reader = Stream(lambda: [{"run": "x"}]), Reader(messages=1000)
        telling = asyncio.create_task(stream.tell(reader.receive, reader.send, lambda: True))
        while not reader.said:
            await asyncio.sleep(0)
        await stream.finish()
        await asyncio.wait_for(telling, 10)
        assert [told["is_last"] for told in reader.said] == [False, True]

    asyncio.run(main())


@pytest.mark.parametrize("most", [4, 5, 6, 9])
def test_a_listener_sends_nobody_away_before_it_is_full(monkeypatch, most):
    monkeypatch.setattr("wide.dashboard.serving.MOST_CONNECTIONS", most)
    with Limited(socket.create_server(("127.0.0.1", 0))) as listener, contextlib.ExitStack() as stack:
        callers = []
        for _ in range(most):
            callers.append(stack.enter_context(socket.create_connection(listener.getsockname())))
            stack.enter_context(listener.accept()[0])
        for caller in callers:
            caller.setblocking(False)
            with pytest.raises(BlockingIOError):
                caller.recv(1)


def test_a_listener_lets_in_so_many_and_the_oldest_goes(monkeypatch):
    monkeypatch.setattr("wide.dashboard.serving.MOST_CONNECTIONS", 3)
    with Limited(socket.create_server(("127.0.0.1", 0))) as listener:
        callers, inside = [], []
        for _ in range(5):
            callers.append(socket.create_connection(listener.getsockname()))
            inside.append(listener.accept()[0])
        for caller in callers[:2]:
            caller.settimeout(10)
            assert caller.recv(1) == b""
        inside[2].close()  # one that is closed makes room
        callers.append(socket.create_connection(listener.getsockname()))
        inside.append(listener.accept()[0])
        for caller in callers[3:]:
            caller.setblocking(False)
            with pytest.raises(BlockingIOError):
                caller.recv(1)
        for line in (*callers, *inside):
            line.close()


def test_an_answer_that_nobody_takes_is_given_up(staged, monkeypatch):
    monkeypatch.setattr("wide.dashboard.answers.TAKE_S", 0.01)
    app, taken = a_server(staged)[0], []
    scope = {"type": "http", "method": "GET", "path": "/api/runs/staged/curves", "query_string": b"", "headers": []}
    scope |= {"headers": [(b"host", b"localhost")], "http_version": "1.1", "scheme": "http", "root_path": ""}

    async def send(message):
        taken.append(message)
        await asyncio.Event().wait()

    async def receive():
        await asyncio.Event().wait()

    asyncio.run(asyncio.wait_for(app(scope, receive, send), 10))
    assert len(taken) == 1
