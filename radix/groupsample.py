"""Decide in about a microsecond whether a request belongs to the sampled groups, so that most need no more work.

A group is the requests whose paths begin alike: a hash of the namespace and the first block decides, so a conversation
is looked at always or never, however long it grows. Where a beginning is a crowd's (a system prompt), it says nothing;
then the first block after what the crowd has in common decides, and so on. What a crowd has in common is learnt from
its requests: what one of them had, shortened by every one that differs. Those blocks are shared by so many that they
are always cached; `look_at` tells how many there are.
"""

from __future__ import annotations

from zlib import crc32

__all__ = ["GroupSample"]

_CROWDED_SHARE = 1 / 64
_FIRST_CROWD = 32
_MAX_COUNTS = 4_096
_MAX_COMMON_BYTES = 32_768
_GOLDEN = 2_654_435_761


class GroupSample:
    """Counts beginnings and samples groups at `rate`; bounded memory, the rare ones are forgotten first."""

    __slots__ = ("_common", "_counts", "_stride", "_total", "rate")

    def __init__(self, stride: int) -> None:
        self.rate = 1.0
        self._stride = stride
        self._counts: dict[int, int] = {}
        self._common: dict[int, bytes] = {}  # crowd to the bytes that its requests share from its first block on
        self._total = 0

    def look_at(self, tokens: bytes, namespace: int) -> int | None:
        """Return how many leading blocks are a crowd's if the request is to be looked at, else None.

        O(1) for most requests, O(the crowd's common bytes) by memcmp for those of crowds.
        """
        if self.rate >= 1.0:
            return 0
        counts, stride = self._counts, self._stride
        end = len(tokens) // stride * stride
        self._total += 1
        crowd = max(_FIRST_CROWD, self._total * _CROWDED_SHARE)
        key, pos = namespace & 0xFFFFFFFF, 0
        while pos < end:
            key = crc32(tokens[pos : pos + stride], key)
            count = counts[key] = counts.get(key, 0) + 1
            if count < crowd:
                break
            common = self._common.get(key)
            if common is None or not tokens.startswith(common, pos):
                common = self._common[key] = self._shared(common, tokens, pos, end)
            pos += len(common)
        if len(counts) > _MAX_COUNTS:
            self._forget_rare()
        return pos // stride if (key * _GOLDEN & 0xFFFFFFFF) < self.rate * 2.0**32 else None

    def _shared(self, common: bytes | None, tokens: bytes, pos: int, end: int) -> bytes:
        """Return what a crowd has in common, as far as it was known, after a request that differs from it at `pos`."""
        if common is None:
            return tokens[pos : min(end, pos + _MAX_COMMON_BYTES)]
        return common[: self._equal_bytes(common, tokens[pos:end])]

    def _equal_bytes(self, one: bytes, other: bytes) -> int:
        """Return the length of the whole blocks that both begin with; the first block is equal by its hash."""
        stride = self._stride
        low, high = 1, min(len(one), len(other)) // stride + 1  # low blocks are equal, high blocks are not or too many
        while high - low > 1:
            middle = (low + high) // 2
            if one[: middle * stride] == other[: middle * stride]:
                low = middle
            else:
                high = middle
        return low * stride

    def _forget_rare(self) -> None:
        self._counts = {key: count >> 1 for key, count in self._counts.items() if count > 3}
        self._common = {key: common for key, common in self._common.items() if key in self._counts}
        self._total >>= 1
