"""What a subscriber of a manager learns: batches of the cache's events, each with the position after it. Frozen."""

from __future__ import annotations

from dataclasses import dataclass

from radixpool.radix.events import Cleared, Event, Removed, Stored
from radixpool.rpc.convert import namespace_from_wire
from radixpool.rpc.errors import ProtocolError
from radixpool.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the log of one life of a cache; a later life has another `log_id`."""

    log_id: int
    seq: int


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events in order, and the position after them.

    A batch that is part of a snapshot describes the whole content as of its position: what was known before the first
    such batch must be dropped. Salts of namespaces are replaced by hashes.
    """

    position: Position
    is_snapshot: bool
    events: tuple[Event, ...]


def batch_from_wire(message: admin_pb2.SubscribeEventsResponse) -> EventBatch:
    """Return the batch of one message."""
    position = Position(message.log_id, message.seq)
    return EventBatch(position, message.snapshot, tuple(map(_event_from_wire, message.events)))


def _event_from_wire(message: admin_pb2.CacheEvent) -> Event:
    match message.WhichOneof("event"):
        case "stored":
            stored = message.stored
            return Stored(
                seq=message.seq,
                namespace=namespace_from_wire(stored.namespace),
                parent=stored.parent_block if stored.HasField("parent_block") else -1,
                start=stored.start_block,
                tokens=stored.tokens,
                blocks=stored.block_ids,
                media=stored.media,
            )
        case "removed":
            return Removed(message.seq, namespace_from_wire(message.removed.namespace), message.removed.block_ids)
        case "cleared":
            cleared = message.cleared
            namespace = namespace_from_wire(cleared.namespace) if cleared.HasField("namespace") else None
            return Cleared(message.seq, namespace, cleared.generation)
        case _:
            raise ProtocolError("the manager sent a kind of event that this client does not know")
