"""What Ray keeps on its machines: the coordinator of a run, and its nodes. Each actor has one child process, which ends
with it; a coordinator that Ray starts again goes on with what is in the run's folder. Knows processes; the decisions
are the caller's (on_ray.py). Does not import ray.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from wide.config import Options
from wide.launch.engines import join_words
from wide.launch.environment import add_wishes
from wide.launch.folder import CHECKPOINTS
from wide.launch.kept import Ended, KeptNode, Versions, bound, folder_here, versions
from wide.launch.served import ERROR, INVITE, Errand
from wide.launch.signals import BEFORE

LOOK_S = 0.5  # how long the coordinator's actor listens to its child before it answers
LAST_WORDS_S = 2.0
MOST_LINES = 1000  # that are kept for a caller who does not listen
QUICK_S, MOST_QUICK = 30.0, 3  # a coordinator that dies so soon, so often, would die again


class NodeActor:
    """Lends its machine to the pool, one process at a time."""

    def __init__(self, name: str, options: Options, invite: str, folder: str) -> None:
        self._node = KeptNode([*join_words(sys.executable, options), "--name", name], invite, folder)

    def versions(self) -> Versions:
        return versions()

    def work(self, pause_s: float) -> Ended:
        """After that pause, until its process ends."""
        time.sleep(pause_s)
        return self._node.work()


@dataclass
class Heard:
    """What a coordinator said since it was last listened to; `answer`: its last word, if it has ended for good."""

    words: list[str] = field(default_factory=list)
    invite: str = ""
    answer: list[Any] | None = None


class CoordinatorActor:
    """`address` is where the machines of this cluster find this one."""

    def __init__(self, errand: Errand, address: str) -> None:
        self._errand, self._address = errand, address
        self._child: Child | None = None
        self._quick, self._is_asked_to_stop = 0, False

    def versions(self) -> Versions:
        return versions()

    def sees(self, marker: str) -> bool:
        return Path(marker).exists()

    def stop(self) -> None:
        """With a checkpoint; should it be asked again, at once."""
        self._is_asked_to_stop = True
        if self._child is not None:
            self._child.process.terminate()

    def hear(self) -> Heard:
        """Starts the coordinator if none is running: Ray may have started this actor again."""
        if self._is_asked_to_stop and self._child is None:
            return Heard(answer=[ERROR, 143, self._interrupted])
        child = self._child = self._child or Child(self._errand, self._address)
        child.listen(LOOK_S)
        if (code := child.process.poll()) is None:
            return Heard(child.taken(), child.invite)
        child.listen_to_the_end()
        heard = Heard(child.taken(), child.invite, child.answer)
        if child.answer is None:
            self._died(heard, child, code)
        return heard

    def _died(self, heard: Heard, child: Child, code: int) -> None:
        """Without an answer: killed, or told to end before it had begun."""
        is_quick = time.monotonic() - child.began_at < QUICK_S
        self._quick = self._quick + 1 if is_quick else 0
        last = child.last_words or f"exit code {code}"
        if code > 128 or self._is_asked_to_stop:
            if code > 128 and heard.words:
                heard.words.pop()  # the caller says it in the end
            heard.answer = [ERROR, code if code > 128 else 143, last if code > 128 else self._interrupted]
        elif self._quick >= MOST_QUICK:
            heard.answer = [ERROR, 1, f"the coordinator on {socket.gethostname()} died {self._quick} times: {last}"]
        else:
            heard.words.append(
                f"the coordinator on {socket.gethostname()} died (exit code {code}): it is started again\n"
            )
            self._child = None

    @property
    def _interrupted(self) -> str:
        """What is true of the run, if its coordinator cannot say it."""
        folder = self._errand.options.out
        has_begun = folder is not None and (folder / CHECKPOINTS / "latest").exists()
        return f"interrupted; go on with --resume {folder}" if has_begun else BEFORE


class Child:
    """The coordinator's process, and what it says: words on stderr, answers on stdout."""

    def __init__(self, errand: Errand, address: str) -> None:
        environment = dict(os.environ)
        add_wishes(environment)
        self.process = subprocess.Popen(
            bound([sys.executable, "-m", "wide.launch.served", address]),
            env=environment,
            cwd=folder_here(errand.folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.began_at, self.last_words = time.monotonic(), ""
        self.invite = ""
        self.answer: list[Any] | None = None
        self._words: deque[str] = deque(maxlen=MOST_LINES)
        self._is_new = threading.Event()
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._hear_words, self._hear_answers)]
        for reader in self._readers:
            reader.start()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as pipe:
            pickle.dump(errand, pipe)

    def listen(self, patience_s: float) -> None:
        """Until there is something new, if that is soon."""
        self._is_new.wait(patience_s)
        self._is_new.clear()

    def listen_to_the_end(self) -> None:
        """Of what was said, now that it has ended; children of its own may have its stderr for a moment longer."""
        for reader in self._readers:
            reader.join(LAST_WORDS_S)

    def taken(self) -> list[str]:
        """What nobody has heard yet."""
        return [self._words.popleft() for _ in range(len(self._words))]

    def _hear_words(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            words = line.decode(errors="replace")
            self._words.append(words)
            self.last_words = words.strip().removeprefix("wide: ") or self.last_words
            self._is_new.set()

    def _hear_answers(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer: list[Any] = msgspec.json.decode(line)
            if answer[0] == INVITE:
                self.invite = answer[1]
            else:
                self.answer = answer
            self._is_new.set()
        self._is_new.set()
