"""Named steps of the protocol at which a test lets a process die or freeze. For tests only.

`RADIXPOOL_FAILPOINTS="directory.store.bodies=kill@20; worker.step.written=stop"` kills the process (SIGKILL to itself)
at the 20th passage of one step and freezes it (SIGSTOP) at the first of the other; each fires once. The variable is
read when this module is loaded. Where it is not set, or does not name a step, the step is a call of a function that
does nothing (about 30 ns). A manager that listens beyond this machine refuses to start with it.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

Failpoint: TypeAlias = Callable[[], None]

VARIABLE: Final = "RADIXPOOL_FAILPOINTS"
ACTIONS: Final[Mapping[str, signal.Signals]] = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
STEPS: Final[Mapping[str, str]] = {
    "recovery.scanned": "the directory is read, and nothing rebuilt yet",
    "recovery.restored": "the tree is rebuilt, and nobody can connect yet",
    "manager.bound": "the manager has its address and does not answer yet",
    "manager.draining": "new sequences are refused, live ones go on",
    "manager.stopped": "the last call has ended, the address and the directory are still taken",
    "register.leased": "a client has a lease that the directory does not know of",
    "register.recorded": "a client is in the directory and has not heard of its epoch",
    "acquire.begun": "an acquire has passed its checks and taken nothing",
    "acquire.allocated": "blocks are allocated and have no handle",
    "commit.begun": "a commit has passed its checks and stored nothing",
    "commit.findable": "blocks are findable and their owner has not heard of it",
    "commit.remapped": "a commit gave up its own blocks for cached ones, and its owner has not heard of it",
    "release.begun": "a release has passed its checks and given nothing back",
    "release.given_back": "blocks of a release are given back, its handle is not forgotten",
    "heartbeat.renewed": "a lease is renewed and its client has not heard of it",
    "steps.completed": "blocks that waited for a step are free, the batch that reported it has not run",
    "batch.half": "one operation of a batch is done, the next one not begun",
    "reply.kept": "a change is made and its reply kept, but not sent",
    "sweep.slice": "a sequence of an expired client is given back, the rest of the slice is not",
    "pool.taken_over": "the manager knows a pool, and the directory does not",
    "pool.emptied": "the directory forgot the blocks of a pool that is gone, the cache did not",
    "directory.store.begun": "nothing of a committed run is written",
    "directory.store.bodies": "the records of a run are written, their states are not",
    "directory.store.states": "the records of a run are valid, the run is not findable",
    "directory.handed_out": "blocks are marked private, nobody has them",
    "directory.returned": "records are cleared and marked free, the blocks are not free",
    "directory.removed": "records are cleared that were torn, orphaned or invalidated",
    "client.acquired": "a client has acquired a sequence and done nothing with it",
    "session.sent": "a batch is on its way over a session, its answer has not come",
    "session.answered": "a batch is answered, and nothing done with it: no copy order is run, no remap taken over",
    "worker.registered": "a worker has its lease and its session, and has not mapped the pool",
    "worker.attached": "a worker has mapped the pool and has no request",
    "worker.step.launched": "a step is announced and has not begun",
    "worker.step.written": "the KV of a step is written and not committed",
    "worker.step.reported": "a step is reported as completed and committed",
    "holder.allocated": "a pool is allocated and nobody knows of it",
    "holder.registered": "the manager has taken a pool over, its holder serves",
    "holder.handing_out": "a worker has asked for the memory and not got it",
    "holder.keeping": "the holder is about to look whether the manager still knows its pool",
}


class _Plan:
    """What happens at one step: `action` at the passage with that number, and only then."""

    def __init__(self, action: signal.Signals, passage: int) -> None:
        self._action = action
        self._passage = passage
        self._passages = itertools.count(1)

    def __call__(self) -> None:
        if next(self._passages) == self._passage:
            os.kill(os.getpid(), self._action)


def failpoint(step: str) -> Failpoint:
    """Return what to call at a step of the protocol. Called once for each step, when its module is loaded."""
    assert step in STEPS, step
    _in_use.add(step)
    return _plans.get(step, _nothing)


def steps_in_use() -> frozenset[str]:
    """Return the steps of the modules that are loaded."""
    return frozenset(_in_use)


def armed_steps() -> tuple[str, ...]:
    """Return the steps that the environment armed, none by default. Raises ValueError for a setting that is wrong."""
    parse_failpoints(os.environ.get(VARIABLE, ""))
    return tuple(_plans)


def parse_failpoints(setting: str) -> dict[str, Failpoint]:
    """Return a plan for each `STEP=ACTION` or `STEP=ACTION@PASSAGE`. Raises ValueError naming what is wrong.

    >>> list(parse_failpoints("commit.findable=kill@3; heartbeat.renewed=stop"))
    ['commit.findable', 'heartbeat.renewed']
    """
    plans: dict[str, Failpoint] = {}
    for entry in filter(None, map(str.strip, setting.split(";"))):
        step, equals, what = entry.partition("=")
        action, _, passage = what.partition("@")
        if step not in STEPS:
            raise ValueError(f"{VARIABLE}: no step is called {step!r}; steps are: {', '.join(STEPS)}")
        if not equals or action not in ACTIONS:
            raise ValueError(f"{VARIABLE}: {step} must be one of {', '.join(ACTIONS)}, got {action!r}")
        if passage and not (passage.isascii() and passage.isdigit() and int(passage) > 0):
            raise ValueError(f"{VARIABLE}: {step}: the passage must be a whole number from 1, got {passage!r}")
        plans[step] = _Plan(ACTIONS[action], int(passage or 1))
    return plans


def _nothing() -> None:
    """Pass a step that is not armed."""


def _from_environment() -> dict[str, Failpoint]:
    try:
        return parse_failpoints(os.environ.get(VARIABLE, ""))
    except ValueError:
        return {}  # `armed_steps` says what is wrong, where it can be told to somebody


_in_use: set[str] = set()
_plans: Final = _from_environment()
