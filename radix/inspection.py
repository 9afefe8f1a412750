"""Read-only views for operators: statistics, every run, one block, and the proof that all is consistent.

Nothing here runs on the hot path: `stats` is O(1), the others walk what they describe.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from radixpool.radix.checking import check_cache
from radixpool.radix.events import Snapshot, Stored, runs_to_tell
from radixpool.radix.flushing import Flushing
from radixpool.radix.namespace import Namespace
from radixpool.radix.node import Node, Root
from radixpool.radix.results import BlockInfo, BlockState, NodeInfo
from radixpool.radix.sequence import Sequence
from radixpool.radix.stats import CacheStats

__all__ = ["Inspection"]


class Inspection(Flushing):
    """Operations that only look."""

    def stats(self) -> CacheStats:
        """Return a snapshot of all counters. O(1)."""
        free, quarantined = len(self._free), self._quarantine.num_blocks
        return CacheStats(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            free_blocks=free,
            cached_blocks=self._cached,
            held_blocks=self.num_blocks - free - self._cached - quarantined,
            quarantined_blocks=quarantined,
            pinned_blocks=self._pinned,
            tree_blocks=self._tree_blocks,
            num_sequences=len(self._sequences),
            num_pins=len(self._pins),
            num_nodes=self._num_nodes,
            num_namespaces=len(self._roots),
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            admitted_requests=self._admitted,
            refused_requests=self._refused,
            committed_blocks=self._committed_blocks,
            remapped_blocks=self._remapped_blocks,
            evicted_blocks=self._evicted_blocks,
            generation=self._generation,
            tick=self._tick,
        )

    def check(self) -> None:
        """Prove every invariant of the cache. O(blocks + runs + the depth of every sequence).

        Raises:
            InvariantViolation: one does not hold; the message names it and dumps the counters.

        """
        check_cache(self)

    def namespaces(self) -> tuple[Namespace, ...]:
        """Return the namespaces that have a tree, in the order they appeared. O(namespaces)."""
        return tuple(self._roots)

    def nodes(self, namespace: Namespace | None = None) -> Iterator[NodeInfo]:
        """Iterate over every findable run, parents before children, of one namespace or of all.

        A view of the present: change nothing while iterating. O(runs + live sequences).
        """
        roots = list(self._roots.values()) if namespace is None else [self._roots.get(namespace)]
        refs = self._count_holders()
        for root in roots:
            stack: list[tuple[Node, int]] = [(root, 0)] if root is not None else []
            while stack:
                node, level = stack.pop()
                if level:
                    yield self._describe(root, node, level - 1, refs.get(id(node), 0))  # type: ignore[arg-type]
                children = list((node.children or {}).values())
                stack.extend((child, level + 1) for child in reversed(children))

    def _count_holders(self) -> dict[int, int]:
        """Return how many sequences and pins go through each run, by id(run)."""
        counts: dict[int, int] = {}
        ends: dict[int, tuple[Node, int]] = {}
        for node in chain((seq._node for seq in self._sequences.values()), self._pin_nodes()):
            ends[id(node)] = (node, ends.get(id(node), (node, 0))[1] + 1)
        for end, count in ends.values():
            node = end
            while node.parent is not node:
                counts[id(node)] = counts.get(id(node), 0) + count
                node = node.parent
        return counts

    def _describe(self, root: Root, node: Node, level: int, refs: int) -> NodeInfo:
        return NodeInfo(
            namespace=root.namespace,
            level=level,
            start=node.start,
            tokens=np.frombuffer(node.key, dtype=np.uint32),
            blocks=np.frombuffer(node.blocks, dtype=np.int32),
            ref_count=refs,
            num_children=len(node.children or ()),
            state=_state(node),
            last_use=node.last_use,
            pinned=node.pins > 0,
            priority=node.priority,
            media=bool(node.media),
        )

    def block_info(self, block_id: int) -> BlockInfo:
        """Explain one block: its state, who holds it and where it stands. O(runs + blocks held).

        Raises:
            ValueError: no such block.

        """
        if not isinstance(block_id, int) or not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block_id must be an integer from 0 to {self.num_blocks - 1}, not {block_id!r}")
        holders = [(seq, index) for seq in self._sequences.values() if (index := _find(seq._table, block_id)) >= 0]
        handles = tuple(seq.handle for seq, _ in holders)
        for info in self.nodes():
            index = _find(info.blocks.tobytes(), block_id)
            if index >= 0:
                size = self.block_size
                tokens = info.tokens[index * size : (index + 1) * size]
                position = info.start + index
                return BlockInfo(block_id, info.state, handles, info.namespace, position, True, tokens, info.last_use)
        if holders:
            seq, index = holders[0]
            return BlockInfo(block_id, BlockState.HELD, handles, seq.namespace, index, False, None, None)
        free = _find(self._free.tobytes(), block_id) >= 0
        state = BlockState.FREE if free else BlockState.QUARANTINED
        return BlockInfo(block_id, state, (), None, None, False, None, None)

    def snapshot(self) -> Snapshot:
        """Return all findable runs as events, with the sequence number to go on from. O(runs + blocks).

        Raises:
            ValueError: the cache was made without an event log.

        """
        if self._events is None:
            raise ValueError("events: this cache has no event log")
        seq = self._events.last_seq
        stored = []
        for root in self._roots.values():
            for node in self._subtree(root)[1:]:
                before = node.parent.blocks[-4:]
                parent = int.from_bytes(before, "little") if before else -1
                for part in runs_to_tell(parent, node.start, node.key, node.blocks):
                    stored.append(Stored(seq, root.namespace, *part, node.media))
        return Snapshot(seq, tuple(stored))

    def holders(self, block_id: int) -> tuple[Sequence, ...]:
        """Return the live sequences whose table names the block. O(blocks held)."""
        return tuple(seq for seq in self._sequences.values() if _find(seq._table, block_id) >= 0)


def _state(node: Node) -> BlockState:
    if node.ref:
        return BlockState.HELD
    return BlockState.QUARANTINED if node.fence else BlockState.CACHED


def _find(packed: bytes, block_id: int) -> int:
    """Return the index of a block id in packed int32 ids, -1 when it is not there."""
    hits = np.flatnonzero(np.frombuffer(packed, dtype=np.int32) == block_id)
    return int(hits[0]) if hits.size else -1
