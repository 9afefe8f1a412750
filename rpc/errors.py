"""Errors that exist only between processes. Those of the cache itself are in `radixpool.radix.errors`.

::

    RadixPoolError
    ├── Fenced                 the caller's epoch is over: register again
    ├── ReplyExpired           a request was repeated whose first reply is no longer known
    ├── LimitExceeded          too many clients, sequences or streams
    ├── ManagerUnavailable     nobody answers at the address, or not in time
    │   ├── Recovering         it has restarted and waits for the pool of its cache
    │   ├── Overloaded         too many bytes of requests are under way at once
    │   ├── SequenceLost       a worker lost it, and with it the caller's own sequence
    │   └── Draining           it is shutting down and takes no new sequences
    ├── AddressInUse           another process serves the address
    ├── AddressUnavailable     the address cannot be listened on
    ├── PoolMismatch           the pool is not what was expected; names the field
    ├── PoolUnavailable        no pool holder is registered
    ├── Unauthenticated        no credential, or one that does not count
    ├── PermissionDenied       a known caller asked for what its role or tenant does not allow
    └── ProtocolError          the peer's answer makes no sense: versions differ
"""

from __future__ import annotations

from radixpool.radix.errors import RadixPoolError


class Fenced(RadixPoolError):
    """The client's epoch is over: its lease expired, it registered again, or the manager restarted."""


class ReplyExpired(RadixPoolError):
    """A request was sent again after its first reply was acknowledged or became too old; it was not run again."""


class LimitExceeded(RadixPoolError):
    """A limit of the service is reached (see `radixpool.rpc.limits`); nothing changed."""


class ManagerUnavailable(RadixPoolError):
    """The manager does not answer at its address, or not within the time limit."""


class Recovering(ManagerUnavailable):
    """The manager has restarted and waits for the pool of its restored cache; the same call will work later."""


class Overloaded(ManagerUnavailable):
    """The manager dropped a large request unread, because too many bytes of others are under way; try again."""


class SequenceLost(ManagerUnavailable):
    """A worker lost the manager, and with it the caller's own sequence; what came of it so far is right."""


class Draining(ManagerUnavailable):
    """The manager is shutting down: live sequences may finish, new ones must wait for the next manager."""


class AddressInUse(RadixPoolError):
    """Another process already serves this address."""


class AddressUnavailable(RadixPoolError):
    """The address cannot be listened on: no such directory or host, or no permission."""


class PoolMismatch(RadixPoolError):
    """The registered pool differs from what was expected in the field that the message names."""


class PoolUnavailable(RadixPoolError):
    """No pool is registered with the manager now."""


class ProtocolError(RadixPoolError):
    """The peer sent something that this version does not understand."""


class Unauthenticated(RadixPoolError):
    """No credential was presented, or one that does not count; the message never repeats it."""


class PermissionDenied(RadixPoolError):
    """The caller is known, and its role or tenant does not allow what it asked for."""
