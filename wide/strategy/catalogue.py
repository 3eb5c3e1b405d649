"""All strategies by name, the preferred ones first. To add one: a file with its policy, fold, forecast and description,
a line here, and a class in node/training.py.
"""

from __future__ import annotations

from wide.strategy.asynchronous import ASYNC
from wide.strategy.description import Strategy
from wide.strategy.local import LOCAL
from wide.strategy.synchronous import SYNC

STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in (SYNC, LOCAL, ASYNC)}
EXACT = SYNC  # the default, what one machine alone does, and what a plan prefers
MEASURES = LOCAL  # what a pool begins with that chooses by itself: all nodes compute, whatever the network
