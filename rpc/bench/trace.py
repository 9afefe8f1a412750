"""A request trace as columns: the one form that readers write and that replays and references read.

A block is a node of the trie of all requests, the pair (parent, key), never the bare key. Nodes are numbered in the
order of their first appearance, so a parent's number is below its children's. A request is a root path of nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

Insert = Literal["prompt", "prompt+output"]

ROOT = -1
"""The parent of a request's first block."""


class TraceError(ValueError):
    """A trace that cannot be read or used: the message names the file, the line and the field."""


@dataclass(frozen=True, slots=True)
class DamagedLine:
    """One line of a trace that was skipped, and why."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Record:
    """One request as a reader found it.

    `keys` name the prompt's blocks in order; `output_keys` those of the output, or None where the trace does not
    tell them. `duration_ms` is None where unknown.
    """

    keys: list[Hashable]
    input_tokens: int
    output_tokens: int = 0
    arrival_ms: float | None = None
    duration_ms: float | None = None
    output_keys: list[Hashable] | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in arrival order, as numpy columns.

    Request i walks `nodes[offsets[i]:offsets[i + 1]]`, of which the first `prompt_blocks[i]` are looked up (these are
    the block references) and the rest, its output, are only inserted. `duration_ms` is NaN where unknown.
    """

    name: str
    sha256: str
    block_size: int
    nodes: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    prompt_blocks: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    arrival_ms: npt.NDArray[np.float64]
    duration_ms: npt.NDArray[np.float64]
    input_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    damaged: tuple[DamagedLine, ...] = ()
    reordered: int = 0

    @property
    def num_requests(self) -> int:
        """Count the requests; O(1)."""
        return len(self.offsets) - 1

    @property
    def num_nodes(self) -> int:
        """Count the distinct blocks, outputs included; O(1)."""
        return len(self.parents)

    @property
    def num_refs(self) -> int:
        """Count the block references, i.e. looked-up blocks; O(requests)."""
        return int(self.prompt_blocks.sum())

    @property
    def largest_request(self) -> int:
        """Return the blocks of the longest path: no smaller pool can serve every request; O(requests)."""
        return int(np.diff(self.offsets).max(initial=0))

    def paths(self) -> list[list[int]]:
        """Return every request's path as plain ints, for the pure-Python simulators; O(nodes)."""
        flat = self.nodes.tolist()
        bounds = self.offsets.tolist()
        return [flat[a:b] for a, b in itertools.pairwise(bounds)]

    def packed_paths(self) -> list[bytes]:
        """Return every path as little-endian uint32 `bytes`, one symbol a block: what `RadixCache` takes; O(nodes)."""
        flat = self.nodes.astype("<u4").tobytes()
        bounds = (self.offsets * 4).tolist()
        return [flat[a:b] for a, b in itertools.pairwise(bounds)]

    def head(self, num_requests: int) -> Trace:
        """Return the trace's first `num_requests` requests; O(nodes)."""
        kept = min(num_requests, self.num_requests)
        nodes = self.nodes[: self.offsets[kept]]
        num_nodes = int(nodes.max(initial=-1)) + 1
        return Trace(
            name=self.name,
            sha256=self.sha256,
            block_size=self.block_size,
            nodes=nodes,
            offsets=self.offsets[: kept + 1],
            prompt_blocks=self.prompt_blocks[:kept],
            parents=self.parents[:num_nodes],
            arrival_ms=self.arrival_ms[:kept],
            duration_ms=self.duration_ms[:kept],
            input_tokens=self.input_tokens[:kept],
            output_tokens=self.output_tokens[:kept],
            damaged=self.damaged,
            reordered=self.reordered,
        )


@dataclass(slots=True)
class TraceBuilder:
    """Collect records and number their blocks; `build` makes the `Trace`.

    With `insert="prompt+output"` a request's path goes on into its output. Output blocks that the trace does not name
    get fresh keys: they take room and are never found again, which is what the trace lets us know.
    """

    name: str
    block_size: int | None = None
    insert: Insert = "prompt"
    sha256: str = ""
    _records: list[Record] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Take one more request; O(1)."""
        self._records.append(record)

    @property
    def num_requests(self) -> int:
        """Count the records so far; O(1)."""
        return len(self._records)

    def build(self, *, damaged: Iterable[DamagedLine] = ()) -> Trace:
        """Sort by arrival (stable), number the blocks and return the trace; O(nodes + n log n)."""
        arrivals = _arrivals(self._records)
        order = np.argsort(arrivals, kind="stable")
        records = [self._records[i] for i in order]
        block_size = self.block_size or infer_block_size(records)
        nodes, lengths, parents = _number(self._paths(records, block_size))
        return Trace(
            name=self.name,
            sha256=self.sha256,
            block_size=block_size,
            nodes=nodes,
            offsets=np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
            prompt_blocks=np.array([len(r.keys) for r in records], dtype=np.int32),
            parents=parents,
            arrival_ms=arrivals[order],
            duration_ms=np.array([np.nan if r.duration_ms is None else r.duration_ms for r in records], dtype=float),
            input_tokens=np.array([r.input_tokens for r in records], dtype=np.int64),
            output_tokens=np.array([r.output_tokens for r in records], dtype=np.int64),
            damaged=tuple(damaged),
            reordered=int(np.count_nonzero(order != np.arange(len(order)))),
        )

    def _paths(self, records: list[Record], block_size: int) -> Iterator[list[Hashable]]:
        for index, record in enumerate(records):
            if self.insert == "prompt":
                yield record.keys
            elif record.output_keys is not None:
                yield record.keys + record.output_keys
            else:
                before = -(-record.input_tokens // block_size)
                after = -(-(record.input_tokens + record.output_tokens) // block_size)
                yield record.keys + [("output", index, i) for i in range(after - before)]


def _arrivals(records: list[Record]) -> npt.NDArray[np.float64]:
    """Fill unknown arrival times with the one before, so that the file's order stays."""
    times = np.empty(len(records))
    last = 0.0
    for i, record in enumerate(records):
        last = last if record.arrival_ms is None else record.arrival_ms
        times[i] = last
    return times - times.min(initial=np.inf) if len(times) else times


def _number(
    paths: Iterable[list[Hashable]],
) -> tuple[npt.NDArray[np.int32], list[int], npt.NDArray[np.int32]]:
    numbers: dict[tuple[int, Hashable], int] = {}
    nodes: list[int] = []
    lengths: list[int] = []
    for path in paths:
        parent = ROOT
        for key in path:
            parent = numbers.setdefault((parent, key), len(numbers))
            nodes.append(parent)
        lengths.append(len(path))
    parents = np.fromiter((parent for parent, _ in numbers), dtype=np.int32, count=len(numbers))
    return np.array(nodes, dtype=np.int32), lengths, parents


def infer_block_size(records: list[Record]) -> int:
    """Return the power of two that explains most requests' (tokens, blocks), whole or rounded-up blocks; O(n).

    Falls back to the mean tokens a block, and to 1 without any block.
    """
    tokens = np.array([r.input_tokens for r in records], dtype=np.int64)
    blocks = np.array([len(r.keys) for r in records], dtype=np.int64)
    if not blocks.sum():
        return 1
    sizes = [1 << i for i in range(17)]
    agreeing = [int(((tokens // size <= blocks) & (blocks <= -(-tokens // size))).sum()) for size in sizes]
    best = max(range(len(sizes)), key=agreeing.__getitem__)
    if agreeing[best] * 2 >= len(records):
        return sizes[best]
    return max(1, round(float(tokens.sum() / blocks.sum())))
