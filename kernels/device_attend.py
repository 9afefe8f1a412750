"""Device code of attention: `attend_items` runs work items over the pool; `device_merge.py` joins what several gave.

A work item is a run of query rows (at most BM // G of them) times a run of tokens of one block table, for one KV head.
Scores live in base 2: partial states are a normalised output and `log2` of its denominator.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
FP8_MAX = tl.constexpr(448.0)
FP8_TINY = tl.constexpr(1e-30)
FP8_WEIGHT = tl.constexpr(256.0)
# Fields of one item record; see forest.py.
RECORD = tl.constexpr(16)
TO_THE_END = tl.constexpr(2147483647)
ROW_RECORD = tl.constexpr(4)
# Integers whose value must not choose another compilation: they change from batch to batch or are zero when unused.
UNSPECIALISED = [
    "stride_table", "window", "stride_ks_block", "stride_ks_head", "stride_ks_token", "stride_vs_block",
    "stride_vs_head", "stride_vs_token",
]  # fmt: skip


@triton.jit
def low_halves(x):
    """Return the low byte (even column) of each int16 pair of e4m3 as fp16."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 h; prmt.b32 t, $1, 0, 0x4420; cvt.u16.u32 h, t; cvt.rn.f16x2.e4m3x2 $0, h; }",
        "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def high_halves(x):
    """Return the high byte (odd column) of each int16 pair of e4m3 as fp16."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 h; prmt.b32 t, $1, 0, 0x4431; cvt.u16.u32 h, t; cvt.rn.f16x2.e4m3x2 $0, h; }",
        "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def quantise_rows(x):
    """Return a tile as e4m3 and the scale of each row, as `quantise_rows` of extend_device_fp8.py."""
    x = x.to(tl.float32)
    top = tl.maximum(tl.max(tl.abs(x), 1), FP8_TINY)
    factor = tl.div_rn(tl.full(top.shape, FP8_MAX, tl.float32), top)
    return (x * factor[:, None]).to(tl.float8e4nv), top / FP8_MAX


@triton.jit
def with_phase(x, phase):
    """Return the bits of float32 values with the lowest one replaced by `phase`, 0 or 1."""
    return (x.to(tl.int32, bitcast=True) & -2) | phase


@triton.jit
def store_states(place, states, mask, INTERPRETED: tl.constexpr):
    """Store 1, 2 or 4 tensors of words side by side at `place`, each word by a relaxed store (see device_merge.py)."""
    if INTERPRETED:
        for j in tl.static_range(len(states)):
            tl.store(place + j, states[j].to(tl.float32, bitcast=True), mask=mask)
    elif len(states) == 1:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r", [place.to(tl.int64), states[0], mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    elif len(states) == 2:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $4, 0; @p st.relaxed.gpu.global.v2.b32 [$1], {$2, $3}; mov.b32 $0, 0; }",
            "=r,l,r,r,r", [place.to(tl.int64), states[0], states[1], mask.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $6, 0; @p st.relaxed.gpu.global.v4.b32 [$1], {$2, $3, $4, $5};"
            " mov.b32 $0, 0; }",
            "=r,l,r,r,r,r,r", [place.to(tl.int64), states[0], states[1], states[2], states[3], mask.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def store_part(
    PART, PART_LSE, cell, live, acc, acc_odd, factor, lse2, phase, BM: tl.constexpr, BLOCK_DV: tl.constexpr,
    STATE: tl.constexpr, PAIRS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store partial states marked with the phase, from the registers that hold them: neighbours go together."""
    halves = tl.arange(0, BLOCK_DV // 2)
    x, y = tl.split(tl.reshape(with_phase(acc * factor[:, None], phase), [BM, BLOCK_DV // 2, 2]))
    row = PART + cell[:, None] * STATE
    if PAIRS:
        x_odd, y_odd = tl.split(tl.reshape(with_phase(acc_odd * factor[:, None], phase), [BM, BLOCK_DV // 2, 2]))
        inside = live[:, None] & (4 * halves < STATE)[None, :]
        store_states(row + 4 * halves[None, :], (x, x_odd, y, y_odd), inside, INTERPRETED)
    else:
        store_states(row + 2 * halves[None, :], (x, y), live[:, None] & (2 * halves < STATE)[None, :], INTERPRETED)
    store_states(PART_LSE + cell, (with_phase(lse2, phase),), live, INTERPRETED)


@triton.jit
def block_of(pos, BLOCK_SIZE: tl.constexpr):
    """Return the index of the block of token `pos` in its table; unsigned, so that powers of two become shifts."""
    return (pos.to(tl.uint32) // BLOCK_SIZE).to(tl.int32)


@triton.jit
def tile_scores(q, q_odd, k, PAIRS: tl.constexpr):
    """Return q @ k.T in float32 [BM, BN]; with PAIRS, k holds e4m3 pairs [BN, D/2] and q its even and odd columns."""
    k = tl.trans(k)
    if PAIRS:
        x = tl.dot(q, low_halves(k))
        x = tl.dot(q_odd, high_halves(k), x)
    else:
        x = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    return x


@triton.jit
def tile_step(
    q, q_odd, k, v, cols, stop, limit, row_begin, context, nodes, slope, k_scales, v_scales, qk_scale, soft_cap, top,
    total, acc, acc_odd, PAIRS: tl.constexpr, TOKEN_SCALES: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, TREE: tl.constexpr, LATE_SUM: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Fold one tile of keys and values into the running maximum, denominator and output (online softmax)."""
    x = tile_scores(q, q_odd, k, PAIRS)
    if FP8:
        x = x * q_odd[:, None]
    if TOKEN_SCALES:
        x = x * k_scales[None, :]
    if CAP:
        # qk_scale is 2 * log2(e) * scale / cap here: tanh(y) = 1 - 2 / (exp(2 y) + 1)
        x = (soft_cap * LOG2E) * (1.0 - 2.0 / (tl.exp2(x * qk_scale) + 1.0))
        qk_scale = 1.0
    if ALIBI:
        # each key's distance behind its query token, which is the last that the row sees
        x = x * qk_scale + slope[:, None] * (cols[None, :] - (limit - 1)[:, None]).to(tl.float32)
        qk_scale = 1.0
    if MASKED:
        seen = cols[None, :] < tl.minimum(limit, stop)[:, None]
        if TREE:
            node = cols[None, :] - context[:, None]
            # in halves of 32 bits: shifts of 64 cost the registers of tall tiles
            half = tl.where(node < 32, nodes.to(tl.int32)[:, None], (nodes >> 32).to(tl.int32)[:, None])
            seen = seen & ((node < 0) | ((half >> (node & 31)) & 1 != 0))
        if WINDOW:
            seen = seen & (cols[None, :] >= row_begin[:, None])
            used = tl.max(seen.to(tl.int32), 0) > 0
            v = tl.where(used[:, None], v, tl.zeros_like(v))
        x = tl.where(seen, x, NEG_INF)
    # The maximum is taken before scaling (scale > 0), so that scale and subtraction are one fused multiply-add.
    new_top = tl.maximum(top, tl.max(x, 1) * qk_scale)
    base = tl.where(new_top == NEG_INF, 0.0, new_top) if MASKED else new_top
    p = tl.exp2(x * qk_scale - base[:, None])
    shrink = tl.exp2(top - base)
    if LATE_SUM:
        total = total * shrink[:, None] + p
    else:
        total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    if TOKEN_SCALES:
        p = p * v_scales[None, :]
    if PAIRS:
        acc_odd = acc_odd * shrink[:, None]
        p16 = p.to(tl.float16)
        acc = tl.dot(p16, low_halves(v), acc)
        acc_odd = tl.dot(p16, high_halves(v), acc_odd)
    elif FP8:
        # e4m3 holds 448: weights of at most 256 keep the most bits; every tile's sum starts anew and is added in fp32
        acc += tl.dot((p * FP8_WEIGHT).to(q.dtype), v) * (1 / FP8_WEIGHT)
    else:
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
    return new_top, total, acc, acc_odd


@triton.jit
def walk_tiles(
    q, q_odd, K, V, table, table_tokens, k_token_scales, v_token_scales, head, begin, stop, end, limit, row_begin,
    context, nodes, slope, qk_scale, soft_cap, top, total, acc, acc_odd,
    stride_k_block, stride_k_head, stride_k_token, stride_v_block, stride_v_head, stride_v_token,
    stride_ks_block, stride_ks_head, stride_ks_token, stride_vs_block, stride_vs_head, stride_vs_token,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, PAIRS: tl.constexpr, TOKEN_SCALES: tl.constexpr, CAP: tl.constexpr,
    ALIBI: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, TREE: tl.constexpr, SAME_STRIDES: tl.constexpr,
    LATE_SUM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Fold the tokens [begin, stop) of one table into the running state; with MASKED they end at `end` <= `stop`."""
    n = tl.arange(0, BN)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    # Block ids are loaded one step ahead: as loop-carried values they cost the pipeline of K and V no stage. They are
    # masked by the width of the table, which is known at once; those past the end are never followed.
    block = tl.load(table + block_of(begin + n, BLOCK_SIZE), mask=begin + n < table_tokens, other=0)
    for pos in tl.range(begin, stop, BN, num_stages=STAGES):
        cols = pos + n
        page = block.to(tl.int64)
        block = tl.load(table + block_of(cols + BN, BLOCK_SIZE), mask=cols + BN < table_tokens, other=0)
        offset = cols - block_of(cols, BLOCK_SIZE) * BLOCK_SIZE
        k_offset = page * stride_k_block + head * stride_k_head + offset * stride_k_token
        v_offset = k_offset
        if not SAME_STRIDES:
            v_offset = page * stride_v_block + head * stride_v_head + offset * stride_v_token
        k_ptr = K + k_offset[:, None] + d[None, :]
        v_ptr = V + v_offset[:, None] + dv[None, :]
        if MASKED:
            live = cols < end
            k = tl.load(k_ptr, mask=live[:, None] & (d < D)[None, :], other=0.0)
            v = tl.load(v_ptr, mask=live[:, None] & (dv < DV)[None, :], other=0.0)
        elif D == BLOCK_D and DV == BLOCK_DV:
            k = tl.load(k_ptr)
            v = tl.load(v_ptr)
        else:
            k = tl.load(k_ptr, mask=(d < D)[None, :], other=0.0)
            v = tl.load(v_ptr, mask=(dv < DV)[None, :], other=0.0)
        k_scales = 1.0
        v_scales = 1.0
        if TOKEN_SCALES:
            ks_ptr = k_token_scales + page * stride_ks_block + head * stride_ks_head + offset * stride_ks_token
            vs_ptr = v_token_scales + page * stride_vs_block + head * stride_vs_head + offset * stride_vs_token
            k_scales = tl.load(ks_ptr, mask=cols < end, other=0.0)
            v_scales = tl.load(vs_ptr, mask=cols < end, other=0.0)
        top, total, acc, acc_odd = tile_step(
            q, q_odd, k, v, cols, end, limit, row_begin, context, nodes, slope, k_scales, v_scales, qk_scale, soft_cap,
            top, total, acc, acc_odd, PAIRS, TOKEN_SCALES, CAP, ALIBI, WINDOW, MASKED, TREE, LATE_SUM,
            FP8,
        )  # fmt: skip
    return top, total, acc, acc_odd


@triton.jit
def load_record(record, exists):
    """Load one item: row start, rows, table, begin, end, first part, tokens after its last row, tokens all rows see."""
    row_start = tl.load(record, mask=exists, other=0)
    num_rows = tl.load(record + 1, mask=exists, other=0)
    seq = tl.load(record + 2, mask=exists, other=0)
    begin = tl.load(record + 3, mask=exists, other=0)
    end = tl.load(record + 4, mask=exists, other=0)
    part = tl.load(record + 5, mask=exists, other=0)
    after = tl.load(record + 8, mask=exists, other=0)
    all_see = tl.load(record + 9, mask=exists, other=0)
    return row_start, num_rows, seq, begin, end, part, after, all_see


@triton.jit(do_not_specialize=UNSPECIALISED)
def attend_items(
    Q, K, V, K_SCALE, V_SCALE, NODES, DEPTHS, SLOPES, OUT, LSE, SINKS, scale, v_factor, soft_cap, window,
    PART, PART_LSE, MARKS, TABLES, SEQ_LENS, ITEMS, ROWS,
    stride_q_row, stride_q_head, stride_table,
    stride_k_block, stride_k_head, stride_k_token, stride_v_block, stride_v_head, stride_v_token,
    stride_ks_block, stride_ks_head, stride_ks_token, stride_vs_block, stride_vs_head, stride_vs_token,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    TILE_DTYPE: tl.constexpr, PAIRS: tl.constexpr, HEAD_SCALES: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    CAP: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr, FP8: tl.constexpr, SPLIT: tl.constexpr, SAME_STRIDES: tl.constexpr,
    STATE: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
    EVICT_FIRST: tl.constexpr,
):  # fmt: skip
    """Run the items of one program for one KV head; grid (kv_heads, programs).

    Item `program` is its first; the others lie together elsewhere. Few loads depend on one another: a cold one costs 1
    us. EVICT_FIRST is for cache_hints.py: what K and V bring is not kept in L2.
    """
    head = tl.program_id(0)
    cta = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    m = tl.arange(0, BM)
    local_row = m // G
    q_head = head * G + m % G
    d = tl.arange(0, BLOCK_D)
    qk_scale = scale * LOG2E
    out_scale = v_factor
    if CAP:
        qk_scale = 2.0 * LOG2E * scale / soft_cap
    slope = 0.0
    if ALIBI:
        slope = tl.load(SLOPES + q_head) * LOG2E
    if HEAD_SCALES:
        qk_scale = qk_scale * tl.load(K_SCALE + head * stride_ks_head)
        out_scale = out_scale * tl.load(V_SCALE + head * stride_vs_head)
    phase = tl.load(MARKS) ^ 1
    table_tokens = stride_table * BLOCK_SIZE
    k_token_scales = K_SCALE
    v_token_scales = V_SCALE
    record = ITEMS + cta * RECORD
    more = tl.load(record + 6)
    rest = ITEMS + tl.load(record + 7) * RECORD
    row_start, num_rows, seq, begin, end, part, after, all_see = load_record(record, True)
    for i in tl.range(0, tl.where(num_rows > 0, 1 + more, 0), num_stages=1):
        ahead = load_record(rest + i * RECORD, i < more)
        table = TABLES + seq.to(tl.int64) * stride_table
        live = local_row < num_rows
        row_ptr = ROWS + (row_start + local_row) * ROW_RECORD
        row = tl.load(row_ptr, mask=live, other=0)
        limit = tl.load(SEQ_LENS + tl.load(row_ptr + 1, mask=live, other=0)) - tl.load(row_ptr + 2, mask=live, other=0)
        limit = tl.where(live, limit, 0)
        end = tl.where(end == TO_THE_END, tl.load(SEQ_LENS + seq) - after, end)
        row_begin = limit
        context = 0
        nodes = 0
        if TREE:
            # A draft node sees the tokens before the tree, and of the tree the nodes whose bits are set.
            context = limit + tl.load(row_ptr + 2, mask=live, other=0) - tl.load(row_ptr + 3, mask=live, other=0)
            nodes = tl.load(NODES + row, mask=live, other=0)
        if WINDOW:
            row_begin = limit - window
            if TREE:
                row_begin = context + tl.load(DEPTHS + row, mask=live, other=0) - window
            lowest = tl.min(tl.where(live, row_begin, TO_THE_END), 0)
            begin = tl.maximum(begin, tl.maximum(lowest, 0) // BN * BN)
        q_ptr = Q + row.to(tl.int64)[:, None] * stride_q_row + q_head[:, None] * stride_q_head
        q_odd = 0.0
        if PAIRS:
            q_mask = live[:, None] & (2 * d < D)[None, :]
            q = tl.load(q_ptr + 2 * d[None, :], mask=q_mask, other=0.0).to(TILE_DTYPE)
            q_odd = tl.load(q_ptr + 2 * d[None, :] + 1, mask=q_mask, other=0.0).to(TILE_DTYPE)
        else:
            q = tl.load(q_ptr + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
            if FP8:
                q, q_odd = quantise_rows(q)
            else:
                q = q.to(TILE_DTYPE)
        top = tl.full([BM], NEG_INF, tl.float32)
        # Narrow tiles spread a row over all warps: they add up weights by column and over columns once, at the end.
        LATE_SUM: tl.constexpr = BM < 64
        total = tl.zeros([BM, BN] if LATE_SUM else [BM], tl.float32)
        acc = tl.zeros([BM, BLOCK_DV], tl.float32)
        acc_odd = 0.0
        if PAIRS:
            acc_odd = tl.zeros([BM, BLOCK_DV], tl.float32)
        KD: tl.constexpr = D // 2 if PAIRS else D
        VD: tl.constexpr = DV // 2 if PAIRS else DV
        mid = begin
        if SPLIT:
            mid = begin + tl.maximum(tl.minimum(all_see, end) - begin, 0) // BN * BN
            top, total, acc, acc_odd = walk_tiles(
                q, q_odd, K, V, table, table_tokens, k_token_scales, v_token_scales, head, begin, mid, mid, limit,
                row_begin, context, nodes, slope,
                qk_scale, soft_cap, top, total, acc, acc_odd,
                stride_k_block, stride_k_head, stride_k_token, stride_v_block, stride_v_head, stride_v_token,
                stride_ks_block, stride_ks_head, stride_ks_token, stride_vs_block, stride_vs_head, stride_vs_token,
                KD, VD, BLOCK_D, BLOCK_DV, BLOCK_SIZE, BN, STAGES, PAIRS, TOKEN_SCALES, CAP, ALIBI, WINDOW, False,
                False, SAME_STRIDES, LATE_SUM, FP8,
            )  # fmt: skip
        top, total, acc, acc_odd = walk_tiles(
            q, q_odd, K, V, table, table_tokens, k_token_scales, v_token_scales, head, mid, end, end, limit, row_begin,
            context, nodes, slope, qk_scale, soft_cap, top, total, acc, acc_odd,
            stride_k_block, stride_k_head, stride_k_token, stride_v_block, stride_v_head, stride_v_token,
            stride_ks_block, stride_ks_head, stride_ks_token, stride_vs_block, stride_vs_head, stride_vs_token,
            KD, VD, BLOCK_D, BLOCK_DV, BLOCK_SIZE, BN, STAGES, PAIRS, TOKEN_SCALES, CAP, ALIBI, WINDOW, True, TREE,
            SAME_STRIDES, LATE_SUM, FP8,
        )  # fmt: skip
        if LATE_SUM:
            total = tl.sum(total, 1)
        if part >= 0:
            safe = tl.where(total > 0, total, 1.0)
            lse2 = tl.where(total > 0, top + tl.log2(safe), NEG_INF)
            factor = out_scale / safe
            cell = (part + local_row).to(tl.int64) * HQ + q_head
            store_part(
                PART, PART_LSE, cell, live, acc, acc_odd, factor, lse2, phase, BM, BLOCK_DV, STATE, PAIRS, INTERPRETED
            )
        else:
            joined = tl.interleave(acc, acc_odd) if PAIRS else acc
            dv = tl.arange(0, BLOCK_DV * 2 if PAIRS else BLOCK_DV)
            out_mask = live[:, None] & (dv < DV)[None, :]
            if HAS_SINKS:
                sink = tl.load(SINKS + q_head) * LOG2E
                new_top = tl.maximum(top, sink)
                shrink = tl.exp2(top - new_top)
                total = total * shrink + tl.exp2(sink - new_top)
                joined = joined * shrink[:, None]
                top = new_top
            safe = tl.where(total > 0, total, 1.0)
            factor = out_scale / safe
            cell = row.to(tl.int64) * HQ + q_head
            rounded = (joined * factor[:, None]).to(OUT.dtype.element_ty)
            tl.store(OUT + cell[:, None] * DV + dv[None, :], rounded, mask=out_mask)
            if HAS_LSE:
                tl.store(LSE + cell, tl.where(total > 0, (top + tl.log2(safe)) * LN2, NEG_INF), mask=live)
        row_start, num_rows, seq, begin, end, part, after, all_see = ahead
    # A grid has ended when all its programs have: one that waits for the grid before is enough.
    if (head == 0) & (cta == 0):  # noqa: SIM102 - the other is known at compile time
        if PDL:
            gdc_wait()
