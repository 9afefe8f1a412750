"""A decode step in columns: what both ends agree on. One bytes object per column instead of one message per sequence.

The columns are packed little-endian, so that packing and unpacking 256 rows costs microseconds. Handles travel whole,
16 bytes a row, and not as short names that a stream would hand out: 4 KiB a message cost nothing, every row is
authorised by what it shows, and a batch that is sent again over another stream means the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from radixpool.rpc import limits
from radixpool.rpc import operations as ops
from radixpool.v1 import cache_pb2

UINT32_BYTES: Final = 4
_HANDLE: Final = np.dtype(f"V{limits.HANDLE_BYTES}")
_TOKEN: Final = np.dtype(f"V{UINT32_BYTES}")
Counts: TypeAlias = npt.NDArray[np.integer] | Sequence[int]
Rows: TypeAlias = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Append tokens to S sequences and commit them: an Extend and a Commit per row, each row by itself, in order.

    handles: of S different sequences: 16 bytes each, or uint8 [S, 16].
    tokens: the new tokens of the first row, then those of the second, and so on: uint32 [T], or any other token ids.
    token_counts: how many tokens each row gets, integers [S], 0 for none. None means one each, or none at all where T
        is 0.
    commit_upto_tokens: so many leading tokens of each row, the new ones counted, have their KV written: integers [S];
        0, or less than before, commits nothing. None commits nothing.

    A row without tokens and commit still names its sequence, as a worker has to before it launches a step over it.
    """

    handles: Sequence[bytes] | npt.NDArray[np.uint8] = field(repr=False)
    tokens: ops.Tokens = b""
    token_counts: Counts | None = None
    commit_upto_tokens: Counts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What came of a Step of S rows; every array is read-only. Rows count from 0 in the order of the step.

    num_tokens: length of each sequence now, uint32 [S]; 0 where there is none.
    committed_tokens: leading tokens that are known to be written, uint32 [S].
    appended_rows, appended_blocks: uint32 and int32 [A]: block `appended_blocks[i]` goes to the end of the block table
        of row `appended_rows[i]`. Apply them before the remaps.
    remap_rows, remap_block_indices, remap_from_blocks, remap_to_blocks: uint32, uint32, int32, int32 [R]: entries of
        block tables that change, before the next step.
    invalid_rows, invalid_from_blocks: uint32 [V]: rows with data that was declared bad, and from which entry on.
    errors: the first error of each row that failed. Where it is the tokens that were refused (PoolExhausted), the
        commit was tried all the same; `num_tokens` and `committed_tokens` say what came of each.
    results: of the operations that went along, in order.
    """

    num_tokens: Rows
    committed_tokens: Rows
    appended_rows: Rows
    appended_blocks: ops.BlockIds
    remap_rows: Rows
    remap_block_indices: Rows
    remap_from_blocks: ops.BlockIds
    remap_to_blocks: ops.BlockIds
    invalid_rows: Rows
    invalid_from_blocks: Rows
    errors: Mapping[int, Exception]
    results: tuple[ops.Result | Exception, ...] = ()


@dataclass(frozen=True, slots=True)
class StepRows:
    """A StepUpdate row by row. `tokens` are packed, b"" where a row has none."""

    handles: list[bytes]
    tokens: list[bytes]
    commit_upto: Sequence[int]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.handles)


def check_columns(update: cache_pb2.StepUpdate) -> int:
    """Return how many rows there are. O(rows). Raises ValueError naming the column that does not fit."""
    packed = len(update.handles)
    rows = packed // limits.HANDLE_BYTES
    if packed % limits.HANDLE_BYTES:
        raise ValueError(f"step_update.handles takes {limits.HANDLE_BYTES} bytes a row, got {packed} bytes")
    if rows > limits.MAX_STEP_ROWS:
        raise ValueError(f"step_update.handles: the limit is {limits.MAX_STEP_ROWS} rows, got {rows}")
    for name in ("token_counts", "commit_upto_tokens"):
        size = len(getattr(update, name))
        if size and size != rows * UINT32_BYTES:
            raise ValueError(f"step_update.{name} takes 4 bytes a row, {rows * UINT32_BYTES} in all, got {size} bytes")
    num_tokens, rest = divmod(len(update.tokens), UINT32_BYTES)
    if rest:
        raise ValueError(f"step_update.tokens takes 4 bytes a token, got {len(update.tokens)} bytes")
    if update.token_counts:
        wanted = sum(array("I", update.token_counts))
        if num_tokens != wanted:
            raise ValueError(f"step_update.token_counts adds up to {wanted}, step_update.tokens holds {num_tokens}")
    elif num_tokens not in (0, rows):
        raise ValueError(f"step_update.tokens holds {num_tokens} for {rows} rows, without step_update.token_counts")
    return rows


def read_rows(update: cache_pb2.StepUpdate) -> StepRows:
    """Take a request's columns apart. O(rows). Raises ValueError for columns that do not fit, or a sequence twice."""
    rows = check_columns(update)
    handles = _cut(update.handles, _HANDLE)
    if len(set(handles)) != rows:
        raise ValueError("step_update.handles: rows {} and {} name the same sequence".format(*_first_twins(handles)))
    upto = update.commit_upto_tokens
    return StepRows(handles, _split_tokens(update, rows), array("I", upto) if upto else array("I", bytes(4 * rows)))


def _split_tokens(update: cache_pb2.StepUpdate, rows: int) -> list[bytes]:
    packed = update.tokens
    if update.token_counts:
        ends = accumulate(array("I", update.token_counts), initial=0)
        return [packed[4 * start : 4 * end] for start, end in pairwise(ends)]
    return _cut(packed, _TOKEN) if packed else [b""] * rows


def _cut(packed: bytes, item: np.dtype[np.void]) -> list[bytes]:
    """Return the items of a column as bytes. Numpy does it in a tenth of the time of slices."""
    items: list[bytes] = np.frombuffer(packed, item).tolist()
    return items


def _first_twins(handles: list[bytes]) -> tuple[int, int]:
    seen: dict[bytes, int] = {}
    for row, handle in enumerate(handles):
        if handle in seen:
            return seen[handle], row
        seen[handle] = row
    raise AssertionError("the handles differ")
