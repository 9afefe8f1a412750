"""Trying again while the manager does not answer, or has no room: how often, how long, and in which steps.

Every request that changes something carries a number under which the manager keeps its first reply, so a request that
is sent again has no second effect.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from radixpool.radix import PoolExhausted
from radixpool.radix.errors import RadixPoolError
from radixpool.rpc.errors import ManagerUnavailable

Reply = TypeVar("Reply")
JITTER: Final = 0.2
"""Each pause is longer or shorter by up to this share, so that clients do not come back all at once."""

ROOM_POLL_S: Final = 0.1
"""How often to ask whether there is room to acquire a lost sequence again."""
ROOM_PATIENCE: Final = 1.5
"""By the defaults 15 s: a restarted manager fences what its former life used for a lease of 10 s and 2 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    """How a client waits for a manager that does not answer.

    initial_backoff_s: pause before the second attempt.
    multiplier: each further pause is so many times the one before.
    max_backoff_s: no pause is longer.
    total_s: no attempt begins later than this after the first one; 0 means a single attempt.
    """

    initial_backoff_s: float = 0.1
    multiplier: float = 1.5
    max_backoff_s: float = 5.0
    total_s: float = 10.0


NO_RETRY: Final = RetryOptions(total_s=0.0)


def pauses(options: RetryOptions, *, draw: Callable[[], float] = random.random) -> Iterator[float]:
    """Yield the pauses between attempts, for ever. `draw` gives uniform numbers from 0 to 1.

    >>> steps = pauses(RetryOptions(), draw=lambda: 0.5)
    >>> [round(next(steps), 4) for _ in range(4)]
    [0.1, 0.15, 0.225, 0.3375]
    """
    pause = options.initial_backoff_s
    while True:
        yield pause * (1 + JITTER * (2 * draw() - 1))
        pause = min(pause * options.multiplier, options.max_backoff_s)


def nobody_answers(error: RadixPoolError) -> bool:
    """Return whether the same call may work once a manager answers."""
    return isinstance(error, ManagerUnavailable)


def lacks_room(error: RadixPoolError) -> bool:
    """Return whether the same call may work once others have given blocks back."""
    return isinstance(error, PoolExhausted) and not error.permanent


def until_room(options: RetryOptions) -> RetryOptions:
    """Return how to wait for room: evenly, and half as long again as for a manager that does not answer."""
    total_s = ROOM_PATIENCE * options.total_s
    return replace(options, initial_backoff_s=ROOM_POLL_S, multiplier=1.0, total_s=total_s)


def call_with_retries(
    attempt: Callable[[], Reply],
    options: RetryOptions,
    *,
    may_pass: Callable[[RadixPoolError], bool] = nobody_answers,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Reply:
    """Return what `attempt` returns, trying again while it raises what `may_pass` and there is time."""
    deadline = clock() + options.total_s
    for pause in pauses(options):
        try:
            return attempt()
        except RadixPoolError as error:
            if not may_pass(error) or clock() + pause > deadline:
                raise
        sleep(pause)
    raise AssertionError("the pauses never end")


async def call_with_retries_async(
    attempt: Callable[[], Awaitable[Reply]],
    options: RetryOptions,
    *,
    may_pass: Callable[[RadixPoolError], bool] = nobody_answers,
) -> Reply:
    """Do the same for a coroutine function."""
    deadline = time.monotonic() + options.total_s
    for pause in pauses(options):
        try:
            return await attempt()
        except RadixPoolError as error:
            if not may_pass(error) or time.monotonic() + pause > deadline:
                raise
        await asyncio.sleep(pause)
    raise AssertionError("the pauses never end")
