"""The interface between the cache and an eviction policy.

The cache decides *what may* go, the policy decides *which of it* goes next. The unit is a `Run`: consecutive blocks of
one path with one history. A run is a **candidate** while nobody holds it and nothing lies below it; only candidates are
ever handed to `add`, so a policy evicts leaf-first without knowing that there is a tree. The cache takes blocks from
the tail of the chosen run, as many as it needs and no more; a run that keeps some blocks stays a candidate.

Calls the cache makes, for one run, in this order::

    inserted(run, n)            n new blocks at its tail (also later, when a run grows in place)
    ( touched(run)              an admitted request hit it; deepest run of the path first; only if observes_hits
    | add(run) … remove(run)    it became a candidate … it stopped being one (held again, or got a child)
    | split(upper, lower)       lower lost its head to the new run upper; both keep lower's history
    | evicted(run, n) )*        victim() chose it and n blocks of its tail are about to go; while still a candidate
    dropped(run)                it leaves the tree for good: after remove() if all of it was evicted, or by a flush

A policy reads `run.num_blocks`, `run.start`, `run.end`, `run.last_use`, `run.priority` and `run.identity()`, writes
`run.prev`, `run.next` and `run.data`, which are its own, and touches nothing else. All times are ticks of the cache's
logical clock: a policy never reads a wall clock or an unseeded random source, so replicas choose the same victims.

With tenant quotas or retention priorities the cache keeps one policy object per group and decides between groups
itself; the policy does not notice. `capacity` is then still that of the whole pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, ClassVar

__all__ = ["EvictionPolicy", "Run"]

DEFAULT_PRIORITY = 35  # the middle of TensorRT-LLM's 0..100 retention scale, so that both directions are left


class Run:
    """Consecutive blocks of one path that share one history: the unit of eviction.

    Attributes:
        end: number of blocks from the root to the end of the run.
        last_use: logical time at which its last holder released it.
        priority: retention priority; lower goes first. The cache orders by it before it asks a policy.
        prev, next, data: the policy's own; None when the run is handed to `inserted` for the first time.

    """

    __slots__ = ("blocks", "data", "end", "key", "last_use", "next", "origin", "prev", "priority", "stride")

    key: bytes
    blocks: bytes
    stride: int
    end: int
    last_use: int
    priority: int
    prev: Any
    next: Any
    data: Any
    origin: bytes | None

    @property
    def num_blocks(self) -> int:
        """Number of blocks, >= 1 except for a policy's own sentinels. O(1)."""
        return len(self.blocks) >> 2

    @property
    def start(self) -> int:
        """Number of blocks before the run on its path: its depth. O(1)."""
        return self.end - (len(self.blocks) >> 2)

    def identity(self, index: int) -> bytes:
        """Return an 8-byte digest of the run's block `index` and everything before it, for ghost entries.

        Equal content gives equal digests in every process and under every way of splitting a path; index -1 is the
        digest of what lies before the run. O(index) after the first call on a path. Digests steer a policy's guesses
        only; a hit is always compared token by token.
        """
        digest, key, stride = self._origin(), self.key, self.stride
        for pos in range(0, (index + 1) * stride, stride):
            digest = blake2b(digest + key[pos : pos + stride], digest_size=8).digest()
        return digest

    def _origin(self) -> bytes:
        """Return the digest of everything before the run."""
        raise NotImplementedError


class EvictionPolicy(ABC):
    """Choose which run loses blocks next.

    Subclasses set `name`, take `capacity` (blocks of the pool) first and their own parameters as keyword-only
    arguments with defaults, and register themselves by being defined in a module of `radixpool.radix.eviction`.
    They must survive `copy.deepcopy` when all runs are in the memo; plain attributes, containers and `random.Random`
    do.
    """

    name: ClassVar[str]
    #: Whether the cache should report hits to `touched`. Costs a call per run of every hit path.
    observes_hits: ClassVar[bool] = False
    #: Whether new blocks may join a run that was released and hit again. They always may join one whose producer has
    #: not released it yet. Only pure recency cannot tell an old block from a new one under the same holder.
    merges_runs: ClassVar[bool] = False
    #: Whether candidates go as soon as a sequence is released, not when room is needed.
    evicts_on_release: ClassVar[bool] = False
    #: At most so many blocks of the run that `victim` returned last may go before it is asked again; `victim` sets it.
    allowance: int = 1 << 62

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def inserted(self, run: Run, num_new: int) -> None:  # noqa: B027 - optional hook
        """Learn that the last `num_new` blocks of `run` were just committed. The run is held."""

    def touched(self, run: Run) -> None:  # noqa: B027 - optional hook
        """Learn that an admitted request hit `run` (all of its blocks). The run is held."""

    @abstractmethod
    def add(self, run: Run) -> None:
        """Make `run` a candidate. `run.last_use` is up to date. At most O(log n)."""

    @abstractmethod
    def remove(self, run: Run) -> None:
        """Stop considering the candidate `run`. At most O(log n)."""

    @abstractmethod
    def victim(self) -> Run | None:
        """Return the candidate whose tail block goes next, or None when there is no candidate.

        May reorder its own lists. The cache then evicts from it before it calls anything else. O(log n) amortised.
        """

    @abstractmethod
    def candidates(self) -> Iterator[Run]:
        """Iterate over all candidates, each once, in any order. For `RadixCache.check`; O(n)."""

    def split(self, upper: Run, lower: Run) -> None:  # noqa: B027 - optional hook
        """Learn that `lower` lost its head blocks to the new run `upper`, its parent, which is no candidate.

        `lower` keeps its object, and its candidacy if it had one. Copy the history to `upper.data` here.
        """

    def evicted(self, run: Run, num_blocks: int) -> None:  # noqa: B027 - optional hook
        """Learn that the last `num_blocks` blocks of the candidate `run` are about to go (they can still be read)."""

    def dropped(self, run: Run) -> None:  # noqa: B027 - optional hook
        """Forget `run`: it left the tree and is not a candidate any more. Keep no reference to it."""
