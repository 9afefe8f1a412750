"""Room: who may take how many blocks, and who loses them.

`_make_room` proves before anything is changed, `_evict` takes. Refusal changes nothing.
"""

from __future__ import annotations

from radixpool.radix.errors import PoolExhausted, QuotaExceeded
from radixpool.radix.eviction.base import EvictionPolicy
from radixpool.radix.node import Node
from radixpool.radix.quotas import Account
from radixpool.radix.tree import Tree

__all__ = ["Room"]


class Room(Tree):
    """Allocation limits and eviction."""

    def _make_room(self, needed: int, payer: Node, target: Node, head: int = 0) -> None:
        """Refuse unless `needed` blocks can be had without touching the path to `target` (its first `head` blocks).

        Changes nothing but what is expired.

        Raises:
            PoolExhausted, QuotaExceeded.

        """
        if needed <= 0:
            return
        spared = self._spared(target, head)
        account = payer.account
        if account is not None and account.maximum is not None:
            allowed = account.maximum - account.used + account.cached - spared
            if needed > allowed:
                raise QuotaExceeded(
                    account.tenant, needed_blocks=needed, allocatable_blocks=allowed, max_blocks=account.maximum
                )
        allocatable = len(self._free) + self._evictable(account) - spared
        if needed > allocatable:
            raise PoolExhausted(
                needed,
                allocatable_blocks=allocatable,
                num_blocks=self.num_blocks,
                retry_after_step=self._quarantine.retry_after(needed - allocatable),
            )

    def _has_room(self, needed: int, payer: Node, target: Node, head: int) -> bool:
        """Tell whether `_make_room` would not refuse."""
        try:
            self._make_room(needed, payer, target, head)
        except (PoolExhausted, QuotaExceeded):
            return False
        return True

    def _spared(self, target: Node, head: int) -> int:
        """Return how many cached blocks a hold on `target` (its first `head` blocks, all if 0) would keep."""
        spared = 0
        if head and target.ref == 0 and not target.fence:
            spared = head - target.num_blocks  # the rest of a partly hit run stays evictable
        node = target
        while node.ref == 0:
            if not node.fence:
                spared += node.num_blocks
            node = node.parent
        return spared

    def _evictable(self, requester: Account | None) -> int:
        """Return how many cached blocks may go for `requester`. O(accounts)."""
        if not self._groups.accounts:
            return self._cached
        others = [account for account in self._groups.accounts.values() if account is not requester]
        closed = sum(account.cached - account.open_to_others for account in others)
        return self._cached - closed

    def _claim(self, needed: int, payer: Node) -> bytes:
        """Evict what is short of `needed` >= 1 blocks and take them. `_make_room` has proven that it works.

        All that is evicted for it is among what is taken, so that it is recorded once, as handed out.
        """
        account = payer.account
        if account is not None and account.maximum is not None and account.used + needed > account.maximum:
            self._evict_own(account.used + needed - account.maximum, account)
        short = needed - len(self._free)
        if short > 0:
            self._evict(short, account)
        return self._take(needed, payer)

    def _evict_own(self, count: int, account: Account) -> None:
        """Evict `count` blocks of one tenant, which must be there."""
        while count > 0:
            run = self._groups.first(account)
            assert isinstance(run, Node)
            count -= self._shorten(run, min(count, run.num_blocks), None)

    def _evict(
        self,
        count: int,
        requester: Account | None = None,
        taken: list[bytes] | None = None,
        *,
        all_may_pay: bool = False,
    ) -> None:
        """Evict up to `count` blocks, tail blocks of the first victims first. O(1) a block plus a decision a run."""
        groups = self._groups
        while count > 0:
            if groups.many:
                victim = groups.victim(requester, all_may_pay=all_may_pay)
                if victim is None:
                    break
                run, limit = victim
                limit = min(limit, count)
            else:
                found = self._policy.victim()
                if found is None:
                    break
                run, limit = found, count
            count -= self._shorten(run, limit, taken)  # type: ignore[arg-type]  # every run is a node

    def _make_free(self, count: int, *, all_may_pay: bool = False) -> list[bytes]:
        """Evict up to `count` blocks for nobody. Return which went, run by run."""
        taken: list[bytes] = []
        self._evict(count, taken=taken, all_may_pay=all_may_pay)
        if self._persistence is not None and taken:
            self._persistence.returned(b"".join(taken))
        return taken

    def _shorten(self, run: Node, limit: int, taken: list[bytes] | None) -> int:
        """Evict up to `limit` blocks from the tail of a candidate. Return how many went.

        They go to the free list; the caller hands them out or records them as free before anything else happens.
        """
        policy = run.policy
        assert policy is not None
        gone = run.blocks
        size = len(gone) >> 2
        if policy.allowance < limit:
            limit = policy.allowance
        if size > limit:
            policy.evicted(run, limit)
            keep = size - limit
            gone = gone[keep * 4 :]
            if self._told:
                self._tell_removed(run, gone)
            run.blocks = run.blocks[: keep * 4]
            run.key = run.key[: keep * self._stride]
            run.end -= limit
            size = limit
            shortest = run
        else:
            policy.evicted(run, size)
            policy.remove(run)
            policy.dropped(run)
            if self._told:
                self._tell_removed(run, gone)
            self._detach(run)
            shortest = run.parent
        if self._persistence is not None:
            self._tell_touched(shortest)
        self._free.frombytes(gone)
        if run.account is not None:
            run.account.used -= size
            run.account.cached -= size
        if taken is not None:
            taken.append(gone)
        self._cached -= size
        self._tree_blocks -= size
        self._evicted_blocks += size
        return size

    def _regroup(self, node: Node, policy: EvictionPolicy) -> None:
        """Hand a live node over to another policy object; its history there begins now."""
        old = node.policy
        assert old is not None
        candidate = not (node.ref or node.fence or node.children)
        if candidate:
            old.remove(node)
        old.dropped(node)
        node.prev = node.next = node.data = None
        node.policy = policy
        policy.inserted(node, node.num_blocks)
        if candidate:
            policy.add(node)
