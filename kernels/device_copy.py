"""Device code that moves KV: write new tokens, rotate, copy blocks, merge finished states. Offsets are 64-bit."""

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)


@triton.jit
def load_rotated(
    x_ptr, COS, SIN, token, live, d, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Load a tile [BT, BLOCK_D] at row pointers `x_ptr` and turn its first 2 * HALF columns; same dtype as stored."""
    mask = live[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr[:, None] + d[None, :], mask=mask, other=0.0)
    if HALF > 0:
        turns = d < 2 * HALF
        if INTERLEAVED:
            partner = d ^ 1
            column = d // 2
            sign = tl.where(d % 2 == 0, -1.0, 1.0)
        else:
            partner = tl.where(d < HALF, d + HALF, d - HALF)
            column = d % HALF
            sign = tl.where(d < HALF, -1.0, 1.0)
        turned = mask & turns[None, :]
        other = tl.load(x_ptr[:, None] + partner[None, :], mask=turned, other=0.0)
        angle = token.to(tl.int64)[:, None] * HALF + column[None, :]
        c = tl.load(COS + angle, mask=turned, other=1.0)
        s = tl.load(SIN + angle, mask=turned, other=0.0)
        y = x.to(tl.float32) * c + other.to(tl.float32) * s * sign[None, :]
        x = tl.where(turns[None, :], y.to(x.dtype), x)
    return x


@triton.jit
def store_tile(
    x, POOL, SCALE, block, offset, head, live, d, stride_block, stride_head, stride_token, stride_s_block,
    stride_s_head, stride_s_token, scale, D: tl.constexpr, FP8: tl.constexpr, HEAD_SCALES: tl.constexpr,
    TOKEN_SCALES: tl.constexpr,
):  # fmt: skip
    """Store a tile [BT, BLOCK_D] to its slots, quantised where the pool is fp8."""
    if FP8:
        x = x.to(tl.float32)
        if TOKEN_SCALES:
            largest = tl.max(tl.abs(x), 1)
            factor = tl.where(largest > 0, largest / FP8_MAX, 1.0)
            s_ptr = SCALE + block * stride_s_block + head * stride_s_head + offset * stride_s_token
            tl.store(s_ptr, factor, mask=live)
            x = tl.div_rn(x, tl.broadcast_to(factor[:, None], x.shape))
        elif HEAD_SCALES:
            x = tl.div_rn(x, tl.full(x.shape, 0.0, tl.float32) + tl.load(SCALE + head * stride_s_head))
        else:
            x = tl.div_rn(x, tl.full(x.shape, 0.0, tl.float32) + scale)
        x = tl.minimum(tl.maximum(x, -FP8_MAX, tl.PropagateNan.ALL), FP8_MAX, tl.PropagateNan.ALL)
    ptr = POOL + block * stride_block + head * stride_head + offset * stride_token
    tl.store(ptr[:, None] + d[None, :], x.to(POOL.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def write_slots(
    X, POOL, SLOTS, SCALE, COS, SIN, scale, num_tokens, stride_x_token, stride_x_head,
    stride_block, stride_head, stride_token, stride_s_block, stride_s_head, stride_s_token,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BT: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, FP8: tl.constexpr, HEAD_SCALES: tl.constexpr, TOKEN_SCALES: tl.constexpr,
):  # fmt: skip
    """Write BT tokens of one head to their slots; grid (token tiles, kv_heads)."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, BLOCK_D)
    slot = tl.load(SLOTS + token, mask=token < num_tokens, other=-1).to(tl.int64)
    live = slot >= 0
    x_ptr = X + token.to(tl.int64) * stride_x_token + head * stride_x_head
    x = load_rotated(x_ptr, COS, SIN, token, live, d, D, HALF, INTERLEAVED)
    store_tile(
        x, POOL, SCALE, slot // BLOCK_SIZE, slot % BLOCK_SIZE, head, live, d, stride_block, stride_head, stride_token,
        stride_s_block, stride_s_head, stride_s_token, scale, D, FP8, HEAD_SCALES, TOKEN_SCALES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def rotate_rows(
    X, OUT, COS, SIN, num_tokens, stride_x_token, stride_x_head, stride_o_token, stride_o_head,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BT: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Turn BT tokens of one head; grid (token tiles, heads)."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, BLOCK_D)
    live = token < num_tokens
    x_ptr = X + token.to(tl.int64) * stride_x_token + head * stride_x_head
    x = load_rotated(x_ptr, COS, SIN, token, live, d, D, HALF, INTERLEAVED)
    o_ptr = OUT + token.to(tl.int64) * stride_o_token + head * stride_o_head
    tl.store(o_ptr[:, None] + d[None, :], x, mask=live[:, None] & (d < D)[None, :])


@triton.jit
def move_blocks(
    SRC, DST, SRC_IDS, DST_IDS, stride_s_block, stride_s_head, stride_s_token, stride_d_block, stride_d_head,
    stride_d_token, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BT: tl.constexpr,
    SRC_INDEXED: tl.constexpr, DST_INDEXED: tl.constexpr,
):  # fmt: skip
    """Copy one head of one block; grid (blocks, kv_heads). A side without ids counts 0, 1, 2, …"""
    i = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    src = i
    dst = i
    if SRC_INDEXED:
        src = tl.load(SRC_IDS + i)
    if DST_INDEXED:
        dst = tl.load(DST_IDS + i)
    d = tl.arange(0, BLOCK_D)
    for start in range(0, BLOCK_SIZE, BT):
        token = start + tl.arange(0, BT)
        mask = (token < BLOCK_SIZE)[:, None] & (d < D)[None, :]
        s_ptr = SRC + src * stride_s_block + head * stride_s_head + token[:, None] * stride_s_token + d[None, :]
        d_ptr = DST + dst * stride_d_block + head * stride_d_head + token[:, None] * stride_d_token + d[None, :]
        tl.store(d_ptr, tl.load(s_ptr, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize=["num_states", "state_cells"])
def merge_finished(OUTS, LSES, OUT, LSE, num_states, state_cells, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Merge `num_states` states of one row and head (natural log); grid (rows * heads)."""
    cell = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    top = float("-inf")
    for i in range(num_states):
        top = tl.maximum(top, tl.load(LSES + i * state_cells + cell))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for i in range(num_states):
        at = i * state_cells + cell
        weight = tl.exp(tl.load(LSES + at) - base)
        x = tl.load(OUTS + at * D + d, mask=d < D, other=0.0).to(tl.float32)
        acc += tl.where(weight > 0, x * weight, 0.0)
        total += weight
    safe = tl.where(total > 0, total, 1.0)
    tl.store(OUT + cell * D + d, (acc / safe).to(OUT.dtype.element_ty), mask=d < D)
    tl.store(LSE + cell, tl.where(total > 0, base + tl.log(safe), float("-inf")))
