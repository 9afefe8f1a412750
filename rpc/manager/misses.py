"""Why a prompt is not cached any further than it is.

The first cause that applies: what is missing is less than a block; a live sequence has the next block but has not
committed it; it was there and was removed; it is there in another namespace; nobody has committed it as far as the
event log goes back. Costs a look at every live sequence, namespace and event. The caller holds the engine's lock.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Final

from radixpool.radix import Namespace, RadixCache
from radixpool.radix.errors import EventsLost
from radixpool.radix.events import Event, EventLog, Removed, Stored
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


class MissExplainer:
    """Explains misses of one cache."""

    def __init__(self, cache: RadixCache, handles: HandleTable, times: EventTimes) -> None:
        self._cache = cache
        self._handles = handles
        self._times = times

    def explain(self, request: pb.ExplainMissRequest, reply: pb.ExplainMissResponse, views: Views) -> None:
        """Fill in how far the prefix is cached and why no further."""
        tokens, namespace = request.prefix.tokens, checked_namespace(request.prefix.namespace)
        found = self._cache.match(tokens, namespace=namespace)
        reply.cached_tokens = found.tokens
        block_size = self._cache.block_size
        wanted = tokens[: (found.tokens + block_size) * TOKEN_BYTES]
        if len(tokens) // TOKEN_BYTES - found.tokens <= block_size:
            reply.reason = pb.MISS_REASON_BELOW_BLOCK_GRANULARITY
        elif producers := self._producers(wanted, namespace):
            reply.reason = pb.MISS_REASON_IN_FLIGHT
            reply.producers.extend(map(views.sequence, producers))
        elif (removed := self._removal(wanted, namespace, found.blocks.tolist())) is not None:
            reply.reason = pb.MISS_REASON_EVICTED
            reply.removed_ms_ago = self._times.ms_ago(removed)
        else:
            self._elsewhere(wanted, namespace, reply, views)

    def _producers(self, wanted: bytes, namespace: Namespace) -> list[Held]:
        same = (
            held
            for held in self._handles
            if held.sequence.namespace == namespace and held.sequence.packed_tokens.startswith(wanted)
        )
        return list(itertools.islice(same, MAX_PRODUCERS))

    def _removal(self, wanted: bytes, namespace: Namespace, cached: list[int]) -> int | None:
        """Return the number of the event that removed the block after the cached ones, None when there is none."""
        assert self._cache.events is not None, "the engine makes every cache with an event log"
        stride = self._cache.block_size * TOKEN_BYTES
        index = len(cached)
        block, removed = -1, None
        for event in _all_kept(self._cache.events):
            if isinstance(event, Stored) and event.namespace == namespace and event.start <= index:
                offset = index - event.start
                if offset * 4 < len(event.blocks) and self._is_wanted(event, wanted, cached, stride):
                    block = int.from_bytes(event.blocks[offset * 4 : offset * 4 + 4], "little")
            elif isinstance(event, Removed) and block >= 0 and block.to_bytes(4, "little") in _ids(event.blocks):
                removed, block = event.seq, -1
        return removed

    def _is_wanted(self, event: Stored, wanted: bytes, cached: list[int], stride: int) -> bool:
        parent = cached[event.start - 1] if event.start else -1
        return event.parent == parent and event.tokens.startswith(wanted[event.start * stride :])

    def _elsewhere(self, wanted: bytes, namespace: Namespace, reply: pb.ExplainMissResponse, views: Views) -> None:
        others = [
            (self._cache.match(wanted, namespace=other).tokens, other)
            for other in self._cache.namespaces()
            if other != namespace
        ]
        best, other = max(others, key=lambda item: item[0], default=(0, namespace))
        if best * TOKEN_BYTES < len(wanted):
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
