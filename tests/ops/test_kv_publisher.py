"""The ZMQ side of KV events: frames, replay, gaps, restarts, and consumers that do not keep up."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from radixpool.radix import EventLog, RadixCache
from radixpool.radix.errors import EventsLost
from radixpool.radix.events import Event, Snapshot
from radixpool.rpc.errors import AddressInUse

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: pip install radixpool[events]")
msgpack = pytest.importorskip("msgpack", reason="msgpack is not installed: pip install radixpool[events]")

from radixpool.rpc.kv_events import publisher as module  # noqa: E402 - needs what was just looked for
from radixpool.rpc.kv_events.messages import Encoding  # noqa: E402
from radixpool.rpc.kv_events.publisher import END_SEQ, KvEventPublisher, PublisherOptions  # noqa: E402

WAIT_MS = 10_000
BLOCK_SIZE = 2


class Manager:
    """A cache behind a lock, as the manager has it."""

    def __init__(self, num_blocks: int = 64, log_events: int = 1000) -> None:
        self.lock = threading.Lock()
        self.num_blocks = num_blocks
        self.snapshots = 0
        self.restart(log_events)

    def restart(self, log_events: int = 1000) -> None:
        with self.lock:
            self.cache = RadixCache(self.num_blocks, BLOCK_SIZE, events=EventLog(log_events))

    def put(self, *tokens: int) -> None:
        with self.lock:
            sequence = self.cache.acquire(list(tokens))
            self.cache.commit(sequence, len(tokens))
            self.cache.release(sequence)

    def last_seq(self) -> int:
        assert self.cache.events is not None
        return self.cache.events.last_seq

    def since(self, seq: int) -> list[Event]:
        assert self.cache.events is not None
        with self.lock:
            return self.cache.events.since(seq)

    def snapshot(self) -> Snapshot:
        self.snapshots += 1
        with self.lock:
            return self.cache.snapshot()


class Subscriber:
    """A consumer as vLLM's documentation has it: SUB for batches, REQ for replays."""

    def __init__(self, publisher: KvEventPublisher, *, topic: bytes = b"", queue: int = 1000) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, queue)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        self._socket.connect(publisher.endpoint)
        self._replay = publisher.replay_endpoint

    def receive(self) -> tuple[int, list[Any]]:
        assert self._socket.poll(WAIT_MS), "no batch came"
        topic, number, payload = self._socket.recv_multipart()
        self.topic, self.payload = topic, payload
        assert len(number) == 8
        timestamp, events, rank = msgpack.unpackb(payload)
        assert abs(timestamp - time.time()) < 60
        self.rank = rank
        return int.from_bytes(number, "big"), events

    def until(self, wanted: Callable[[Any], bool]) -> list[tuple[int, list[Any]]]:
        batches = [self.receive()]
        while not any(wanted(event) for event in batches[-1][1]):
            batches.append(self.receive())
        return batches

    def replay(self, first: int) -> list[tuple[int, list[Any]]]:
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._replay)
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            batches = []
            while True:
                assert socket.poll(WAIT_MS), "the replay did not end"
                empty, topic, number, payload = socket.recv_multipart()
                assert empty == b""
                if number == END_SEQ:
                    assert (topic, payload) == (b"", b"")
                    return batches
                batches.append((int.from_bytes(number, "big"), msgpack.unpackb(payload)[1]))

    def send_garbage(self) -> None:
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 500)
            socket.connect(self._replay)
            for frames in ((b"",), (b"", b"x"), (b"", b"", b"", b""), (b"\xff" * 100,)):
                socket.send_multipart(frames)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def publish(stack: ExitStack) -> Callable[..., KvEventPublisher]:
    def publish(manager: Manager, **options: Any) -> KvEventPublisher:
        settings = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*", **options}
        publisher = KvEventPublisher(
            manager, PublisherOptions(**settings), num_blocks=manager.num_blocks, block_size=BLOCK_SIZE
        )
        publisher.start()
        stack.callback(publisher.close)
        return publisher

    return publish


@pytest.fixture
def subscribe(stack: ExitStack) -> Callable[..., Subscriber]:
    def subscribe(publisher: KvEventPublisher, **options: Any) -> Subscriber:
        subscriber = Subscriber(publisher, **options)
        stack.callback(subscriber.close)
        return subscriber

    return subscribe


def stores(*tokens: int) -> Callable[[Any], bool]:
    return lambda event: event.get("token_ids") == list(tokens)


def test_a_life_begins_with_a_clear_and_goes_on_with_consecutive_numbers(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., Subscriber]
) -> None:
    manager = Manager()
    manager.put(1, 2)
    subscriber = subscribe(publish(manager, topic="kv@node@model", rank=3), topic=b"kv@")
    number, events = subscriber.receive()
    assert number == 0
    assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored"]
    assert (subscriber.topic, subscriber.rank) == (b"kv@node@model", 3)
    for index in range(3):
        manager.put(index, 7, 8, 9)
        number, events = subscriber.until(stores(index, 7, 8, 9))[-1]
        assert number == index + 1


def test_older_consumers_get_arrays(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., Subscriber]
) -> None:
    manager = Manager()
    manager.put(1, 2)
    _, events = subscribe(publish(manager, encoding=Encoding.ARRAY)).receive()
    assert [event[0] for event in events] == ["AllBlocksCleared", "BlockStored"]
    assert events[1][3] == [1, 2]


def test_removals_are_published(publish: Callable[..., KvEventPublisher], subscribe: Callable[..., Subscriber]) -> None:
    manager = Manager()
    manager.put(1, 2, 3, 4)
    subscriber = subscribe(publish(manager))
    stored = subscriber.receive()[1][1]
    with manager.lock:
        manager.cache.evict(1)
    _, (removed,) = subscriber.receive()
    assert (removed["type"], removed["block_hashes"]) == ("BlockRemoved", stored["block_hashes"][1:])


def test_scenario_62_missed_batches_are_replayed_from_any_number(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., Subscriber]
) -> None:
    manager = Manager()
    publisher = publish(manager)
    early = subscribe(publisher)
    early.receive()
    for token in range(5):
        manager.put(token, token)
        early.until(stores(token, token))
    late = subscribe(publisher)
    batches = late.replay(2)
    assert [number for number, _ in batches] == [2, 3, 4, 5]
    assert batches[0][1][0]["token_ids"] == [1, 1]
    assert late.replay(6) == []
    assert [number for number, _ in late.replay(0)] == [0, 1, 2, 3, 4, 5]


def test_what_is_too_old_to_replay_is_answered_by_the_whole_state_once(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., Subscriber]
) -> None:
    manager = Manager()
    publisher = publish(manager, buffer_batches=2)
    subscriber = subscribe(publisher)
    subscriber.receive()
    for token in range(5):
        manager.put(token, token)
        subscriber.until(stores(token, token))
    ((number, events),) = subscriber.replay(0)
    assert number == 5
    assert events[0]["type"] == "AllBlocksCleared"
    assert sorted(event["token_ids"] for event in events[1:]) == [[token, token] for token in range(5)]
    snapshots = manager.snapshots
    assert [number for number, _ in subscriber.replay(0)] == [4, 5], "the state is not read again at once"
    assert manager.snapshots == snapshots
    manager.put(9, 9)
    assert subscriber.until(stores(9, 9))[-1][0] == 6, "others saw nothing of it"


def test_a_publisher_that_fell_behind_announces_everything_anew(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., Subscriber]
) -> None:
    manager = Manager(log_events=2)
    subscriber = subscribe(publish(manager))
    subscriber.receive()
    with manager.lock:
        for token in range(5):
            sequence = manager.cache.acquire([token, token])
            manager.cache.commit(sequence, 2)
            manager.cache.release(sequence)
    number, events = subscriber.receive()
    assert number == 1
    assert events[0]["type"] == "AllBlocksCleared"
    assert len(events) == 6


def test_another_cache_in_its_place_is_noticed(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., Subscriber]
) -> None:
    manager = Manager()
    for token in range(3):
        manager.put(token, token)
    subscriber = subscribe(publish(manager))
    subscriber.receive()
    manager.restart()
    manager.put(8, 8)
    batches = subscriber.until(stores(8, 8))
    assert any(event["type"] == "AllBlocksCleared" for _, events in batches for event in events)


def test_scenario_63_a_new_life_on_the_same_port_clears_the_former(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., Subscriber]
) -> None:
    manager = Manager()
    manager.put(1, 2)
    first = publish(manager)
    endpoint = first.endpoint
    subscriber = subscribe(first)
    assert subscriber.receive()[0] == 0
    first.close()
    other = Manager()
    other.put(5, 6)
    publish(other, endpoint=endpoint, replay_endpoint="")
    number, events = subscriber.receive()
    assert number == 0
    assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored"]


class Index:
    """What a router keeps: for each name the nodes and media that have it, as vLLM's events tell them apart."""

    def __init__(self, **subscribers: Subscriber) -> None:
        self._subscribers = subscribers
        self.held: dict[tuple[str, str], set[int]] = {}

    def take(self, node: str) -> None:
        for event in self._subscribers[node].receive()[1]:
            match event["type"]:
                case "AllBlocksCleared":
                    for place in [place for place in self.held if place[0] == node]:
                        del self.held[place]
                case "BlockStored":
                    self.held.setdefault((node, event["medium"]), set()).update(event["block_hashes"])
                case "BlockRemoved":
                    self.held[node, event["medium"]].difference_update(event["block_hashes"])

    def places(self, name: int) -> set[tuple[str, str]]:
        return {place for place, names in self.held.items() if name in names}


def test_scenario_65_leaving_one_medium_or_node_is_not_leaving_all(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., Subscriber]
) -> None:
    """The same prefix on a node's GPU, in its host memory, and on another node: one name, three places."""
    caches = {"gpu": Manager(), "host": Manager(), "other": Manager()}
    media = {"gpu": "GPU", "host": "CPU", "other": "GPU"}
    index = Index(**{name: subscribe(publish(cache, medium=media[name])) for name, cache in caches.items()})
    for name, cache in caches.items():
        index.take(name)
        cache.put(1, 2)
        index.take(name)
    (names,) = {frozenset(names) for names in index.held.values()}
    (name,) = names
    assert index.places(name) == {("gpu", "GPU"), ("host", "CPU"), ("other", "GPU")}
    with caches["gpu"].lock:
        caches["gpu"].cache.evict(1)
    index.take("gpu")
    assert index.places(name) == {("host", "CPU"), ("other", "GPU")}
    caches["other"].restart()
    index.take("other")
    assert index.places(name) == {("host", "CPU")}
    with caches["host"].lock:
        caches["host"].cache.flush(mode="new_generation")
    index.take("host")
    assert index.places(name) == set()


def test_a_subscriber_that_never_reads_slows_nobody_and_costs_bounded_memory(
    publish: Callable[..., KvEventPublisher],
    subscribe: Callable[..., Subscriber],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SUBSCRIBER_QUEUE", 10)
    manager = Manager(num_blocks=2048)
    publisher = publish(manager, buffer_batches=50)
    stuck = subscribe(publisher, queue=1)
    reader = subscribe(publisher)
    stuck.receive()
    reader.receive()
    slowest = 0.0
    for round_ in range(60):
        start = time.perf_counter()
        manager.put(*(round_ * 1000 + index for index in range(600)))
        slowest = max(slowest, time.perf_counter() - start)
        reader.until(lambda event, first=round_ * 1000: event.get("token_ids", [None])[0] == first)
    assert slowest < 5.0, "a put waited for a subscriber"
    assert len(list(publisher._buffer.since(0))) <= 50


def test_a_replay_that_nobody_reads_slows_nobody(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., Subscriber], stack: ExitStack
) -> None:
    manager = Manager(num_blocks=2048)
    publisher = publish(manager)
    reader = subscribe(publisher)
    reader.receive()
    for token in range(50):
        manager.put(*(token * 1000 + index for index in range(40)))
        reader.until(lambda event, first=token * 1000: event.get("token_ids", [None])[0] == first)
    context = stack.enter_context(zmq.Context())
    deaf = context.socket(zmq.DEALER)
    deaf.setsockopt(zmq.LINGER, 0)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.connect(publisher.replay_endpoint)
    for _ in range(20):
        deaf.send_multipart((b"", bytes(8)))
    manager.put(7, 7)
    reader.until(stores(7, 7))
    deaf.close()


def test_malformed_replay_requests_are_ignored(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., Subscriber]
) -> None:
    manager = Manager()
    subscriber = subscribe(publish(manager))
    subscriber.receive()
    subscriber.send_garbage()
    assert [number for number, _ in subscriber.replay(0)] == [0]


def test_closing_publishes_what_happened_until_then(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., Subscriber]
) -> None:
    manager = Manager()
    publisher = publish(manager)
    subscriber = subscribe(publisher)
    subscriber.receive()
    manager.put(1, 2)
    publisher.close()
    subscriber.until(stores(1, 2))


def test_a_failing_source_is_announced_anew_when_it_works_again(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., Subscriber], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Manager()
    subscriber = subscribe(publish(manager))
    subscriber.receive()
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    failures = iter([RuntimeError("once"), EventsLost(1, first_seq=2)])

    def since(seq: int) -> list[Event]:
        error = next(failures, None)
        if error is not None:
            raise error
        return Manager.since(manager, seq)

    monkeypatch.setattr(manager, "since", since)
    manager.put(1, 2)
    _, events = subscriber.until(stores(1, 2))[-1]
    assert events[0]["type"] == "AllBlocksCleared"


def test_a_taken_endpoint_is_named_and_nothing_is_left(publish: Callable[..., KvEventPublisher]) -> None:
    first = publish(Manager())
    with pytest.raises(
        AddressInUse,
        match=re.escape(f"kv_events endpoint {first.replay_endpoint} cannot be bound: Address already in use"),
    ):
        publish(Manager(), replay_endpoint=first.replay_endpoint)


def test_an_ipc_endpoint_is_for_its_owner_alone(
    publish: Callable[..., KvEventPublisher], subscribe: Callable[..., Subscriber], tmp_path: Any
) -> None:
    path = tmp_path / "e"
    publisher = publish(Manager(), endpoint=f"ipc://{path}", replay_endpoint="")
    assert path.stat().st_mode & 0o077 == 0
    assert subscribe(publisher).receive()[0] == 0
