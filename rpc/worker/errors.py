"""Why a request of a worker fails, besides the errors of the cache."""

from __future__ import annotations

from radixpool.radix.errors import RadixPoolError


class InternalError(RadixPoolError):
    """The worker failed in a way that is a bug of ours; its log has the trace."""


class BlocksInvalidated(RadixPoolError):
    """A block that the sequence reads was reported damaged; what was computed from it cannot be trusted."""


class OutOfMemory(RadixPoolError):
    """A forward pass did not fit into memory; the pool and the cache are as they were before."""


class DeviceLost(RadixPoolError):
    """The GPU does not answer this process any more, and never will: only a new process can go on."""
