"""A plan on the device: one int32 buffer that holds every table of the forest, and the workspace for partial states.

All sections lie in one tensor, so that a plan is one host-to-device copy. Steps that only grow are small messages (see
plan_send.py). With a `PlanCapacity` sections have fixed places and launch grids fixed sizes; the counts are read on the
device. Views are made when they are first asked for.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixpool.kernels.forest import RECORD, ROW_RECORD, Forest
from radixpool.kernels.forest_pack import ALIGN, SECTIONS, CutFacts, Layout, tables_in, unpack
from radixpool.kernels.launch import (
    FEW_PARTS,
    TILE_ROWS,
    ConfigOf,
    DeviceInfo,
    ctas_per_head,
    evicts_first,
    merge_config,
    merge_config_for_any,
    merge_programs,
)
from radixpool.kernels.native_cut import NativeCut, NumpyCut
from radixpool.kernels.plan_step import MAX_GROWTH_TOKENS, padded
from radixpool.kernels.spec import AttentionSpec

if TYPE_CHECKING:
    from radixpool.kernels.plan_send import StepSender

Array = NDArray[np.int32]
MAX_STATE_VALUES = 2**32  # merges count the values of partial states (16 GiB) in 32 bits
ROOM_BLOCKS = 8  # columns at least that the tables may grow by without a new plan; with a capacity as many as steps ask


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
        for name, least in (("max_seqs", 1), ("max_blocks", 1), ("max_rows", 0), ("max_parts", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected an integer from {least} on, got {value!r}")
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

    def holds(self, facts: CutFacts) -> bool:
        """Return whether the cut batch fits."""
        return facts.num_parts <= self.max_parts and sum(facts.items) <= self.max_items


class DevicePlan:
    """The device side of one plan. Upload before use; the tensors stay valid until the next upload of another size."""

    def __init__(
        self, spec: AttentionSpec, device: DeviceInfo, config_of: ConfigOf,
        capacity: PlanCapacity | None,
    ) -> None:  # fmt: skip
        self.spec, self.device, self.config_of, self.capacity = spec, device, config_of, capacity
        self.merge_grid = 0 if capacity is None else capacity.max_rows
        self.tall = capacity is not None
        self.bound: dict[Any, Any] = {}
        self.merge = FEW_PARTS if capacity is None else merge_config_for_any(capacity.max_rows, spec, device)
        self.num_seqs, self.watched, self.evict_first = 0, False, False
        self.on_cuda = torch.device(spec.device).type == "cuda"
        self.buffer: Tensor | None = None
        self.workspace: Workspace | None = None
        self.fixed_tables: Tensor | None = None
        if capacity is not None:
            self.reserve_parts(capacity.max_parts)
            shape = capacity.max_seqs, capacity.max_blocks
            self.fixed_tables = torch.zeros(shape, dtype=torch.int32, device=spec.device)

    def reserve_parts(self, count: int) -> None:
        """Make room for `count` partial states; never shrinks."""
        if self.workspace is None or self.workspace.count < count:
            self.workspace = Workspace(self.spec, count) if count else no_parts(self.spec)

    @functools.cached_property
    def full_grids(self) -> tuple[int, ...]:
        """The programs of every tile height: the grids of a plan with a capacity."""
        return tuple(
            ctas_per_head(self.config_of(h, tall=True), self.spec, self.device) if h >= self.spec.group_size else 0
            for h in TILE_ROWS
        )

    def lay_out(self, facts: CutFacts, num_seqs: int, width: int) -> Layout:
        """Return where the sections of a batch lie: as close as they can, or where the capacity has them."""
        merging = merge_programs(self.merge, self.spec.num_q_heads) if self.watched else 0
        c = self.capacity
        stride = padded(width + ROOM_BLOCKS) if c is None else padded(min(width + MAX_GROWTH_TOKENS, c.max_blocks))
        tables = num_seqs * stride
        if c is None:
            rows, merged, grids = facts.num_rows * ROW_RECORD, facts.num_merge_rows, facts.programs
            items = (count * RECORD for count in facts.items)
            widths = (ALIGN, 1 + merged * merging, num_seqs, rows, merged, merged + 1, facts.num_parts, *items, tables)
            return Layout.of(widths, grids, stride)
        items = ((c.max_items + grid) * RECORD if grid else 0 for grid in self.full_grids)
        lists = c.max_rows, c.max_rows + 1, c.max_parts
        widths = (ALIGN, 1 + c.max_rows * merging, c.max_seqs, c.max_rows * ROW_RECORD, *lists, *items, tables)
        return Layout.of(widths, self.full_grids, stride)

    def upload(self, cut: NativeCut | NumpyCut, num_seqs: int, width: int, *, watched: bool = True) -> None:
        """Copy a cut batch to the device, in one transfer; with a capacity the tables then move to their place there.

        `watched`: merges may watch the attending programs (see device_merge.py); others wait for all of them.
        """
        self.refuse_capture()
        facts, capacity = cut.facts, self.capacity
        if capacity is None:
            self.reserve_parts(facts.num_parts)  # first, as it may be refused: the plan then stays what it was
        self.forget()
        if capacity is None:
            self.tall, self.merge_grid = bool(facts.tall), facts.num_merge_rows
            self.merge = merge_config(facts.num_parts / max(1, facts.num_merge_rows))
        self.watched = watched and self.merge.watched and not self.tall
        self.evict_first = evicts_first(facts.unique_tokens * self.spec.kv_bytes_per_token * self.spec.num_kv_heads)
        self.facts, self.num_seqs = facts, num_seqs
        self.layout = layout = self.lay_out(facts, num_seqs, width)
        self.host = host = staging(layout.total, self.spec.device)
        cut.pack(layout, host)
        if self.fixed_tables is None:
            if self.buffer is None or len(self.buffer) != layout.total:
                self.buffer = torch.empty(layout.total, dtype=torch.int32, device=self.spec.device)
            self.buffer.copy_(host, non_blocking=True)
        else:
            assert capacity is not None
            begin = layout.begins[-1]
            if self.buffer is None:  # its tables are on their way to their fixed place, whatever their width
                room = capacity.max_seqs * padded(capacity.max_blocks)
                self.buffer = torch.empty(begin + room, dtype=torch.int32, device=self.spec.device)
            self.buffer[: layout.total].copy_(host, non_blocking=True)
            given = self.buffer[begin : begin + num_seqs * layout.table_stride].view(num_seqs, layout.table_stride)
            self.fixed_tables[:num_seqs, :width].copy_(given[:, :width])

    def forget(self) -> None:
        """Drop what was made for the last upload."""
        self.bound.clear()
        for name in ("sections", "tables", "heights", "forest", "sender"):
            self.__dict__.pop(name, None)

    @functools.cached_property
    def heights(self) -> dict[int, int]:
        """The programs launched for each KV head, by tile height."""
        return {h: grid for h, grid in zip(TILE_ROWS, self.layout.grids, strict=True) if grid}

    @functools.cached_property
    def sections(self) -> dict[str, Tensor]:
        """The sections on the device, by name, but for the tables."""
        assert self.buffer is not None
        begins = self.layout.begins
        return {name: self.buffer[a:b] for name, a, b in zip(SECTIONS, begins, begins[1:], strict=False)}

    @functools.cached_property
    def tables(self) -> Tensor:
        """The block tables, `[sequences, table_stride]`."""
        if self.fixed_tables is not None:
            return self.fixed_tables
        assert self.buffer is not None
        begin, shape = self.layout.begins[-1], (self.num_seqs, self.table_stride)
        return self.buffer[begin : begin + shape[0] * shape[1]].view(shape)

    @property
    def table_stride(self) -> int:
        """Entries from one table to the next."""
        return self.layout.table_stride if self.capacity is None else self.capacity.max_blocks

    @functools.cached_property
    def forest(self) -> Forest:
        """What was planned, read from the host's copy."""
        return unpack(self.facts, self.layout, self.host.numpy())

    def host_tables(self) -> Array:
        """Return the host's copy of the tables, `[sequences, stride]`, of which `width` columns are filled.

        Entries below the lengths must stay, as the transfer may be under way; others may change: what the device gets
        of them too early it does not read.
        """
        return tables_in(self.host.numpy(), self.layout, self.num_seqs)

    @functools.cached_property
    def sender(self) -> StepSender:
        """What sends steps to this upload. Imports Triton."""
        assert self.buffer is not None
        tables = (self.buffer, self.layout.begins[-1]) if self.fixed_tables is None else (self.fixed_tables, 0)
        sender: StepSender = importlib.import_module("radixpool.kernels.plan_send").StepSender(
            (self.buffer, self.layout.begin("lens")), tables, num_seqs=self.num_seqs, stride=self.table_stride
        )
        return sender

    def refuse_capture(self) -> None:
        """Raise `RuntimeError` where the current stream is being captured: a replay would send the same plan again."""
        if self.on_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "plan: a plan can't be made or updated in a CUDA graph; update it before the graph's replay"
            )


class Workspace:
    """Room for `count` partial states: `part` `[count, num_q_heads, state_width]` and `part_lse`, both float32.

    Launches that follow one another tell their states apart by a phase in every word (see device_merge.py).
    """

    def __init__(self, spec: AttentionSpec, count: int) -> None:
        self.count, self.heads, self.width = count, spec.num_q_heads, state_width(spec)
        if count * self.heads * self.width > MAX_STATE_VALUES:
            most = MAX_STATE_VALUES // (self.heads * self.width)
            raise ValueError(f"plan: expected at most {most} partial states (16 GiB), got {count}: split the batch")
        self.begin = -(-count * self.heads // ALIGN) * ALIGN
        entries = self.begin + count * self.heads * self.width
        self.memory = torch.empty(entries, dtype=torch.float32, device=spec.device)

    @functools.cached_property
    def part_lse(self) -> Tensor:
        """The LSE of each state and head, in base 2."""
        return self.memory[: self.count * self.heads].view(self.count, self.heads)

    @functools.cached_property
    def part(self) -> Tensor:
        """The states."""
        return self.memory[self.begin :].view(self.count, self.heads, self.width)


@functools.cache
def no_parts(spec: AttentionSpec) -> Workspace:
    """Return the workspace of plans without partial states: memory to name where a kernel takes a pointer."""
    return Workspace(spec, 1)


def state_width(spec: AttentionSpec) -> int:
    """Return the float32 that one head of a partial state takes: neighbours are stored four at a time."""
    return -(-spec.v_head_dim // 4) * 4


def staging(entries: int, device: torch.device | str) -> Tensor:
    """Return host memory to copy from. Pinned memory is not handed out again before the copies from it are done."""
    return torch.empty(entries, dtype=torch.int32, pin_memory=torch.device(device).type == "cuda")
