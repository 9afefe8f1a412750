"""Who is computing what just now: so that a second request for the same prefix can wait instead of computing it twice.

A sequence's uncommitted part begins where its deepest run ends, so a producer is filed under (that run, its next
block). The index is kept only once somebody has asked for it; until then it costs nothing.
"""

from __future__ import annotations

from radixpool.radix.fences import FencedCore
from radixpool.radix.node import Node
from radixpool.radix.sequence import Sequence

__all__ = ["InFlight"]


class InFlight(FencedCore):
    """The index of producers, and the live sequences it is made from."""

    _sequences: dict[int, Sequence]
    _producers: dict[tuple[Node, bytes], list[Sequence]] | None = None

    def _track(self, seq: Sequence) -> None:
        """File `seq` where it produces now, or nowhere when it has no whole uncommitted block. O(1)."""
        producers = self._producers
        assert producers is not None
        old, new = seq._producing, self._produces(seq)
        if old == new:
            return
        if old is not None:
            filed = producers[old]
            filed.remove(seq)
            if not filed:
                del producers[old]
        if new is not None:
            producers.setdefault(new, []).append(seq)
        seq._producing = new

    def _produces(self, seq: Sequence) -> tuple[Node, bytes] | None:
        start = seq._node.end * self._stride
        block = bytes(seq._tokens[start : start + self._stride])
        if seq.released or len(block) < self._stride:
            return None
        return seq._node, block + seq._marks.get(seq._node.end, b"")

    def _find_producer(
        self, node: Node, key: bytes, marks: dict[int, bytes], limit: int
    ) -> tuple[Sequence, int] | None:
        """Find who computes most of `key` beyond the end of `node`, up to block `limit`.

        Returns:
            The producer and how many blocks of the path will be shared with it; None if there is none.
            O(producers of the same block, times the length).

        """
        if self._producers is None:
            self._producers = {}
            for seq in self._sequences.values():
                self._track(seq)
        start, stride = node.end, self._stride
        if start >= limit:
            return None
        first = key[start * stride : (start + 1) * stride] + marks.get(start, b"")
        best: tuple[Sequence, int] | None = None
        for seq in self._producers.get((node, first), ()):
            theirs = bytes(seq._tokens[start * stride : limit * stride])
            most = len(theirs) // stride
            shared = start + self._common(theirs[: most * stride], key, start * stride, most)
            shared = next((i for i in range(start, shared) if marks.get(i) != seq._marks.get(i)), shared)
            if best is None or shared > best[1]:
                best = (seq, shared)
        return best
