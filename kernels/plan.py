"""One ragged batch, planned once per forward pass and used by every layer.

`plan_forest` checks the batch on the host and, for the Triton backend, cuts it into work items (see `forest.py`) and
uploads them in one copy. A plan never reads or writes the pool. `ForestPlan.update` moves it to the next step: for free
where a decode step only appended, in place on the device always, so that a captured CUDA graph can be replayed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixpool.kernels.device_plan import DevicePlan, PlanCapacity
from radixpool.kernels.extend_plan import DECODE_QUERY_TOKENS, extend_config
from radixpool.kernels.forest import Forest, TallKernel
from radixpool.kernels.launch import ConfigOf, DeviceInfo, TileConfig, tile_config
from radixpool.kernels.native_cut import NativeCut, NumpyCut, cut_batch
from radixpool.kernels.plan_step import NO_GROWTH, Entries, StepWatch, put_entries
from radixpool.kernels.spec import AttentionSpec

Int32Array = NDArray[np.int32]
INT32 = np.iinfo(np.int32)


@dataclass(slots=True)
class ForestPlan:
    """A planned batch of `B` sequences with `num_rows` query tokens in all. Made by `plan_forest`.

    `block_tables` int32 `[B, max_blocks]`, `seq_lens` (all KV tokens, new ones included), `query_lens` and
    `query_starts` `[B + 1]` are host arrays; row `query_starts[i] + j` of `q` is query token `j` of sequence `i`.
    `forest` and `device_plan` exist for the Triton backend only.
    """

    spec: AttentionSpec
    capacity: PlanCapacity | None = None
    sharing: Literal["forest", "none"] = "forest"
    block_tables: Int32Array = field(init=False)
    seq_lens: Int32Array = field(init=False)
    query_lens: Int32Array = field(init=False)
    query_starts: Int32Array = field(init=False)
    device_plan: DevicePlan | None = None
    checked: set[Any] = field(default_factory=set)
    fast: Any = None  # the fast extend path of this cut (see extend_path.py); None: not yet asked for, False: never
    watch: StepWatch | None = None  # tells steps that only grow from new batches; made at the first
    decoding: bool = False  # one query token a sequence

    @property
    def forest(self) -> Forest | None:
        """The cut batch; the same object until it is cut anew."""
        return None if self.device_plan is None else self.device_plan.forest

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.seq_lens)

    @property
    def num_rows(self) -> int:
        """Query tokens in the batch: the first dimension of `q`."""
        return int(self.query_starts[-1])

    @property
    def blocks_needed(self) -> Int32Array:
        """Blocks that each sequence's length needs, `[B]`."""
        return -(-self.seq_lens // np.int32(self.spec.block_size))

    @property
    def config_of(self) -> ConfigOf:
        """The launch configuration by tile height and presence of tall tiles; the same object for equal plans.

        A plan with a capacity may meet both, and its launches are fixed: it counts as one with tall tiles.
        """
        return config_function(self.spec, self.device.arch, tile_config, fixed=self.capacity is not None)

    @property
    def device(self) -> DeviceInfo:
        """What is known of the device."""
        return device_info(torch.device(self.spec.device))

    def update(self, block_tables: Any | None, seq_lens: Any, query_lens: Any | None = None) -> bool:
        """Make this the plan of the next step's batch, in place; return whether the old cut could be kept.

        `block_tables=None`: no table changed. The cut is kept if every sequence only grew at its end, by at most 64
        tokens since it was cut, with the same number of query tokens: then only lengths, and table entries that
        changed, are sent. Device addresses don't change for a plan with a capacity. O(table entries) compared, nothing
        at all without tables. Raises `ValueError` as `plan_forest` does, and changes nothing then.
        """
        tables = None if block_tables is None else host_int32("block_tables", block_tables, 2)
        lens = host_int32("seq_lens", seq_lens, 1)
        if self.same_queries(query_lens) and self.grow(lens, tables, None):
            return True
        self.cut(self.block_tables if tables is None else tables, lens, query_lens)
        return False

    def advance(self, seq_lens: Any, *, rows: Any = (), columns: Any = (), blocks: Any = ()) -> bool:
        """Do what `update` does where the caller knows what changed: entry (`rows[i]`, `columns[i]`) is `blocks[i]`.

        Query lengths stay; tables get wider where a column asks for it. No table is compared: O(lengths + changes).
        Raises `ValueError` as `update` does, and for rows that the batch does not have.
        """
        if not len(rows) and not len(columns) and not len(blocks):
            return self.update(None, seq_lens, self.query_lens)
        lens = host_int32("seq_lens", seq_lens, 1)
        entries = host_int32("rows", rows, 1), host_int32("columns", columns, 1), host_int32("blocks", blocks, 1)
        as_many = len(entries[0]) == len(entries[1]) == len(entries[2])
        if as_many and self.grow(lens, None, entries):
            return True
        self.cut(put_entries(self.block_tables, *entries), lens, self.query_lens)
        return False

    def same_queries(self, query_lens: Any | None) -> bool:
        """Return whether the given query lengths (None: one each) are those of this plan."""
        if query_lens is None or query_lens is self.query_lens:
            return query_lens is not None or self.decoding
        return np.array_equal(host_int32("query_lens", query_lens, 1), self.query_lens)

    def grow(self, lens: Int32Array, tables: Int32Array | None, entries: Entries | None) -> bool:
        """Move to the given batch if it only grew and the cut still fits; else return False: cut it anew.

        `tables` or `entries` tell what changed in the tables; without either nothing did.
        """
        on_device = self.device_plan
        if on_device is None or not on_device.facts.growable or len(lens) != len(self.seq_lens):
            return False
        on_device.refuse_capture()
        watch, sender = self.watch or self.new_watch(on_device), on_device.sender
        message = sender.take()
        count = watch.compare(lens, tables, message) if entries is None else watch.advance(lens, entries, message)
        if count == NO_GROWTH:
            sender.give_back(message)
            return False
        try:
            sender.send(message, count)
        except BaseException:
            on_device.facts = on_device.facts._replace(growable=0)  # the watch is ahead of the device: cut anew
            raise
        if self.block_tables.shape[1] != watch.state.width:
            self.block_tables = watch.tables
        self.seq_lens, self.fast = lens.copy(), None
        return True

    def new_watch(self, on_device: DevicePlan) -> StepWatch:
        """Return what tells steps that only grow from other batches, from this one on."""
        tables = on_device.host_tables()
        self.watch = StepWatch(
            tables, self.seq_lens, self.spec.block_size, width=self.block_tables.shape[1],
            room=min(tables.shape[1], on_device.table_stride),
        )  # fmt: skip
        return self.watch

    def cut(self, tables: Int32Array, seq_lens: Any, query_lens: Any | None) -> None:
        """Check the batch and make this its plan: cut it into items and upload them (Triton), and keep copies."""
        self.watch = None  # it may have followed a batch that is refused below
        lens, new, starts = checked_batch(tables, seq_lens, query_lens, self.spec)
        if self.capacity is not None:
            self.capacity.check(tables, starts)
        if self.spec.backend == "triton":
            if self.device_plan is None:
                self.device_plan = DevicePlan(self.spec, self.device, self.config_of, self.capacity)
            kernel: TallKernel = "plain" if query_lens is None else self.tall_kernel(new)
            cut = self.cut_to_fit(tables, lens, new, starts, kernel)
            self.device_plan.upload(cut, *tables.shape, watched=kernel == "plain")
            tables, self.fast = self.device_plan.host_tables()[:, : tables.shape[1]], None
        else:
            tables = tables.copy()
        self.block_tables, self.seq_lens, self.query_lens, self.query_starts = tables, lens, new, starts
        self.decoding = query_lens is None or bool((new == 1).all())

    def tall_kernel(self, query_lens: Int32Array) -> TallKernel:
        """Return which kernel will run the tallest tiles; "persistent" is the fast extend kernel (extend_path.py)."""
        if self.capacity is not None or torch.device(self.spec.device).type != "cuda":
            return "plain"
        extends = len(query_lens) and query_lens.max() > DECODE_QUERY_TOKENS
        return "persistent" if extends and extend_config(self.spec, self.device.arch) is not None else "plain"

    def cut_to_fit(
        self, tables: Int32Array, lens: Int32Array, new: Int32Array, starts: Int32Array, kernel: TallKernel
    ) -> NativeCut | NumpyCut:
        """Cut a batch into items; share less where a capacity has no room for the partial states."""
        assert self.device_plan is not None
        device, config_of = self.device_plan.device, self.device_plan.config_of
        gain = 1.0 if self.sharing == "forest" else np.inf
        while True:
            cut = cut_batch(
                tables, lens, new, starts, self.spec, device, config_of, min_gain_bytes=gain, tall_kernel=kernel
            )
            if self.capacity is None or self.capacity.holds(cut.facts):
                return cut
            if gain == np.inf:
                raise ValueError(f"capacity: expected room for {cut.facts.num_parts} parts, got {self.capacity}")
            gain = gain * 64 if gain < 2**40 else np.inf


@functools.cache
def config_function(spec: AttentionSpec, arch: int, table: Callable[..., TileConfig], *, fixed: bool) -> ConfigOf:
    """Return `config_for` of these shapes; one object for each, so that what follows from it can be kept."""
    return functools.partial(config_for, spec, arch, table, fixed=fixed)


def config_for(
    spec: AttentionSpec, arch: int, table: Callable[..., TileConfig], tile_rows: int, *, fixed: bool, tall: bool
) -> TileConfig:
    """Return the launch configuration of one class of tiles; `fixed` plans count as plans with tall tiles."""
    head_dim = max(spec.head_dim, spec.v_head_dim)
    return table(spec.kv_dtype.itemsize, head_dim, tile_rows, arch, tall=tall or fixed)


def device_info(device: torch.device) -> DeviceInfo:
    """Return `DeviceInfo.of(device)`, read once per device."""
    if device not in _DEVICES:
        _DEVICES[device] = DeviceInfo.of(device)
    return _DEVICES[device]


_DEVICES: dict[torch.device, DeviceInfo] = {}


def host_int32(name: str, value: Any, ndim: int) -> Int32Array:
    """Return `value` (ndarray, tensor or nested sequence of ints) as a C-contiguous int32 host array; may be a view.

    Raises `TypeError` for what is no integer, `ValueError` for another number of dimensions or a value beyond int32.
    """
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.size == 0:
        array = array.astype(np.int32).reshape((0,) * ndim if array.ndim != ndim else array.shape)
    if array.dtype.kind not in "iu":
        raise_beyond_int32(name, array)
        raise TypeError(f"{name}: expected integers, got {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimension(s), got shape {array.shape}")
    if array.dtype != np.int32 and array.size and (array.min() < INT32.min or array.max() > INT32.max):
        raise_beyond_int32(name, array)
    return np.ascontiguousarray(array, dtype=np.int32)


def raise_beyond_int32(name: str, array: NDArray[Any]) -> None:
    """Raise `ValueError` if all are whole numbers, one of them beyond int32; numpy keeps the largest as objects."""
    if array.dtype.kind == "O" and not all(isinstance(x, int) for x in array.flat):
        return
    if array.dtype.kind in "iuO":
        bad = next((x for x in array.flat if not INT32.min <= x <= INT32.max), None)
        if bad is not None:
            raise ValueError(f"{name}: expected values from {INT32.min} to {INT32.max} (int32), got {bad}")


def checked_batch(
    tables: Int32Array, seq_lens: Any, query_lens: Any | None, spec: AttentionSpec
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Return lengths, query lengths and query starts as new host arrays that fit the tables and each other."""
    lens = host_int32("seq_lens", seq_lens, 1).copy()
    if query_lens is None:
        check_lengths(tables, lens, None, spec.block_size)
        return lens, np.ones(len(lens), np.int32), np.arange(len(lens) + 1, dtype=np.int32)
    new = host_int32("query_lens", query_lens, 1).copy()
    check_lengths(tables, lens, new, spec.block_size)
    starts = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(new, out=starts[1:])
    return lens, new, starts


def plan_forest(
    block_tables: Any, seq_lens: Any, query_lens: Any | None = None, *, spec: AttentionSpec,
    capacity: PlanCapacity | None = None, sharing: Literal["forest", "none"] = "forest",
) -> ForestPlan:  # fmt: skip
    """Plan attention for a ragged batch: prefill, extend and decode rows in any mixture.

    `block_tables` int `[B, max_blocks]`: physical block ids, read up to what each length needs. `seq_lens` int `[B]`:
    all KV tokens of each sequence, those of this step included. `query_lens` int `[B]`: how many of them are new (the
    query tokens; default 1 each; 0 is allowed). Query token `j` sees the first `seq_len - query_len + j + 1` tokens.

    `capacity` fixes device addresses and launch grids up to a largest batch, for CUDA graphs: capture any operation
    with this plan, `update` it, replay. `sharing="none"` reads shared blocks once per sequence (for comparisons). The
    inputs are copied. O(n log n + table entries); about 0.15 ms for 256 sequences of 4k tokens.
    Raises `ValueError` for lengths that don't fit each other, the tables or the capacity.
    """
    tables = host_int32("block_tables", block_tables, 2)
    if sharing not in ("forest", "none"):
        raise ValueError(f"sharing: expected 'forest' or 'none', got {sharing!r}")
    plan = ForestPlan(spec, capacity, sharing)
    plan.cut(tables, seq_lens, query_lens)
    return plan


def check_lengths(tables: Int32Array, lens: Int32Array, new: Int32Array | None, block_size: int) -> None:
    """Check that tables, lengths and query lengths (None: one each) describe one batch."""
    if len(lens) != len(tables) or (new is not None and len(new) != len(tables)):
        raise ValueError(
            f"seq_lens, query_lens: expected {len(tables)} entries as block_tables has rows, "
            f"got {len(lens)} and {len(lens if new is None else new)}"
        )
    if new is not None and new.size and new.min() < 0:
        raise ValueError(f"query_lens: expected no negative length, got {new.min()}")
    room = min(tables.shape[1] * block_size, INT32.max)
    if lens.size and int(lens.view(np.uint32).max()) > room:  # where a negative length is the largest of all
        if lens.min() < 0:
            raise ValueError(f"seq_lens: expected no negative length, got {lens.min()}")
        i = int(lens.argmax())
        raise ValueError(
            f"block_tables: row {i} holds {tables.shape[1]} blocks of {block_size} tokens, seq_lens[{i}] is {lens[i]}"
        )
