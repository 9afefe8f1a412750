"""Groups of candidates: which policy object ranks a run, and which group pays first.

There is one group, and so one policy object, until a tenant gets a quota or a range gets a retention priority. Then
each (tenant with a quota, priority) has its own object of the same policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixpool.radix.eviction import make_policy
from radixpool.radix.eviction.base import EvictionPolicy, Run

if TYPE_CHECKING:
    from radixpool.radix.quotas import Account

__all__ = ["PolicyGroups"]


class PolicyGroups:
    """All policy objects of a cache. `many` is False while there is only the default one."""

    def __init__(self, spec: str, capacity: int) -> None:
        self.spec = spec
        self.capacity = capacity
        self.default = make_policy(spec, capacity)
        self.many = False

    def account(self, tenant: str) -> Account | None:
        """Return the account of `tenant`, None when it has no quota."""
        return None

    def policy(self, account: Account | None, priority: int) -> EvictionPolicy:
        """Return the policy object of a group, made on first use."""
        return self.default

    def victim(self) -> Run | None:
        """Return the run that loses its tail next."""
        return self.default.victim()

    def policies(self) -> list[EvictionPolicy]:
        """Return all policy objects."""
        return [self.default]
