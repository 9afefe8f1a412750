"""The thread that publishes a cache's events over ZMQ and answers replay requests.

PUB frames: topic, sequence number (8 bytes, big-endian), msgpack batch. Replay is a ROUTER: a request is one sequence
number, the answer every kept batch from there on as topic, number, batch, then an end mark numbered -1.

Numbers begin with 0 in each life of the manager, and the first batch clears whatever a consumer knew of a former life,
then announces what is findable now. Whoever asks for batches that are no longer kept gets one batch of the same kind
instead, for itself alone, numbered as the newest one.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import msgpack
import structlog
import zmq

from radixpool.radix.errors import EventsLost
from radixpool.radix.events import Event, Snapshot
from radixpool.rpc.errors import AddressInUse
from radixpool.rpc.kv_events.messages import BlocksStored, Encoding, KvEvent, batch, message
from radixpool.rpc.kv_events.replay import ReplayBuffer
from radixpool.rpc.kv_events.translator import Translator
from radixpool.rpc.security.transport import private_files

POLL_INTERVAL_S: Final = 0.01
"""How long an event may wait to be published while nothing else happens."""
RETRY_S: Final = 1.0
"""Wait after a failure of ours."""
SETTLE_S: Final = 0.3
"""Wait before the first batch: subscribers of a former life come back within ZMQ's reconnect interval, 0.1 s."""
MAX_BLOCKS_PER_BATCH: Final = 1024
MAX_EVENTS_PER_BATCH: Final = 256
MIN_STATE_INTERVAL_S: Final = 2.0
"""Between two replays that need the whole state, because reading it holds up the manager."""
SUBSCRIBER_QUEUE: Final = 1_000
"""Batches that ZMQ keeps for one slow subscriber before it drops further ones for it."""
SEQ_BYTES: Final = 8
END_SEQ: Final = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
_REPLAY_FRAMES: Final = 3

_log = structlog.get_logger("radixpool.kv_events")


class EventSource(Protocol):
    """A cache's event log, safe to read from another thread."""

    def last_seq(self) -> int:
        """Return the number of the newest event. O(1)."""

    def since(self, seq: int) -> list[Event]:
        """Return the events after `seq`. Raises EventsLost when they are not all kept, or belong to another cache."""

    def snapshot(self) -> Snapshot:
        """Return all that is findable, and the number to go on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherOptions:
    """Where and how to publish.

    Attributes:
        endpoint: ZMQ endpoint that is bound.
        replay_endpoint: ZMQ endpoint of the replay socket, empty for none.
        topic: first frame.
        encoding: of single events.
        medium: tier of the pool's memory: "GPU" or "CPU".
        rank: data-parallel rank written into each batch.
        buffer_batches: batches kept for replay.

    """

    endpoint: str
    replay_endpoint: str = ""
    topic: str = ""
    encoding: Encoding = Encoding.MAP
    medium: str = "GPU"
    rank: int = 0
    buffer_batches: int = 10_000


class KvEventPublisher:
    """Publishes one cache from `start()` to `close()`. Raises AddressInUse when an endpoint cannot be bound."""

    def __init__(
        self,
        source: EventSource,
        options: PublisherOptions,
        *,
        num_blocks: int,
        block_size: int,
        on_published: Callable[[KvEvent], None] = lambda _event: None,
        on_resync: Callable[[], None] = lambda: None,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._source = source
        self._options = options
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._translator = Translator(num_blocks=num_blocks, block_size=block_size)
        self._buffer = ReplayBuffer(options.buffer_batches)
        self._on_published = on_published
        self._on_resync = on_resync
        self._settle_s = settle_s
        self._topic = options.topic.encode()
        self._seq: int | None = None
        self._state_sent_at = -math.inf
        self._stopping = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._publisher = self._bind(zmq.PUB, options.endpoint, queue=SUBSCRIBER_QUEUE)
            replay_queue = 2 * (options.buffer_batches + 1)
            endpoint = options.replay_endpoint
            self._replay = self._bind(zmq.ROUTER, endpoint, queue=replay_queue) if endpoint else None
        except AddressInUse:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    @property
    def endpoint(self) -> str:
        """Where batches are published, with the port that the system chose."""
        return str(self._publisher.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def replay_endpoint(self) -> str:
        """Where replay requests are answered, empty for nowhere."""
        return "" if self._replay is None else str(self._replay.getsockopt_string(zmq.LAST_ENDPOINT))

    def start(self) -> None:
        """Publish what is findable, and from then on what changes."""
        self._thread.start()

    def close(self) -> None:
        """Publish what happened until now, then stop. Closing again is harmless."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._context.destroy(linger=100)

    def _bind(self, kind: int, endpoint: str, *, queue: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, queue)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            with private_files():
                socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise AddressInUse(
                f"kv_events endpoint {endpoint} cannot be bound: {zmq.strerror(error.errno or 0)}"
            ) from None
        return socket

    def _run(self) -> None:
        self._stopping.wait(self._settle_s)
        while True:
            stopping = self._stopping.is_set()
            try:
                busy = self._publish_changes()
            except Exception:
                _log.exception("publishing failed; the whole state will be announced anew")
                self._seq = None
                busy = False
                self._stopping.wait(RETRY_S)
            if stopping:
                return
            self._serve_replays(wait_s=0 if busy else POLL_INTERVAL_S)

    def _publish_changes(self) -> bool:
        """Publish what is new; return whether there was anything."""
        if self._seq is not None and self._source.last_seq() == self._seq:
            return False
        try:
            events = self._source.since(self._seq) if self._seq is not None else None
        except (EventsLost, ValueError):
            events = None
        if events is None:
            snapshot = self._source.snapshot()
            self._on_resync()
            self._publish(self._translator.restart(snapshot))
            self._seq = snapshot.seq
        elif events:
            self._publish(itertools.chain.from_iterable(map(self._translator.translate, events)))
            self._seq = events[-1].seq
        return True

    def _publish(self, events: Iterable[KvEvent]) -> None:
        for group in _groups(_politely(events)):
            payload = self._pack(group)
            number = self._buffer.append(payload)
            # A PUB socket never waits: what a full subscriber cannot take is dropped for that subscriber alone.
            self._publisher.send_multipart((self._topic, number.to_bytes(SEQ_BYTES, "big"), payload))
            for event in group:
                self._on_published(event)

    def _pack(self, events: Iterable[KvEvent]) -> bytes:
        options = self._options
        messages = [message(event, encoding=options.encoding, medium=options.medium) for event in events]
        packed: bytes = msgpack.packb(batch(messages, timestamp=time.time(), rank=options.rank))
        return packed

    def _serve_replays(self, *, wait_s: float) -> None:
        """Answer at most one replay request, waiting up to `wait_s` for it."""
        if self._replay is None:
            self._stopping.wait(wait_s)
            return
        if not self._replay.poll(int(wait_s * 1000)):
            return
        frames = self._replay.recv_multipart()
        if len(frames) != _REPLAY_FRAMES or len(frames[2]) != SEQ_BYTES:
            return
        peer, _, wanted = frames
        first = int.from_bytes(wanted, "big")
        if first < self._buffer.first_seq and self._send_state(peer):
            first = self._buffer.next_seq
        for number, payload in self._buffer.since(first):
            self._send_replay(peer, self._topic, number.to_bytes(SEQ_BYTES, "big"), payload)
        self._send_replay(peer, b"", END_SEQ, b"")

    def _send_state(self, peer: bytes) -> bool:
        """Tell one peer to forget everything and take in what is findable now, unless that was done just before.

        What happens between the newest batch and the snapshot is told again by the next batch, which does no harm.
        """
        now = time.monotonic()
        if now - self._state_sent_at < MIN_STATE_INTERVAL_S:
            return False
        self._state_sent_at = now
        self._publish_changes()
        number = self._buffer.next_seq - 1
        stranger = Translator(num_blocks=self._num_blocks, block_size=self._block_size)
        payload = self._pack(list(stranger.restart(self._source.snapshot())))
        self._send_replay(peer, self._topic, number.to_bytes(SEQ_BYTES, "big"), payload)
        return True

    def _send_replay(self, peer: bytes, topic: bytes, number: bytes, payload: bytes) -> None:
        assert self._replay is not None
        # A ROUTER drops what its peer does not read, or when the peer has gone.
        self._replay.send_multipart((peer, b"", topic, number, payload))


def _politely(events: Iterable[KvEvent]) -> Iterator[KvEvent]:
    """Yield the events, and before each let threads that serve requests have the interpreter."""
    for event in events:
        time.sleep(0)
        yield event


def _groups(events: Iterable[KvEvent]) -> Iterator[list[KvEvent]]:
    """Cut a stream of events into batches of bounded size."""
    group: list[KvEvent] = []
    blocks = 0
    for event in events:
        size = len(event.hashes) if isinstance(event, BlocksStored) else 0
        if group and (blocks + size > MAX_BLOCKS_PER_BATCH or len(group) >= MAX_EVENTS_PER_BATCH):
            yield group
            group, blocks = [], 0
        group.append(event)
        blocks += size
    if group:
        yield group
