"""Pins, priorities, evictions, flushes, quotas and explanations, over the wire."""

from __future__ import annotations

import pytest

from radixpool.radix import Namespace, NotCached, PinBudgetExceeded, QuotaExceeded, UnknownPin
from radixpool.radix.errors import CacheBusy
from radixpool.radix.media import MediaSpan
from radixpool.rpc import limits
from radixpool.rpc.client import AsyncClient
from radixpool.rpc.inspection import Flushed, FlushMode, MissReason
from radixpool.v1 import admin_pb2

PROMPT = list(range(10))
OTHER = list(range(50, 60))


def keep(client, tokens, **options) -> None:
    with client.acquire(tokens, **options) as seq:
        seq.commit(len(tokens))


def test_row_42_a_pinned_prefix_stays_until_it_is_unpinned(client):
    keep(client, PROMPT)
    pinned = client.pin(PROMPT)
    assert pinned.pinned_tokens == 8
    assert client.stats().cache.pinned_blocks == 2
    assert client.evict(64).tolist() == []
    assert client.match(PROMPT).cached_tokens == 8
    client.unpin(pinned.pin_id)
    with pytest.raises(UnknownPin):
        client.unpin(pinned.pin_id)
    assert len(client.evict(64)) == 2


def test_a_pin_ends_with_its_time(client, eventually):
    keep(client, PROMPT)
    client.pin(PROMPT, ttl_ms=50)
    eventually(lambda: client.stats().cache.pinned_blocks == 0)
    assert len(client.evict(64)) == 2


def test_row_43_pins_have_a_budget(client):
    keep(client, list(range(200)))
    with pytest.raises(NotCached):
        client.pin(OTHER)
    with pytest.raises(PinBudgetExceeded):
        client.pin(list(range(200)))
    assert client.stats().cache.pinned_blocks == 0


def test_row_36_eviction_takes_tails_first_and_a_dry_run_nothing(client):
    keep(client, PROMPT)
    foreseen = client.evict(2, dry_run=True).tolist()
    assert client.match(PROMPT).cached_tokens == 8
    assert client.evict(1).tolist() == foreseen[:1]
    assert client.match(PROMPT).cached_tokens == 4
    assert client.evict(5).tolist() == foreseen[1:]


def test_row_50_flushing_what_is_in_use(client):
    seq = client.acquire(PROMPT)
    seq.commit(10)
    generation = client.info().generation
    with pytest.raises(CacheBusy):
        client.flush(FlushMode.IDLE_ONLY)
    assert client.match(PROMPT).cached_tokens == 8
    assert client.flush(FlushMode.NEW_GENERATION) == Flushed(0, 2)
    assert client.match(PROMPT).cached_tokens == 0
    assert client.info().generation == generation + 1
    seq.extend([1, 2, 3])
    seq.release()
    assert client.stats().cache.free_blocks == 64


def test_flushing_one_namespace(client):
    keep(client, PROMPT, namespace=Namespace(model="a"))
    keep(client, PROMPT, namespace=Namespace(model="b"))
    assert client.flush(FlushMode.IDLE_ONLY, namespace=Namespace(model="a")) == Flushed(2, 0)
    assert client.match(PROMPT, namespace=Namespace(model="b")).cached_tokens == 8


def test_quotas_bound_a_tenant_and_are_listed(client):
    client.set_quota("acme", guaranteed_blocks=1, max_blocks=3)
    with pytest.raises(QuotaExceeded) as refusal:
        client.acquire(range(16), namespace=Namespace(tenant="acme"))
    assert (refusal.value.tenant, refusal.value.max_blocks) == ("acme", 3)
    (usage,) = client.stats().tenants
    assert (usage.tenant, usage.guaranteed_blocks, usage.max_blocks, usage.used_blocks) == ("acme", 1, 3, 0)
    client.remove_quota("acme")
    client.acquire(range(16), namespace=Namespace(tenant="acme")).release()
    with pytest.raises(ValueError, match="acme"):
        client.remove_quota("acme")


def test_retention_says_how_many_blocks_it_reached(client):
    keep(client, PROMPT)
    assert client.set_retention(PROMPT, 80, stop=4) == 1
    assert client.set_retention(PROMPT, 80, ttl_ms=1000) == 2
    with pytest.raises(ValueError, match="100"):
        client.set_retention(PROMPT, 101)


def test_requests_without_a_choice_name_the_choices(client, server):
    with client.acquire(PROMPT):
        header = client._identity.bare_header()
    for method, request in (
        ("SetQuota", admin_pb2.SetQuotaRequest(header=header, tenant="t")),
        ("SetRetention", admin_pb2.SetRetentionRequest(header=header)),
        ("Flush", admin_pb2.FlushRequest(header=header)),
    ):
        with pytest.raises(ValueError, match="must be "):
            client._read(getattr(client._admin, method), request)


def test_explain_below_block_granularity(client):
    keep(client, PROMPT)
    miss = client.explain_miss(PROMPT)
    assert (miss.cached_tokens, miss.reason) == (8, MissReason.BELOW_BLOCK_GRANULARITY)


def test_explain_in_flight(client):
    with client.acquire(PROMPT):
        miss = client.explain_miss(PROMPT)
    assert (miss.cached_tokens, miss.reason) == (0, MissReason.IN_FLIGHT)
    assert [producer.client_name for producer in miss.producers] == ["test"]


def test_explain_evicted_and_when(client, eventually):
    keep(client, PROMPT)
    client.evict(1)
    miss = client.explain_miss(PROMPT)
    assert (miss.cached_tokens, miss.reason) == (4, MissReason.EVICTED)
    eventually(lambda: client.explain_miss(PROMPT).removed_ms_ago > 0)
    keep(client, PROMPT)
    assert client.explain_miss(PROMPT).reason is MissReason.BELOW_BLOCK_GRANULARITY
    assert client.explain_miss([*PROMPT[:4], 77, 77, 77, 77, 77]).reason is MissReason.NEVER_SEEN


def test_explain_other_namespace(client):
    keep(client, PROMPT, namespace=Namespace(adapter="x"))
    miss = client.explain_miss(PROMPT)
    assert (miss.reason, miss.other_namespace, miss.other_cached_tokens) == (
        MissReason.OTHER_NAMESPACE,
        Namespace(adapter="x"),
        8,
    )


def test_explain_never_seen(client):
    keep(client, PROMPT)
    miss = client.explain_miss(OTHER)
    assert (miss.cached_tokens, miss.reason, miss.removed_ms_ago) == (0, MissReason.NEVER_SEEN, None)


CAT, DOG = [MediaSpan(1, 6, b"cat")], [MediaSpan(1, 6, b"dog")]


def test_media_are_part_of_the_prefix_that_an_operator_names(client):
    """They were dropped: operators reached what is cached of the bare tokens, which is another prefix."""
    keep(client, PROMPT, media=CAT)
    assert client.match(PROMPT).cached_tokens == 0
    assert client.match(PROMPT, media=CAT).cached_tokens == 8
    assert (client.set_retention(PROMPT, 80), client.set_retention(PROMPT, 80, media=CAT)) == (0, 2)
    with pytest.raises(NotCached):
        client.pin(PROMPT, media=DOG)
    assert client.pin(PROMPT, media=CAT).pinned_tokens == 8


def test_explained_with_media(client):
    for media in (CAT, DOG):
        with client.acquire(PROMPT, media=media) as seq:
            assert client.explain_miss(PROMPT, media=media).reason is MissReason.IN_FLIGHT
            assert client.explain_miss(PROMPT).reason is MissReason.NEVER_SEEN
            seq.commit(10)
    assert client.explain_miss(PROMPT, media=CAT).cached_tokens == 8
    assert client.explain_miss(PROMPT).cached_tokens == 0
    assert client.explain_miss(PROMPT, namespace=Namespace(adapter="x"), media=DOG).other_cached_tokens == 8
    assert client.explain_miss(PROMPT, namespace=Namespace(adapter="x")).reason is MissReason.NEVER_SEEN
    client.evict(4)
    assert client.explain_miss(PROMPT, media=DOG).reason is MissReason.EVICTED
    assert client.explain_miss(PROMPT).reason is MissReason.NEVER_SEEN


def test_the_digest_of_media_is_bounded(client, server):
    """Every block under the content carries it: one of 1 MiB over 10,000 blocks took 10 GiB, before any refusal."""
    for media in ([MediaSpan(0, 10, bytes(257))], [MediaSpan(0, 10, bytes(1 << 20))]):
        with pytest.raises(
            ValueError, match=rf"media\[0\].digest must be at most 256 bytes, not {len(media[0].digest)}"
        ):
            client.acquire(PROMPT, media=media)
    client.acquire(PROMPT, media=[MediaSpan(0, 10, bytes(256))]).release()


async def test_the_asyncio_client_matches_media_too(client, server):
    keep(client, PROMPT, media=CAT)
    async with AsyncClient(server.address) as other:
        assert (await other.match(PROMPT, media=CAT)).cached_tokens == 8
        assert (await other.match(PROMPT, media=DOG)).cached_tokens == 0


def test_more_than_an_answer_can_name_is_not_evicted(client, monkeypatch):
    monkeypatch.setattr(limits, "MAX_EVICTED_BLOCKS", 1)
    keep(client, PROMPT)
    for dry_run in (True, False):
        with pytest.raises(ValueError, match="num_blocks must be at most 1 at a time, got 2"):
            client.evict(2, dry_run=dry_run)
    assert client.match(PROMPT).cached_tokens == 8
    assert len(client.evict(1)) == 1
