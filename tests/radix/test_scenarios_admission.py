"""Scenarios A and B: atomic admission, and commit only of what was computed."""

from __future__ import annotations

import pytest

from radixpool.radix import PoolExhausted


@pytest.mark.parametrize("order", [("abcdef", "uvwx"), ("uvwx", "abcdef")])
def test_a_hit_is_pinned_before_anything_is_allocated(letters, order) -> None:
    """Row 1: in either order exactly one is admitted, and the hit's blocks are nobody's new blocks."""
    box = letters(4)
    box.put("abcd")
    hit = set(box.cache.match([ord(c) for c in "abcd"]).blocks.tolist())
    admitted = [seq for text in order if (seq := _try(box, text)) is not None]
    assert len(admitted) == 1
    assert not hit & set(admitted[0].block_table[admitted[0].cached_tokens // 2 :].tolist())
    assert box.match("abcd") == 4


def _try(box, text):
    before = box.counts
    try:
        return box.acq(text)
    except PoolExhausted:
        assert box.counts == before
        return None


def test_a_refusal_gives_the_numbers(letters) -> None:
    """Row 1: how many blocks are needed, can be had and are short."""
    box = letters(4)
    box.put("abcd")
    assert box.acq("abcdef").cached_tokens == 4
    with pytest.raises(PoolExhausted) as refusal:
        box.acq("uvwx")
    error = refusal.value
    assert (error.needed_blocks, error.allocatable_blocks, error.short_blocks, error.permanent) == (2, 1, 1, False)


def test_a_hit_does_not_count_as_room_for_its_own_request(letters) -> None:
    """Row 2: two hits and three new blocks do not fit into four."""
    box = letters(4)
    box.put("abcd")
    with pytest.raises(PoolExhausted):
        box.acq("abcdefghij")
    assert box.counts == (2, 2, 0, 0)
    assert box.match("abcd") == 4


def test_a_refusal_leaves_no_trace(letters) -> None:
    """Row 3: nothing is allocated, no handle exists, and the error has the numbers."""
    box = letters(3)
    with pytest.raises(PoolExhausted, match=r"needs 4 blocks.*3 of 3.*1 short; it can never be admitted") as refusal:
        box.acq("abcdefgh")
    assert refusal.value.permanent
    stats = box.cache.stats()
    assert (stats.free_blocks, stats.num_sequences, stats.num_namespaces, stats.refused_requests) == (3, 0, 0, 1)
    assert list(box.cache.sequences()) == []


def test_a_refused_hit_does_not_split_the_run_it_would_have_hit(letters) -> None:
    """Row 3's kind: the tree has the same shape after a refusal."""
    box = letters(4)
    box.put("abcdef")
    with pytest.raises(PoolExhausted):
        box.acq("abuvwxyzk")
    assert box.runs() == {"abcdef": 0}


def test_a_retry_finds_what_is_cached_then_not_what_was_cached_before(letters) -> None:
    """Row 5: the hit of a failed try is not remembered."""
    box = letters(4)
    box.put("abcd")
    other = box.acq("wxyz")
    with pytest.raises(PoolExhausted):
        box.acq("abcdefgh")
    assert len(box.ev(2)) == 2
    box.rel(other)
    assert box.acq("abcdefgh").cached_tokens == 0


def test_the_same_request_a_hundred_times_leaks_nothing(letters) -> None:
    """Row 6: after each round nothing is held and only the one copy is cached."""
    box = letters(8)
    for _ in range(100):
        box.put("abcd")
        assert box.counts == (6, 2, 0, 0)


def test_quarantined_blocks_are_refused_until_their_step_is_over(letters) -> None:
    """Row 7: the refusal names the step; after it the request is admitted."""
    box = letters(4)
    box.cache.add_worker("gpu", completed_step=6)
    seq = box.acq("abcdefgh")
    assert box.rel(seq, after_step=7).quarantined_blocks == 4
    assert box.counts == (0, 0, 0, 4)
    with pytest.raises(PoolExhausted, match="retry after step 7") as refusal:
        box.acq("uvwx")
    assert refusal.value.retry_after_step == 7
    assert box.cache.complete_step("gpu", 6) == 0
    assert box.cache.complete_step("gpu", 7) == 4
    assert box.acq("uvwx").num_blocks == 2


def test_committed_blocks_wait_for_the_step_too_but_can_be_hit(letters) -> None:
    """Row 7's kind: a committed block behind a fence is findable, and not handed out."""
    box = letters(4)
    box.cache.add_worker("gpu")
    seq = box.acq("abcdefgh")
    box.com(seq, 8)
    box.rel(seq, after_step=0)
    assert box.counts == (0, 0, 0, 4)
    assert box.ev(4) == []
    again = box.acq("abcdefgh", max_hit=8)
    assert again.cached_tokens == 8
    assert box.counts == (0, 0, 4, 0)
    box.rel(again)
    assert box.counts == (0, 0, 0, 4)
    assert box.cache.complete_step("gpu", 0) == 4
    assert box.counts == (0, 4, 0, 0)
    assert len(box.ev(4)) == 4


def test_nothing_is_findable_before_it_was_computed(letters) -> None:
    """Row 9: an uncommitted block is not findable, and an abort leaves nothing."""
    box = letters(8)
    seq = box.acq("abcd")
    assert box.match("abcd") == 0
    box.rel(seq)
    assert box.match("abcd") == 0
    assert box.counts == (8, 0, 0, 0)


def test_a_chunked_prefill_keeps_exactly_its_committed_chunk(letters) -> None:
    """Row 10: two of six tokens were computed."""
    box = letters(8)
    seq = box.acq("abcdef")
    box.com(seq, 2)
    box.rel(seq)
    assert box.match("abcdef") == 2
    assert box.counts == (7, 1, 0, 0)


def test_recomputing_the_last_block_of_a_full_hit_adds_no_copy(letters) -> None:
    """Row 13: the recomputed block is a twin; the tree still has exactly two blocks."""
    box = letters(8)
    box.put("abcd")
    seq = box.acq("abcd", max_hit=3)
    assert seq.cached_tokens == 2
    assert len(box.com(seq, 4).remaps) == 1
    assert box.cache.stats().tree_blocks == 2
    box.rel(seq)
    assert box.counts == (6, 2, 0, 0)


def test_the_last_token_is_always_computed(letters) -> None:
    """Row 13's kind: without max_hit a fully cached prompt leaves its last token to compute."""
    box = letters(8)
    box.put("abcd")
    assert box.acq("abcd").cached_tokens == 2
    assert box.acq("abcde").cached_tokens == 4
