"""Device code of fp8 prefill on Hopper: as `extend_device.py`, with both products on e4m3 operands.

Queries are rounded per row and head (scale = amax / 448), weights to e4m3 of 256 times their value. The tensor core
adds fp8 products with about 14 bits, so every tile starts at zero and is added to the output in float32 (DeepSeek-V3,
arXiv 2412.19437, section 3.3.2). wgmma wants V with its keys side by side: `turn_values` has laid them out so, in the
order in which the accumulators of the scores hold them, so that weights go from scores to operands without an exchange.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as wait_mma

from radixpool.kernels.extend_device import first_scores
from radixpool.kernels.extend_device_load import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    UNSPECIALISED,
    first_key,
    make_barriers,
    produce,
    produce_chunks,
    row_tile_layout,
)
from radixpool.kernels.extend_device_tile import (
    LOG2E,
    NEG_INF,
    load_entry,
    load_queries,
    store_out,
    store_part,
    sum_in_thread,
    thread_barrier,
)

FP8_MAX = gl.constexpr(448.0)
FP8_TINY = gl.constexpr(1e-30)  # the largest magnitude of a row of zeros, to divide by
HEADROOM = gl.constexpr(8.0)  # weights are at most 2**8: e4m3 holds 448, and small ones keep their bits


@gluon.jit
def quantise_rows(q):
    """Return a tile of queries as e4m3, and the scale of each row: its largest magnitude becomes 448.

    Divided once a row and exactly: bf16 has many ties, and a quotient that is off by one bit moves them.
    """
    x = q.to(gl.float32)
    top = gl.maximum(gl.max(gl.abs(x), 1), FP8_TINY)
    factor = gl.div_rn(gl.full([top.shape[0]], FP8_MAX, gl.float32, top.type.layout), top)
    return (x * factor[:, None]).to(gl.float8e4nv), top / FP8_MAX


@gluon.jit
def mask_keys(s, pos, limit, lowest, BN: gl.constexpr, WINDOW: gl.constexpr, layout: gl.constexpr):
    """Return the scores with what each row may not see at -inf."""
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, layout))[None, :]
    seen = n < (limit - pos)[:, None]
    if WINDOW:
        seen = seen & (n >= (lowest - pos)[:, None])
    return gl.where(seen, s, NEG_INF)


@gluon.jit
def soften_rows(s, top, total, qk_scale, BN: gl.constexpr, MASKED: gl.constexpr, CAP: gl.constexpr):
    """Fold one tile into the online softmax, as `soften`, with a scale per row and weights of up to 2**HEADROOM."""
    scale = qk_scale
    if CAP:
        scale = gl.full([top.shape[0]], LOG2E, gl.float32, top.type.layout)
    new_top = gl.maximum(top, gl.max(s, 1) * scale - HEADROOM)
    base = new_top
    if MASKED:
        base = gl.where(new_top == NEG_INF, 0.0, new_top)
    p = gl.exp2(s * scale[:, None] - base[:, None])
    shrink = gl.exp2(top - base)
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None] + sum_in_thread(p, BN)
    return p, new_top, total, shrink


@gluon.jit
def as_operand(p, BN: gl.constexpr, layout: gl.constexpr):
    """Return weights as e4m3, four to a word. Key 8 a + 2 t + b of 16 becomes 4 t + 2 a + b, in the same thread t.

    Words, of which every fourth holds something, because Triton takes 8-bit values apart that a loop carries. Not pure:
    the conversion stays before the wait for the product.
    """
    rows: gl.constexpr = p.shape[0]
    p = p.reshape([rows, BN // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([rows, BN])
    p = gl.convert_layout(p, layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $5, $4; cvt.rn.satfinite.e4m3x2.f32 b, $7, $6;"
        " mov.b32 $0, {a, b}; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }",
        "=r,=r,=r,=r,f,f,f,f", [p], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def settle(words, nothing):
    """Return the same words, after the product; `nothing` is a zero that the compiler can't see.

    Otherwise ptxas packs them into registers that the product in flight still reads, and then runs products one by one.
    """
    return gl.inline_asm_elementwise(
        "xor.b32 $0, $4, $8; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;", "=r,=r,=r,=r,r,r,r,r,r,r,r,r",
        [words, nothing], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def unpack(words):
    """Return the e4m3 operand that `as_operand` packed."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [words], dtype=gl.float8e4nv, is_pure=False, pack=4
    )  # fmt: skip


@gluon.jit
def cap_scores(s, qk_scale, soft_cap):
    """Return soft_cap * tanh(scores / soft_cap); `qk_scale` is 2 log2(e) scale / soft_cap of each row."""
    return soft_cap * (1.0 - 2.0 / (gl.exp2(s * qk_scale[:, None]) + 1.0))


@gluon.jit
def one_step(
    q_tile, k_buf, v_buf, barriers, acc, p8, top, total, shrink, done, pos, limit, lowest, qk_scale,
    soft_cap, zero, no_out, nothing, BN: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    CAP: gl.constexpr, WINDOW: gl.constexpr, MASKED: gl.constexpr, s_layout: gl.constexpr, o_layout: gl.constexpr,
    p_layout: gl.constexpr,
):  # fmt: skip
    """Scores of tile `done + 1` and product of tile `done`, both in flight, then the softmax of the new scores."""
    full, empty = barriers
    ahead = (done + 1) % STAGES
    operand = unpack(p8)
    s_token = warpgroup_mma(q_tile, k_buf.index(ahead).permute((1, 0)), zero, use_acc=False, is_async=True)
    o_token = warpgroup_mma(operand, v_buf.index(done % V_STAGES).permute((1, 0)), no_out, use_acc=False, is_async=True)
    s = wait_mma(1, deps=[s_token])
    if CAP:
        s = cap_scores(s, qk_scale, soft_cap)
    if MASKED:
        s = mask_keys(s, pos, limit, lowest, BN, WINDOW, s_layout)
    p, top, total, next_shrink = soften_rows(s, top, total, qk_scale, BN, MASKED, CAP)
    next8 = as_operand(p, BN, p_layout)
    # As in extend_device.py: this wait keeps the softmax before that for the product.
    mbarrier.wait(full.index((done + 2) % STAGES), ((done + 2) // STAGES) & 1)
    part = wait_mma(0, deps=[o_token])
    mbarrier.arrive(empty.index(ahead), count=1)
    next8 = settle(next8, nothing)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None] + part
    return acc, next8, top, total, next_shrink


@gluon.jit
def consume(
    buffers, barriers, pointers, numbers, part_id: gl.constexpr, ROWS: gl.constexpr, HQ: gl.constexpr,
    G: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BD: gl.constexpr, BDV: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, V_STAGES: gl.constexpr, HEAD_SCALES: gl.constexpr, CAP: gl.constexpr, WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Compute 64 rows of every entry."""
    q_buf, k_buf, v_buf, out_buf = buffers
    full, empty = barriers
    ENTRIES, ORDER, LIMITS, Q, OUT, LSE, PART, PART_LSE, K_SCALE, V_SCALE, SINKS = pointers
    first, last, scale, v_factor, soft_cap, window, row_stride, head_stride, ks_stride, vs_stride = numbers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BDV, 32])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 4)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    load_layout: gl.constexpr = row_tile_layout(BD)
    store_layout: gl.constexpr = row_tile_layout(BDV)
    q_tile = q_buf.index(part_id)
    zero = gl.zeros([ROWS, BN], gl.float32, s_layout)
    no_out = gl.zeros([ROWS, BDV], gl.float32, o_layout)
    nothing = gl.program_id(1)
    step = 0
    mbarrier.wait(full.index(0), 0)
    q = load_queries(Q, ENTRIES, ORDER, first, row_stride, head_stride, part_id, ROWS, G, D, BD, load_layout)
    for entry in range(first, last):
        q8, q_scale = quantise_rows(q)
        q_tile.store(q8)
        fence_async_shared()
        thread_barrier()
        fields = load_entry(ENTRIES, LIMITS, entry, part_id, ROWS, G, row_layout)
        row_start, num_rows, begin, end, part, head, shortest, limit = fields
        begin = first_key(begin, end, shortest, window, BN, WINDOW)
        factor = scale * LOG2E
        if CAP:
            factor = 2.0 * LOG2E * scale / soft_cap
        out_scale = v_factor
        if HEAD_SCALES:
            factor = factor * gl.load(K_SCALE + head * ks_stride)
            out_scale = out_scale * gl.load(V_SCALE + head * vs_stride)
        qk_scale = gl.convert_layout(q_scale, row_layout) * factor
        lowest = limit - window
        limit = gl.minimum(limit, end)
        tiles = (end - begin + BN - 1) // BN
        s = first_scores(q_tile, k_buf, empty, step, zero, BD, STAGES)
        if CAP:
            s = cap_scores(s, qk_scale, soft_cap)
        s = mask_keys(s, begin + (tiles - 1) * BN, limit, lowest, BN, WINDOW, s_layout)
        top = gl.full([ROWS], NEG_INF, gl.float32, row_layout)
        total = sum_in_thread(zero, BN)
        acc = no_out
        p, top, total, shrink = soften_rows(s, top, total, qk_scale, BN, True, CAP)
        p8 = as_operand(p, BN, p_layout)
        mbarrier.wait(full.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1)
        masked = tiles
        if not WINDOW:
            masked = tiles - gl.maximum(gl.minimum(shortest, end) - begin, 0) // BN
        for i in range(1, masked):
            acc, p8, top, total, shrink = one_step(
                q_tile, k_buf, v_buf, barriers, acc, p8, top, total, shrink, step + i - 1,
                begin + (tiles - 1 - i) * BN, limit, lowest, qk_scale, soft_cap, zero, no_out, nothing, BN, STAGES,
                V_STAGES, CAP, WINDOW, True, s_layout, o_layout, p_layout,
            )  # fmt: skip
        if not WINDOW:
            for i in range(gl.maximum(masked, 1), tiles):
                acc, p8, top, total, shrink = one_step(
                    q_tile, k_buf, v_buf, barriers, acc, p8, top, total, shrink, step + i - 1,
                    begin + (tiles - 1 - i) * BN, limit, lowest, qk_scale, soft_cap, zero, no_out, nothing, BN,
                    STAGES, V_STAGES, CAP, WINDOW, False, s_layout, o_layout, p_layout,
                )  # fmt: skip
        step += tiles
        values = v_buf.index((step - 1) % V_STAGES).permute((1, 0))
        o_token = warpgroup_mma(unpack(p8), values, no_out, use_acc=False, is_async=True)
        q = load_queries(
            Q, ENTRIES, ORDER, gl.minimum(entry + 1, last - 1), row_stride, head_stride, part_id, ROWS, G, D, BD,
            load_layout,
        )  # fmt: skip
        product = wait_mma(0, deps=[o_token])
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None] + product
        total_of_row = gl.convert_layout(gl.sum(total, 1), row_layout)
        if part >= 0:
            store_part(
                (acc,), top, total_of_row, out_scale, PART, PART_LSE, part, num_rows, head, part_id, HQ, G, DV,
                row_layout,
            )  # fmt: skip
        else:
            store_out(
                out_buf.index(part_id), (acc,), top, total_of_row, out_scale, OUT, LSE, ORDER + row_start, SINKS,
                num_rows, head, part_id, HQ, G, DV, BDV, HAS_SINKS, HAS_LSE, row_layout, store_layout,
            )  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALISED)
def extend_tiles_fp8(
    k_desc, v_desc, Q, OUT, LSE, PART, PART_LSE, TABLES, ENTRIES, STARTS, ORDER, LIMITS, RUNS, PLACES, K_SCALE, V_SCALE,
    SINKS, scale, v_factor, soft_cap, window, stride_q_row, stride_q_head, stride_table, stride_ks_head, stride_vs_head,
    ROWS: gl.constexpr, HQ: gl.constexpr, G: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BD: gl.constexpr,
    BDV: gl.constexpr, BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, HEAD_SCALES: gl.constexpr, CAP: gl.constexpr, WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Run the entries STARTS[program] to STARTS[program + 1]; grid (programs,), 4 + 4 + 1 + 1 warps."""
    dtype: gl.constexpr = k_desc.dtype
    BOX: gl.constexpr = BD if BD < 128 else 128
    k_layout: gl.constexpr = gl.NVMMASharedLayout(BOX, 8, rank=2)
    v_layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    q_buf = gl.allocate_shared_memory(dtype, [2, ROWS, BD], k_layout)
    k_buf = gl.allocate_shared_memory(dtype, [STAGES, BN, BD], k_layout)
    v_buf = gl.allocate_shared_memory(dtype, [V_STAGES, BDV, BN], v_layout)
    out_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    out_buf = gl.allocate_shared_memory(OUT.dtype.element_ty, [2, ROWS, BDV], out_layout)
    full, empty = make_barriers(STAGES)
    first = gl.load(STARTS + gl.program_id(0))
    last = gl.load(STARTS + gl.program_id(0) + 1)
    buffers = (q_buf, k_buf, v_buf, out_buf)
    barriers = (full, empty)
    pointers = (ENTRIES, ORDER, LIMITS, Q, OUT, LSE, PART, PART_LSE, K_SCALE, V_SCALE, SINKS)
    numbers = (
        first, last, scale, v_factor, soft_cap, window, stride_q_row, stride_q_head, stride_ks_head, stride_vs_head
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consume, (buffers, barriers, pointers, numbers, gl.constexpr(0), ROWS, HQ, G, D, DV, BD, BDV, BN, STAGES,
                       V_STAGES, HEAD_SCALES, CAP, WINDOW, HAS_SINKS, HAS_LSE)),
            (consume, (buffers, barriers, pointers, numbers, gl.constexpr(1), ROWS, HQ, G, D, DV, BD, BDV, BN, STAGES,
                       V_STAGES, HEAD_SCALES, CAP, WINDOW, HAS_SINKS, HAS_LSE)),
            (produce, (k_desc, k_buf, full, empty, ENTRIES, TABLES, first, last, stride_table, window, BLOCK_SIZE,
                       PAGE, BN, BN, BD, BOX, STAGES, STAGES, WINDOW, False, 0)),
            (produce_chunks, (v_desc, v_buf, full, empty, ENTRIES, RUNS, PLACES, first, last, window, BN, BDV, STAGES,
                              V_STAGES, WINDOW)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
