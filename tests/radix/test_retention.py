"""Retention priorities, TTLs of pins and ranges, on a clock of the test's own."""

from __future__ import annotations

import pytest

from radixpool.radix import ExpireResult


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def codes(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_a_lower_priority_goes_first(letters) -> None:
    box = letters(8)
    box.put("abcd")
    box.put("uvwx")
    assert box.cache.set_retention(codes("uvwx"), 10) == 2
    box.cache.check()
    box.ev(2)
    assert (box.match("abcd"), box.match("uvwx")) == (4, 0)


def test_a_range_is_cut_out_of_its_run(letters) -> None:
    box = letters(8)
    box.put("abcdef")
    box.put("uv")
    assert box.cache.set_retention(codes("abcdefgh"), 90, stop=5) == 2  # whole blocks of what is cached
    box.cache.check()
    assert box.runs() == {"abcd": 0, "ef": 0, "uv": 0}
    box.ev(2)
    assert (box.match("abcdef"), box.match("uv")) == (4, 0)
    assert box.cache.set_retention(codes("abcd"), 80, start=1) == 1
    box.cache.check()
    assert [info.priority for info in box.cache.nodes()] == [90, 80]


def test_a_sequence_may_ask_before_it_commits(letters) -> None:
    box = letters(8)
    seq = box.acq("abcdef")
    assert box.cache.set_retention(seq, 90, stop=4) == 0
    box.com(seq, 2)
    box.com(seq, 6)
    assert [(info.num_blocks, info.priority) for info in box.cache.nodes()] == [(1, 90), (1, 90), (1, 35)]
    box.rel(seq)
    box.put("uv")
    assert box.ev(8)[0] == seq.block_table[2]
    dead = box.acq("wxyz")
    box.cache.flush(mode="new_generation")
    assert box.cache.set_retention(dead, 5) == 0
    box.com(dead, 4)
    box.rel(dead)


def test_priorities_and_pins_end_with_their_time(letters) -> None:
    clock = Clock()
    box = letters(8, clock=clock)
    box.put("abcd")
    box.put("uv")
    box.cache.set_retention(codes("abcd"), 90, ttl=10)
    box.cache.set_retention(codes("uv"), 50, ttl=20)
    pin = box.cache.pin(codes("abcd"), ttl=5)
    assert box.cache.pins() == (pin,)
    assert pin.deadline == 5.0
    assert box.cache.expire() == ExpireResult(pins=(), ranges=0)
    clock.now = 7.0
    assert box.cache.expire().pins == (pin.pin_id,)
    box.cache.check()
    clock.now = 12.0
    box.cache.set_retention(codes("ab"), 70)  # what was set since then stays
    assert box.cache.expire().ranges == 1
    box.cache.check()
    assert {info.start: info.priority for info in box.cache.nodes() if info.tokens[0] != ord("u")} == {0: 70, 1: 35}
    clock.now = 20.0
    assert box.cache.expire().ranges == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"priority": 101}, ValueError, "priority must be an integer from 0 to 100, not 101"),
        ({"priority": 1, "start": -1}, ValueError, "start must be at least 0"),
        ({"priority": 1, "ttl": 0}, ValueError, "ttl must be more than 0 seconds, not 0"),
        ({"priority": 1, "ttl": "1"}, TypeError, "ttl must be a number of seconds or None, not str"),
    ],
)
def test_bad_retention(letters, options, error, message) -> None:
    with pytest.raises(error, match=message):
        letters(8).cache.set_retention([1, 2], **options)


def test_pins_share_their_blocks(letters) -> None:
    box = letters(12, pin_budget=3)
    box.put("abcdef")
    whole = box.cache.pin(codes("abcdef"))
    part = box.cache.pin(codes("abcd"))
    box.cache.check()
    assert box.cache.stats().pinned_blocks == 3
    assert box.cache.stats().num_pins == 2
    box.cache.unpin(whole.pin_id)
    box.cache.check()
    assert box.cache.stats().pinned_blocks == 2
    assert [info.pinned for info in box.cache.nodes()] == [True, False]
    holder = box.acq("abcdef", max_hit=6)
    box.cache.invalidate(holder, 1)
    box.cache.check()
    assert box.cache.pins()[0].num_blocks == 1
    box.cache.invalidate(holder, 0)
    box.cache.check()
    assert box.cache.pins() == ()
    assert part.num_blocks == 2


def priorities(box) -> dict[int, int]:
    return {info.start: info.priority for info in box.cache.nodes()}


def test_setting_a_retention_again_prolongs_it(letters) -> None:
    """The first deadline took the priority away, though it had been set anew since then."""
    clock = Clock()
    box = letters(8, clock=clock)
    box.put("abcd")
    for now in (0.0, 8.0, 16.0):
        clock.now = now
        assert box.cache.set_retention(codes("abcd"), 90, ttl=10) == 2
        box.cache.expire()
        assert priorities(box) == {0: 90}
    clock.now = 25.0
    assert box.cache.expire().ranges == 0
    clock.now = 26.0
    assert box.cache.expire().ranges == 1
    assert priorities(box) == {0: 35}


@pytest.mark.parametrize("later", [{"ttl": 30}, {}], ids=["longer", "for good"])
def test_of_overlapping_retentions_the_later_one_counts(letters, later) -> None:
    clock = Clock()
    box = letters(8, clock=clock)
    box.put("abcd")
    box.cache.set_retention(codes("abcd"), 90, ttl=10)
    box.cache.set_retention(codes("abxy"), 90, **later)
    clock.now = 10.0
    box.cache.expire()
    box.cache.check()
    assert priorities(box) == {0: 90, 1: 35}


def test_the_same_retention_again_is_remembered_once(letters) -> None:
    """Whatever stands behind the range: every request of a long system prompt may ask for it."""
    box = letters(8, clock=Clock())
    box.put("abcd")
    for tail in "klmnop":
        box.cache.set_retention(codes("ab" + tail * 6), 90, stop=2, ttl=10)
    assert len(box.cache._ranges) == 1
    box.cache.set_retention(codes("abzz"), 90, stop=2)
    assert len(box.cache._ranges) == 0, "and for good means that no end is remembered"


def test_what_a_long_generation_commits_is_one_range(letters) -> None:
    """Each commit kept a copy of the whole prefix: 122 MiB for one generation of 32,000 tokens."""
    clock = Clock()
    box = letters(64, clock=clock)
    seq = box.cache.acquire(codes("ab"))
    box.cache.set_retention(seq, 90, ttl=10)
    for letter in range(30):
        box.cache.extend(seq, [letter, letter])
        box.cache.commit(seq, seq.num_tokens)
    box.cache.set_retention(seq, 90, ttl=10)
    assert len(box.cache._ranges) == 1
    assert set(priorities(box).values()) == {90}
    clock.now = 10.0
    assert box.cache.expire().ranges == 1
    assert set(priorities(box).values()) == {35}
    box.cache.release(seq)
    box.cache.check()
