"""Remember what was evicted, by identity, up to a number of blocks: the ghost lists of 2Q, ARC and S3-FIFO.

One entry stands for the blocks that one eviction took from the end of a run, under the identity of the first of them:
a later request along that path misses from exactly that block on. The deeper blocks cannot be the first to miss, so
they need no entry of their own.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["GhostList"]


class GhostList:
    """Identities of evicted blocks, oldest out first, at most `limit` blocks after each `trim`."""

    __slots__ = ("_entries", "blocks", "limit")

    def __init__(self, limit: int) -> None:
        self._entries: OrderedDict[bytes, int] = OrderedDict()
        self.blocks = 0
        self.limit = limit

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._entries

    def add(self, identity: bytes, num_blocks: int) -> None:
        """Remember that `num_blocks` blocks from `identity` on went; the newest entry. O(1)."""
        self.blocks += num_blocks - self._entries.pop(identity, 0)
        self._entries[identity] = num_blocks

    def pop(self, identity: bytes) -> int:
        """Forget the entry and return its blocks, 0 if there is none. O(1)."""
        num_blocks = self._entries.pop(identity, 0)
        self.blocks -= num_blocks
        return num_blocks

    def trim(self, limit: int | None = None) -> None:
        """Forget the oldest entries until at most `limit` blocks (the list's own limit) are left. O(forgotten)."""
        bound = self.limit if limit is None else limit
        while self.blocks > bound:
            self.blocks -= self._entries.popitem(last=False)[1]
