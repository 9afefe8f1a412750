"""Device code of the fast extend path on Hopper: one persistent Gluon kernel with two producer warps and two consumers.

A work entry is a tile of 128 packed query rows times a run of tokens of one block table, for one KV head. One producer
warp gathers the pages of K, one those of V, into swizzled shared memory: a bulk tensor copy for each page and 64
columns. Each consumer warpgroup owns half of the rows (tiles of head dim 64 may have 256) and keeps one asynchronous
wgmma ahead: the scores of the next tile run under the softmax of the present one. Keys are walked from the last to the
first, so that masks come first.
The two-stage overlap follows FlashAttention-3 (arXiv 2407.08608).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as wait_mma
from triton.language.extra.cuda import gdc_launch_dependents

from radixpool.kernels.extend_device_load import (
    BOX,
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    UNSPECIALISED,
    first_key,
    make_barriers,
    produce,
    row_tile_layout,
)
from radixpool.kernels.extend_device_tile import (
    LOG2E,
    NEG_INF,
    load_entry,
    load_queries,
    mask_scores,
    no_outputs,
    out_layout,
    shrink_outputs,
    soften,
    store_out,
    store_part,
    sum_in_thread,
    thread_barrier,
)


@gluon.jit
def multiply_keys(q_tile, keys, zero, D: gl.constexpr):
    """Start the products of queries and keys; where D fills three quarters of the columns, of those only."""
    HALF: gl.constexpr = keys.shape[1] // 2
    if D * 2 <= HALF * 3:
        token = warpgroup_mma(
            q_tile.slice(0, HALF, 1), keys.slice(0, HALF, 1).permute((1, 0)), zero, use_acc=False, is_async=True
        )  # fmt: skip
        token = warpgroup_mma(
            q_tile.slice(HALF, HALF // 2, 1), keys.slice(HALF, HALF // 2, 1).permute((1, 0)), token, is_async=True
        )  # fmt: skip
    else:
        token = warpgroup_mma(q_tile, keys.permute((1, 0)), zero, use_acc=False, is_async=True)
    return token


@gluon.jit
def multiply_values(p, values, acc):
    """Start the products of weights and values: one for each tensor of outputs (`no_outputs`)."""
    if len(acc) == 2:
        HALF: gl.constexpr = acc[0].shape[1]
        a_layout: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
        b_layout: gl.constexpr = gl.DotOperandLayout(0, acc[1].type.layout, 2)
        tokens = (
            warpgroup_mma(gl.convert_layout(p, a_layout), values.slice(0, HALF, 1), acc[0], is_async=True),
            warpgroup_mma(gl.convert_layout(p, b_layout), values.slice(HALF, HALF // 2, 1), acc[1], is_async=True),
        )
    else:
        tokens = (warpgroup_mma(p, values, acc[0], is_async=True),)
    return tokens


@gluon.jit
def wait_product(tokens, p, following):
    """Return the outputs, once their products are done; keep both weights in registers until then."""
    if len(tokens) == 2:
        first, second, p, following = wait_mma(0, deps=[tokens[0], tokens[1], p, following])
        acc = (first, second)
    else:
        first, p, following = wait_mma(0, deps=[tokens[0], p, following])
        acc = (first,)
    return acc, p, following


@gluon.jit
def first_scores(q_tile, k_buf, empty, step, zero, D: gl.constexpr, STAGES: gl.constexpr):
    """Return the raw scores of an entry's first tile (its last keys)."""
    stage = step % STAGES
    token = multiply_keys(q_tile, k_buf.index(stage), zero, D)
    s = wait_mma(0, deps=[token])
    mbarrier.arrive(empty.index(stage), count=1)
    return s


@gluon.jit
def one_step(
    q_tile, k_buf, v_buf, barriers, acc, p16, top, total, done, pos, end, limit, lowest, qk_scale,
    soft_cap, zero, D: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    CAP: gl.constexpr, WINDOW: gl.constexpr, MASKED: gl.constexpr, s_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """Scores of tile `done + 1` and product of tile `done`, both in flight, then the softmax of the new scores."""
    full, empty = barriers
    stage = done % V_STAGES
    ahead = (done + 1) % STAGES
    s_token = multiply_keys(q_tile, k_buf.index(ahead), zero, D)
    tokens = multiply_values(p16, v_buf.index(stage), acc)
    s = wait_mma(len(tokens), deps=[s_token])
    if CAP:
        s = soft_cap * (1.0 - 2.0 / (gl.exp2(s * qk_scale) + 1.0))
    if MASKED:
        s = mask_scores(s, pos, end, limit, lowest, PAGE, BN, WINDOW, s_layout)
    p, top, total, shrink = soften(s, top, total, qk_scale, BN, MASKED, CAP)
    next16 = gl.convert_layout(p.to(k_buf.dtype), p_layout)
    # Waiting for the next keys here, not at the top, keeps ptxas from moving the softmax behind the product's wait.
    mbarrier.wait(full.index((done + 2) % STAGES), ((done + 2) // STAGES) & 1)
    acc, p16, next16 = wait_product(tokens, p16, next16)
    # One barrier frees the keys of the new scores and the values of the product: each costs a barrier of the warps too.
    mbarrier.arrive(empty.index(ahead), count=1)
    acc = shrink_outputs(acc, shrink, not MASKED)
    return acc, next16, top, total


@gluon.jit
def consume(
    buffers, barriers, pointers, numbers, part_id: gl.constexpr, ROWS: gl.constexpr, HQ: gl.constexpr,
    G: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BD: gl.constexpr, BDV: gl.constexpr, PAGE: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, V_STAGES: gl.constexpr, HEAD_SCALES: gl.constexpr, CAP: gl.constexpr,
    WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of every entry."""
    q_buf, k_buf, v_buf, out_buf = buffers
    full, empty = barriers
    ENTRIES, ORDER, LIMITS, Q, OUT, LSE, PART, PART_LSE, K_SCALE, V_SCALE, SINKS = pointers
    first, last, scale, v_factor, soft_cap, window, row_stride, head_stride, ks_stride, vs_stride = numbers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout(BDV), 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    load_layout: gl.constexpr = row_tile_layout(BD)
    store_layout: gl.constexpr = row_tile_layout(BDV)
    q_tile = q_buf.index(part_id)
    zero = gl.zeros([ROWS, BN], gl.float32, s_layout)
    step = 0
    mbarrier.wait(full.index(0), 0)
    q = load_queries(Q, ENTRIES, ORDER, first, row_stride, head_stride, part_id, ROWS, G, D, BD, load_layout)
    for entry in range(first, last):
        q_tile.store(q)
        fence_async_shared()
        thread_barrier()
        fields = load_entry(ENTRIES, LIMITS, entry, part_id, ROWS, G, row_layout)
        row_start, num_rows, begin, end, part, head, shortest, limit = fields
        begin = first_key(begin, end, shortest, window, PAGE, WINDOW)
        qk_scale = scale * LOG2E
        if CAP:
            # tanh(y) = 1 - 2 / (exp(2 y) + 1), with the scale folded in
            qk_scale = 2.0 * LOG2E * scale / soft_cap
        out_scale = v_factor
        if HEAD_SCALES:
            qk_scale = qk_scale * gl.load(K_SCALE + head * ks_stride)
            out_scale = out_scale * gl.load(V_SCALE + head * vs_stride)
        lowest = limit - window
        limit = gl.minimum(limit, end)
        tiles = (end - begin + BN - 1) // BN
        s = first_scores(q_tile, k_buf, empty, step, zero, D, STAGES)
        if CAP:
            s = soft_cap * (1.0 - 2.0 / (gl.exp2(s * qk_scale) + 1.0))
        s = mask_scores(s, begin + (tiles - 1) * BN, end, limit, lowest, PAGE, BN, WINDOW, s_layout)
        top = gl.full([ROWS], NEG_INF, gl.float32, row_layout)
        total = sum_in_thread(zero, BN)
        acc = no_outputs(ROWS, DV, BDV)
        p, top, total, _ = soften(s, top, total, qk_scale, BN, True, CAP)
        p16 = gl.convert_layout(p.to(k_buf.dtype), p_layout)
        mbarrier.wait(full.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1)
        masked = tiles
        if not WINDOW:
            masked = tiles - gl.maximum(gl.minimum(shortest, end // PAGE * PAGE) - begin, 0) // BN
        for i in range(1, masked):
            acc, p16, top, total = one_step(
                q_tile, k_buf, v_buf, barriers, acc, p16, top, total, step + i - 1,
                begin + (tiles - 1 - i) * BN, end, limit, lowest, qk_scale, soft_cap, zero, D, PAGE, BN, STAGES,
                V_STAGES, CAP, WINDOW, True, s_layout, p_layout,
            )  # fmt: skip
        if not WINDOW:
            for i in range(gl.maximum(masked, 1), tiles):
                acc, p16, top, total = one_step(
                    q_tile, k_buf, v_buf, barriers, acc, p16, top, total, step + i - 1,
                    begin + (tiles - 1 - i) * BN, end, limit, lowest, qk_scale, soft_cap, zero, D, PAGE, BN, STAGES,
                    V_STAGES, CAP, WINDOW, False, s_layout, p_layout,
                )  # fmt: skip
        step += tiles
        tokens = multiply_values(p16, v_buf.index((step - 1) % V_STAGES), acc)
        # The next entry's queries travel while this one's last product and its epilogue run.
        q = load_queries(
            Q, ENTRIES, ORDER, gl.minimum(entry + 1, last - 1), row_stride, head_stride, part_id, ROWS, G, D, BD,
            load_layout,
        )  # fmt: skip
        acc, p16, _ = wait_product(tokens, p16, p16)
        total_of_row = gl.convert_layout(gl.sum(total, 1), row_layout)
        if part >= 0:
            store_part(
                acc, top, total_of_row, out_scale, PART, PART_LSE, part, num_rows, head, part_id, HQ, G, DV, row_layout,
            )  # fmt: skip
        else:
            store_out(
                out_buf.index(part_id), acc, top, total_of_row, out_scale, OUT, LSE, ORDER + row_start, SINKS, num_rows,
                head, part_id, HQ, G, DV, BDV, HAS_SINKS, HAS_LSE, row_layout, store_layout,
            )  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALISED)
def extend_tiles(
    k_desc, v_desc, Q, OUT, LSE, PART, PART_LSE, TABLES, ENTRIES, STARTS, ORDER, LIMITS, K_SCALE, V_SCALE, SINKS,
    scale, v_factor, soft_cap, window, stride_q_row, stride_q_head, stride_table, stride_ks_head, stride_vs_head,
    ROWS: gl.constexpr, HQ: gl.constexpr, G: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BD: gl.constexpr,
    BDV: gl.constexpr, BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    V_STAGES: gl.constexpr, HEAD_SCALES: gl.constexpr, CAP: gl.constexpr, WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Run the entries STARTS[program] to STARTS[program + 1]; grid (programs,), 4 + 4 + 1 + 1 warps."""
    gdc_launch_dependents()
    dtype: gl.constexpr = k_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_buf = gl.allocate_shared_memory(dtype, [2, ROWS, BD], q_layout)
    k_buf = gl.allocate_shared_memory(dtype, [STAGES, BN, BD], q_layout)
    v_buf = gl.allocate_shared_memory(dtype, [V_STAGES, BN, BDV], q_layout)
    out_buf = q_buf  # the queries have been read when outputs pass through shared memory
    if BD != BDV:
        out_buf = gl.allocate_shared_memory(dtype, [2, ROWS, BDV], q_layout)
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
            (consume, (buffers, barriers, pointers, numbers, gl.constexpr(0), ROWS, HQ, G, D, DV, BD, BDV, PAGE, BN,
                       STAGES, V_STAGES, HEAD_SCALES, CAP, WINDOW, HAS_SINKS, HAS_LSE)),
            (consume, (buffers, barriers, pointers, numbers, gl.constexpr(1), ROWS, HQ, G, D, DV, BD, BDV, PAGE, BN,
                       STAGES, V_STAGES, HEAD_SCALES, CAP, WINDOW, HAS_SINKS, HAS_LSE)),
            (produce, (k_desc, k_buf, full, empty, ENTRIES, TABLES, first, last, stride_table, window, BLOCK_SIZE,
                       PAGE, PAGE, BN, BD, BOX, STAGES, STAGES, WINDOW, True, 0)),
            (produce, (v_desc, v_buf, full, empty, ENTRIES, TABLES, first, last, stride_table, window, BLOCK_SIZE,
                       PAGE, PAGE, BN, BDV, BOX, STAGES, V_STAGES, WINDOW, True, 1)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
