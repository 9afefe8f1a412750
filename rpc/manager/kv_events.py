"""The manager's end of KV events: a source that reads the engine's log, and the publisher that is configured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter

from radixpool.radix.errors import EventsLost
from radixpool.radix.events import Event, EventLog, Snapshot
from radixpool.rpc.config import KvEventsConfig
from radixpool.rpc.kv_events.messages import Encoding
from radixpool.rpc.manager.engine import Engine

if TYPE_CHECKING:
    from radixpool.rpc.kv_events.publisher import KvEventPublisher


class EngineEvents:
    """Reads the log of whatever cache the engine has now; another pool means another cache and another log."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read: EventLog | None = None

    def last_seq(self) -> int:
        """Return the number of the newest event, -1 when it is of another log than was read last. O(1)."""
        log = self._log()
        return log.last_seq if log is self._read else -1

    def since(self, seq: int) -> list[Event]:
        """Return the events after `seq`. Raises EventsLost when they are not all kept, or the log is another one."""
        with self._engine.lock:
            log = self._log()
            if log is not self._read:
                raise EventsLost(seq, first_seq=log.last_seq + 1)
            return log.since(seq)

    def snapshot(self) -> Snapshot:
        """Return all that is findable; holds up the manager for about 0.1 s per million blocks."""
        with self._engine.lock:
            self._read = self._log()
            return self._engine.cache.snapshot()

    def _log(self) -> EventLog:
        log = self._engine.cache.events
        assert log is not None, "the engine makes every cache with an event log"
        return log


def require_packages() -> None:
    """Raise ValueError when the packages that a publisher needs are not installed."""
    try:
        import radixpool.rpc.kv_events.publisher  # noqa: F401
    except ImportError as error:
        raise ValueError(f"kv_events.endpoint needs {error.name}: pip install 'radixpool[events]'") from None


def make_publisher(config: KvEventsConfig, engine: Engine, registry: CollectorRegistry) -> KvEventPublisher:
    """Return a publisher, its endpoints bound but silent until it is started. Raises AddressInUse."""
    from radixpool.rpc.kv_events.publisher import KvEventPublisher, PublisherOptions

    published = Counter("radixpool_kv_events", "KV events published, by type.", ("type",), registry=registry)
    resyncs = Counter(
        "radixpool_kv_events_resyncs",
        "Times the whole state was announced anew to all subscribers; once at every start.",
        registry=registry,
    )

    def count(event: Any) -> None:
        published.labels(type(event).__name__).inc()

    options = PublisherOptions(
        endpoint=config.endpoint,
        replay_endpoint=config.replay_endpoint,
        topic=config.topic,
        encoding=Encoding(config.encoding),
        medium=config.medium,
        rank=config.data_parallel_rank,
        buffer_batches=config.buffer_batches,
    )
    return KvEventPublisher(
        EngineEvents(engine),
        options,
        num_blocks=engine.options.num_blocks,
        block_size=engine.options.block_size,
        on_published=count,
        on_resync=resyncs.inc,
    )
