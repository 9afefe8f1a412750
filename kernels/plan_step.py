"""From one step's plan to the next: does the batch only grow, so that its cut still fits, and what has to be sent?"""

from __future__ import annotations

import ctypes

import numpy as np

from radixpool.kernels.forest_pack import ALIGN
from radixpool.kernels.forest_paths import Array
from radixpool.kernels.native_cut import address, library

MAX_CHANGES = 1024  # table entries that one step may change without a new plan
MAX_GROWTH_TOKENS = 64  # a re-used plan leaves each sequence's growth to its last item: up to this many tokens
NO_GROWTH = -1  # in place of a number of changes: the batch must be cut anew
Entries = tuple[Array, Array, Array]  # rows, columns and blocks of table entries, as many of each


class Message:
    """What one step sends: lengths, padded to `ALIGN`, then rows, columns and blocks of the changes, `most` of each."""

    __slots__ = ("address", "body")

    def __init__(self, body: Array) -> None:
        self.body, self.address = body, address(body)

    def changes(self, num_seqs: int, most: int) -> Array:
        """Return the room for rows, columns and blocks, `[3, most]`."""
        first = padded(num_seqs)
        return self.body[first : first + 3 * most].reshape(3, most)


def padded(count: int) -> int:
    """Return `count` rounded up to whole sections."""
    return -(-count // ALIGN) * ALIGN


def message_entries(num_seqs: int) -> int:
    """Return the entries of a message for so many sequences."""
    return padded(num_seqs) + 3 * MAX_CHANGES


class Watch(ctypes.Structure):
    """The state of a `StepWatch`; mirrors `Watch` of forest_step.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tables", "lens", "planned")),
        *((name, ctypes.c_int64) for name in ("num_seqs", "width", "stride", "room", "block_size", "max_growth",
                                              "most")),
    )  # fmt: skip


class StepWatch:
    """Compares each step's batch with the one before: does the cut still fit, and what is new?

    A sequence may be at most `max_growth` tokens longer than it was planned, and at most `most` table entries may
    change, none below the old length. `tables` `[num_seqs, stride]`, of which `width` columns are in use, become this
    watch's own: it writes new entries into them and may use `room` columns. Entries of new columns are -1 before.
    """

    __slots__ = ("lens", "place", "planned", "state", "whole")

    def __init__(
        self, tables: Array, lens: Array, block_size: int, *, width: int, room: int,
        max_growth: int = MAX_GROWTH_TOKENS, most: int = MAX_CHANGES,
    ) -> None:  # fmt: skip
        self.whole, self.lens, self.planned = tables, lens.copy(), lens.copy()
        self.state = Watch(
            address(tables), address(self.lens), address(self.planned), len(lens), width, tables.shape[1], room,
            block_size, max_growth, most,
        )  # fmt: skip
        self.place = ctypes.addressof(self.state)

    @property
    def tables(self) -> Array:
        """The tables of the last step: a view."""
        return self.whole[:, : self.state.width]

    def compare(self, lens: Array, tables: Array | None, message: Message) -> int:
        """Move to the given batch and write its message; return how many table entries changed, or `NO_GROWTH`.

        `tables=None`: none changed. After `NO_GROWTH` this watch has ended. O(table entries); O(lengths) without.
        """
        if len(lens) != len(self.lens) or (tables is not None and len(tables) != len(lens)):
            return NO_GROWTH
        width = self.state.width if tables is None else tables.shape[1]
        code = library()
        if code is None:
            return self.compare_in_numpy(lens, tables, width, message)
        given = None if tables is None else address(tables)
        count: int = code.radixpool_compare(self.place, address(lens), given, width, message.address)
        return count

    def advance(self, lens: Array, entries: Entries, message: Message) -> int:
        """Do what `compare` does where rows, columns and blocks (as many of each) are known. O(lengths + entries)."""
        if len(lens) != len(self.lens):
            return NO_GROWTH
        code = library()
        if code is None:
            return self.advance_in_numpy(lens, entries, message)
        places = map(address, entries)
        count: int = code.radixpool_advance(self.place, address(lens), *places, len(entries[0]), message.address)
        return count

    def make_room(self, lens: Array, width: int) -> bool:
        """Return whether the cut fits these lengths and tables so wide; new columns then hold -1."""
        state, grown = self.state, lens.astype(np.int64) - self.planned
        if width > state.room or (len(lens) and lens.max() > width * state.block_size):
            return False
        if len(grown) and not 0 <= grown.min() <= grown.max() <= state.max_growth:
            return False
        self.whole[:, state.width : width] = -1
        return True

    def move_to(self, lens: Array, width: int, entries: Entries, message: Message) -> int:
        """Move to new lengths, width and entries, and write the message; of entries for one place the last counts."""
        rows, columns, blocks = entries
        for row, column, block in zip(rows.tolist(), columns.tolist(), blocks.tolist(), strict=True):
            self.whole[row, column] = block
        changes = message.changes(len(lens), self.state.most)[:, : len(rows)]
        changes[:] = rows, columns, self.whole[rows, columns]
        message.body[: len(lens)] = self.lens[:] = lens
        self.state.width = width
        return len(rows)

    def compare_in_numpy(self, lens: Array, tables: Array | None, width: int, message: Message) -> int:
        """Do what the C function does."""
        if not self.make_room(lens, width):
            return NO_GROWTH
        rows = columns = blocks = np.zeros(0, np.int32)
        if tables is not None:
            differs = tables != self.whole[:, :width]
            used = -(-self.lens // self.state.block_size)
            if (used > width).any() or (differs & (np.arange(width) < used[:, None])).any():
                return NO_GROWTH
            rows, columns = (index.astype(np.int32) for index in np.nonzero(differs))
            blocks = tables[rows, columns]
        return NO_GROWTH if len(rows) > self.state.most else self.move_to(lens, width, (rows, columns, blocks), message)

    def advance_in_numpy(self, lens: Array, entries: Entries, message: Message) -> int:
        """Do what the C function does."""
        rows, columns, _ = entries
        if len(rows) > self.state.most or (rows < 0).any() or (rows >= len(lens)).any() or (columns < 0).any():
            return NO_GROWTH
        if (columns.astype(np.int64) * self.state.block_size < self.lens[rows]).any():
            return NO_GROWTH
        width = max(self.state.width, int(columns.max()) + 1 if len(columns) else 0)
        return self.move_to(lens, width, entries, message) if self.make_room(lens, width) else NO_GROWTH


def put_entries(tables: Array, rows: Array, columns: Array, blocks: Array) -> Array:
    """Return a copy of the tables with entry (`rows[i]`, `columns[i]`) set to `blocks[i]`, wider where one asks for it.

    Raises `ValueError` for entries that the tables can't have.
    """
    if not len(rows) == len(columns) == len(blocks):
        counts = f"{len(rows)}, {len(columns)} and {len(blocks)}"
        raise ValueError(f"rows, columns, blocks: expected as many of each, got {counts}")
    if len(rows) and (rows.min() < 0 or rows.max() >= len(tables)):
        raise ValueError(f"rows: expected 0 to {len(tables) - 1}, got {rows.min()} to {rows.max()}")
    if len(columns) and columns.min() < 0:
        raise ValueError(f"columns: expected no negative column, got {columns.min()}")
    width = max(tables.shape[1], int(columns.max()) + 1 if len(columns) else 0)
    copy = np.full((len(tables), width), -1, np.int32)
    copy[:, : tables.shape[1]] = tables
    copy[rows, columns] = blocks
    return copy
