"""The settings of a cache, checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixpool.radix.events import EventLog
from radixpool.radix.persistence import Persistence

__all__ = ["CacheOptions"]

MAX_BLOCKS = 2**31 - 1  # block tables are int32


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What `RadixCache` was made with; see there.

    Raises:
        TypeError, ValueError: a setting of the wrong type or out of range; the message names it.

    """

    num_blocks: int
    block_size: int
    policy: str
    clock: Callable[[], float]
    pin_budget: int | None
    persistence: Persistence | None
    events: EventLog | None

    def __post_init__(self) -> None:
        _check("num_blocks", self.num_blocks, 1)
        _check("block_size", self.block_size, 1)
        if self.pin_budget is not None:
            _check("pin_budget", self.pin_budget, 0)
        if self.num_blocks > MAX_BLOCKS:
            raise ValueError(f"num_blocks must be at most {MAX_BLOCKS}, not {self.num_blocks}")


def _check(name: str, value: int, lowest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be int, not {type(value).__name__}")
    if value < lowest:
        raise ValueError(f"{name} must be at least {lowest}, not {value}")
