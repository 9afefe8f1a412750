"""Quotas of tenants: a share that others' requests never evict, and a maximum. A tenant over its share pays first."""

from __future__ import annotations

from dataclasses import dataclass

from radixpool.radix.admission import check_count
from radixpool.radix.node import Node, Root
from radixpool.radix.quotas import Account
from radixpool.radix.variants import Variants

__all__ = ["TenantUsage", "Tenants"]


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """A tenant's quota and what it uses of it, in blocks; `cached_blocks` are those that may be evicted."""

    tenant: str
    guaranteed_blocks: int
    max_blocks: int | None
    used_blocks: int
    cached_blocks: int


class Tenants(Variants):
    """Operations on quotas."""

    def set_quota(self, tenant: str, *, guaranteed_blocks: int = 0, max_blocks: int | None = None) -> None:
        """Give a tenant a guaranteed share and a maximum, or change them. Evicts nothing.

        Args:
            tenant: the `Namespace.tenant` it is for.
            guaranteed_blocks: blocks that requests of other tenants never evict. What is held is never taken anyway;
                the shares of all tenants must fit into the pool together.
            max_blocks: most blocks the tenant may use, cached ones included; a request that needs more evicts the
                tenant's own blocks first and is refused with `QuotaExceeded` if that is not enough. None: no maximum.

        Raises:
            ValueError, TypeError: a number out of range.

        O(runs and sequences of the tenant) the first time, else O(tenants).

        """
        if not isinstance(tenant, str):
            raise TypeError(f"tenant must be str, not {type(tenant).__name__}")
        check_count("guaranteed_blocks", guaranteed_blocks)
        if max_blocks is not None:
            check_count("max_blocks", max_blocks)
            if max_blocks < guaranteed_blocks:
                raise ValueError(f"max_blocks must be at least guaranteed_blocks={guaranteed_blocks}, not {max_blocks}")
        accounts = self._groups.accounts
        others = sum(account.guaranteed for account in accounts.values() if account.tenant != tenant)
        if others + guaranteed_blocks > self.num_blocks:
            raise ValueError(
                f"guaranteed_blocks must leave room for the others' {others} of {self.num_blocks}, "
                f"not {guaranteed_blocks}"
            )
        account = accounts.get(tenant)
        if account is not None:
            account.guaranteed, account.maximum = guaranteed_blocks, max_blocks
            return
        account = Account(tenant, guaranteed_blocks, max_blocks)
        accounts[tenant] = account
        self._groups.many = True
        self._assign(tenant, account)

    def remove_quota(self, tenant: str) -> None:
        """Let a tenant share in what has no quota again. O(runs and sequences of the tenant).

        Raises:
            ValueError: it has no quota.

        """
        account = self._groups.accounts.pop(tenant, None)
        if account is None:
            raise ValueError(f"tenant {tenant!r} has no quota")
        self._assign(tenant, None)
        self._groups.discard(account)

    def quotas(self) -> tuple[TenantUsage, ...]:
        """Return all quotas with what is used of them. O(tenants with a quota)."""
        return tuple(
            TenantUsage(a.tenant, a.guaranteed, a.maximum, a.used, a.cached) for a in self._groups.accounts.values()
        )

    def _assign(self, tenant: str, account: Account | None) -> None:
        """Charge everything of a tenant to `account`, findable or not."""
        own = [seq for seq in self._sequences.values() if seq._namespace.tenant == tenant]
        order: list[Node] = [root for root in self._roots.values() if root.namespace.tenant == tenant]
        nodes = {id(root) for root in order}
        for ends in (
            (seq._node for seq in own),
            (node for node in self._pin_nodes() if node.root.namespace.tenant == tenant),
            (node for node in self._quarantine.fenced_nodes() if node.root.namespace.tenant == tenant),
        ):
            for end in ends:  # paths that are not findable any more
                node = end
                while id(node) not in nodes:
                    nodes.add(id(node))
                    order.append(node)
                    node = node.parent
        for node in order:
            for child in (node.children or {}).values():
                if id(child) not in nodes:
                    nodes.add(id(child))
                    order.append(child)
        for node in order:
            node.account = account
            if account is not None:
                account.used += node.num_blocks
                if not (node.ref or node.fence):
                    account.cached += node.num_blocks
            if isinstance(node, Root):
                if node.policy is not None:
                    node.policy = self._groups.policy(account, node.priority)
            elif node.policy is not None:
                self._regroup(node, self._groups.policy(account, node.priority))
        if account is not None:
            account.used += sum(seq.num_blocks - seq._node.end for seq in own)
