"""The account of a tenant with a quota: what it uses and what it may."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Account"]


@dataclass(slots=True, eq=False)
class Account:
    """Blocks of one tenant, over all of its namespaces.

    Attributes:
        tenant: whose it is.
        guaranteed: blocks that other tenants' requests never evict.
        maximum: most blocks it may use, None for no limit.
        used: blocks in its trees and private to its sequences. Quarantined private blocks are nobody's.
        cached: those of them that nobody holds and that may be evicted.

    """

    tenant: str
    guaranteed: int
    maximum: int | None
    used: int = 0
    cached: int = 0

    @property
    def over(self) -> int:
        """Blocks beyond the guaranteed share, 0 without a share: what pays first. O(1)."""
        return max(0, self.used - self.guaranteed) if self.guaranteed else 0

    @property
    def open_to_others(self) -> int:
        """Cached blocks that other tenants' requests may evict. O(1)."""
        return min(self.cached, max(0, self.used - self.guaranteed))
