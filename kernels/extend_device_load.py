"""What the fast extend kernels share: two producer warps, and the barriers between them and the consumers.

One producer gathers the keys of each tile, one the values. Tile `n` of the keys arrives together with the values of
tile `n - 1`, which the same step multiplies, under one barrier (`full`), and one barrier (`empty`) frees both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from radixpool.kernels.extend_device_tile import ENTRY

BOX = gl.constexpr(64)  # columns of one bulk copy: 128 bytes, one swizzle row
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)
UNSPECIALISED = ["stride_table", "window", "stride_ks_head", "stride_vs_head"]
# Names that Triton changed between 3.6 and 3.9.
copy_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
NEW_NAMES = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.constexpr_function
def row_tile_layout(columns):
    """Return a register layout whose threads hold 16 bytes of a row each, whole rows of `columns` side by side."""
    wide = min(16, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // wide, wide], [4, 1], [1, 0])


@gluon.jit
def view_as(buffer, shape: gl.constexpr, layout: gl.constexpr):
    """Return the same shared memory under another shape and layout."""
    if NEW_NAMES:
        view = buffer.reinterpret(buffer.dtype, shape, layout)
    else:
        view = buffer._reinterpret(buffer.dtype, shape, layout)
    return view


@gluon.jit
def first_key(begin, end, shortest, window, STEP: gl.constexpr, WINDOW: gl.constexpr):
    """Return where an entry's keys begin: with a window, at the step of the first key that any row may see."""
    if WINDOW:
        begin += gl.maximum(gl.minimum(shortest - window, end - 1) - begin, 0) // STEP * STEP
    return begin


@gluon.jit
def copy_tile(
    desc, boxes, barrier, table, pos, end, head, first_box, BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr,
    PAGES: gl.constexpr, COLS: gl.constexpr, BOX: gl.constexpr, LAST: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    """Start the copies of one tile; its boxes lie side by side, BOX columns each, as wgmma reads them.

    With LAST the tile holds the entry's end: the last page is shifted to end there. What then lies before its block is
    out of bounds and filled with zeros by the copy engine, as pages past the end are; what lies inside it is valid
    data that the consumers mask. So a NaN past the end never reaches shared memory.
    """
    for p in gl.static_range(PAGES):
        at = pos + p * PAGE
        if LAST:
            live = at < end
            page = gl.load(table + gl.where(live, at, 0) // BLOCK_SIZE)
            offset = at % BLOCK_SIZE
            if SHIFT:
                offset -= gl.maximum(at + PAGE - end, 0)
            offset = gl.where(live, offset, BLOCK_SIZE)
        else:
            page = gl.load(table + at // BLOCK_SIZE)
            offset = at % BLOCK_SIZE
        for c in gl.static_range(COLS):
            copy_box(desc, [page, head, offset, c * BOX], barrier, boxes.index(first_box + p + c * PAGES))


@gluon.jit
def produce(
    desc, buffer, full, empty, ENTRIES, TABLES, first, last, stride_table, window, BLOCK_SIZE: gl.constexpr,
    PAGE: gl.constexpr, STEP: gl.constexpr, BN: gl.constexpr, COLUMNS: gl.constexpr, BOX: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, WINDOW: gl.constexpr, SHIFT: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """Gather the pages of K, or of V, for every tile of every entry into one of SLOTS tiles of `buffer`.

    SHIFT: see `copy_tile`. Keys of a tile arrive and leave with the values of the tile before: BEHIND is 1 for V.
    """
    PAGES: gl.constexpr = BN // PAGE
    COLS: gl.constexpr = COLUMNS // BOX
    BITS: gl.constexpr = buffer.dtype.primitive_bitwidth
    box_layout: gl.constexpr = gl.NVMMASharedLayout(BOX * BITS // 8, BITS, rank=4)
    boxes = view_as(buffer, [SLOTS * COLS * PAGES, 1, 1, PAGE, BOX], box_layout)
    step = 0
    if BEHIND:
        mbarrier.arrive(full.index(0), count=1)  # there are no values before the first tile
    for entry in range(first, last):
        record = ENTRIES + entry * ENTRY
        table = TABLES + gl.load(record + 2).to(gl.int64) * stride_table
        end = gl.load(record + 4)
        head = gl.load(record + 6)
        begin = first_key(gl.load(record + 3), end, gl.load(record + 7), window, STEP, WINDOW)
        tiles = (end - begin + BN - 1) // BN
        for i in range(tiles):
            pos = begin + (tiles - 1 - i) * BN
            barrier = full.index((step + BEHIND) % STAGES)
            first_box = step % SLOTS * COLS * PAGES
            turn = step + BEHIND + STAGES - SLOTS
            mbarrier.wait(empty.index(turn % STAGES), ((turn // STAGES) & 1) ^ 1)
            mbarrier.expect(barrier, BN * COLUMNS * BITS // 8)
            if i == 0:
                copy_tile(
                    desc, boxes, barrier, table, pos, end, head, first_box, BLOCK_SIZE, PAGE, PAGES, COLS, BOX, True,
                    SHIFT,
                )  # fmt: skip
            else:
                copy_tile(
                    desc, boxes, barrier, table, pos, end, head, first_box, BLOCK_SIZE, PAGE, PAGES, COLS, BOX, False,
                    SHIFT,
                )  # fmt: skip
            step += 1
    if not BEHIND:
        # the last values have no keys beside them
        mbarrier.wait(empty.index(step % STAGES), ((step // STAGES) & 1) ^ 1)
        mbarrier.arrive(full.index(step % STAGES), count=1)


@gluon.jit
def produce_chunks(
    desc, buffer, full, empty, ENTRIES, RUNS, PLACES, first, last, window, BN: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Copy the turned values of every tile of every entry, as `produce` does for V: one bulk copy each."""
    box_layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=4)
    boxes = view_as(buffer, [SLOTS, 1, 1, COLUMNS, BN], box_layout)
    step = 0
    mbarrier.arrive(full.index(0), count=1)
    for entry in range(first, last):
        record = ENTRIES + entry * ENTRY
        start = gl.load(record + 3)
        end = gl.load(record + 4)
        head = gl.load(record + 6)
        begin = first_key(start, end, gl.load(record + 7), window, BN, WINDOW)
        places = PLACES + gl.load(RUNS + entry) + (begin - start) // BN
        tiles = (end - begin + BN - 1) // BN
        for i in range(tiles):
            barrier = full.index((step + 1) % STAGES)
            chunk = gl.load(places + tiles - 1 - i)
            turn = step + 1 + STAGES - SLOTS
            mbarrier.wait(empty.index(turn % STAGES), ((turn // STAGES) & 1) ^ 1)
            mbarrier.expect(barrier, BN * COLUMNS)
            copy_box(desc, [chunk, head, 0, 0], barrier, boxes.index(step % SLOTS))
            step += 1


@gluon.jit
def make_barriers(STAGES: gl.constexpr):
    """Return the rings of barriers that say which tiles are loaded, and which are read by both consumers."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=2)
    return full, empty
