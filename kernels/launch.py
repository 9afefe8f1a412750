"""Launch decisions: a pure function from shape and device to configuration, over a shipped table.

`tuning.json` is made by `bench/tune.py` on a card; where it has no entry for an architecture, its `default` list is
used. Nothing is timed while serving.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Protocol

import torch

from radixpool.kernels.spec import AttentionSpec

TILE_ROWS = (16, 32, 64, 128)
TALL_ROWS = 64  # tiles from here on are bound by arithmetic, narrower ones by memory
SHARED_MEMORY_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What launch decisions and plans need to know of a device. `arch` is the compute capability times ten."""

    arch: int
    num_sms: int
    pdl: bool

    @classmethod
    def of(cls, device: torch.device) -> DeviceInfo:
        """Read a CUDA device; the CPU (interpreter) counts as a small one without dependent launches."""
        if device.type != "cuda":
            return cls(arch=90, num_sms=4, pdl=False)
        p = torch.cuda.get_device_properties(device)
        return cls(arch=p.major * 10 + p.minor, num_sms=p.multi_processor_count, pdl=p.major >= 9)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one class of tiles runs.

    `block_n` tokens a step, `num_warps`, `num_stages` of the load pipeline, `ctas_per_sm` resident programs the plan
    fills, `split` runs whole tiles without masks first, `max_registers` 0: no cap.
    `ctas_beside` are the resident programs where a taller class runs at the same time.
    """

    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int
    split: bool = False
    max_registers: int = 0
    ctas_beside: int = 1


class ConfigOf(Protocol):
    """The launch configurations of one plan; one object for equal plans, so that what follows from it can be kept."""

    def __call__(self, tile_rows: int, *, tall: bool) -> TileConfig:
        """Return the configuration of one class of tiles; `tall`: the plan has tall tiles too."""

    def __hash__(self) -> int: ...


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n` (n >= 1).

    >>> [next_power_of_two(n) for n in (1, 3, 16, 80)]
    [1, 4, 16, 128]
    """
    return 1 << (n - 1).bit_length()


@functools.cache
def tuning_table() -> dict[str, dict[str, dict[str, int | bool]]]:
    """Return the shipped table: architecture -> "kv bytes/head dim/tile rows" -> TileConfig fields."""
    text = resources.files("radixpool.kernels").joinpath("tuning.json").read_text()
    table: dict[str, dict[str, dict[str, int | bool]]] = json.loads(text)["tiles"]
    return table


@functools.cache
def tile_config(kv_bytes: int, head_dim: int, tile_rows: int, arch: int, *, tall: bool = False) -> TileConfig:
    """Return the configuration of one class of tiles, made to fit the shared memory of `arch`.

    `tall`: the plan has tall tiles too (64 rows or more); narrow ones then have entries of their own, named `rows+`.
    """
    block_d = max(16, next_power_of_two(head_dim))
    table = tuning_table()
    entries = table.get(str(arch), table["default"])
    names = [f"{tile_rows}+", f"{tile_rows}"] if tall and tile_rows < 64 else [f"{tile_rows}"]
    keys = [f"{size}/{width}/{name}" for name in names for size in (kv_bytes, "*") for width in (block_d, "*")]
    found = next(t[key] for key in keys for t in (entries, table["default"]) if key in t)
    config = TileConfig(**found)  # type: ignore[arg-type]
    return fit_shared_memory(config, kv_bytes, block_d, tile_rows, SHARED_MEMORY_BYTES.get(arch, 99 * 1024))


def fit_shared_memory(config: TileConfig, kv_bytes: int, block_d: int, tile_rows: int, limit: int) -> TileConfig:
    """Return `config` with fewer stages, then narrower steps, until K, V and Q tiles fit into `limit` bytes."""
    fields = {name: getattr(config, name) for name in TileConfig.__slots__}

    def bytes_needed() -> int:
        stage = int(fields["block_n"]) * block_d * 2 * kv_bytes
        return stage * int(fields["num_stages"]) + tile_rows * (block_d + int(fields["block_n"])) * max(2, kv_bytes)

    while bytes_needed() > limit and fields["num_stages"] > 2:
        fields["num_stages"] -= 1
    while bytes_needed() > limit and fields["block_n"] > 16:
        fields["block_n"] //= 2
    return TileConfig(**fields)


def uses_pairs(spec: AttentionSpec, tile_rows: int, arch: int, *, interpreted: bool) -> bool:
    """Return whether fp8 KV is read as pairs (int16), which lets `ldmatrix` transpose it: narrow tiles, on a GPU."""
    return (
        spec.kv_dtype == torch.float8_e4m3fn and tile_rows < 64 and arch >= 89 and not interpreted
        and spec.head_dim % 2 == 0 and spec.v_head_dim % 2 == 0 and min(spec.head_dim, spec.v_head_dim) >= 32
    )  # fmt: skip


def ctas_per_head(
    config: TileConfig, spec: AttentionSpec, device: DeviceInfo, *, beside: bool = False
) -> int:  # fmt: skip
    """Return how many programs per KV head fill the device once, or the room `beside` the programs of tall tiles."""
    per_sm = config.ctas_beside if beside else config.ctas_per_sm
    return max(1, device.num_sms * per_sm // spec.num_kv_heads)


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """How partial states are joined.

    A program joins `heads` query heads of a row; `groups` of threads share out the row's parts, and each has the loads
    of `block_n` of them in flight. `watched`: programs wait for the parts of their row, not for all that attend; with
    many parts looking at them takes longer than that wait, and beside tall tiles there is no room to wait in.
    """

    heads: int
    groups: int
    block_n: int
    num_warps: int = 4
    watched: bool = False


FEW_PARTS = MergeConfig(2, 1, 8, num_warps=2, watched=True)
SOME_PARTS, MANY_PARTS = MergeConfig(4, 1, 16), MergeConfig(1, 4, 16)
EVICT_FIRST_BYTES = 200 * 2**20  # measured on an H200 (50 MiB of L2): a gain up to 192 MiB, a loss from 512 MiB on


def merge_config(parts_per_row: float) -> MergeConfig:
    """Return how to join rows of so many partial states, on average.

    >>> [merge_config(n) == c for n, c in ((4, FEW_PARTS), (9.3, SOME_PARTS), (64, MANY_PARTS))]
    [True, True, True]
    """
    if parts_per_row <= FEW_PARTS.block_n:
        return FEW_PARTS
    return SOME_PARTS if parts_per_row <= SOME_PARTS.block_n else MANY_PARTS


def merge_programs(config: MergeConfig, num_q_heads: int) -> int:
    """Return how many programs join the heads of one row.

    >>> merge_programs(FEW_PARTS, 32), merge_programs(FEW_PARTS, 6), merge_programs(MANY_PARTS, 8)
    (16, 3, 8)
    """
    return -(-num_q_heads // min(config.heads, next_power_of_two(num_q_heads)))


def evicts_first(kv_bytes: int) -> bool:
    """Return whether a launch that reads so much KV once should leave the L2 cache to others.

    What lies dirty there then need not be written back meanwhile. In a long launch it is all the same, only later and
    piece by piece.
    """
    return kv_bytes <= EVICT_FIRST_BYTES


def merge_config_for_any(max_rows: int, spec: AttentionSpec, device: DeviceInfo) -> MergeConfig:
    """Return how to join the rows of any batch of up to `max_rows`, if two programs an SM share out each KV head."""
    return merge_config(max(SOME_PARTS.block_n, 2 * device.num_sms / (spec.num_kv_heads * max_rows)))
