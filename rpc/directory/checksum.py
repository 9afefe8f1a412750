"""A keyed checksum over rows of 32-bit words, computed for many rows at once.

`h(row) = sum(k[i] * row[i]) mod 2**64` with odd 64-bit keys drawn from the directory's random seed: the multilinear
family of Lemire and Kaser, "Strongly universal string hashing is fast" (The Computer Journal, 2014).

What it detects: a change confined to one aligned 32-bit word always (an odd key times a nonzero difference below 2**32
is nonzero mod 2**64), and any other change with a probability of at least 1 - 2**-32 over the choice of the keys: for a
word whose difference d is nonzero, d * k takes each value for at most 2**31 of the 2**63 odd k. The keys guard against
accidents, not against somebody who can read them in the header.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


class RowChecksum:
    """Checksums of rows of `num_words` 32-bit words under the keys of one seed; the words `left_out` do not count.

    A row of zeros has the checksum 0: whoever stores rows keeps one word that counts from being zero.
    """

    __slots__ = ("_keys",)

    def __init__(self, seed: bytes, num_words: int, *, left_out: tuple[int, ...] = ()) -> None:
        stream = hashlib.shake_256(seed).digest(8 * num_words)
        self._keys = np.frombuffer(stream, dtype="<u8").astype(np.uint64) | np.uint64(1)
        self._keys[list(left_out)] = 0

    def of(self, rows: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        """Return one checksum per row of `rows` [n, num_words]. O(rows.size)."""
        return self.of_wide(rows.astype(np.uint64))

    def of_wide(
        self, rows: npt.NDArray[np.uint64], out: npt.NDArray[np.uint64] | None = None
    ) -> npt.NDArray[np.uint64]:
        """Return one checksum per row whose words were widened to 64 bits before, in `out` if given. O(rows.size)."""
        sums: npt.NDArray[np.uint64] = rows.dot(self._keys, out)
        return sums
