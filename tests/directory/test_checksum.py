"""The checksum detects what its docstring promises."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from radixpool.rpc.directory.checksum import RowChecksum

WORD = st.integers(0, 2**32 - 1)


@given(st.binary(min_size=16, max_size=16), st.lists(WORD, min_size=8, max_size=8), st.integers(0, 7), WORD)
def test_a_change_of_one_word_is_always_detected(seed: bytes, row: list[int], word: int, value: int) -> None:
    checksum = RowChecksum(seed, 8)
    changed = list(row)
    changed[word] = value
    one, other = checksum.of(np.array([row, changed], dtype=np.uint32)).tolist()
    assert (one == other) == (row[word] == value)


def test_words_left_out_do_not_count_and_rows_are_independent() -> None:
    checksum = RowChecksum(b"seed", 6, left_out=(0, 3))
    rows = np.arange(12, dtype=np.uint32).reshape(2, 6)
    changed = rows.copy()
    changed[:, (0, 3)] = 99
    assert checksum.of(changed).tolist() == checksum.of(rows).tolist()
    assert checksum.of(rows[1:]).tolist() == checksum.of(rows)[1:].tolist()


def test_swapped_and_doubled_words_are_detected_under_many_keys() -> None:
    """Two changed words are missed with a probability of at most 2**-32: never in a few thousand tries."""
    rng = np.random.default_rng(1)
    for seed in range(2000):
        checksum = RowChecksum(seed.to_bytes(2, "little"), 8)
        row = rng.integers(0, 2**32, 8, dtype=np.uint32)
        swapped = row[[1, 0, *range(2, 8)]]
        top_bits = row ^ np.array([1 << 31, 1 << 31, 0, 0, 0, 0, 0, 0], dtype=np.uint32)
        sums = checksum.of(np.stack((row, swapped, top_bits))).tolist()
        assert len(set(sums)) == 3
