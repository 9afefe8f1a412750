"""Errors that exist only between processes. Those of the cache itself are in `radixpool.radix.errors`.

::

    RadixPoolError
    ├── Fenced                 the caller's epoch is over: register again
    ├── LimitExceeded          too many clients, sequences or streams
    ├── ManagerUnavailable     nobody answers at the address, or not in time
    ├── AddressInUse           another process serves the address
    ├── AddressUnavailable     the address cannot be listened on
    ├── PoolMismatch           the pool is not what was expected; names the field
    ├── PoolUnavailable        no pool holder is registered
    └── ProtocolError          the peer's answer makes no sense: versions differ
"""

from __future__ import annotations

from radixpool.radix.errors import RadixPoolError


class Fenced(RadixPoolError):
    """The client's epoch is over: its lease expired, it registered again, or the manager restarted."""


class LimitExceeded(RadixPoolError):
    """A limit of the service is reached (see `radixpool.rpc.limits`); nothing changed."""


class ManagerUnavailable(RadixPoolError):
    """The manager does not answer at its address, or not within the time limit."""


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
