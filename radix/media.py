"""Media in the key: images, audio and video stand for placeholder tokens, so their digests join the blocks' keys.

A block under media content is a run of its own, found by its tokens *and* the encoded spans that cover it: which part
of which content lies where in the block. Two prompts share it only if both agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["MAX_DIGEST_BYTES", "MediaSpan", "Segment", "mark_blocks", "segments"]

MAX_DIGEST_BYTES = 256
"""Every block under the content carries its digest, so a long one would cost its length a block."""

Marks = dict[int, bytes]  # block index -> encoded spans that cover it


class MediaSpan(NamedTuple):
    """Placeholder tokens `[start, start + length)` of a prompt stand for the content with this digest.

    Attributes:
        start: first placeholder token, counted from the beginning of the sequence.
        length: number of placeholder tokens, at least 1.
        digest: digest of the content and of everything that changes its embedding, 1 to 256 bytes.

    """

    start: int
    length: int
    digest: bytes


class Segment(NamedTuple):
    """Blocks `[first, last)` of a path without media, or one block with it."""

    first: int
    last: int
    mark: bytes


def mark_blocks(media: Iterable[MediaSpan], num_tokens: int, block_size: int) -> Marks:
    """Return the encoded spans of every block that media content covers. O(blocks covered).

    Raises:
        ValueError, TypeError: a span outside the tokens, out of order, overlapping, or without a digest, or with one
            that is too long.

    >>> marks = mark_blocks([MediaSpan(1, 2, b"cat")], 4, 2)
    >>> sorted(marks), marks[0] == marks[1]
    ([0, 1], False)

    """
    marks: Marks = {}
    end = 0
    for index, span in enumerate(media):
        start, length, digest = span
        if not isinstance(digest, bytes) or not digest:
            raise TypeError(f"media[{index}].digest must be non-empty bytes, not {digest!r}")
        if len(digest) > MAX_DIGEST_BYTES:
            raise ValueError(f"media[{index}].digest must be at most {MAX_DIGEST_BYTES} bytes, not {len(digest)}")
        if not isinstance(start, int) or not isinstance(length, int) or length < 1 or start < end:
            raise ValueError(
                f"media[{index}] must begin at or after token {end} and cover at least 1, not {start}+{length}"
            )
        end = start + length
        if end > num_tokens:
            raise ValueError(f"media[{index}] covers tokens {start} to {end - 1}, there are {num_tokens}")
        for block in range(start // block_size, (end - 1) // block_size + 1):
            offset = start - block * block_size  # negative: the content began in an earlier block
            encoded = offset.to_bytes(8, "little", signed=True) + length.to_bytes(8, "little")
            marks[block] = marks.get(block, b"") + encoded + len(digest).to_bytes(4, "little") + digest
    return marks


def segments(marks: Marks, first: int, last: int) -> Iterator[Segment]:
    """Cut blocks `[first, last)` into runs without media and single blocks with it. O(segments).

    >>> [tuple(s) for s in segments({2: b"m"}, 0, 4)]
    [(0, 2, b''), (2, 3, b'm'), (3, 4, b'')]
    """
    for block in sorted(block for block in marks if first <= block < last):
        if first < block:
            yield Segment(first, block, b"")
        yield Segment(block, block + 1, marks[block])
        first = block + 1
    if first < last:
        yield Segment(first, last, b"")
