"""Who is alive: one lease per client, in epochs, on a monotonic clock. A lease that expired is never revived.

All leases have one TTL, so the order of their last renewals is the order of their deadlines: expiry looks at the front
of an ordered dict, O(1) a lease.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from radixpool.rpc import limits
from radixpool.rpc.errors import Fenced, LimitExceeded, PermissionDenied
from radixpool.rpc.liveness import ProcessWatch
from radixpool.rpc.security.identity import current_tenant


class Lease:
    """One epoch of one client, the handles it acquired and the requests whose replies are kept (in their order).

    No reply to a request up to `reply_floor` is kept except those in `replied`. Of a worker, `process` is watched and
    no step after `launched_step` has begun, and the cache knows its steps as those of `worker_key`.
    """

    __slots__ = (
        "alive",
        "client_id",
        "deadline",
        "epoch",
        "handles",
        "launched_step",
        "name",
        "process",
        "replied",
        "reply_floor",
        "role",
        "tenant",
        "worker_key",
    )

    def __init__(self, client_id: bytes, *, name: str, role: int, epoch: int, deadline: float) -> None:
        self.client_id = client_id
        self.name = name
        self.role = role
        # Whose callers alone may use the lease; None for clients that serve all tenants.
        self.tenant = current_tenant()
        self.epoch = epoch
        self.deadline = deadline
        self.alive = True
        # Both are taken from at the front, which a plain dict does in O(what was taken before).
        self.handles: OrderedDict[bytes, None] = OrderedDict()
        self.replied: OrderedDict[int, None] = OrderedDict()
        self.reply_floor = 0
        self.process = ProcessWatch()
        self.launched_step = 0
        self.worker_key = f"epoch {epoch}"


class LeaseTable:
    """The live leases. `clock` gives monotonic seconds; epochs count up from `first_epoch`."""

    def __init__(self, *, ttl_s: float, clock: Callable[[], float], first_epoch: int) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._next_epoch = first_epoch
        self._leases: OrderedDict[bytes, Lease] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, client_id: bytes) -> bool:
        return client_id in self._leases

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def register(self, client_id: bytes, *, name: str, role: int) -> tuple[Lease, Lease | None]:
        """Start a new epoch of a client. Returns its lease and the dead lease of the epoch before, if there was one.

        Raises LimitExceeded, PermissionDenied, nothing changed.
        """
        if client_id not in self._leases and len(self._leases) >= limits.MAX_CLIENTS:
            raise LimitExceeded(f"clients: the limit is {limits.MAX_CLIENTS}, all are registered")
        known = self._leases.get(client_id)
        if known is not None and known.tenant != current_tenant():
            raise PermissionDenied("client_id is registered by a client of another tenant")
        former = self.end(client_id)
        deadline = self._clock() + self._ttl_s
        lease = Lease(client_id, name=name, role=role, epoch=self._next_epoch, deadline=deadline)
        self._next_epoch += 1
        self._leases[client_id] = lease
        return lease, former

    def admit(self, client_id: bytes, epoch: int) -> Lease:
        """Return the live lease of this epoch. Raises Fenced. O(1)."""
        lease = self._leases.get(client_id)
        if lease is None or lease.tenant != current_tenant():
            raise Fenced("client is not registered: its lease expired, or the manager was restarted; register again")
        if lease.epoch != epoch:
            raise Fenced(f"epoch {epoch} is over, the client is in epoch {lease.epoch}; register again")
        if lease.deadline <= self._clock():
            raise Fenced(f"the lease of epoch {epoch} has expired; register again")
        return lease

    def renew(self, lease: Lease) -> None:
        """Move the deadline of a live lease a whole TTL from now. O(1)."""
        lease.deadline = self._clock() + self._ttl_s
        self._leases.move_to_end(lease.client_id)

    def end(self, client_id: bytes) -> Lease | None:
        """End a lease and return it; None when there is none. O(1)."""
        lease = self._leases.pop(client_id, None)
        if lease is not None:
            lease.alive = False
        return lease

    def pop_expired(self) -> Lease | None:
        """End and return the lease that expired first, None when none has. O(1)."""
        oldest = next(iter(self._leases.values()), None)
        if oldest is None or oldest.deadline > self._clock():
            return None
        return self.end(oldest.client_id)

    def remaining_ms(self, lease: Lease) -> int:
        """Return how long the lease still lasts."""
        return max(0, int((lease.deadline - self._clock()) * 1000))
