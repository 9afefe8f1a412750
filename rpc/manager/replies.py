"""First replies, kept so that a request that is sent again gets the same answer without a second effect.

A client says in each header up to which request it has received the replies; those are dropped at once. The others stay
for `REPLY_RETENTION_S`, unless all of them together would take more than `MAX_REPLY_BYTES`: then the oldest go early.
The numbers of a client's requests rise, so a number at or below one whose reply is gone is refused, never run again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from radixpool.rpc import limits
from radixpool.rpc.errors import ReplyExpired
from radixpool.rpc.manager.leases import Lease
from radixpool.v1 import common_pb2


@dataclass(slots=True)
class _Kept:
    """A reply message, or the error that was raised instead."""

    outcome: Any
    deadline: float
    size_bytes: int
    lease: Lease


class ReplyCache:
    """Replies by (epoch, request id), oldest first. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: OrderedDict[tuple[int, int], _Kept] = OrderedDict()
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        """Size on the wire of all kept replies."""
        return self._size_bytes

    def find(self, lease: Lease, header: common_pb2.RequestHeader) -> Any | None:
        """Return the first outcome of this request, None when it is new. O(1) plus what is dropped.

        Raises ReplyExpired for a request that was answered, when the answer is gone.
        """
        self._drop_acknowledged(lease, header.acknowledged_request_id)
        kept = self._kept.get((lease.epoch, header.request_id))
        if kept is not None:
            return kept.outcome
        if header.request_id <= lease.reply_floor:
            raise ReplyExpired(
                f"request_id {header.request_id} was answered before, and replies up to {lease.reply_floor} are gone"
            )
        return None

    def keep(self, lease: Lease, request_id: int, outcome: Any) -> None:
        """Remember the first outcome of a request: a message, or the error raised. O(size of the message)."""
        size_bytes = limits.KEPT_REPLY_OVERHEAD_BYTES
        if isinstance(outcome, Exception):
            outcome.__context__ = None  # an error that it replaced would hold the request by its frames
        else:
            size_bytes += outcome.ByteSize()
        kept = _Kept(outcome, self._clock() + limits.REPLY_RETENTION_S, size_bytes, lease)
        self._kept[lease.epoch, request_id] = kept
        lease.replied[request_id] = None
        self._size_bytes += size_bytes
        while self._kept and self._must_drop(next(iter(self._kept.values()))):
            self._drop(next(iter(self._kept)))

    def _must_drop(self, oldest: _Kept) -> bool:
        return oldest.deadline <= self._clock() or self._size_bytes > limits.MAX_REPLY_BYTES

    def _drop_acknowledged(self, lease: Lease, upto: int) -> None:
        while lease.replied and (oldest := next(iter(lease.replied))) <= upto:
            self._drop((lease.epoch, oldest))

    def _drop(self, key: tuple[int, int]) -> None:
        kept = self._kept.pop(key)
        self._size_bytes -= kept.size_bytes
        del kept.lease.replied[key[1]]
        kept.lease.reply_floor = max(kept.lease.reply_floor, key[1])
