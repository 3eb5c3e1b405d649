"""The simulated process that runs evaluate(): it answers, after a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wide.errors import ConnectionLost
from wide.node.greeting import HEADER_LIMIT, PAYLOAD_LIMIT
from wide.transport.connection import Connection
from wide.transport.introduction import Self, hello
from wide.transport.memory import pair
from wide.wire import messages as say
from wide.wire.frames import Destinations
from wide.wire.proof import NONCE_NBYTES, of_token

if TYPE_CHECKING:
    from faults.simulator import World


NONCE = bytes(NONCE_NBYTES)


class Evaluator:
    """On the coordinator's machine: nothing is ever wrong with its line."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._mine, self._theirs = pair()
        self._connection = Connection(self._mine)
        self._connection.reader.allow(self._place_for, HEADER_LIMIT, PAYLOAD_LIMIT)
        self._mine.on_input = lambda: world.later(0.01, self._react)

    def begin(self) -> None:
        self._world.call(self._theirs)
        self._connection.send(say.Knock(say.PROTOCOL, NONCE))

    def _react(self) -> None:
        try:
            while self._mine.has_input() and not self._mine.is_closed:
                for message in self._connection.receive():
                    self._hear(message)
        except ConnectionLost:
            self._mine.close()

    def _hear(self, message: say.Message) -> None:
        if isinstance(message, say.Challenge):
            credential = of_token(self._world.evaluator_token, "evaluator")
            who = Self("evaluator", "evaluator", "here", 1, "sim")
            self._connection.send(hello(credential, who, (NONCE, message.nonce)))
        elif isinstance(message, say.Welcome):
            self._connection.send(say.Ready(self._world.tensors, None))
        elif isinstance(message, say.Evaluate):
            answer = say.Evaluated(message.epoch, message.step, {"accuracy": 0.5})
            self._world.later(self._world.chance.expovariate(1.0), self._answer, answer)
        elif isinstance(message, say.Stop):
            self._mine.close()

    def _answer(self, answer: say.Evaluated) -> None:
        try:
            self._connection.send(answer)
        except ConnectionLost:
            self._mine.close()

    def _place_for(self, message: say.Message, nbytes: int) -> Destinations:
        return (memoryview(bytearray(nbytes)),) if nbytes else ()
