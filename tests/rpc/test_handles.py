"""Where capabilities come from."""

from __future__ import annotations

from radixpool.rpc.manager.handles import RandomBytes


def test_random_bytes_never_come_twice_whatever_their_sizes():
    draw = RandomBytes()
    pieces = [draw(16) for _ in range(1_000)] + [draw(size) for size in (7, 5_000, 16, 1_024, 1_017, 16)]
    assert [len(piece) for piece in pieces[-6:]] == [7, 5_000, 16, 1_024, 1_017, 16]
    prefixes = {piece[:7] for piece in pieces}
    assert len(prefixes) == len(pieces)


def test_two_sources_share_nothing():
    assert RandomBytes()(16) != RandomBytes()(16)
