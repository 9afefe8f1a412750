"""What happened to the findable blocks, in order: for routers, indexers and replicas that follow a cache.

Replaying the events, from the beginning or from a snapshot, gives the same answer as the tree for every prefix
(`EventIndex` does it). The log keeps the last `capacity` events; who is further behind takes a snapshot and goes on
from its sequence number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from radixpool.radix.errors import EventsLost
from radixpool.radix.namespace import Namespace

__all__ = ["MAX_RUN_BYTES", "Cleared", "Event", "EventLog", "Removed", "Snapshot", "Stored", "runs_to_tell"]

NO_PARENT = -1
MAX_RUN_BYTES = 1 << 20
"""Packed tokens of one `Stored`: a longer run is told as several, so that whoever sends events can bound a message."""


class Stored(NamedTuple):
    """A run of blocks became findable.

    Attributes:
        seq: sequence number, one more than the event before.
        namespace: the tree.
        parent: block before the run on its path, -1 at the root.
        start: index of the first block on its path.
        tokens: packed little-endian uint32 token ids of the run.
        blocks: packed little-endian int32 block ids of the run, path order.
        media: encoded media spans under the run, which then is one block; else empty.

    """

    seq: int
    namespace: Namespace
    parent: int
    start: int
    tokens: bytes
    blocks: bytes
    media: bytes


class Removed(NamedTuple):
    """Blocks (packed int32, path order; the last one went first) are not findable any more."""

    seq: int
    namespace: Namespace
    blocks: bytes


class Cleared(NamedTuple):
    """Nothing stored before is findable in `namespace` (None: anywhere); `generation` counts such clearings."""

    seq: int
    namespace: Namespace | None
    generation: int


Event = Stored | Removed | Cleared


def runs_to_tell(parent: int, start: int, tokens: bytes, blocks: bytes) -> Sequence[tuple[int, int, bytes, bytes]]:
    """Cut a run where it is longer than one event may be; each part with its parent and start. O(length).

    >>> [(parent, start, len(blocks)) for parent, start, _, blocks in runs_to_tell(-1, 0, bytes(3 << 20), bytes(12))]
    [(-1, 0, 4), (0, 1, 4), (0, 2, 4)]
    """
    if len(tokens) <= MAX_RUN_BYTES:
        return ((parent, start, tokens, blocks),)
    stride = len(tokens) // (len(blocks) >> 2)
    count = max(1, MAX_RUN_BYTES // stride)
    parts = []
    for first in range(0, len(blocks) >> 2, count):
        part = blocks[4 * first : 4 * (first + count)]
        parts.append((parent, start + first, tokens[first * stride : (first + count) * stride], part))
        parent = int.from_bytes(part[-4:], "little")
    return parts


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All findable runs, parents first, as of event `seq`: apply it to an empty index and go on with `seq + 1`."""

    seq: int
    stored: tuple[Stored, ...]


class EventLog:
    """A bounded log of events with consecutive sequence numbers from 1."""

    def __init__(self, capacity: int = 65_536) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self.last_seq = 0
        self.capacity = capacity
        self._events: deque[Event] = deque(maxlen=capacity)

    def since(self, seq: int) -> list[Event]:
        """Return the events after `seq`. O(events returned).

        Raises:
            EventsLost: some of them are not kept any more; take a snapshot.
            ValueError: `seq` is in the future or negative.

        """
        if not 0 <= seq <= self.last_seq:
            raise ValueError(f"seq must be 0 to {self.last_seq}, not {seq}")
        missing = self.last_seq - seq
        if missing > len(self._events):
            raise EventsLost(seq, first_seq=self.last_seq - len(self._events) + 1)
        events = self._events
        return [events[i] for i in range(-missing, 0)] if missing < 64 else list(events)[len(events) - missing :]

    def skip(self, count: int) -> None:
        """Give up `count` numbers for events that are not kept: so many more follow that they would be lost anyway."""
        if count > 0:
            self.last_seq += count
            self._events.clear()

    def stored(self, namespace: Namespace, parent: int, start: int, tokens: bytes, blocks: bytes, media: bytes) -> None:
        """Append a `Stored`, of a very long run several. O(1)."""
        for part in runs_to_tell(parent, start, tokens, blocks):
            self.last_seq += 1
            self._events.append(Stored(self.last_seq, namespace, *part, media))

    def removed(self, namespace: Namespace, blocks: bytes) -> None:
        """Append a `Removed`. O(1)."""
        self.last_seq += 1
        self._events.append(Removed(self.last_seq, namespace, blocks))

    def cleared(self, namespace: Namespace | None, generation: int) -> None:
        """Append a `Cleared`. O(1)."""
        self.last_seq += 1
        self._events.append(Cleared(self.last_seq, namespace, generation))
