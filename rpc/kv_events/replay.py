"""The last published batches, for subscribers that missed some. Bounded in batches and in bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

MAX_REPLAY_BYTES: Final = 64 << 20


class ReplayBuffer:
    """A window of consecutive batches; the oldest go first when it is full."""

    def __init__(self, max_batches: int, *, max_bytes: int = MAX_REPLAY_BYTES) -> None:
        self._batches: deque[bytes] = deque()
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._bytes = 0
        self.next_seq = 0

    def append(self, payload: bytes) -> int:
        """Keep a batch and return its sequence number. O(1) amortised."""
        self._batches.append(payload)
        self._bytes += len(payload)
        while len(self._batches) > self._max_batches or self._bytes > self._max_bytes:
            self._bytes -= len(self._batches.popleft())
        self.next_seq += 1
        return self.next_seq - 1

    @property
    def first_seq(self) -> int:
        """Sequence number of the oldest batch that is kept; `next_seq` when there is none."""
        return self.next_seq - len(self._batches)

    def since(self, seq: int) -> Iterator[tuple[int, bytes]]:
        """Yield number and payload of each kept batch from `seq` on."""
        for number, payload in enumerate(list(self._batches), self.first_seq):
            if number >= seq:
                yield number, payload
