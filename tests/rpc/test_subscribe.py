"""Subscribers rebuild the tree from what they are told, resume, and are cut off when they cannot keep up."""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque

import pytest

from radixpool.radix import Namespace
from radixpool.radix.errors import EventsLost
from radixpool.radix.eventindex import EventIndex
from radixpool.radix.events import Cleared, EventLog, Removed, Snapshot, Stored
from radixpool.rpc import limits
from radixpool.rpc.client import Client
from radixpool.rpc.errors import LimitExceeded
from radixpool.rpc.events import EventBatch, Position
from radixpool.rpc.inspection import FlushMode


def keep(client, tokens, **options) -> None:
    with client.acquire(tokens, **options) as seq:
        seq.commit(len(tokens))


def take(stream, last_seq: int) -> list[EventBatch]:
    """Read until the position has reached `last_seq`."""
    batches = []
    for batch in stream:
        batches.append(batch)
        if batch.position.seq >= last_seq:
            return batches
    raise AssertionError("the stream ended")


def keep_only(server, capacity: int) -> None:
    """Make the event log short, as if much had happened since."""
    log = server.engine.cache.events
    log._events = deque(log._events, maxlen=capacity)


def last_seq(server) -> int:
    return server.engine.cache.events.last_seq


def test_row_59_stored_runs_name_their_parent(client, server):
    stream = client.subscribe_events()
    first = next(stream)
    assert (first.is_snapshot, first.events) == (True, ())
    with client.acquire(range(24)) as seq:
        seq.commit(6)
        seq.commit(24)
    events = [event for batch in take(stream, last_seq(server)) for event in batch.events]
    assert all(isinstance(event, Stored) for event in events)
    assert [(event.parent, event.start, len(event.blocks) // 4) for event in events] == [
        (-1, 0, 1),
        (seq.block_table[0], 1, 5),
    ]


def test_row_61_a_flush_clears(client, server):
    keep(client, range(8))
    stream = client.subscribe_events()
    next(stream)
    client.flush(FlushMode.NEW_GENERATION)
    events = [event for batch in take(stream, last_seq(server)) for event in batch.events]
    assert [type(event) for event in events] in ([Cleared], [Removed, Cleared])


def test_row_62_a_reader_resumes_where_it_was(client, server):
    stream = client.subscribe_events()
    position = next(stream).position
    stream.close()
    for first in range(5):
        keep(client, [first, 1, 2, 3, 4])
    (batch,) = take(client.subscribe_events(position), last_seq(server))
    assert [event.seq for event in batch.events] == list(range(position.seq + 1, position.seq + 6))


def test_row_62_a_position_that_is_too_old_is_refused(client, server, monkeypatch):
    keep_only(server, 2)
    position = Position(server.engine.event_log_id, 0)
    for first in range(5):
        keep(client, [first, 1, 2, 3, 4])
    with pytest.raises(EventsLost):
        next(client.subscribe_events(position))
    snapshot = next(client.subscribe_events())
    assert snapshot.is_snapshot
    assert len(snapshot.events) == 5
    assert snapshot.position.seq == last_seq(server)


def test_row_63_a_position_of_another_life_is_refused(client, server):
    for position in (Position(server.engine.event_log_id - 1, 0), Position(5, 77)):
        with pytest.raises(EventsLost):
            next(client.subscribe_events(position))
    with pytest.raises(ValueError, match="seq must be 0 to"):
        next(client.subscribe_events(Position(server.engine.event_log_id, 99)))


def test_a_reader_that_is_too_slow_is_cut_off(server, client):
    stream = client.subscribe_events()
    next(stream)
    keep_only(server, 4)
    with server.engine.lock:
        events: EventLog = server.engine.cache.events
        for _ in range(100):
            events.cleared(None, 1)
    with pytest.raises(EventsLost):
        take(stream, last_seq(server))


def test_the_number_of_subscribers_is_limited(client, server, monkeypatch, eventually):
    monkeypatch.setattr(limits, "MAX_SUBSCRIBERS", 2)
    streams = [client.subscribe_events() for _ in range(2)]
    for stream in streams:
        next(stream)
    with pytest.raises(LimitExceeded, match="event subscribers: the limit is 2"):
        next(client.subscribe_events())
    for stream in streams:
        stream.close()
    eventually(lambda: server.engine.subscribers.taken == 0)


def test_salts_travel_as_hashes(client, server):
    stream = client.subscribe_events()
    next(stream)
    for salt in ("pepper", "pepper", "chili"):
        keep(client, range(8), namespace=Namespace(cache_salt=salt))
    keep(client, range(100, 108), namespace=Namespace(cache_salt="pepper"))
    events = [event for batch in take(stream, last_seq(server)) for event in batch.events]
    salts = [event.namespace.cache_salt for event in events]
    assert len(set(salts)) == 2
    assert all(salt.startswith("hash:") for salt in salts)


def test_an_index_fed_by_a_stream_equals_the_tree(make_server):
    server = make_server(num_blocks=40)
    choice = random.Random(5)
    with Client(server.address) as client:
        keep(client, [1, 2, 3, 4, 5])

        def work() -> None:
            for _ in range(150):
                keep(client, [choice.randrange(3) for _ in range(choice.randrange(1, 30))])
            client.flush(FlushMode.IDLE_ONLY)
            for _ in range(50):
                keep(client, [choice.randrange(3) for _ in range(choice.randrange(1, 30))])

        worker = threading.Thread(target=work)
        worker.start()
        stream = client.subscribe_events()
        index = EventIndex(4)
        for batch in stream:
            if batch.is_snapshot:
                index.load(Snapshot(batch.position.seq, batch.events))
            for event in () if batch.is_snapshot else batch.events:
                index.apply(event)
            if batch.position.seq >= 200 and not worker.is_alive() and batch.position.seq >= last_seq(server):
                break
        stream.close()
        for tokens in itertools.product(range(3), repeat=8):
            assert 4 * len(index.match(tokens)) == client.match(tokens).cached_tokens


def test_long_runs_come_in_messages_of_the_size_that_is_allowed(make_server):
    """64 events a message were too many for prompts of 17,000 tokens: nobody could subscribe any more."""
    server = make_server(num_blocks=70_000, block_size=16)
    with Client(server.address) as client:
        live = client.subscribe_events()
        next(live)
        prompts = [[number] * 17_000 for number in range(64)]
        for prompt in prompts:
            keep(client, prompt)
        told = EventIndex(block_size=16)
        told.load(Snapshot(0, ()))
        for batch in take(live, last_seq(server)):
            for event in batch.events:
                told.apply(event)
        snapshot = [event for batch in itertools.islice(client.subscribe_events(), 2) for event in batch.events]
        assert len(snapshot) == 64, "two messages of them"
        fresh = EventIndex(block_size=16)
        fresh.load(Snapshot(last_seq(server), tuple(snapshot)))
        for prompt in prompts[::16]:
            assert len(told.match(prompt)) == len(fresh.match(prompt)) == 17_000 // 16


def test_long_namespaces_count_too(make_server):
    namespace = Namespace("m" * 500, "r" * 500, "a" * 500, tenant="t" * 450)
    with Client(make_server(num_blocks=70_000, block_size=16).address) as client:
        for number in range(64):
            keep(client, [number] * 16_000, namespace=namespace)
        batches = itertools.islice(client.subscribe_events(), 2)
        assert sum(len(batch.events) for batch in batches) == 64


def test_one_run_larger_than_a_message_is_told_in_parts(make_server):
    """A prompt is told with its block ids: while a very long one was cached, nobody could subscribe."""
    server = make_server(num_blocks=400_000, block_size=2)
    with Client(server.address) as client:
        live = client.subscribe_events()
        next(live)
        prompt = range(720_000)
        client.acquire(prompt).release(commit_upto=len(prompt))
        told, fresh = EventIndex(block_size=2), EventIndex(block_size=2)
        told.load(Snapshot(0, ()))
        for batch in take(live, last_seq(server)):
            for event in batch.events:
                told.apply(event)
        snapshot = [event for batch in itertools.islice(client.subscribe_events(), 2) for event in batch.events]
        fresh.load(Snapshot(last_seq(server), tuple(snapshot)))
        assert len(told.match(prompt)) == len(fresh.match(prompt)) == len(prompt) // 2
