"""`build_forest` and `pack` in C: the same cut, bit for bit; numpy's where there is no C compiler.

See `forest_paths.c`. A batch is cut first, which tells how much memory its plan takes, and packed into that then.
"""

from __future__ import annotations

import ctypes
import functools
import struct

from torch import Tensor

from radixpool.kernels import forest as numpy_cut
from radixpool.kernels import forest_pack, launch, token_cuts
from radixpool.kernels.forest import Forest, TallKernel
from radixpool.kernels.forest_pack import CutFacts, Layout
from radixpool.kernels.forest_paths import Array
from radixpool.kernels.launch import TILE_ROWS, ConfigOf, DeviceInfo
from radixpool.kernels.native import load
from radixpool.kernels.spec import AttentionSpec

SOURCES = ("forest_paths", "forest_cut", "forest_pack", "forest_step")
CONSTANTS = {
    numpy_cut: ("RECORD", "ROW_RECORD", "JOIN_SHARE", "TALL_COST", "BESIDE_SHARE", "TALL_COST_APART",
                "NARROW_COST_APART", "TALL_SHARE", "NARROW_SHARE"),
    token_cuts: ("ITEM_OVERHEAD_TOKENS", "MIN_PIECE_TOKENS", "CUT_TOKENS", "WHOLE_TILE_SLACK"),
    launch: ("TALL_ROWS",),
    forest_pack: ("ALIGN",),
}  # fmt: skip
POINTER, INT = ctypes.c_void_p, ctypes.c_int64
FACTS = struct.Struct(f"{len(CutFacts._fields)}q")
PLACES = struct.Struct(f"{len(forest_pack.SECTIONS) + 1 + len(TILE_ROWS)}q")


class Batch(ctypes.Structure):
    """What the C function reads; mirrors `Batch` of forest_paths.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tables", "lens", "query_lens", "query_starts")),
        *((name, ctypes.c_int64) for name in ("num_seqs", "width", "stride", "block_size", "group_size",
                                              "kv_bytes_per_token", "v_head_dim", "item_overhead_bytes")),
        ("min_gain_bytes", ctypes.c_double),
        ("programs", ctypes.c_int64 * 2 * 2 * len(TILE_ROWS)),
        *((name, ctypes.c_int64) for name in ("persistent", "num_sms", "num_kv_heads", "sm_step")),
        *((name, ctypes.c_int64 * len(TILE_ROWS)) for name in ("per_sm", "with_tall", "beside_tall")),
    )  # fmt: skip


def constants() -> tuple[tuple[str, float], ...]:
    """Return the macros that the C code is compiled with: the constants of its definition in numpy."""
    return tuple((name, getattr(module, name)) for module, names in CONSTANTS.items() for name in names)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled code with its signatures, or None."""
    found = load(SOURCES, constants())
    if found is not None:
        for name, result, arguments in (
            ("cut", POINTER, (POINTER, POINTER)),
            ("pack", None, (POINTER, POINTER, POINTER)),
            ("drop", None, (POINTER,)),
            ("compare", INT, (POINTER, POINTER, POINTER, INT, POINTER)),
            ("advance", INT, (POINTER, POINTER, POINTER, POINTER, POINTER, INT, POINTER)),
            ("send", INT, (POINTER, POINTER, POINTER, INT, INT)),
        ):
            function = getattr(found, f"radixpool_{name}")
            function.restype, function.argtypes = result, arguments
    return found


def address(array: Array) -> int:
    """Return where an array lies; in a quarter of the time that `array.ctypes` takes, where it may be written."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]  # it is a buffer
    except (TypeError, ValueError):  # read-only, or empty
        return int(array.ctypes.data)


@functools.lru_cache(maxsize=64)
def fixed_fields(
    spec: AttentionSpec, device: DeviceInfo, config_of: ConfigOf, min_gain_bytes: float,
    item_overhead_bytes: int, tall_kernel: TallKernel,
) -> bytes:  # fmt: skip
    """Return a `Batch` without its arrays: what stays the same from step to step."""
    batch = Batch(
        block_size=spec.block_size, group_size=spec.group_size, kv_bytes_per_token=spec.kv_bytes_per_token,
        v_head_dim=spec.v_head_dim, item_overhead_bytes=item_overhead_bytes, min_gain_bytes=min_gain_bytes,
        persistent=tall_kernel == "persistent", num_sms=device.num_sms, num_kv_heads=spec.num_kv_heads,
        sm_step=numpy_cut.sm_step(config_of, spec),
    )  # fmt: skip
    for h, height in enumerate(TILE_ROWS):
        batch.per_sm[h] = config_of(height, tall=height == TILE_ROWS[-1]).ctas_per_sm
        with_tall = config_of(height, tall=True)
        batch.with_tall[h], batch.beside_tall[h] = with_tall.ctas_per_sm, with_tall.ctas_beside
        for tall in (0, 1):
            for beside in (0, 1):
                batch.programs[h][tall][beside] = numpy_cut.programs_of(
                    height, config_of, spec, device, tall=bool(tall), beside=bool(beside)
                )
    return bytes(batch)


class NumpyCut:
    """A batch cut by numpy, to be packed once its place is known."""

    __slots__ = ("facts", "forest", "lens", "tables")

    def __init__(self, forest: Forest, tables: Array, lens: Array) -> None:
        self.forest, self.tables, self.lens, self.facts = forest, tables, lens, CutFacts.of(forest)

    def pack(self, layout: Layout, host: Tensor) -> None:
        """Write all sections."""
        forest_pack.pack(self.forest, layout, self.tables, self.lens, host.numpy())


class NativeCut:
    """A batch cut in C, to be packed once its place is known. It owns C memory."""

    __slots__ = ("arrays", "batch", "code", "facts", "handle", "sizes")

    def __init__(self, code: ctypes.CDLL, fixed: bytes, arrays: tuple[Array, Array, Array, Array]) -> None:
        self.code, self.arrays, self.handle = code, arrays, None
        self.batch, self.sizes = Batch.from_buffer_copy(fixed), (ctypes.c_char * FACTS.size)()
        tables, lens, query_lens, query_starts = arrays
        batch = self.batch
        batch.tables, batch.lens = address(tables), address(lens)
        batch.query_lens, batch.query_starts = address(query_lens), address(query_starts)
        (batch.num_seqs, batch.width), batch.stride = tables.shape, tables.strides[0] // tables.itemsize
        self.handle = code.radixpool_cut(ctypes.addressof(batch), ctypes.addressof(self.sizes))
        if not self.handle:
            raise MemoryError("plan: no memory for the work items")
        self.facts = CutFacts._make(FACTS.unpack(self.sizes))

    def pack(self, layout: Layout, host: Tensor) -> None:
        """Write all sections."""
        places = PLACES.pack(*layout.begins, layout.table_stride, *layout.grids)
        self.code.radixpool_pack(self.handle, places, host.data_ptr())

    def __del__(self) -> None:
        if self.handle:
            self.code.radixpool_drop(self.handle)


def cut_batch(
    tables: Array, lens: Array, query_lens: Array, query_starts: Array, spec: AttentionSpec, device: DeviceInfo,
    config_of: ConfigOf, *, min_gain_bytes: float = 1.0,
    tall_kernel: TallKernel = "plain",
) -> NativeCut | NumpyCut:  # fmt: skip
    """Cut a batch as `forest.build_forest` does; in C where there is a compiler. int32 arrays, contiguous rows."""
    code = library()
    if code is None:
        forest = numpy_cut.build_forest(
            tables, lens, query_lens, query_starts, spec, device, config_of, min_gain_bytes=min_gain_bytes,
            tall_kernel=tall_kernel,
        )  # fmt: skip
        return NumpyCut(forest, tables, lens)
    fixed = fixed_fields(spec, device, config_of, min_gain_bytes, numpy_cut.ITEM_OVERHEAD_BYTES, tall_kernel)
    return NativeCut(code, fixed, (tables, lens, query_lens, query_starts))
