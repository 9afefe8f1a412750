"""An index of a cache's findable blocks, kept by its events: what a router or a replica holds.

Idempotent and suspicious: an event it has seen is ignored, a gap or an unknown parent raises `ResyncNeeded` and changes
nothing, so that nothing is ever hung in the wrong place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from radixpool.radix.errors import RadixPoolError
from radixpool.radix.events import NO_PARENT, Cleared, Event, Removed, Snapshot, Stored
from radixpool.radix.media import MediaSpan, mark_blocks
from radixpool.radix.namespace import DEFAULT_NAMESPACE, Namespace
from radixpool.radix.tokens import TokensLike, pack_tokens

__all__ = ["EventIndex", "ResyncNeeded"]


class ResyncNeeded(RadixPoolError):
    """An event does not fit what the index knows: take a snapshot. Nothing was changed."""


@dataclass(slots=True, eq=False)
class _Block:
    block_id: int
    key: bytes
    parent: _Block | None
    children: dict[bytes, _Block] = field(default_factory=dict)


class EventIndex:
    """Findable blocks by namespace. One namespace's prefixes form a trie of single blocks."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.seq = 0
        self._roots: dict[Namespace, _Block] = {}
        self._blocks: dict[tuple[Namespace, int], _Block] = {}

    def __len__(self) -> int:
        """Return the number of findable blocks. O(1)."""
        return len(self._blocks)

    def load(self, snapshot: Snapshot) -> None:
        """Replace everything by a snapshot. O(blocks)."""
        self.seq = snapshot.seq
        self._roots.clear()
        self._blocks.clear()
        for stored in snapshot.stored:
            self._store(stored)

    def apply(self, event: Event) -> None:
        """Take in the next event; one that was taken in before is ignored. O(blocks in it).

        Raises:
            ResyncNeeded: events are missing before it, or its parent is unknown or itself; nothing was changed.

        """
        if event.seq <= self.seq:
            return
        if event.seq != self.seq + 1:
            raise ResyncNeeded(f"event {event.seq} follows {self.seq}: events are missing")
        if isinstance(event, Stored):
            self._store(event)
        elif isinstance(event, Removed):
            self._remove(event)
        else:
            self._clear(event)
        self.seq = event.seq

    def match(
        self, tokens: TokensLike, *, namespace: Namespace = DEFAULT_NAMESPACE, media: Iterable[MediaSpan] = ()
    ) -> list[int]:
        """Return the block ids of the longest known prefix. O(length of the match)."""
        key = pack_tokens(tokens)
        marks = mark_blocks(media, len(key) >> 2, self.block_size)
        stride = self.block_size * 4
        block = self._roots.get(namespace)
        found: list[int] = []
        for index in range(len(key) // stride):
            first = key[index * stride : (index + 1) * stride] + marks.get(index, b"")
            block = block.children.get(first) if block is not None else None
            if block is None:
                break
            found.append(block.block_id)
        return found

    def _store(self, event: Stored) -> None:
        stride = self.block_size * 4
        ids = _ids(event.blocks)
        if event.parent in ids:
            raise ResyncNeeded(f"event {event.seq}: block {event.parent} cannot be its own parent")
        if event.parent == NO_PARENT:
            parent = self._roots.get(event.namespace) or _Block(NO_PARENT, b"", None)
        else:
            known = self._blocks.get((event.namespace, event.parent))
            if known is None:
                raise ResyncNeeded(f"event {event.seq}: parent block {event.parent} is unknown")
            parent = known
        if event.parent == NO_PARENT:
            self._roots[event.namespace] = parent
        for index, block_id in enumerate(ids):
            key = event.tokens[index * stride : (index + 1) * stride] + event.media
            block = _Block(block_id, key, parent)
            parent.children[key] = block
            self._blocks[event.namespace, block_id] = block
            parent = block

    def _remove(self, event: Removed) -> None:
        for block_id in reversed(_ids(event.blocks)):
            block = self._blocks.pop((event.namespace, block_id), None)
            if block is not None and block.parent is not None:
                del block.parent.children[block.key]
        root = self._roots.get(event.namespace)
        if root is not None and not root.children:
            del self._roots[event.namespace]

    def _clear(self, event: Cleared) -> None:
        if event.namespace is None:
            self._roots.clear()
            self._blocks.clear()
            return
        self._roots.pop(event.namespace, None)
        self._blocks = {key: block for key, block in self._blocks.items() if key[0] != event.namespace}


def _ids(packed: bytes) -> list[int]:
    return memoryview(packed).cast("i").tolist()
