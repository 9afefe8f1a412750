"""Quotas: a tenant over its share pays first, nobody pays within it, and the maximum holds."""

from __future__ import annotations

import pytest

from radixpool.radix import Namespace, PoolExhausted, QuotaExceeded, TenantUsage

A, B, C = (Namespace(tenant=name) for name in "abc")


def usage(box, tenant: str) -> tuple[int, int]:
    (found,) = [quota for quota in box.cache.quotas() if quota.tenant == tenant]
    return found.used_blocks, found.cached_blocks


def test_who_is_over_its_share_pays_first(letters) -> None:
    box = letters(8)
    box.cache.set_quota("a", guaranteed_blocks=2)
    box.put("uv", namespace=B)  # older than all of a's
    box.put("abcdefgh", namespace=A)
    assert usage(box, "a") == (4, 4)
    box.acq("klmnopqr", namespace=C)  # one more than is free
    assert box.match("abcdefgh", namespace=A) == 6
    assert box.match("uv", namespace=B) == 2
    assert usage(box, "a") == (3, 3)


def test_a_share_is_never_evicted_for_others(letters) -> None:
    box = letters(8)
    box.cache.set_quota("a", guaranteed_blocks=3)
    box.put("abcdefgh", namespace=A)
    box.put("uv", namespace=B)
    with pytest.raises(PoolExhausted, match=r"needs 6 blocks, 5 of 8"):
        box.acq("klmnopqrstwx", namespace=C)
    box.acq("klmnopqrst", namespace=C)
    assert box.match("abcdefgh", namespace=A) == 6
    assert box.match("uv", namespace=B) == 0
    assert usage(box, "a") == (3, 3)


def test_a_tenant_may_evict_its_own_share(letters) -> None:
    box = letters(4)
    box.cache.set_quota("a", guaranteed_blocks=4)
    box.put("abcdefgh", namespace=A)
    seq = box.acq("klmnopqr", namespace=A)
    assert seq.num_blocks == 4
    box.rel(seq)
    assert usage(box, "a") == (0, 0)


def test_the_operator_evicts_shares_last(letters) -> None:
    box = letters(8)
    box.cache.set_quota("a", guaranteed_blocks=2)
    box.put("abcd", namespace=A)
    box.put("uvwx", namespace=B)
    assert len(box.ev(2)) == 2
    assert box.match("abcd", namespace=A) == 4
    foreseen = box.cache.evict(8, dry_run=True).blocks.tolist()
    assert box.ev(8) == foreseen
    assert box.match("abcd", namespace=A) == 0


def test_a_maximum_evicts_the_tenants_own_blocks_then_refuses(letters) -> None:
    box = letters(8)
    box.cache.set_quota("a", max_blocks=3)
    box.put("abcd", namespace=A)
    seq = box.acq("klmn", namespace=A)  # one of abcd has to go although the pool has room
    assert box.match("abcd", namespace=A) == 2
    assert usage(box, "a") == (3, 1)
    with pytest.raises(QuotaExceeded, match="tenant 'a' exceeded: needs 2 blocks, may take 1 more of its 3") as error:
        box.cache.reserve(seq, 4)
    assert (error.value.needed_blocks, error.value.allocatable_blocks, error.value.max_blocks) == (2, 1, 3)
    assert box.cache.stats().refused_requests == 1
    box.cache.reserve(seq, 2)
    assert usage(box, "a") == (3, 0)
    assert box.acq("abcdefghij", namespace=B).num_blocks == 5


def test_a_maximum_counts_no_hit_twice(letters) -> None:
    box = letters(8)
    box.cache.set_quota("a", max_blocks=3)
    box.put("abcd", namespace=A)
    assert box.acq("abcd", namespace=A, max_hit=4).num_blocks == 2  # nothing new: nothing to refuse
    assert box.acq("abcdef", namespace=A).cached_tokens == 4
    assert usage(box, "a") == (3, 0)


def test_without_shares_the_least_recently_used_goes_whoever_it_is(letters) -> None:
    box = letters(4)
    box.cache.set_quota("a", max_blocks=4)
    box.put("ab", namespace=A)
    box.put("uv", namespace=B)
    box.put("cd", namespace=A)
    box.acq("klmn", namespace=C)
    assert [box.match(t, namespace=n) for t, n in (("ab", A), ("uv", B), ("cd", A))] == [0, 2, 2]


def test_a_quota_set_late_counts_what_is_there(letters) -> None:
    box = letters(20)
    box.cache.add_worker("gpu")
    box.put("abcd", namespace=A)
    held = box.acq("abcdefg", namespace=A)
    box.com(held, 6)
    stale = box.acq("wxyz", namespace=Namespace(tenant="a", adapter="x"))
    box.com(stale, 4)
    box.cache.flush(stale.namespace, mode="new_generation")
    fenced = box.acq("mnop", namespace=A)
    box.com(fenced, 4)
    box.rel(fenced, after_step=0)
    box.cache.pin([ord(c) for c in "ab"], namespace=A)
    box.put("uv", namespace=B)
    box.put("ij", namespace=A)
    box.cache.set_quota("a", guaranteed_blocks=2, max_blocks=10)
    box.cache.check()
    assert box.cache.quotas() == (TenantUsage("a", 2, 10, 9, 1),)
    box.cache.set_quota("a", max_blocks=9)
    assert box.cache.quotas() == (TenantUsage("a", 0, 9, 9, 1),)
    box.rel(stale)
    assert usage(box, "a") == (7, 1)
    box.cache.complete_step("gpu", 0)
    assert usage(box, "a") == (7, 3)
    box.cache.remove_quota("a")
    box.cache.check()
    assert box.cache.quotas() == ()
    box.rel(held)
    with pytest.raises(ValueError, match="tenant 'a' has no quota"):
        box.cache.remove_quota("a")


def test_bad_quotas(letters) -> None:
    box = letters(8)
    box.cache.set_quota("a", guaranteed_blocks=6)
    for arguments, error, message in (
        ({"guaranteed_blocks": 3}, ValueError, "must leave room for the others' 6 of 8, not 3"),
        ({"guaranteed_blocks": -1}, ValueError, "guaranteed_blocks must be at least 0"),
        (
            {"guaranteed_blocks": 2, "max_blocks": 1},
            ValueError,
            "max_blocks must be at least guaranteed_blocks=2, not 1",
        ),
        ({"max_blocks": 1.5}, TypeError, "max_blocks must be int"),
    ):
        with pytest.raises(error, match=message):
            box.cache.set_quota("b", **arguments)
    with pytest.raises(TypeError, match="tenant must be str, not int"):
        box.cache.set_quota(1)
    assert len(box.cache.quotas()) == 1
