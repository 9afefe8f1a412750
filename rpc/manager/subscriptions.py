"""One subscriber to the cache's events: a snapshot or a position, then what happens, for as long as it keeps up.

The event log is the bounded queue: a subscriber whose position has left it is cut off with EventsLost and begins again
from a snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from radixpool.radix.errors import EventsLost
from radixpool.radix.events import Cleared, Event, EventLog, Stored
from radixpool.rpc import limits
from radixpool.rpc.manager.engine import Engine
from radixpool.rpc.manager.views import Views
from radixpool.rpc.security.identity import current_tenant
from radixpool.v1 import admin_pb2 as pb

POLL_S: Final = 0.02
_EVENT_BYTES: Final = 4096
"""What an event takes at most besides tokens, block ids and media: a namespace with four long fields, and numbers."""
_ROOM_BYTES: Final = limits.MAX_MESSAGE_BYTES - _EVENT_BYTES


class Subscription:
    """Yields answers until `is_active` says no. Raises EventsLost when it must begin anew."""

    def __init__(self, engine: Engine, views: Views, is_active: Callable[[], bool]) -> None:
        self._engine = engine
        self._views = views
        self._is_active = is_active
        self._tenant = current_tenant()

    def run(self, request: pb.SubscribeEventsRequest) -> Iterator[pb.SubscribeEventsResponse]:
        """Yield the snapshot, if no position is given, then events as they come."""
        log_id, seq = request.log_id, request.after_seq
        if log_id == 0:
            if seq:
                raise ValueError(f"after_seq needs the log_id that it counts in, got {seq} without one")
            with self._engine.lock:
                log_id = self._engine.event_log_id
                snapshot = self._engine.cache.snapshot()
            seq = snapshot.seq
            yield from self._answers(list(snapshot.stored), log_id, seq, snapshot=True)
        while self._is_active():
            events = self._since(log_id, seq)
            if not events:
                time.sleep(POLL_S)
                continue
            seq = events[-1].seq
            yield from self._answers(events, log_id, seq, snapshot=False)

    def _since(self, log_id: int, seq: int) -> list[Event]:
        with self._engine.lock:
            log = self._engine.cache.events
            assert isinstance(log, EventLog), "the engine makes every cache with an event log"
            if log_id != self._engine.event_log_id:
                raise EventsLost(seq, first_seq=log.last_seq + 1)
            return log.since(seq)

    def _answers(
        self, events: list[Event], log_id: int, seq: int, *, snapshot: bool
    ) -> Iterator[pb.SubscribeEventsResponse]:
        """Yield events in messages of bounded size; an empty list makes one message, which carries the position."""
        parts = list(_parts(events)) or [[]]
        for number, part in enumerate(parts, start=1):
            reply = pb.SubscribeEventsResponse(
                log_id=log_id,
                seq=seq if snapshot or number == len(parts) else part[-1].seq,
                snapshot=snapshot,
                events=[self._views.event(event) for event in part if self._is_shown(event)],
            )
            self._engine.stamp(reply.header)
            yield reply

    def _is_shown(self, event: Event) -> bool:
        if self._tenant is None or (isinstance(event, Cleared) and event.namespace is None):
            return True
        assert event.namespace is not None
        return event.namespace.tenant == self._tenant


def _parts(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Cut events into what fits into one message each."""
    part: list[Event] = []
    room = _ROOM_BYTES
    for event in events:
        size = _EVENT_BYTES
        if not isinstance(event, Cleared):
            size += len(event.blocks)
        if isinstance(event, Stored):
            size += len(event.tokens) + len(event.media)
        if part and (size > room or len(part) == limits.EVENTS_PER_MESSAGE):
            yield part
            part, room = [], _ROOM_BYTES
        part.append(event)
        room -= size
    if part:
        yield part
