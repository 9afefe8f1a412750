"""Events: exact, in order, and enough to rebuild what the tree would answer."""

from __future__ import annotations

import random

import pytest

from radixpool.radix import (
    Cleared,
    EventLog,
    EventsLost,
    MediaSpan,
    Namespace,
    PoolExhausted,
    RadixCache,
    Removed,
    Stored,
)
from radixpool.radix.eventindex import EventIndex, ResyncNeeded


def _text(packed: bytes) -> str:
    return "".join(map(chr, memoryview(packed).cast("I").tolist()))


def test_stored_names_the_parent_and_only_what_is_new(letters) -> None:
    """Row 59: com(3) then com(6) on abcdef."""
    log = EventLog()
    box = letters(8, events=log)
    seq = box.acq("abcdef")
    box.com(seq, 3)
    box.com(seq, 6)
    table = seq.block_table.tolist()
    first, second = log.since(0)
    assert (_text(first.tokens), first.parent, first.start) == ("ab", -1, 0)
    assert (_text(second.tokens), second.parent, second.start) == ("cdef", table[0], 1)
    assert memoryview(second.blocks).cast("i").tolist() == table[1:]


def test_a_flush_clears_the_index(letters) -> None:
    """Row 61: Cleared(namespace, generation)."""
    log = EventLog()
    box = letters(8, events=log)
    other = Namespace(tenant="t")
    box.put("abcd")
    box.put("abcd", namespace=other)
    box.cache.flush(other, mode="new_generation")
    index = EventIndex(2)
    for event in log.since(0):
        index.apply(event)
    assert isinstance(event, Cleared)
    assert (event.namespace, event.generation) == (other, 1)
    assert (len(index), index.match([ord(c) for c in "abcd"], namespace=other)) == (2, [])
    box.cache.flush(mode="new_generation")
    index.apply(log.since(index.seq)[0])
    assert len(index) == 0


def test_a_gap_is_filled_from_the_log_or_by_a_snapshot(letters) -> None:
    """Row 62: five events missed: replay, or if they are gone, the snapshot and then the next."""
    log = EventLog(capacity=4)
    box = letters(16, events=log)
    index = EventIndex(2)
    box.put("ab")
    for event in log.since(0):
        index.apply(event)
    for text in ("cd", "ef", "gh", "ij", "kl"):
        box.put(text)
    with pytest.raises(EventsLost, match="events after 1 are gone, the log begins with 3"):
        log.since(index.seq)
    index.load(box.cache.snapshot())
    box.put("abmn")
    box.ev(1)
    for event in log.since(index.seq):
        index.apply(event)
    assert len(index) == box.cache.stats().tree_blocks
    for text in ("ab", "cd", "kl", "abmn"):
        assert index.match([ord(c) for c in text]) == box.cache.match([ord(c) for c in text]).blocks.tolist()


def test_what_does_not_fit_is_refused_and_nothing_else_lost(letters) -> None:
    """Row 64: a duplicate is a no-op; an unknown parent, itself as parent, or a gap asks for a resync."""
    log = EventLog()
    box = letters(8, events=log)
    box.put("abcd")
    box.ev(1)
    stored, removed = log.since(0)
    assert isinstance(removed, Removed)
    index = EventIndex(2)
    index.apply(stored)
    index.apply(removed)
    index.apply(removed)
    assert len(index) == 1
    block = memoryview(stored.blocks).cast("i")[0]
    new = stored._replace(seq=3, blocks=(7).to_bytes(4, "little"), tokens=stored.tokens[:8])
    for bad, message in (
        (new._replace(parent=6), "parent block 6 is unknown"),
        (new._replace(parent=7), "block 7 cannot be its own parent"),
        (new._replace(seq=5), "event 5 follows 2: events are missing"),
    ):
        with pytest.raises(ResyncNeeded, match=message):
            index.apply(bad)
        assert (len(index), index.seq) == (1, 2)
    index.apply(removed._replace(seq=3, blocks=(5).to_bytes(4, "little")))  # a block it never knew
    index.apply(new._replace(seq=4, parent=block, start=1))
    assert index.match([97, 98, 97, 98]) == [block, 7]
    index.apply(Cleared(5, Namespace(tenant="nobody"), 1))
    assert len(index) == 2


def test_replaying_all_events_answers_every_prefix_as_the_tree() -> None:
    """Random operations with media and namespaces; the index is compared after each."""
    rng = random.Random(5)
    log = EventLog(100)
    cache = RadixCache(24, 2, events=log)
    index = EventIndex(2)
    live = []
    for _ in range(1500):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
        namespace = Namespace(tenant=rng.choice("ab"))
        media = [MediaSpan(rng.randrange(len(tokens)), 1, rng.choice((b"cat", b"dog")))] if rng.random() < 0.3 else []
        try:
            seq = cache.acquire(tokens, namespace=namespace, media=media)
            cache.commit(seq, rng.randint(0, len(tokens)))
            live.append(seq)
        except PoolExhausted:
            pass
        if live and rng.random() < 0.1:
            cache.invalidate(live[0], rng.randrange(live[0].num_blocks))
        if rng.random() < 0.02:
            cache.flush(rng.choice((None, namespace)), mode="new_generation")
        while live and rng.random() < 0.55:
            cache.release(live.pop(rng.randrange(len(live))))
        for event in log.since(index.seq):
            index.apply(event)
        cache.check()
        assert len(index) == cache.stats().tree_blocks
        found = cache.match(tokens, namespace=namespace, media=media).blocks.tolist()
        assert index.match(tokens, namespace=namespace, media=media) == found
    fresh = EventIndex(2)
    fresh.load(cache.snapshot())
    assert len(fresh) == len(index)
    assert fresh.match(tokens, namespace=namespace, media=media) == found
    assert any(isinstance(event, Stored) and event.media for event in log.since(log.last_seq - 90))
