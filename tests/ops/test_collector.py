"""The manager's counters come out under the promised names, and only when scraped."""

from __future__ import annotations

from dataclasses import fields

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from radixpool.radix.stats import CacheStats
from radixpool.rpc.metrics import ManagerCollector, ServiceSnapshot

BASE = {field.name: 0 for field in fields(CacheStats)} | {"num_blocks": 100, "block_size": 16, "free_blocks": 100}


class Source:
    """A manager whose counters the test sets."""

    def __init__(self) -> None:
        self.stats = dict(BASE)
        self.service = ServiceSnapshot(version="1.2", policy="lru", incarnation=2**63 + 1, uptime_s=5.5, serving=True)
        self.reads = 0

    def cache_stats(self) -> CacheStats:
        self.reads += 1
        return CacheStats(**self.stats)

    def service_snapshot(self) -> ServiceSnapshot:
        return self.service


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def registry(source: Source) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(ManagerCollector(source))
    return registry


def test_nothing_is_read_before_a_scrape(source: Source, registry: CollectorRegistry) -> None:
    assert source.reads == 0
    generate_latest(registry)
    assert source.reads == 1


def test_block_states_add_up_and_usage_counts_what_cannot_be_handed_out(
    source: Source, registry: CollectorRegistry
) -> None:
    source.stats |= {"free_blocks": 40, "cached_blocks": 35, "held_blocks": 20, "quarantined_blocks": 5}
    states = {
        state: registry.get_sample_value("radixpool_kv_blocks", {"state": state})
        for state in ("free", "cached", "held", "quarantined")
    }
    assert states == {"free": 40, "cached": 35, "held": 20, "quarantined": 5}
    assert registry.get_sample_value("radixpool_kv_cache_usage_ratio") == 0.25


def test_hits_and_queries_are_tokens_under_the_fields_names(source: Source, registry: CollectorRegistry) -> None:
    source.stats |= {"queried_tokens": 4096, "hit_tokens": 1024}
    assert registry.get_sample_value("radixpool_prefix_cache_queries_total") == 4096
    assert registry.get_sample_value("radixpool_prefix_cache_hits_total") == 1024


def test_evictions_are_split_by_cause(source: Source, registry: CollectorRegistry) -> None:
    source.stats["evicted_blocks"] = 10
    source.service = ServiceSnapshot(
        version="1", policy="lru", incarnation=1, uptime_s=1, serving=True, evicted_by_cause={"operator": 3}
    )
    sample = registry.get_sample_value
    assert sample("radixpool_kv_blocks_evicted_total", {"cause": "operator"}) == 3
    assert sample("radixpool_kv_blocks_evicted_total", {"cause": "capacity"}) == 7


def test_leases_by_role_and_incarnation_as_an_exact_label(source: Source, registry: CollectorRegistry) -> None:
    source.service = ServiceSnapshot(
        version="1",
        policy="lru",
        incarnation=2**63 + 1,
        uptime_s=1,
        serving=False,
        clients={"worker": 2, "frontend": 4},
        expired_leases=3,
        fenced_requests=9,
        open_sessions=6,
    )
    sample = registry.get_sample_value
    assert sample("radixpool_leases", {"role": "worker"}) == 2
    assert sample("radixpool_leases", {"role": "frontend"}) == 4
    assert sample("radixpool_leases_expired_total") == 3
    assert sample("radixpool_requests_fenced_total") == 9
    assert sample("radixpool_sessions") == 6
    assert sample("radixpool_serving") == 0
    assert sample("radixpool_incarnation_info", {"incarnation": str(2**63 + 1)}) == 1


def test_every_metric_is_documented_and_well_formed(registry: CollectorRegistry) -> None:
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert len(families) > 20
    for family in families:
        assert family.name.startswith("radixpool_")
        assert family.documentation.endswith("."), family.name
        assert family.type in {"gauge", "counter"}


def test_every_counter_of_the_cache_is_exported(registry: CollectorRegistry, source: Source) -> None:
    # A distinct value in each field must show up, so a counter added to the cache cannot be forgotten here.
    source.stats = {name: 1000 + index for index, name in enumerate(BASE)}
    shown = {sample.value for family in registry.collect() for sample in family.samples}
    unexported = {name for name, value in source.stats.items() if value not in shown}
    assert unexported == {"tick"}
