"""What can go wrong, whose fault it is and the exit code that says so. Knows nothing else."""

from __future__ import annotations

from collections.abc import Sequence


class WideError(Exception):
    """A failure that is explained to a person in one line; `details` (a traceback) is for verbose mode only."""

    exit_code = 1

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class TrainingFailed(WideError):
    """The job cannot be trained as it is: its code raised, or its numbers are no longer finite."""


class NotRepeatable(TrainingFailed):
    """The job gives other numbers when it is computed again: wherever it is tried, it will."""


class ParametersMoved(TrainingFailed):
    """The loss changes parameters, or unfreezes them: their values must travel with every update. See codec.layout."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"the loss changes parameters by itself: {', '.join(names[:5])}")
        self.names = list(names)


class UsageError(WideError):
    """The command, an option or the job file is wrong."""

    exit_code = 2


class Unreachable(WideError):
    """Nobody answers at the coordinator's address, or the coordinator went away."""

    exit_code = 69


class NotYet(WideError):
    """What was asked for is not there yet; a moment later it may be."""

    exit_code = 75


class OtherSet(NotYet):
    """The pool uses another instruction set, which this machine has, too: come again with that one (`isa`)."""

    def __init__(self, message: str, isa: str) -> None:
        super().__init__(message)
        self.isa = isa


class StartsAgain(WideError):
    """The pool needs another instruction set (`isa`), which counts only before torch is loaded: its coordinator goes on
    with the run in `folder` as a new process.
    """

    def __init__(self, message: str, isa: str, folder: str) -> None:
        super().__init__(message)
        self.isa, self.folder = isa, folder


class VersionMismatch(WideError):
    """The other side speaks another version of the protocol."""

    exit_code = 76


class Refused(WideError):
    """The coordinator does not want this node: token, model or data differ."""

    exit_code = 77


class OtherProgram(Refused):
    """The node's code, or its arguments, are not the pool's: what the pool sends now may be."""


class WrongPool(Refused):
    """Whoever answers has another certificate than the invite's."""


class Interrupted(WideError):
    """Somebody asked the run to stop (Ctrl-C or SIGTERM)."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class ProtocolError(WideError):
    """The peer sent something that this protocol does not allow. `reason` is one countable word or two."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Absent(ProtocolError):
    """The peer was away for too long: paused, or cut off. It may come again."""

    exit_code = NotYet.exit_code


class ConnectionLost(WideError):
    """The connection ended: closed by the peer, reset, or timed out."""

    exit_code = 69


class NotShared(ConnectionLost):
    """Memory that should have been shared with the coordinator is not: come again, and have everything sent."""


class Left(BaseException):
    """This machine wants to leave the pool. Raised wherever the user's code happens to be: what catches every Exception
    there must not catch this.
    """


BY_EXIT_CODE: dict[int, type[WideError]] = {
    error.exit_code: error for error in (TrainingFailed, UsageError, Unreachable, NotYet, VersionMismatch, Refused)
}
