"""Device code that copies fp8 blocks to the dtype of Q: e4m3 fits exactly into fp16 and bf16; scales stay apart."""

import triton
import triton.language as tl


@triton.jit
def widen_rows(
    POOL, WIDE, page, copy, head, stride_block, stride_head, stride_token, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Copy one block of one head; WIDE is contiguous [blocks, HEADS, BLOCK_SIZE, D]."""
    d = tl.arange(0, BLOCK_D)
    source = POOL + page * stride_block + head * stride_head
    target = WIDE + (copy * HEADS + head) * BLOCK_SIZE * D
    for first in range(0, BLOCK_SIZE, BT):
        t = first + tl.arange(0, BT)
        mask = (t < BLOCK_SIZE)[:, None] & (d < D)[None, :]
        x = tl.load(source + t[:, None] * stride_token + d[None, :], mask=mask)
        tl.store(target + t[:, None] * D + d[None, :], x.to(WIDE.dtype.element_ty), mask=mask)


@triton.jit
def widen_blocks(
    K, V, WIDE_K, WIDE_V, BLOCKS, stride_k_block, stride_k_head, stride_k_token, stride_v_block, stride_v_head,
    stride_v_token, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Copy block BLOCKS[i] of K and V to place i; grid (blocks, HEADS)."""
    copy = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    page = tl.load(BLOCKS + copy).to(tl.int64)
    widen_rows(
        K, WIDE_K, page, copy, head, stride_k_block, stride_k_head, stride_k_token, HEADS, D, BLOCK_D, BLOCK_SIZE, BT
    )
    widen_rows(
        V, WIDE_V, page, copy, head, stride_v_block, stride_v_head, stride_v_token, HEADS, DV, BLOCK_DV, BLOCK_SIZE, BT
    )
