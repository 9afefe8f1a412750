"""Scenarios B to F that need rewind, fork, invalidate, in-flight sharing, pins and events."""

from __future__ import annotations

import sys

import pytest

from radixpool.radix import (
    CopyOrder,
    EventLog,
    InvalidateResult,
    Namespace,
    PendingPrefix,
    PinBudgetExceeded,
    PoolExhausted,
    RadixCache,
    Removed,
    Sequence,
    UnknownPin,
)


def test_bad_data_is_unfindable_and_freed_after_its_holders(letters) -> None:
    """Row 12: the second block of abcd fails: its descendants go too, holders are told, free only when released."""
    log = EventLog()
    box = letters(10, events=log)
    loader = box.acq("abcd")
    box.com(loader, 4)
    below = box.acq("abcdef")
    box.com(below, 6)
    bad = loader.block_table.tolist()[1]
    gone = below.block_table.tolist()[1:]
    seen = log.last_seq
    result = box.cache.invalidate(loader, 1)
    box.cache.check()
    assert box.match("abcdef") == 2
    assert set(result.holders) == {loader.handle, below.handle}
    assert (result.removed_blocks, result.freed_blocks) == (2, 0)
    assert loader.invalid_from == below.invalid_from == 1
    assert below.state == "invalid"
    removed = [b for e in log.since(seen) if isinstance(e, Removed) for b in memoryview(e.blocks).cast("i").tolist()]
    assert sorted(removed) == sorted(gone)
    assert not {bad, *gone} & set(box.cache._free)
    box.rel(loader)
    assert bad not in box.cache._free
    box.rel(below)
    assert {bad, *gone} <= set(box.cache._free)
    assert box.counts == (9, 1, 0, 0)


def test_unheld_descendants_of_bad_data_are_freed_at_once(letters) -> None:
    """Row 12's kind: only what somebody holds has to wait."""
    box = letters(10)
    box.put("abcdef")
    box.put("abcdxy")
    holder = box.acq("abcd", max_hit=4)
    result = box.cache.invalidate(holder, 1)
    box.cache.check()
    assert (result.removed_blocks, result.freed_blocks, result.holders) == (3, 2, (holder.handle,))
    box.put("abcd")
    assert box.match("abcd") == 4


def test_invalidating_a_private_block_takes_back_what_is_committed_of_it(letters) -> None:
    """Row 12's kind: a partly written tail."""
    box = letters(8)
    seq = box.acq("abc")
    box.com(seq, 3)
    assert box.cache.invalidate(seq, 1) == InvalidateResult(removed_blocks=0, freed_blocks=0, holders=())
    assert seq.committed_tokens == 2
    with pytest.raises(ValueError, match="block_index must be an integer from 0 to 1"):
        box.cache.invalidate(seq, 2)


def test_rejected_drafts_are_never_findable(letters) -> None:
    """Row 14: only e of four lookahead slots is verified; the rest goes back."""
    box = letters(8)
    seq = box.acq("abcd")
    box.com(seq, 4)
    box.cache.reserve(seq, 4)
    assert box.counts == (4, 0, 4, 0)
    box.ext(seq, "e")
    box.com(seq, 5)
    assert box.cache.rewind(seq, 5) == (5, 1, 0)
    box.cache.check()
    assert box.counts == (5, 0, 3, 0)
    assert box.match("abcdwx") == 4
    box.ext(seq, "wx")  # drafts whose ids are known
    assert box.cache.rewind(seq, 5).freed_blocks == 1
    box.ext(seq, "f")
    box.com(seq, 6)
    assert (box.match("abcdef"), box.match("abcdew")) == (6, 4)


def test_a_reused_block_is_not_found_under_its_old_content(letters) -> None:
    """Row 16: after each of 1,000 rounds the index is exactly what is cached."""
    box = letters(4)
    for i in range(1000):
        old, new = ("abcd", "wxyz") if i % 2 else ("wxyz", "abcd")
        box.put(old)
        box.ev(4)
        other = box.acq(new)
        box.rel(other)
        assert (box.match("abcd"), box.match("wxyz")) == (0, 0)
        assert box.cache.stats().tree_blocks == sum(len(run) // 2 for run in box.runs()) == 0


def test_a_failed_load_gives_everything_back(letters) -> None:
    """Row 18: acquire, the load fails, release: as before the call."""
    box = letters(8)
    box.put("ab")
    before = box.counts
    box.rel(box.acq("abcdef", reserve=4))
    assert box.counts == before


def test_no_removal_is_announced_while_the_content_stays(letters) -> None:
    """Row 21: giving up one of two copies announces nothing; the last one's eviction announces one removal."""
    log = EventLog()
    box = letters(8, events=log)
    one, two = box.acq("ab"), box.acq("ab")
    box.com(one, 2)
    assert len(box.com(two, 2).remaps) == 1
    box.rel(one)
    box.rel(two)
    assert not [event for event in log.since(0) if isinstance(event, Removed)]
    assert box.match("ab") == 2
    box.ev(8)
    assert len([event for event in log.since(0) if isinstance(event, Removed)]) == 1


@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_waiting_for_a_producer_holds_nothing(letters, outcome) -> None:
    """Row 22: r2 pends on r1; when r1 commits it hits, when r1 aborts it becomes the producer."""
    box = letters(8)
    producer = box.acq("abcd")
    free = box.counts[0]
    pending = box.acq("abcdef", in_flight="wait")
    assert pending == PendingPrefix(producer.handle, cached_tokens=0, available_tokens=4)
    assert box.counts[0] == free
    if outcome == "commit":
        box.com(producer, 4)
    else:
        box.rel(producer)
    seq = box.acq("abcdef", in_flight="wait")
    assert isinstance(seq, Sequence)
    assert seq.cached_tokens == (4 if outcome == "commit" else 0)
    third = box.acq("abcdefgh", in_flight="wait")
    assert isinstance(third, PendingPrefix)
    assert third.producer == seq.handle
    assert third.available_tokens == 6


def test_a_report_names_the_producer_and_admits(letters) -> None:
    """Row 22's kind: who wants to compute it twice may; who asks nothing sees nothing."""
    box = letters(12)
    producer = box.acq("abcd")
    assert box.acq("abcd", in_flight="report").in_flight == producer.handle
    assert box.acq("abcd").in_flight is None
    assert box.acq("xyz", in_flight="report").in_flight is None
    with pytest.raises(ValueError, match="in_flight must be"):
        box.acq("abcd", in_flight="never")


def test_a_split_during_a_copy_loses_nothing(letters) -> None:
    """Row 27: a step copies abcd out; abxy splits it meanwhile; nothing of it goes before the step is over."""
    box = letters(8)
    box.cache.add_worker("copier")
    reader = box.acq("abcd", max_hit=4)
    box.com(reader, 4)
    box.rel(reader, after_step=0)
    box.put("abxy")
    assert box.runs() == {"ab": 0, "cd": 0, "xy": 0}
    assert len(box.ev(8)) == 1  # xy alone
    assert box.match("abcd") == 4
    assert box.cache.complete_step("copier", 0) == 2
    box.cache.check()
    assert len(box.ev(8)) == 2
    assert len(set(box.cache._free)) == 8


def test_a_partly_filled_tail_is_freed_once(letters) -> None:
    """Row 32: five tokens are two cached blocks and one tail that goes back once."""
    box = letters(8)
    box.put("abcde")
    assert box.counts == (6, 2, 0, 0)
    assert len(set(box.cache._free)) == 6


def test_empty_runs_do_not_pile_up(letters) -> None:
    """Row 34: 10,000 chains through a small pool leave nothing once all is evicted."""
    box = letters(8)
    for i in range(10_000):
        seq = box.cache.acquire([i, i + 1, i + 2, i, 7])
        box.cache.commit(seq, 5)
        box.cache.release(seq)
    assert box.cache.stats().num_nodes <= 8
    box.ev(8)
    stats = box.cache.stats()
    assert (stats.num_nodes, stats.num_namespaces, stats.free_blocks) == (0, 0, 8)


def test_a_fork_copies_the_tail_before_either_side_writes(letters) -> None:
    """Row 35: ab is shared, the tails differ, and there is one copy order of one token."""
    box = letters(8)
    one = box.acq("abc")
    box.com(one, 3)
    result = box.cache.fork(one)
    two = box.cache.sequence(result.handles[0])
    assert result.copies == (CopyOrder(int(one.block_table[1]), int(two.block_table[1]), 1),) == two.copies
    assert box.runs() == {"ab": 2}
    box.ext(one, "d")
    box.ext(two, "x")
    box.com(one, 4)
    box.com(two, 4)
    assert one.block_table[0] == two.block_table[0]
    assert one.block_table[1] != two.block_table[1]
    assert (box.match("abcd"), box.match("abcx")) == (4, 4)


def test_forks_are_all_admitted_or_none(letters) -> None:
    """Row 35's kind: three forks need three tails."""
    box = letters(4)
    seq = box.acq("abc")
    box.com(seq, 3)
    with pytest.raises(PoolExhausted) as refusal:
        box.cache.fork(seq, 3)
    assert (refusal.value.needed_blocks, refusal.value.short_blocks) == (3, 1)
    assert box.counts == (2, 0, 2, 0)
    assert len(box.cache.fork(seq, 2).handles) == 2
    with pytest.raises(ValueError, match="n must be at least 1"):
        box.cache.fork(seq, 0)


def test_throw_away_blocks_do_not_push_out_the_cache(letters) -> None:
    """Row 40: an uncommitted request's blocks are used before anything cached is evicted."""
    box = letters(4)
    box.put("abcd")
    box.rel(box.acq("x"))
    box.acq("uvwx")
    assert box.match("abcd") == 4


def test_a_pin_is_one_holder_and_an_unpin_makes_one_candidate(letters) -> None:
    """Row 42: nothing goes while pinned, once after, and a second unpin is an error."""
    box = letters(8)
    box.put("ab")
    pin = box.cache.pin([ord("a"), ord("b")])
    box.cache.check()
    assert box.ev(8) == []
    assert box.cache.stats().pinned_blocks == 1
    box.cache.unpin(pin.pin_id)
    box.cache.check()
    with pytest.raises(UnknownPin):
        box.cache.unpin(pin.pin_id)
    assert len(box.ev(8)) == 1
    assert len(set(box.cache._free)) == 8


def test_pins_leave_room_for_requests(letters) -> None:
    """Row 43: beyond the budget a pin is refused, and a request is still admitted."""
    box = letters(4, pin_budget=2)
    box.put("abcd")
    assert box.cache.pin([ord(c) for c in "abcd"]).num_blocks == 2
    box.put("efgh")
    with pytest.raises(PinBudgetExceeded, match="2 more blocks, 2 pinned, budget 2"):
        box.cache.pin([ord(c) for c in "efgh"])
    assert box.acq("uvwx").num_blocks == 2
    assert box.match("abcd") == 4


def test_what_is_left_of_a_chain_is_a_prefix(letters) -> None:
    """Row 45: a chain that does not fit leaves its beginning, never a middle without it."""
    box = letters(2)
    seq = box.acq("abcd")
    box.com(seq, 4)
    with pytest.raises(PoolExhausted):
        box.ext(seq, "ef")
    box.rel(seq)
    assert box.match("abcdef") == 4
    box.ev(1)
    assert box.match("abcdef") == 2
    assert box.cache.stats().tree_blocks == 1


def test_evicting_costs_the_same_with_a_hundred_times_the_leaves() -> None:
    """Row 46, counted in calls instead of seconds: ev(1) at 100,000 leaves takes at most 3 x the calls at 1,000."""

    def calls(num_leaves: int) -> int:
        cache = RadixCache(num_leaves, 1)
        for i in range(num_leaves):
            seq = cache.acquire([i])
            cache.commit(seq, 1)
            cache.release(seq)
        count = 0

        def profile(frame, event, arg) -> None:
            nonlocal count
            count += 1

        sys.setprofile(profile)
        try:
            for _ in range(200):
                cache.evict(1)
        finally:
            sys.setprofile(None)
        return count

    assert calls(100_000) <= 3 * calls(1_000)


def test_a_release_needs_no_namespace(letters) -> None:
    """Row 49: the handle knows its salt; refs are 0 after."""
    box = letters(8)
    salted = Namespace(cache_salt="s")
    seq = box.acq("abcd", namespace=salted)
    box.com(seq, 4)
    box.rel(seq)
    assert [info.ref_count for info in box.cache.nodes(salted)] == [0]
    assert box.counts == (6, 2, 0, 0)
