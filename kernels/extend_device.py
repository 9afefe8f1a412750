"""Device code of the fast extend path on Hopper: one persistent Gluon kernel with two producer warps and two consumers.

A work entry is a tile of 128 packed query rows times a run of tokens of one block table, for one KV head. One producer
warp gathers the pages of K, one those of V, into swizzled shared memory: a bulk tensor copy for each page and 64
columns. Each consumer warpgroup owns 64 rows and keeps one asynchronous wgmma ahead: the scores of the next tile run
under the softmax of the present one. Keys are walked from the last to the first, so that masks come first.
The two-stage overlap follows FlashAttention-3 (arXiv 2407.08608).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as wait_mma
from triton.language.extra.cuda import gdc_launch_dependents

from radixpool.kernels.extend_device_tile import (
    ENTRY,
    LOG2E,
    NEG_INF,
    ROWS,
    load_queries,
    mask_scores,
    rescale,
    soften,
    store_out,
    store_part,
    sum_in_thread,
)

BOX = gl.constexpr(64)  # columns of one bulk copy: 128 bytes, one swizzle row
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)
UNSPECIALISED = ["stride_table", "window", "stride_ks_head", "stride_vs_head"]
# Names that Triton changed between 3.6 and 3.9.
copy_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
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
    STAGES: gl.constexpr, WINDOW: gl.constexpr, SHIFT: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """Gather the pages of K, or of V, for every tile of every entry.

    SHIFT: see `copy_tile`. The barrier that frees a tile frees the values of the tile before: BEHIND is 1 for V.
    """
    PAGES: gl.constexpr = BN // PAGE
    COLS: gl.constexpr = COLUMNS // BOX
    BITS: gl.constexpr = buffer.dtype.primitive_bitwidth
    box_layout: gl.constexpr = gl.NVMMASharedLayout(BOX * BITS // 8, BITS, rank=4)
    boxes = view_as(buffer, [STAGES * COLS * PAGES, 1, 1, PAGE, BOX], box_layout)
    step = 0
    for entry in range(first, last):
        record = ENTRIES + entry * ENTRY
        table = TABLES + gl.load(record + 2).to(gl.int64) * stride_table
        end = gl.load(record + 4)
        head = gl.load(record + 6)
        begin = first_key(gl.load(record + 3), end, gl.load(record + 7), window, STEP, WINDOW)
        tiles = (end - begin + BN - 1) // BN
        for i in range(tiles):
            pos = begin + (tiles - 1 - i) * BN
            stage = step % STAGES
            barrier = full.index(stage)
            first_box = stage * COLS * PAGES
            turn = step + BEHIND
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


@gluon.jit
def first_scores(q_tile, k_buf, k_full, empty, step, zero, STAGES: gl.constexpr):
    """Return the raw scores of an entry's first tile (its last keys)."""
    stage = step % STAGES
    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    token = warpgroup_mma(q_tile, k_buf.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = wait_mma(0, deps=[token])
    mbarrier.arrive(empty.index(stage), count=1)
    return s


@gluon.jit
def one_step(
    q_tile, k_buf, v_buf, barriers, acc, p16, top, total, done, more, pos, end, limit, lowest, qk_scale,
    soft_cap, zero, PAGE: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CAP: gl.constexpr,
    WINDOW: gl.constexpr, MASKED: gl.constexpr, s_layout: gl.constexpr, o_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """Scores of tile `done + 1` and product of tile `done`, both in flight, then the softmax of the new scores."""
    k_full, v_full, empty = barriers
    stage = done % STAGES
    ahead = (done + 1) % STAGES
    s_token = warpgroup_mma(q_tile, k_buf.index(ahead).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), (done // STAGES) & 1)
    o_token = warpgroup_mma(p16, v_buf.index(stage), acc, is_async=True)
    s = wait_mma(1, deps=[s_token])
    if CAP:
        s = soft_cap * (1.0 - 2.0 / (gl.exp2(s * qk_scale) + 1.0))
    if MASKED:
        s = mask_scores(s, pos, end, limit, lowest, PAGE, BN, WINDOW, s_layout)
    p, top, total, shrink = soften(s, top, total, qk_scale, BN, MASKED, CAP)
    next16 = gl.convert_layout(p.to(k_buf.dtype), p_layout)
    # Waiting for the next keys here, not at the top, keeps ptxas from moving the softmax behind the product's wait.
    mbarrier.wait(k_full.index((done + 2) % STAGES), ((done + 2) // STAGES) & 1, pred=more)
    acc, p16, next16 = wait_mma(0, deps=[o_token, p16, next16])
    # One barrier frees the keys of the new scores and the values of the product: each costs a barrier of the warps too.
    mbarrier.arrive(empty.index(ahead), count=1)
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))
    if not MASKED:
        acc = rescale(acc, shrink, acc.shape[1])
    else:
        acc = acc * shrink[:, None]
    return acc, next16, top, total


@gluon.jit
def consume(
    buffers, barriers, pointers, numbers, part_id: gl.constexpr, HQ: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, BD: gl.constexpr, BDV: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    HEAD_SCALES: gl.constexpr, CAP: gl.constexpr, WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Compute 64 rows of every entry."""
    q_buf, k_buf, v_buf = buffers
    k_full, v_full, empty = barriers
    ENTRIES, ORDER, LIMITS, Q, OUT, LSE, PART, PART_LSE, K_SCALE, V_SCALE, SINKS = pointers
    first, last, scale, v_factor, soft_cap, window, row_stride, head_stride, ks_stride, vs_stride = numbers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BDV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    load_layout: gl.constexpr = row_tile_layout(BD)
    store_layout: gl.constexpr = row_tile_layout(BDV)
    q_tile = q_buf.index(part_id)
    zero = gl.zeros([ROWS, BN], gl.float32, s_layout)
    step = 0
    q = load_queries(Q, ENTRIES, ORDER, first, row_stride, head_stride, part_id, G, D, BD, load_layout)
    for entry in range(first, last):
        q_tile.store(q)
        fence_async_shared()
        thread_barrier()
        record = ENTRIES + entry * ENTRY
        row_start = gl.load(record)
        num_rows = gl.load(record + 1)
        end = gl.load(record + 4)
        part = gl.load(record + 5)
        head = gl.load(record + 6)
        shortest = gl.load(record + 7)
        begin = first_key(gl.load(record + 3), end, shortest, window, PAGE, WINDOW)
        qk_scale = scale * LOG2E
        if CAP:
            # tanh(y) = 1 - 2 / (exp(2 y) + 1), with the scale folded in
            qk_scale = 2.0 * LOG2E * scale / soft_cap
        out_scale = v_factor
        if HEAD_SCALES:
            qk_scale = qk_scale * gl.load(K_SCALE + head * ks_stride)
            out_scale = out_scale * gl.load(V_SCALE + head * vs_stride)
        m = part_id * ROWS + gl.arange(0, ROWS, layout=row_layout)
        limit = gl.load(LIMITS + row_start + m // G, mask=m // G < num_rows, other=0)
        lowest = limit - window
        limit = gl.minimum(limit, end)
        tiles = (end - begin + BN - 1) // BN
        s = first_scores(q_tile, k_buf, k_full, empty, step, zero, STAGES)
        if CAP:
            s = soft_cap * (1.0 - 2.0 / (gl.exp2(s * qk_scale) + 1.0))
        s = mask_scores(s, begin + (tiles - 1) * BN, end, limit, lowest, PAGE, BN, WINDOW, s_layout)
        top = gl.full([ROWS], NEG_INF, gl.float32, row_layout)
        total = sum_in_thread(zero, BN)
        acc = gl.zeros([ROWS, BDV], gl.float32, o_layout)
        p, top, total, _ = soften(s, top, total, qk_scale, BN, True, CAP)
        p16 = gl.convert_layout(p.to(k_buf.dtype), p_layout)
        mbarrier.wait(k_full.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1, pred=tiles > 1)
        masked = tiles
        if not WINDOW:
            masked = tiles - gl.maximum(gl.minimum(shortest, end // PAGE * PAGE) - begin, 0) // BN
        for i in range(1, masked):
            acc, p16, top, total = one_step(
                q_tile, k_buf, v_buf, barriers, acc, p16, top, total, step + i - 1, i + 1 < tiles,
                begin + (tiles - 1 - i) * BN, end, limit, lowest, qk_scale, soft_cap, zero, PAGE, BN, STAGES, CAP,
                WINDOW, True, s_layout, o_layout, p_layout,
            )  # fmt: skip
        if not WINDOW:
            for i in range(gl.maximum(masked, 1), tiles):
                acc, p16, top, total = one_step(
                    q_tile, k_buf, v_buf, barriers, acc, p16, top, total, step + i - 1, i + 1 < tiles,
                    begin + (tiles - 1 - i) * BN, end, limit, lowest, qk_scale, soft_cap, zero, PAGE, BN, STAGES, CAP,
                    WINDOW, False, s_layout, o_layout, p_layout,
                )  # fmt: skip
        step += tiles
        stage = (step - 1) % STAGES
        mbarrier.wait(v_full.index(stage), ((step - 1) // STAGES) & 1)
        o_token = warpgroup_mma(p16, v_buf.index(stage), acc, is_async=True)
        # The next entry's queries travel while this one's last product and its epilogue run.
        q = load_queries(
            Q, ENTRIES, ORDER, gl.minimum(entry + 1, last - 1), row_stride, head_stride, part_id, G, D, BD, load_layout
        )  # fmt: skip
        acc, p16 = wait_mma(0, deps=[o_token, p16])
        total_of_row = gl.convert_layout(gl.sum(total, 1), row_layout)
        if part >= 0:
            store_part(
                acc, top, total_of_row, out_scale, PART, PART_LSE, part, num_rows, head, part_id, HQ, G, DV, BDV,
                row_layout, o_layout,
            )  # fmt: skip
        else:
            store_out(
                acc, top, total_of_row, out_scale, OUT, LSE, ORDER + row_start, SINKS, num_rows, head, part_id, HQ, G,
                DV, BDV, HAS_SINKS, HAS_LSE, row_layout, o_layout, store_layout,
            )  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALISED)
def extend_tiles(
    k_desc, v_desc, Q, OUT, LSE, PART, PART_LSE, TABLES, ENTRIES, STARTS, ORDER, LIMITS, K_SCALE, V_SCALE, SINKS,
    scale, v_factor, soft_cap, window, stride_q_row, stride_q_head, stride_table, stride_ks_head, stride_vs_head,
    HQ: gl.constexpr, G: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BD: gl.constexpr, BDV: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    HEAD_SCALES: gl.constexpr, CAP: gl.constexpr, WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Run the entries STARTS[program] to STARTS[program + 1]; grid (programs,), 4 + 4 + 1 + 1 warps."""
    gdc_launch_dependents()
    dtype: gl.constexpr = k_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_buf = gl.allocate_shared_memory(dtype, [2, ROWS, BD], q_layout)
    k_buf = gl.allocate_shared_memory(dtype, [STAGES, BN, BD], q_layout)
    v_buf = gl.allocate_shared_memory(dtype, [STAGES, BN, BDV], q_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    first = gl.load(STARTS + gl.program_id(0))
    last = gl.load(STARTS + gl.program_id(0) + 1)
    buffers = (q_buf, k_buf, v_buf)
    barriers = (k_full, v_full, empty)
    pointers = (ENTRIES, ORDER, LIMITS, Q, OUT, LSE, PART, PART_LSE, K_SCALE, V_SCALE, SINKS)
    numbers = (
        first, last, scale, v_factor, soft_cap, window, stride_q_row, stride_q_head, stride_ks_head, stride_vs_head
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consume, (buffers, barriers, pointers, numbers, gl.constexpr(0), HQ, G, D, DV, BD, BDV, PAGE, BN, STAGES,
                       HEAD_SCALES, CAP, WINDOW, HAS_SINKS, HAS_LSE)),
            (consume, (buffers, barriers, pointers, numbers, gl.constexpr(1), HQ, G, D, DV, BD, BDV, PAGE, BN, STAGES,
                       HEAD_SCALES, CAP, WINDOW, HAS_SINKS, HAS_LSE)),
            (produce, (k_desc, k_buf, k_full, empty, ENTRIES, TABLES, first, last, stride_table, window, BLOCK_SIZE,
                       PAGE, PAGE, BN, BD, BOX, STAGES, WINDOW, True, 0)),
            (produce, (v_desc, v_buf, v_full, empty, ENTRIES, TABLES, first, last, stride_table, window, BLOCK_SIZE,
                       PAGE, PAGE, BN, BDV, BOX, STAGES, WINDOW, True, 1)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
