"""Device code of the fast extend path on Hopper: one persistent Gluon kernel with a producer warp and two consumers.

A work entry is a tile of 128 packed query rows times a run of tokens of one block table, for one KV head. The producer
copies pages into swizzled shared memory, one bulk tensor copy per page and 64 columns; each consumer warpgroup owns 64
rows and keeps one asynchronous wgmma ahead: the scores of the next tile overlap the output product of the present one.
Keys are walked from the last to the first, so masks come first. Scores live in base 2, as in `device_attend.py`.
The two-stage overlap follows FlashAttention-3 (arXiv 2407.08608).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as wait_mma

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
NEG_INF = gl.constexpr(float("-inf"))
ROWS = gl.constexpr(64)  # rows of one consumer: the M of one wgmma
BOX = gl.constexpr(64)  # columns of one bulk copy: 128 bytes, one swizzle row
# Fields of one entry; see extend_plan.py.
ENTRY = gl.constexpr(8)
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
def first_key(begin, end, shortest, window, PAGE: gl.constexpr, WINDOW: gl.constexpr):
    """Return where an entry's keys begin: with a window, at the page of the first key that any row may see."""
    if WINDOW:
        lowest = gl.maximum(shortest - window, 0) // PAGE * PAGE
        begin = gl.minimum(gl.maximum(begin, lowest), (end - 1) // PAGE * PAGE)
    return begin


@gluon.jit
def copy_page(desc, boxes, barrier, page, head, offset, box, PAGES: gl.constexpr, COLS: gl.constexpr):
    """Start the copies of one page; boxes of one stage lie column half by column half, as wgmma reads them."""
    for c in gl.static_range(COLS):
        copy_box(desc, [page, head, offset, c * BOX], barrier, boxes.index(box + c * PAGES))


@gluon.jit
def produce(
    k_desc, v_desc, k_buf, v_buf, k_full, k_empty, v_full, v_empty, ENTRIES, TABLES, first, last, stride_table, window,
    BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, BD: gl.constexpr, BDV: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Gather pages for every tile of every entry. Rows past an entry's end come as zeros: a NaN there can't spread.

    The last page is shifted so that it ends where the entry ends; what then lies before the block is out of bounds and
    filled with zeros by the copy engine, and what lies inside it is valid data that the consumers mask.
    """
    PAGES: gl.constexpr = BN // PAGE
    K_COLS: gl.constexpr = BD // BOX
    V_COLS: gl.constexpr = BDV // BOX
    box_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    k_boxes = view_as(k_buf, [STAGES * K_COLS * PAGES, 1, 1, PAGE, BOX], box_layout)
    v_boxes = view_as(v_buf, [STAGES * V_COLS * PAGES, 1, 1, PAGE, BOX], box_layout)
    step = 0
    for entry in range(first, last):
        record = ENTRIES + entry * ENTRY
        table = TABLES + gl.load(record + 2).to(gl.int64) * stride_table
        end = gl.load(record + 4)
        head = gl.load(record + 6)
        begin = first_key(gl.load(record + 3), end, gl.load(record + 7), window, PAGE, WINDOW)
        tiles = (end - begin + BN - 1) // BN
        for i in range(tiles):
            pos = begin + (tiles - 1 - i) * BN
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), BN * BD * 2)
            for p in gl.static_range(PAGES):
                at = pos + p * PAGE
                live = at < end
                page = gl.load(table + gl.where(live, at, 0) // BLOCK_SIZE)
                offset = gl.where(live, at % BLOCK_SIZE - gl.maximum(at + PAGE - end, 0), BLOCK_SIZE)
                copy_page(k_desc, k_boxes, k_full.index(stage), page, head, offset, stage * K_COLS * PAGES + p, PAGES, K_COLS)
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), BN * BDV * 2)
            for p in gl.static_range(PAGES):
                at = pos + p * PAGE
                live = at < end
                page = gl.load(table + gl.where(live, at, 0) // BLOCK_SIZE)
                offset = gl.where(live, at % BLOCK_SIZE - gl.maximum(at + PAGE - end, 0), BLOCK_SIZE)
                copy_page(v_desc, v_boxes, v_full.index(stage), page, head, offset, stage * V_COLS * PAGES + p, PAGES, V_COLS)
            step += 1


@gluon.jit
def mask_scores(s, pos, end, limit, lowest, PAGE: gl.constexpr, BN: gl.constexpr, WINDOW: gl.constexpr,
                layout: gl.constexpr):  # fmt: skip
    """Return the scores with what each row may not see at -inf; knows the shifted last page."""
    col = pos + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
    last_page = (end - 1) // PAGE * PAGE
    shift = last_page + PAGE - end
    shifted = col >= last_page
    key = gl.where(shifted, col - shift, col)
    key = gl.where(shifted & (key < last_page), 2147483647, key)
    seen = key[None, :] < limit[:, None]
    if WINDOW:
        seen = seen & (key[None, :] >= lowest[:, None])
    return gl.where(seen, s, NEG_INF)


@gluon.jit
def soften(s, top, total, qk_scale, soft_cap, MASKED: gl.constexpr, CAP: gl.constexpr):
    """Online softmax of one tile: return probabilities, new maximum (scaled), new denominator and the shrink factor."""
    scale = qk_scale
    if CAP:
        scale = LOG2E
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    base = new_top
    if MASKED:
        base = gl.where(new_top == NEG_INF, 0.0, new_top)
    p = gl.exp2(s * scale - base[:, None])
    shrink = gl.exp2(top - base)
    total = total * shrink + gl.sum(p, 1)
    return p, new_top, total, shrink


@gluon.jit
def store_part(
    acc, top, total, out_scale, PART, PART_LSE, part, num_rows, head, part_id: gl.constexpr, HQ: gl.constexpr,
    G: gl.constexpr, DV: gl.constexpr, BDV: gl.constexpr, row_layout: gl.constexpr, o_layout: gl.constexpr,
    store_layout: gl.constexpr,
):  # fmt: skip
    """Write a partial state: the output normalised, and log2 of its denominator."""
    m = part_id * ROWS + gl.arange(0, ROWS, layout=row_layout)
    safe = gl.where(total > 0, total, 1.0)
    cell = (part + m // G).to(gl.int64) * HQ + head * G + m % G
    gl.store(PART_LSE + cell, gl.where(total > 0, top + gl.log2(safe), NEG_INF), mask=m // G < num_rows)
    factor = gl.convert_layout(out_scale / safe, gl.SliceLayout(1, o_layout))
    m = part_id * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, o_layout))
    d = gl.arange(0, BDV, layout=gl.SliceLayout(0, o_layout))
    cell = (part + m // G).to(gl.int64) * HQ + head * G + m % G
    mask = (m // G < num_rows)[:, None] & (d < DV)[None, :]
    gl.store(PART + cell[:, None] * DV + d[None, :], acc * factor[:, None], mask=mask)


@gluon.jit
def store_out(
    acc, top, total, out_scale, OUT, LSE, ORDER, SINKS, num_rows, head, part_id: gl.constexpr, HQ: gl.constexpr,
    G: gl.constexpr, DV: gl.constexpr, BDV: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
    row_layout: gl.constexpr, o_layout: gl.constexpr, store_layout: gl.constexpr,
):  # fmt: skip
    """Write finished rows of the output, and their LSE."""
    m = part_id * ROWS + gl.arange(0, ROWS, layout=row_layout)
    live = m // G < num_rows
    q_head = head * G + m % G
    if HAS_SINKS:
        sink = gl.load(SINKS + q_head, mask=live, other=0.0) * LOG2E
        new_top = gl.maximum(top, sink)
        shrink = gl.exp2(top - new_top)
        total = total * shrink + gl.exp2(sink - new_top)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        top = new_top
    safe = gl.where(total > 0, total, 1.0)
    if HAS_LSE:
        row = gl.load(ORDER + m // G, mask=live, other=0).to(gl.int64)
        gl.store(LSE + row * HQ + q_head, gl.where(total > 0, (top + gl.log2(safe)) * LN2, NEG_INF), mask=live)
    factor = gl.convert_layout(out_scale / safe, gl.SliceLayout(1, o_layout))
    o = gl.convert_layout((acc * factor[:, None]).to(OUT.dtype.element_ty), store_layout)
    m = part_id * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, store_layout))
    d = gl.arange(0, BDV, layout=gl.SliceLayout(0, store_layout))
    live = m // G < num_rows
    row = gl.load(ORDER + m // G, mask=live, other=0).to(gl.int64)
    cell = row * HQ + head * G + m % G
    gl.store(OUT + cell[:, None] * DV + d[None, :], o, mask=live[:, None] & (d < DV)[None, :])


@gluon.jit
def consume(
    buffers, barriers, pointers, numbers, part_id: gl.constexpr,
    HQ: gl.constexpr, G: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BD: gl.constexpr, BDV: gl.constexpr,
    PAGE: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, HEAD_SCALES: gl.constexpr, CAP: gl.constexpr,
    WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    """Compute 64 rows of every entry."""
    q_buf, k_buf, v_buf = buffers
    k_full, k_empty, v_full, v_empty, turn = barriers
    ENTRIES, ORDER, LIMITS, Q, OUT, LSE, PART, PART_LSE, K_SCALE, V_SCALE, SINKS = pointers
    first, last, scale, v_factor, soft_cap, window, stride_q_row, stride_q_head, stride_ks_head, stride_vs_head = numbers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BDV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    load_layout: gl.constexpr = row_tile_layout(BD)
    store_layout: gl.constexpr = row_tile_layout(BDV)
    q_tile = q_buf.index(part_id)
    step = 0
    for entry in range(first, last):
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
            qk_scale = 2.0 * LOG2E * scale / soft_cap
        out_scale = v_factor
        if HEAD_SCALES:
            qk_scale = qk_scale * gl.load(K_SCALE + head * stride_ks_head)
            out_scale = out_scale * gl.load(V_SCALE + head * stride_vs_head)
        # Q: 64 packed rows (row, head of the group) into shared memory
        qm = part_id * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, load_layout))
        q_live = qm // G < num_rows
        q_row = gl.load(ORDER + row_start + qm // G, mask=q_live, other=0).to(gl.int64)
        qd = gl.arange(0, BD, layout=gl.SliceLayout(0, load_layout))
        q_ptr = Q + (q_row * stride_q_row + (head * G + qm % G) * stride_q_head)[:, None] + qd[None, :]
        q = gl.load(q_ptr, mask=q_live[:, None] & (qd < D)[None, :], other=0.0)
        m = part_id * ROWS + gl.arange(0, ROWS, layout=row_layout)
        live = m // G < num_rows
        limit = gl.load(LIMITS + row_start + m // G, mask=live, other=0)
        lowest = limit
        if WINDOW:
            lowest = limit - window
        limit = gl.minimum(limit, end)
        q_tile.store(q)
        fence_async_shared()
        gl.thread_barrier()
        tiles = (end - begin + BN - 1) // BN
        # tile 0: the last keys; always masked
        stage = step % STAGES
        phase = (step // STAGES) & 1
        zero = gl.zeros([ROWS, BN], gl.float32, s_layout)
        mbarrier.wait(k_full.index(stage), phase)
        s_token = warpgroup_mma(q_tile, k_buf.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = wait_mma(0, deps=[s_token])
        mbarrier.arrive(k_empty.index(stage), count=1)
        if CAP:
            s = soft_cap * (1.0 - 2.0 / (gl.exp2(s * qk_scale) + 1.0))
        s = mask_scores(s, begin + (tiles - 1) * BN, end, limit, lowest, PAGE, BN, WINDOW, s_layout)
        top = gl.full([ROWS], NEG_INF, gl.float32, row_layout)
        total = gl.zeros([ROWS], gl.float32, row_layout)
        acc = gl.zeros([ROWS, BDV], gl.float32, o_layout)
        p, top, total, shrink = soften(s, top, total, qk_scale, soft_cap, True, CAP)
        p16 = gl.convert_layout(p.to(k_buf.dtype), p_layout)
        masked = tiles
        if not WINDOW:
            masked = tiles - gl.maximum(gl.minimum(shortest, end // PAGE * PAGE) - begin, 0) // BN
        mbarrier.wait(k_full.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1, pred=tiles > 1)
        for i in range(1, masked):
            acc, p16, top, total = one_step(
                q_tile, k_buf, v_buf, barriers, acc, p16, top, total, step + i - 1, i + 1 < tiles,
                begin + (tiles - 1 - i) * BN, end, limit, lowest, qk_scale, soft_cap, zero, part_id, PAGE, BN, STAGES, CAP,
                WINDOW, True, PINGPONG, s_layout, o_layout, p_layout,
            )  # fmt: skip
        if not WINDOW:
            for i in range(gl.maximum(masked, 1), tiles):
                acc, p16, top, total = one_step(
                    q_tile, k_buf, v_buf, barriers, acc, p16, top, total, step + i - 1, i + 1 < tiles,
                    begin + (tiles - 1 - i) * BN, end, limit, lowest, qk_scale, soft_cap, zero, part_id, PAGE, BN, STAGES,
                    CAP, WINDOW, False, PINGPONG, s_layout, o_layout, p_layout,
                )  # fmt: skip
        step += tiles
        stage = (step - 1) % STAGES
        mbarrier.wait(v_full.index(stage), ((step - 1) // STAGES) & 1)
        o_token = warpgroup_mma(p16, v_buf.index(stage), acc, is_async=True)
        acc, p16 = wait_mma(0, deps=[o_token, p16])
        mbarrier.arrive(v_empty.index(stage), count=1)
        if part >= 0:
            store_part(
                acc, top, total, out_scale, PART, PART_LSE, part, num_rows, head, part_id, HQ, G, DV, BDV, row_layout,
                o_layout, store_layout,
            )  # fmt: skip
        else:
            store_out(
                acc, top, total, out_scale, OUT, LSE, ORDER + row_start, SINKS, num_rows, head, part_id, HQ, G, DV, BDV,
                HAS_SINKS, HAS_LSE, row_layout, o_layout, store_layout,
            )  # fmt: skip


@gluon.jit
def one_step(
    q_tile, k_buf, v_buf, barriers, acc, p16, top, total, done, more, pos, end, limit, lowest, qk_scale, soft_cap, zero, part_id: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    CAP: gl.constexpr, WINDOW: gl.constexpr, MASKED: gl.constexpr, PINGPONG: gl.constexpr, s_layout: gl.constexpr,
    o_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """Scores of tile `done + 1` and output product of tile `done`, both in flight, then the softmax of the new scores."""
    k_full, k_empty, v_full, v_empty, turn = barriers
    stage = done % STAGES
    phase = (done // STAGES) & 1
    ahead = (done + 1) % STAGES
    ahead_phase = ((done + 1) // STAGES) & 1
    if PINGPONG:
        mbarrier.wait(turn.index(part_id), done & 1)
    s_token = warpgroup_mma(q_tile, k_buf.index(ahead).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    o_token = warpgroup_mma(p16, v_buf.index(stage), acc, is_async=True)
    if PINGPONG:
        mbarrier.arrive(turn.index(1 - part_id), count=1)
    s = wait_mma(1, deps=[s_token])
    mbarrier.arrive(k_empty.index(ahead), count=1)
    if CAP:
        s = soft_cap * (1.0 - 2.0 / (gl.exp2(s * qk_scale) + 1.0))
    if MASKED:
        s = mask_scores(s, pos, end, limit, lowest, PAGE, BN, WINDOW, s_layout)
    p, top, total, shrink = soften(s, top, total, qk_scale, soft_cap, MASKED, CAP)
    next16 = gl.convert_layout(p.to(k_buf.dtype), p_layout)
    # Waiting for the next keys here, not at the top, keeps ptxas from moving the softmax behind the wait for the product.
    mbarrier.wait(k_full.index((done + 2) % STAGES), ((done + 2) // STAGES) & 1, pred=more)
    acc, p16, next16 = wait_mma(0, deps=[o_token, p16, next16])
    mbarrier.arrive(v_empty.index(stage), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
    return acc, next16, top, total


@gluon.jit(do_not_specialize=["stride_table", "window"])
def extend_tiles(
    k_desc, v_desc, Q, OUT, LSE, PART, PART_LSE, TABLES, ENTRIES, STARTS, ORDER, LIMITS, K_SCALE, V_SCALE, SINKS,
    scale, v_factor, soft_cap, window, stride_q_row, stride_q_head, stride_table, stride_ks_head, stride_vs_head,
    HQ: gl.constexpr, G: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BD: gl.constexpr, BDV: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, HEAD_SCALES: gl.constexpr,
    CAP: gl.constexpr, WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    """Run the entries STARTS[program] to STARTS[program + 1]; grid (programs,), 4 warps + 4 + 1."""
    dtype: gl.constexpr = k_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_buf = gl.allocate_shared_memory(dtype, [2, ROWS, BD], q_layout)
    k_buf = gl.allocate_shared_memory(dtype, [STAGES, BN, BD], q_layout)
    v_buf = gl.allocate_shared_memory(dtype, [STAGES, BN, BDV], q_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    if PINGPONG:
        mbarrier.arrive(turn.index(0), count=1)
    first = gl.load(STARTS + gl.program_id(0))
    last = gl.load(STARTS + gl.program_id(0) + 1)
    buffers = (q_buf, k_buf, v_buf)
    barriers = (k_full, k_empty, v_full, v_empty, turn)
    pointers = (ENTRIES, ORDER, LIMITS, Q, OUT, LSE, PART, PART_LSE, K_SCALE, V_SCALE, SINKS)
    numbers = (
        first, last, scale, v_factor, soft_cap, window, stride_q_row, stride_q_head, stride_ks_head, stride_vs_head
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consume, (buffers, barriers, pointers, numbers, gl.constexpr(0), HQ, G, D, DV, BD, BDV, PAGE, BN, STAGES,
                       HEAD_SCALES, CAP, WINDOW, HAS_SINKS, HAS_LSE, PINGPONG)),
            (consume, (buffers, barriers, pointers, numbers, gl.constexpr(1), HQ, G, D, DV, BD, BDV, PAGE, BN, STAGES,
                       HEAD_SCALES, CAP, WINDOW, HAS_SINKS, HAS_LSE, PINGPONG)),
            (produce, (k_desc, v_desc, k_buf, v_buf, k_full, k_empty, v_full, v_empty, ENTRIES, TABLES, first, last,
                       stride_table, window, BLOCK_SIZE, PAGE, BN, BD, BDV, STAGES, WINDOW)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
