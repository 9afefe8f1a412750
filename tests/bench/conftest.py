"""Fixtures of the policy-benchmark tests: real traces where they are at hand, small made-up ones, naive simulators."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable
from functools import lru_cache
from pathlib import Path

import pytest

from radixpool.rpc.bench.readers import ReadOptions, read_trace
from radixpool.rpc.bench.trace import Record, Trace, TraceBuilder

REPO = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("RADIXPOOL_SHARED", REPO.parent / "shared"))


@lru_cache(maxsize=8)
def _read(name: str, limit: int | None) -> Trace:
    return read_trace(str(SHARED / "traces" / f"{name}.jsonl.xz"), ReadOptions(limit=limit))


@pytest.fixture(scope="session")
def trace_path() -> Callable[[str], Path]:
    """Return the path of a shared trace file, or skip."""

    def find(file: str) -> Path:
        path = SHARED / "traces" / file
        if not path.is_file():
            pytest.skip(f"no real traces here: {path} is absent (set RADIXPOOL_SHARED)")
        return path

    return find


@pytest.fixture(scope="session")
def real_trace(trace_path) -> Callable[..., Trace]:
    """Return a shared trace by name, its first `limit` requests if given, or skip."""

    def read(name: str, limit: int | None = None) -> Trace:
        trace_path(f"{name}.jsonl.xz")
        return _read(name, limit)

    return read


@pytest.fixture(scope="session")
def make_trace() -> Callable[..., Trace]:
    """Return a trace from a list of paths of block names; one token a block unless `block_size` says otherwise.

    `prompts` says how many blocks of each path are its prompt, the rest being its output; all unless given.
    """

    def make(paths: list[list[Hashable]], *, block_size: int = 1, arrivals=None, durations=None, prompts=None) -> Trace:
        builder = TraceBuilder(name="made", block_size=block_size, insert="prompt+output")
        for i, path in enumerate(paths):
            prompt = len(path) if prompts is None else prompts[i]
            builder.add(
                Record(
                    keys=list(path[:prompt]),
                    output_keys=list(path[prompt:]),
                    input_tokens=prompt * block_size,
                    output_tokens=(len(path) - prompt) * block_size,
                    arrival_ms=None if arrivals is None else arrivals[i],
                    duration_ms=None if durations is None else durations[i],
                )
            )
        return builder.build()

    return make


class NaiveCache:
    """The rules of the replay, block by block, by scanning everything: match, pin, evict leaf-first, insert, touch.

    `rank(block)` orders the unpinned leaves, lowest goes first; blocks are prefixes (tuples), so the tree is explicit.
    """

    def __init__(self, capacity: int, policy: str) -> None:
        self.capacity = capacity
        self.rank = {
            "lru": lambda b: (self.touched[b],),
            "fifo": lambda b: (self.inserted[b],),
            "lfu": lambda b: (self.uses[b], self.touched[b]),
        }[policy]
        self.inserted: dict[tuple, int] = {}
        self.touched: dict[tuple, int] = {}
        self.uses: dict[tuple, int] = {}
        self.clock = itertools.count()
        self.evicted = 0

    def request(self, path: list[Hashable]) -> int:
        """Serve one request and return its hits; a path longer than the capacity is refused."""
        if len(path) > self.capacity:
            return 0
        blocks = [tuple(path[: i + 1]) for i in range(len(path))]
        hits = len(list(itertools.takewhile(self.inserted.__contains__, blocks)))
        while len(self.inserted) + len(blocks) - hits > self.capacity:
            parents = {block[:-1] for block in self.inserted}
            leaves = [b for b in self.inserted if b not in parents and b not in blocks]
            victim = min(leaves, key=self.rank)
            for table in (self.inserted, self.touched, self.uses):
                del table[victim]
            self.evicted += 1
        for block in reversed(blocks):
            now = next(self.clock)
            self.inserted.setdefault(block, now)
            self.touched[block] = now
            self.uses[block] = self.uses.get(block, 0) + 1
        return hits


@pytest.fixture(scope="session")
def naive_cache() -> type[NaiveCache]:
    return NaiveCache


class Exhaustive:
    """The most hits any leaf-first choice of victims can reach, by trying all of them. For tiny traces only.

    `counted` says how many leading blocks of each request can be hit, all unless given. Without `tree`, blocks are
    independent: any may go, and each is hit alone.
    """

    def __init__(
        self, paths: list[list[Hashable]], capacity: int, *, bypass: bool, counted=None, tree: bool = True
    ) -> None:
        self.paths = [[tuple(path[: i + 1]) for i in range(len(path))] for path in paths]
        self.counted = [len(path) for path in paths] if counted is None else counted
        self.capacity = capacity
        self.bypass = bypass
        self.tree = tree
        self.known: dict[tuple[int, frozenset], int] = {}

    def best(self, time: int = 0, resident: frozenset = frozenset()) -> int:
        if time == len(self.paths):
            return 0
        key = (time, resident)
        if key not in self.known:
            path, looked_up = self.paths[time], self.paths[time][: self.counted[time]]
            if len(path) > self.capacity and not self.bypass:
                return self.best(time + 1, resident)
            find = itertools.takewhile if self.tree else filter
            hits = len(list(find(resident.__contains__, looked_up)))
            self.known[key] = hits + max(self.best(time + 1, kept) for kept in self.choices(path, resident))
        return self.known[key]

    def choices(self, path: list[tuple], resident: frozenset) -> list[frozenset]:
        """All sets that may be resident after the request: closed under parents, within the capacity."""
        pool = sorted(resident | set(path))
        size = min(self.capacity, len(pool))
        pinned = set() if self.bypass else set(path)
        return [
            kept
            for chosen in itertools.combinations(pool, size)
            if (kept := frozenset(chosen)) >= pinned
            and not (self.tree and any(len(b) > 1 and b[:-1] not in kept for b in kept))
        ]


@pytest.fixture(scope="session")
def exhaustive() -> type[Exhaustive]:
    return Exhaustive
