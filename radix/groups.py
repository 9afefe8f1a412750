"""Groups of candidates: which policy object ranks a run, and which group pays first.

There is one group, and so one policy object, until a tenant gets a quota or a range gets a retention priority. Then
each (account, priority) has an object of its own of the same policy, and a victim is found like this:

1. the account most blocks over its guaranteed share pays first, and down to the share only;
2. then whatever has no share (tenants without a quota, tenants with a maximum only) and the requester's own account,
   the lowest priority first, of equal ones the least recently used;
3. blocks within the share of another account never pay, except to the operator.

Within an account the lowest priority goes first, and within a priority the policy decides.
"""

from __future__ import annotations

from typing import NamedTuple

from radixpool.radix.eviction import make_policy
from radixpool.radix.eviction.base import DEFAULT_PRIORITY, EvictionPolicy, Run
from radixpool.radix.quotas import Account

__all__ = ["PolicyGroups", "Victim"]

_NO_LIMIT = 2**63


class Victim(NamedTuple):
    """The run that loses its tail next, and how many blocks it may lose at most."""

    run: Run
    limit: int


class PolicyGroups:
    """All policy objects of a cache, and all accounts. `many` is False while there is only the default group."""

    def __init__(self, spec: str, capacity: int) -> None:
        self.spec = spec
        self.capacity = capacity
        self.default = make_policy(spec, capacity)
        self.accounts: dict[str, Account] = {}
        self.many = False
        self._policies: dict[Account | None, dict[int, EvictionPolicy]] = {None: {DEFAULT_PRIORITY: self.default}}

    def account(self, tenant: str) -> Account | None:
        """Return the account of `tenant`, None when it has no quota. O(1)."""
        return self.accounts.get(tenant)

    def policy(self, account: Account | None, priority: int) -> EvictionPolicy:
        """Return the policy object of a group, made on first use. O(1), O(groups) the first time."""
        own = self._policies.setdefault(account, {})
        policy = own.get(priority)
        if policy is None:
            policy = make_policy(self.spec, self.capacity)
            own[priority] = policy
            self._policies[account] = dict(sorted(own.items()))
            self.many = True
        return policy

    def policies(self) -> list[EvictionPolicy]:
        """Return all policy objects."""
        return [policy for own in self._policies.values() for policy in own.values()]

    def discard(self, account: Account) -> None:
        """Forget the policy objects of an account that no tree uses any more."""
        self._policies.pop(account, None)

    def first(self, account: Account | None) -> Run | None:
        """Return the run of one account that goes first. O(priorities in use) policy decisions."""
        for policy in self._policies.get(account, {}).values():
            run = policy.victim()
            if run is not None:
                return run
        return None

    def victim(self, requester: Account | None, *, all_may_pay: bool) -> Victim | None:
        """Return the run that loses its tail next for a request of `requester`. O(accounts) policy decisions."""
        over = [account for account in self.accounts.values() if account.cached and account.over]
        if over:
            account = max(over, key=lambda account: (account.over, account.tenant))
            run = self.first(account)
            assert run is not None
            return Victim(run, account.over)
        equals = [None, *(a for a in self.accounts.values() if a.cached and (not a.guaranteed or a is requester))]
        found = [run for account in equals if (run := self.first(account)) is not None]
        if not found and all_may_pay:
            found = [run for a in self.accounts.values() if a.cached and (run := self.first(a)) is not None]
        if not found:
            return None
        return Victim(min(found, key=lambda run: (run.priority, run.last_use)), _NO_LIMIT)
