"""A plan on the device: one int32 buffer that holds every table of the forest, and the workspace for partial states.

All sections lie in one tensor, so that a plan is one host-to-device copy, and a step that only grows a small one. With
a `PlanCapacity` sections have fixed places and launch grids fixed sizes; the counts are read on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixpool.kernels.forest import RECORD, ROW_RECORD, Forest
from radixpool.kernels.launch import (
    FEW_PARTS,
    TILE_ROWS,
    DeviceInfo,
    TileConfig,
    ctas_per_head,
    merge_config,
    merge_config_for_any,
    next_power_of_two,
)
from radixpool.kernels.spec import AttentionSpec

Array = NDArray[np.int32]
Long = NDArray[np.int64]
MAX_CHANGES = 1024  # table entries that one step may change without a new plan
ROOM_BLOCKS = 8  # columns at least that the tables may grow by without a new plan
ALIGN = 16  # int32 entries: sections start on 64 bytes, which Triton's 16-byte specialisation needs


@dataclass(frozen=True, slots=True)
class PlanCapacity:
    """The largest batch that a plan with fixed addresses must hold.

    `max_rows` query tokens, `max_seqs` sequences, `max_blocks` entries in a table; `max_parts` partial states
    (default: four for each row and 2,048 more), each `num_q_heads * v_head_dim` float32 of workspace.
    """

    max_seqs: int
    max_blocks: int
    max_rows: int = 0
    max_parts: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_rows", self.max_rows or self.max_seqs)
        object.__setattr__(self, "max_parts", self.max_parts or 4 * self.max_rows + 2048)

    @property
    def max_items(self) -> int:
        """Items that the buffers hold."""
        return 2 * self.max_parts

    def check(self, tables: Array, starts: Array) -> None:
        """Raise `ValueError` unless a batch with these tables and query starts fits."""
        for name, limit, value in (
            ("max_seqs", self.max_seqs, tables.shape[0]),
            ("max_blocks", self.max_blocks, tables.shape[1]),
            ("max_rows", self.max_rows, int(starts[-1])),
        ):
            if value > limit:
                raise ValueError(f"capacity: expected at most {name}={limit}, got {value}")

    def holds(self, forest: Forest) -> bool:
        """Return whether the cut batch fits."""
        return forest.num_parts <= self.max_parts and forest.num_items <= self.max_items


class DevicePlan:
    """The device side of one plan. Upload before use; the tensors stay valid until the next upload of another size."""

    def __init__(
        self, spec: AttentionSpec, device: DeviceInfo, config_of: Callable[[int, bool], TileConfig],
        capacity: PlanCapacity | None,
    ) -> None:  # fmt: skip
        self.spec, self.device, self.config_of, self.capacity = spec, device, config_of, capacity
        self.sections: dict[str, Tensor] = {}
        self.heights: dict[int, int] = {}
        self.merge_grid = 0
        self.tall = capacity is not None
        self.bound: dict[Any, Any] = {}
        self.merge = FEW_PARTS if capacity is None else merge_config_for_any(capacity.max_rows, spec, device)
        self.table_stride = 0
        self.step: Array = np.zeros(0, np.int32)  # host side of the section "lens": what one step sends
        self.views: dict[int, StepViews] = {}
        self.buffer: Tensor | None = None
        self.tables: Tensor | None = None
        self.part: Tensor | None = None
        self.part_lse: Tensor | None = None
        if capacity is not None:
            self.reserve_parts(capacity.max_parts)

    def reserve_parts(self, count: int) -> None:
        """Make room for `count` partial states; never shrinks."""
        if count == 0 and self.part_lse is None:
            self.part, self.part_lse = no_parts(self.spec)
        elif self.part_lse is None or len(self.part_lse) < count:
            shape = (count, self.spec.num_q_heads)
            self.part = torch.empty((*shape, self.spec.v_head_dim), dtype=torch.float32, device=self.spec.device)
            self.part_lse = torch.empty(shape, dtype=torch.float32, device=self.spec.device)

    def section_sizes(self, arrays: dict[str, Array]) -> dict[str, int]:
        """Return the entries each section takes: what it holds, or what the capacity asks for."""
        if self.capacity is None:
            return {name: len(a) for name, a in arrays.items()}
        c = self.capacity
        fixed: dict[str, int] = {
            "counts": ALIGN, "lens": step_entries(c.max_seqs), "rows": c.max_rows * ROW_RECORD,
            "merge_rows": c.max_rows, "merge_starts": c.max_rows + 1, "merge_parts": c.max_parts,
        }  # fmt: skip
        items = {f"items{h}": (c.max_items + grid) * RECORD for h, grid in self.heights.items()}
        return fixed | items

    def full_grids(self) -> dict[int, int]:
        """Return the programs of every tile height: the grids of a plan with a capacity."""
        heights = (h for h in TILE_ROWS if h >= self.spec.group_size)
        return {h: ctas_per_head(self.config_of(h, True), self.spec, self.device) for h in heights}

    def fill_grid(self, height: int, items: Array, programs: dict[int, int]) -> Array:
        """Return the items flat, with empty ones for the programs of the grid that the cut leaves without work."""
        idle = self.heights[height] - programs.get(height, 0)
        if idle == 0:
            return items.reshape(-1)
        busy = programs.get(height, 0)
        padded = np.concatenate([items[:busy], np.zeros((idle, RECORD), np.int32), items[busy:]])
        padded[:busy, 7] += idle
        return padded.reshape(-1)

    def upload(self, forest: Forest, tables: Array, lens: Array) -> Array:
        """Copy a cut batch to the device, in one transfer (with a capacity the tables are another).

        Returns the host's copy of the tables. Its entries below the lengths must stay, as the transfer may be under
        way; others may change: what the device gets of them too early it does not read.
        """
        capacity = self.capacity
        counts = np.zeros(ALIGN, np.int32)
        counts[0] = len(forest.merge_rows)
        self.step = np.zeros(step_entries(capacity.max_seqs if capacity else len(lens)), np.int32)
        self.step[: len(lens)] = lens
        arrays = {
            "counts": counts, "lens": self.step, "rows": forest.rows.reshape(-1), "merge_rows": forest.merge_rows,
            "merge_starts": forest.merge_starts, "merge_parts": forest.merge_parts,
        }  # fmt: skip
        self.bound.clear()
        self.heights = forest.programs if capacity is None else self.full_grids()
        nothing = np.zeros((0, RECORD), np.int32)
        for height in self.heights:
            arrays[f"items{height}"] = self.fill_grid(height, forest.items.get(height, nothing), forest.programs)
        self.merge_grid = len(forest.merge_rows) if capacity is None else capacity.max_rows
        if capacity is None:
            self.tall = forest.tall
            self.merge = merge_config(forest.num_parts / max(1, len(forest.merge_rows)))
        copy = self.send(arrays, tables)
        self.reserve_parts(forest.num_parts)
        self.views.clear()
        return copy

    def send(self, arrays: dict[str, Array], tables: Array) -> Array:
        """Lay the arrays and the tables out in one host buffer, copy it, and point the sections at their places."""
        sizes = {name: -(-max(size, 1) // ALIGN) * ALIGN for name, size in self.section_sizes(arrays).items()}
        shape = tables.shape[0], -(-(tables.shape[1] + ROOM_BLOCKS) // ALIGN) * ALIGN
        total = sum(sizes.values())
        if self.capacity is None:
            sizes["tables"] = shape[0] * shape[1]
        host = staging(sum(sizes.values()), self.spec.device)
        view, place = host.numpy(), 0
        for name, array in arrays.items():
            view[place : place + len(array)] = array
            place += sizes[name]
        if self.buffer is None or len(self.buffer) != len(host):
            self.buffer = torch.empty(len(host), dtype=torch.int32, device=self.spec.device)
        self.sections = dict(zip(sizes, self.buffer.split(list(sizes.values())), strict=True))
        if self.capacity is not None:
            self.buffer.copy_(host, non_blocking=True)
            return self.send_tables(tables, (self.capacity.max_seqs, self.capacity.max_blocks))
        copy: Array = view[total:].reshape(shape)[:, : tables.shape[1]]
        copy[:] = tables
        self.buffer.copy_(host, non_blocking=True)
        self.tables = self.sections.pop("tables").view(shape)
        self.table_stride = shape[1]
        return copy

    def send_tables(self, tables: Array, shape: tuple[int, int]) -> Array:
        """Copy the block tables to their fixed place of the given shape; return the host's copy."""
        if self.tables is None:
            self.tables = torch.zeros(shape, dtype=torch.int32, device=self.spec.device)
            self.table_stride = shape[1]
        host = staging(tables.size, self.spec.device).view(tables.shape)
        copy: Array = host.numpy()
        copy[:] = tables
        self.tables[: tables.shape[0], : tables.shape[1]].copy_(host, non_blocking=True)
        return copy

    def grow(self, lens: Array, places: Long, blocks: Array) -> None:
        """Send new lengths and the table entries that changed, in one copy; `places` are row * stride + column.

        The host buffer is pageable: the copy has read it when it returns, so that the next step may write it.
        """
        count = len(places)
        room = next_power_of_two(max(count, ALIGN)) if count else 0  # padded by repeating the last change
        if room not in self.views:
            self.views[room] = StepViews(self.step, self.sections["lens"], len(lens), room)
        views = self.views[room]
        self.step[: len(lens)] = lens
        if count:
            views.places[:count], views.places[count:] = places, places[-1]
            views.blocks[:count], views.blocks[count:] = blocks, blocks[-1]
        views.device.copy_(views.host, non_blocking=True)
        if count:
            assert self.tables is not None
            self.tables.view(-1).scatter_(0, views.device_places, views.device_blocks)


class StepViews:
    """What a step with up to `room` changes sends: views of the section "lens" on both sides, made once.

    The section holds the lengths, then `room` places (int64), then as many blocks.
    """

    __slots__ = ("blocks", "device", "device_blocks", "device_places", "host", "places")

    def __init__(self, step: Array, section: Tensor, num_seqs: int, room: int) -> None:
        first = len(step) - 3 * MAX_CHANGES
        middle, end = first + 2 * room, first + 3 * room
        self.places, self.blocks = step[first:middle].view(np.int64), step[middle:end]
        self.device_places, self.device_blocks = section[first:middle].view(torch.int64), section[middle:end]
        used = end if room else num_seqs
        self.host, self.device = torch.from_numpy(step[:used]), section[:used]


@functools.cache
def no_parts(spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Return the workspace of plans without partial states: memory to name where a kernel takes a pointer."""
    shape = (1, spec.num_q_heads)
    part = torch.empty((*shape, spec.v_head_dim), dtype=torch.float32, device=spec.device)
    return part, torch.empty(shape, dtype=torch.float32, device=spec.device)


def step_entries(num_seqs: int) -> int:
    """Return the entries of the section that one step writes: lengths, then (place, block) of each changed entry."""
    return -(-max(num_seqs, 1) // ALIGN) * ALIGN + 3 * MAX_CHANGES


def staging(entries: int, device: torch.device | str) -> Tensor:
    """Return host memory to copy from. Pinned memory is not handed out again before the copies from it are done."""
    return torch.empty(entries, dtype=torch.int32, pin_memory=torch.device(device).type == "cuda")
