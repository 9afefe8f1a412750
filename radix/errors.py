"""Operating errors of the cache. Callers' mistakes are ``ValueError`` or ``TypeError`` instead.

::

    RadixPoolError
    ├── PoolExhausted          not enough free or evictable blocks; nothing was changed
    ├── QuotaExceeded          the tenant's maximum would be passed; nothing was changed
    ├── UnknownSequence        the handle was released, fenced, or never existed
    ├── UnknownPin             the pin was removed, expired, or never existed
    ├── UnknownWorker          no such worker is registered
    ├── PinBudgetExceeded      the pin would pass the pin budget; nothing was changed
    ├── NotCached              there is nothing to pin
    ├── EventsLost             the event log does not reach back that far
    ├── CacheBusy              an idle-only flush found holders; nothing was changed
    └── InvariantViolation     ``check()`` found the cache inconsistent: a bug of ours
"""

from __future__ import annotations

__all__ = [
    "RadixPoolError",
    "PoolExhausted",
    "QuotaExceeded",
    "UnknownSequence",
    "UnknownPin",
    "UnknownWorker",
    "PinBudgetExceeded",
    "NotCached",
    "EventsLost",
    "CacheBusy",
    "InvariantViolation",
]


class RadixPoolError(Exception):
    """Base of every operating error of radixpool."""


class PoolExhausted(RadixPoolError):
    """Refuse an operation for want of blocks; nothing was changed.

    Attributes:
        needed_blocks: new blocks the operation needs beyond its hit.
        allocatable_blocks: free blocks plus cached ones that may be evicted for it (its own hit never counts).
        short_blocks: ``needed_blocks - allocatable_blocks``.
        num_blocks: size of the pool.
        retry_after_step: the step whose completion frees enough quarantined blocks, or None.

    """

    def __init__(
        self, needed_blocks: int, *, allocatable_blocks: int, num_blocks: int, retry_after_step: int | None = None
    ) -> None:
        self.needed_blocks = needed_blocks
        self.allocatable_blocks = allocatable_blocks
        self.short_blocks = needed_blocks - allocatable_blocks
        self.num_blocks = num_blocks
        self.retry_after_step = retry_after_step
        hint = ""
        if self.permanent:
            hint = "; it can never be admitted"
        elif retry_after_step is not None:
            hint = f"; retry after step {retry_after_step}"
        super().__init__(
            f"pool exhausted: needs {needed_blocks} blocks, {allocatable_blocks} of {num_blocks} can be allocated, "
            f"{self.short_blocks} short{hint}"
        )

    @property
    def permanent(self) -> bool:
        """Whether even an empty pool is too small."""
        return self.needed_blocks > self.num_blocks


class QuotaExceeded(RadixPoolError):
    """Refuse an operation that would take a tenant past its maximum; nothing was changed.

    Attributes:
        tenant: whose quota it is.
        needed_blocks: new blocks the operation needs.
        allocatable_blocks: blocks the tenant may still take, its own evictable ones included.
        max_blocks: the quota.

    """

    def __init__(self, tenant: str, *, needed_blocks: int, allocatable_blocks: int, max_blocks: int) -> None:
        self.tenant = tenant
        self.needed_blocks = needed_blocks
        self.allocatable_blocks = allocatable_blocks
        self.max_blocks = max_blocks
        super().__init__(
            f"quota of tenant {tenant!r} exceeded: needs {needed_blocks} blocks, may take {allocatable_blocks} more "
            f"of its {max_blocks}"
        )


class UnknownSequence(RadixPoolError):
    """Name a sequence that was released or never existed. Nothing was changed."""

    def __init__(self, handle: object) -> None:
        self.handle = handle
        super().__init__(f"unknown sequence {handle!r}: it was released or never existed")


class UnknownPin(RadixPoolError):
    """Name a pin that was removed, expired or never existed. Nothing was changed."""

    def __init__(self, pin_id: int) -> None:
        self.pin_id = pin_id
        super().__init__(f"unknown pin {pin_id}: it was removed, has expired or never existed")


class UnknownWorker(RadixPoolError):
    """Name a worker that is not registered. Nothing was changed."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        super().__init__(f"unknown worker {worker!r}: register it first")


class PinBudgetExceeded(RadixPoolError):
    """Refuse a pin that would pass the budget; nothing was changed."""

    def __init__(self, *, needed_blocks: int, pinned_blocks: int, budget_blocks: int) -> None:
        self.needed_blocks = needed_blocks
        self.pinned_blocks = pinned_blocks
        self.budget_blocks = budget_blocks
        super().__init__(
            f"pin budget exceeded: {needed_blocks} more blocks, {pinned_blocks} pinned, budget {budget_blocks}"
        )


class NotCached(RadixPoolError):
    """Refuse to pin a prefix of which not even one block is cached; nothing was changed."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        super().__init__(f"not cached: not one whole block of these {num_tokens} tokens is in the tree")


class EventsLost(RadixPoolError):
    """Ask for events that the log does not keep any more: take a snapshot and go on from it."""

    def __init__(self, seq: int, *, first_seq: int) -> None:
        self.seq = seq
        self.first_seq = first_seq
        super().__init__(f"events after {seq} are gone, the log begins with {first_seq}: take a snapshot")


class CacheBusy(RadixPoolError):
    """Refuse an idle-only flush while sequences or pins hold blocks; nothing was changed."""

    def __init__(self, *, held_blocks: int, quarantined_blocks: int) -> None:
        self.held_blocks = held_blocks
        self.quarantined_blocks = quarantined_blocks
        super().__init__(f"cache is busy: {held_blocks} blocks held, {quarantined_blocks} quarantined")


class InvariantViolation(RadixPoolError):
    """Report that the cache is inconsistent. The message holds the state."""
