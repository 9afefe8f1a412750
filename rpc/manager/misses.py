"""Why a prompt is not cached any further than it is.

The first cause that applies: what is missing is less than a block; a live sequence has the next block but has not
committed it; it was there and was removed; it is there in another namespace; nobody has committed it as far as the
event log goes back. Costs a look at every live sequence, namespace and event. The caller holds the engine's lock.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from radixpool.radix import Namespace, RadixCache, Sequence
from radixpool.radix.errors import EventsLost
from radixpool.radix.events import Event, EventLog, Removed, Stored
from radixpool.radix.media import mark_blocks
from radixpool.rpc.convert import media_from_wire
from radixpool.rpc.manager.handles import HandleTable, Held
from radixpool.rpc.manager.operations import checked_namespace
from radixpool.rpc.manager.views import Views
from radixpool.v1 import admin_pb2 as pb

MAX_TIMES: Final = 65_536
MAX_PRODUCERS: Final = 16
TOKEN_BYTES: Final = 4


class EventTimes:
    """When the event log had reached which number: a bounded list, added to at every sweep. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reached: deque[tuple[int, float]] = deque(maxlen=MAX_TIMES)

    def note(self, last_seq: int) -> None:
        """Note the newest number, if it is new. O(1)."""
        if not self._reached or self._reached[-1][0] != last_seq:
            self._reached.append((last_seq, self._clock()))

    def ms_ago(self, seq: int) -> int:
        """Return for how long at least the event has been in the past, 0 when that is not known. O(list)."""
        times = (time for reached, time in self._reached if reached >= seq)
        first = next(times, None)
        return 0 if first is None else int((self._clock() - first) * 1000)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is cached of a prefix, and the block after it.

    tokens: packed, up to the end of that block; media_keys: of all these blocks; cached: ids of the cached ones.
    """

    tokens: bytes
    namespace: Namespace
    media_keys: Mapping[int, bytes]
    cached: list[int]

    def has_media_of(self, sequence: Sequence) -> bool:
        """Whether a sequence has the same media under these blocks."""
        last = len(self.cached)
        return self.media_keys == {block: key for block, key in sequence.media_keys.items() if block <= last}


class MissExplainer:
    """Explains misses of one cache."""

    def __init__(self, cache: RadixCache, handles: HandleTable, times: EventTimes) -> None:
        self._cache = cache
        self._handles = handles
        self._times = times

    def explain(self, request: pb.ExplainMissRequest, reply: pb.ExplainMissResponse, views: Views) -> None:
        """Fill in how far the prefix is cached and why no further."""
        prefix, block_size = request.prefix, self._cache.block_size
        namespace, media = checked_namespace(prefix.namespace), media_from_wire(prefix.media)
        found = self._cache.match(prefix.tokens, namespace=namespace, media=media)
        reply.cached_tokens = found.tokens
        num_tokens, index = len(prefix.tokens) // TOKEN_BYTES, found.tokens // block_size
        keys = mark_blocks(media, num_tokens, block_size)
        wanted = _Wanted(
            tokens=prefix.tokens[: (index + 1) * block_size * TOKEN_BYTES],
            namespace=namespace,
            media_keys={block: key for block, key in keys.items() if block <= index},
            cached=found.blocks.tolist(),
        )
        if num_tokens - found.tokens <= block_size:
            reply.reason = pb.MISS_REASON_BELOW_BLOCK_GRANULARITY
        elif producers := self._producers(wanted):
            reply.reason = pb.MISS_REASON_IN_FLIGHT
            reply.producers.extend(map(views.sequence, producers))
        elif (removed := self._removal(wanted)) is not None:
            reply.reason = pb.MISS_REASON_EVICTED
            reply.removed_ms_ago = self._times.ms_ago(removed)
        else:
            self._elsewhere(request.prefix, wanted, reply, views)

    def _producers(self, wanted: _Wanted) -> list[Held]:
        same = (
            held
            for held in self._handles
            if held.sequence.namespace == wanted.namespace
            and held.sequence.packed_tokens.startswith(wanted.tokens)
            and wanted.has_media_of(held.sequence)
        )
        return list(itertools.islice(same, MAX_PRODUCERS))

    def _removal(self, wanted: _Wanted) -> int | None:
        """Return the number of the event that removed the block after the cached ones, None when there is none."""
        assert self._cache.events is not None, "the engine makes every cache with an event log"
        index = len(wanted.cached)
        block, removed = -1, None
        for event in _all_kept(self._cache.events):
            if isinstance(event, Stored) and event.namespace == wanted.namespace and event.start <= index:
                offset = index - event.start
                if offset * 4 < len(event.blocks) and self._is_wanted(event, wanted):
                    block = int.from_bytes(event.blocks[offset * 4 : offset * 4 + 4], "little")
            elif isinstance(event, Removed) and block >= 0 and block.to_bytes(4, "little") in _ids(event.blocks):
                removed, block = event.seq, -1
        return removed

    def _is_wanted(self, event: Stored, wanted: _Wanted) -> bool:
        parent = wanted.cached[event.start - 1] if event.start else -1
        return (
            event.parent == parent
            and event.media == wanted.media_keys.get(len(wanted.cached), b"")
            and event.tokens.startswith(wanted.tokens[event.start * self._cache.block_size * TOKEN_BYTES :])
        )

    def _elsewhere(self, prefix: pb.Prefix, wanted: _Wanted, reply: pb.ExplainMissResponse, views: Views) -> None:
        media = media_from_wire(prefix.media)
        others = [
            (self._cache.match(prefix.tokens, namespace=other, media=media).tokens, other)
            for other in self._cache.namespaces()
            if other != wanted.namespace
        ]
        best, other = max(others, key=lambda item: item[0], default=(0, wanted.namespace))
        if best * TOKEN_BYTES < len(wanted.tokens):
            reply.reason = pb.MISS_REASON_NEVER_SEEN
            return
        reply.reason = pb.MISS_REASON_OTHER_NAMESPACE
        reply.other_namespace.CopyFrom(views.namespace(other))
        reply.other_cached_tokens = best


def _all_kept(log: EventLog) -> list[Event]:
    try:
        return log.since(0)
    except EventsLost as lost:
        return log.since(lost.first_seq - 1)


def _ids(packed: bytes) -> set[bytes]:
    return {packed[i : i + 4] for i in range(0, len(packed), 4)}
