"""Scenarios about flush, copy-on-write hits and media."""

from __future__ import annotations

import pytest

from radixpool.radix import (
    CacheBusy,
    MediaSpan,
    Namespace,
)


def test_flush_while_busy(letters) -> None:
    """Row 50: idle-only is refused unchanged; a new generation hides everything, and r1 goes on and caches nothing."""
    box = letters(8)
    seq = box.acq("abcd")
    box.com(seq, 4)
    before = box.cache.stats()
    with pytest.raises(CacheBusy, match="2 blocks held"):
        box.cache.flush()
    assert box.cache.stats() == before
    result = box.cache.flush(mode="new_generation")
    box.cache.check()
    assert (result.freed_blocks, result.held_blocks, result.generation) == (0, 2, 1)
    assert box.match("abcd") == 0
    box.ext(seq, "ef")
    box.com(seq, 6)
    assert box.match("abcdef") == 0
    box.put("abcd")  # the new generation has its own
    assert box.match("abcdef") == 4
    box.rel(seq)
    assert box.counts == (6, 2, 0, 0)
    assert box.cache.flush().freed_blocks == 2


def test_drain_frees_what_nobody_holds(letters) -> None:
    """Row 50's kind: what is held stays findable and goes with the next drain."""
    box = letters(8)
    box.put("abcdef")
    seq = box.acq("abcd", max_hit=4)
    result = box.cache.flush(mode="drain")
    box.cache.check()
    assert (result.freed_blocks, result.held_blocks) == (1, 2)
    assert box.match("abcdef") == 4
    box.rel(seq)
    assert box.cache.flush(mode="drain").freed_blocks == 2
    with pytest.raises(ValueError, match="mode must be"):
        box.cache.flush(mode="now")


def test_a_flush_of_one_namespace_leaves_the_others(letters) -> None:
    """Row 50's kind: scope."""
    box = letters(8)
    other = Namespace(tenant="t")
    box.put("abcd")
    box.put("abcd", namespace=other)
    box.cache.flush(other, mode="new_generation")
    box.cache.check()
    assert (box.match("abcd"), box.match("abcd", namespace=other)) == (4, 0)


def test_a_copy_on_write_hit_goes_into_the_block(letters) -> None:
    """A partly equal block is copied, its source cannot go before the first commit."""
    box = letters(6)
    box.put("abcd")
    plain = box.acq("abcx")
    assert (plain.cached_tokens, plain.copies) == (2, ())
    box.rel(plain)
    seq = box.acq("abcxy", partial=True)
    (copy,) = seq.copies
    source = int(box.cache.match([ord(c) for c in "abcd"]).blocks[1])
    assert (copy.src, copy.dst, copy.num_tokens) == (source, int(seq.block_table[1]), 1)
    assert seq.cached_tokens == seq.committed_tokens == 3
    assert box.ev(6) == []
    box.com(seq, 5)
    assert box.ev(6) == [source]
    box.rel(seq)
    assert box.match("abcxy") == 4


def test_a_copy_of_bad_data_is_bad(letters) -> None:
    """Row 12's kind: who began its tail as a copy of the block is told, at the index of its copy."""
    box = letters(8)
    loader = box.acq("abcd")
    box.com(loader, 4)
    copier = box.acq("abcxy", partial=True)
    result = box.cache.invalidate(loader, 1)
    box.cache.check()
    assert set(result.holders) == {loader.handle, copier.handle}
    assert copier.invalid_from == 1
    box.rel(loader)
    box.rel(copier)
    assert box.counts == (7, 1, 0, 0)


def test_media_are_part_of_the_key(letters) -> None:
    """The same placeholders with another picture are another prefix; the text before is shared."""
    box = letters(12)
    cat, dog = [MediaSpan(2, 3, b"cat")], [MediaSpan(2, 3, b"dog")]
    seq = box.acq("ab###fgh", media=cat)
    box.com(seq, 8)
    box.rel(seq)

    def match(media) -> int:
        return box.cache.match([ord(c) for c in "ab###fgh"], media=media).tokens

    assert match(cat) == 8
    assert match(dog) == match([]) == 2
    assert match([MediaSpan(2, 2, b"cat")]) == 2
    other = box.acq("ab###fgh", media=dog)
    assert other.cached_tokens == 2
    box.com(other, 8)
    again = box.acq("ab###fgh", media=cat)
    assert again.cached_tokens == 6
    remaps = box.com(again, 8).remaps
    assert [remap.index for remap in remaps] == [3]
    twin = box.acq("ab###fgh", media=cat, max_hit=2)
    assert [remap.index for remap in box.com(twin, 8).remaps] == [1, 2, 3]
    for s in (other, again, twin):
        box.rel(s)


def test_media_may_come_with_an_extension(letters) -> None:
    """A later turn brings a picture."""
    box = letters(12)
    seq = box.acq("abc")
    with pytest.raises(ValueError, match="media\\[0\\] must begin among the new tokens, at 3 or later, not 2"):
        box.cache.extend(seq, [1, 1], media=[MediaSpan(2, 1, b"x")])
    box.cache.extend(seq, [ord("#")] * 3, media=[MediaSpan(3, 3, b"cat")])
    assert sorted(seq.media_keys) == [1, 2]
    box.com(seq, 6)
    box.cache.rewind(seq, 6)
    box.rel(seq)
    tokens = [ord(c) for c in "abc###"]
    assert box.cache.match(tokens, media=[MediaSpan(3, 3, b"cat")]).tokens == 6
    assert box.cache.match(tokens).tokens == 2
