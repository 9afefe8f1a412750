"""Turn the manager's own counters into Prometheus metrics at the moment of a scrape.

Names follow the field: `prefix_cache_queries` and `prefix_cache_hits` count tokens, as in vLLM, so that the usual
`rate(hits) / rate(queries)` is the hit ratio. Reading is O(1) in the size of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radixpool.radix.stats import CacheStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSnapshot:
    """Counters of the manager process at one moment.

    Attributes:
        version: the package's version.
        policy: name of the eviction policy.
        incarnation: which life of the manager this is.
        uptime_s: seconds since it began to serve.
        serving: whether the health service says SERVING.
        clients: registered clients with a live lease, by role.
        expired_leases: leases that ran out.
        fenced_requests: requests of an epoch that is over.
        open_sessions: Session streams open now.
        evicted_by_cause: blocks that operators and flushes took out of the cache, by cause; what is left of the
            cache's own count went for want of room.
        removed_by_cause: blocks that left the cache for other reasons than eviction, by cause.
        advised_hit_ratio: block hit ratio that another (policy, multiple of the pool's size) would have had.

    """

    version: str
    policy: str
    incarnation: int
    uptime_s: float
    serving: bool
    clients: Mapping[str, int] = field(default_factory=dict)
    expired_leases: int = 0
    fenced_requests: int = 0
    open_sessions: int = 0
    evicted_by_cause: Mapping[str, int] = field(default_factory=dict)
    removed_by_cause: Mapping[str, int] = field(default_factory=dict)
    advised_hit_ratio: Mapping[tuple[str, str], float] = field(default_factory=dict)


class ManagerSource(Protocol):
    """Where the collector reads. Both methods are O(1) and may be called from any thread."""

    def cache_stats(self) -> CacheStats:
        """Return the cache's counters."""

    def service_snapshot(self) -> ServiceSnapshot:
        """Return the process's counters."""


class ManagerCollector(Collector):
    """Yields the metrics of one manager; register it with a `CollectorRegistry`."""

    def __init__(self, source: ManagerSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Read both snapshots once and yield every metric made from them."""
        stats, service = self._source.cache_stats(), self._source.service_snapshot()
        yield from _cache_gauges(stats)
        yield from _cache_counters(stats, service)
        yield from _service_metrics(service)

    def describe(self) -> Iterator[Metric]:
        """Name nothing in advance: registering must not read a manager that is still starting."""
        return iter(())


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"radixpool_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"radixpool_{name}", text, value=value)


def _by_label(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for label, value in sorted(values.items()):
        family.add_metric((label,), value)
    return family


def _cache_gauges(stats: CacheStats) -> Iterator[Metric]:
    states = {
        "free": stats.free_blocks,
        "cached": stats.cached_blocks,
        "held": stats.held_blocks,
        "quarantined": stats.quarantined_blocks,
    }
    blocks = GaugeMetricFamily("radixpool_kv_blocks", "KV blocks of the pool, each in one state.", labels=("state",))
    yield _by_label(blocks, states)
    yield _gauge("kv_blocks_capacity", "KV blocks that this manager hands out.", stats.num_blocks)
    yield _gauge("kv_block_size_tokens", "Tokens in one block.", stats.block_size)
    in_use = stats.held_blocks + stats.quarantined_blocks
    yield _gauge(
        "kv_cache_usage_ratio",
        "Blocks that cannot be handed out now (held or quarantined) over all blocks.",
        in_use / stats.num_blocks,
    )
    yield _gauge("kv_blocks_pinned", "Committed blocks under a pin; they count as held too.", stats.pinned_blocks)
    yield _gauge("kv_blocks_findable", "Committed blocks that a lookup can find.", stats.tree_blocks)
    yield _gauge("sequences", "Sequences alive.", stats.num_sequences)
    yield _gauge("pins", "Pins alive.", stats.num_pins)
    yield _gauge("tree_nodes", "Runs of blocks in all prefix trees.", stats.num_nodes)
    yield _gauge("namespaces", "Prefix trees.", stats.num_namespaces)
    yield _gauge("generation", "Flushes that started new content.", stats.generation)


def _cache_counters(stats: CacheStats, service: ServiceSnapshot) -> Iterator[Metric]:
    yield _counter("prefix_cache_queries", "Prompt tokens of admitted requests.", stats.queried_tokens)
    yield _counter("prefix_cache_hits", "Prompt tokens of admitted requests that were cached.", stats.hit_tokens)
    yield _counter("requests_admitted", "Acquires that succeeded.", stats.admitted_requests)
    yield _counter("requests_refused", "Acquires, extends and reserves that were refused.", stats.refused_requests)
    yield _counter("kv_blocks_committed", "Blocks that became findable.", stats.committed_blocks)
    yield _counter("kv_blocks_remapped", "Own copies given up because the content was cached.", stats.remapped_blocks)
    causes = dict(service.evicted_by_cause)
    causes["capacity"] = stats.evicted_blocks - sum(causes.values())
    evicted = CounterMetricFamily("radixpool_kv_blocks_evicted", "Blocks evicted, by cause.", labels=("cause",))
    yield _by_label(evicted, causes)
    if service.removed_by_cause:
        removed = CounterMetricFamily(
            "radixpool_kv_blocks_removed", "Blocks that stopped being findable without eviction.", labels=("cause",)
        )
        yield _by_label(removed, service.removed_by_cause)


def _service_metrics(service: ServiceSnapshot) -> Iterator[Metric]:
    info = GaugeMetricFamily("radixpool_build_info", "Always 1.", labels=("version", "policy"))
    info.add_metric((service.version, service.policy), 1)
    yield info
    # As a label, because a 64-bit number does not survive a float.
    life = GaugeMetricFamily(
        "radixpool_incarnation_info", "Always 1; one life of the manager.", labels=("incarnation",)
    )
    life.add_metric((str(service.incarnation),), 1)
    yield life
    yield _gauge("uptime_seconds", "Seconds since the manager began to serve.", service.uptime_s)
    yield _gauge("serving", "1 while the health service says SERVING.", float(service.serving))
    leases = GaugeMetricFamily("radixpool_leases", "Clients with a live lease, by role.", labels=("role",))
    yield _by_label(leases, service.clients)
    yield _counter("leases_expired", "Leases that ran out.", service.expired_leases)
    yield _counter("requests_fenced", "Requests of an epoch that is over.", service.fenced_requests)
    yield _gauge("sessions", "Session streams open now.", service.open_sessions)
    advised = GaugeMetricFamily(
        "radixpool_advised_hit_ratio",
        "Estimated block hit ratio under another policy or multiple of the pool's size.",
        labels=("policy", "multiple"),
    )
    for labels, ratio in service.advised_hit_ratio.items():
        advised.add_metric(labels, ratio)
    yield advised
