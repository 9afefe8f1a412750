"""Device code that lays out fp8 values for `extend_device_fp8.py`: keys side by side, in the order of its weights."""

import triton
import triton.language as tl

TURN_UNSPECIALISED = ["stride_table"]


@triton.jit
def byte_of_each(a, b, c, d, SHIFT: tl.constexpr):
    """Return the words made of one byte of four words each."""
    return (
        (a >> SHIFT & 0xFF) | (b >> SHIFT & 0xFF) << 8 | (c >> SHIFT & 0xFF) << 16 | (d >> SHIFT & 0xFF) << 24
    )  # fmt: skip


@triton.jit
def load_rows(V, table, token, end, head, word, stride_block, stride_head, stride_token, DV: tl.constexpr,
              BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """Return a row of words for each token, zeros from `end` on."""
    live = token < end
    block = tl.load(table + token // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    row = V + block * stride_block + head * stride_head + (token % BLOCK_SIZE) * stride_token
    return tl.load(row[:, None] + word[None, :], mask=live[:, None] & (word < DV // 4)[None, :], other=0)


@triton.jit(do_not_specialize=TURN_UNSPECIALISED)
def turn_values(
    V, TURNED, TABLES, CHUNKS, stride_table, stride_block, stride_head, stride_token, HEADS: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Turn chunk `program` of at most BT tokens into TURNED [chunks, HEADS, DV, BT]; zeros past its end.

    Grid (chunks, HEADS). V and TURNED are int32 words of four e4m3, strides count words. A chunk is (table, first
    token, end, 0). Of every 16 keys, key 8 a + 2 t + b comes to place 4 t + 2 a + b: one word holds keys
    2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
    """
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    table = TABLES + tl.load(CHUNKS + chunk * 4).to(tl.int64) * stride_table
    end = tl.load(CHUNKS + chunk * 4 + 2)
    place = tl.arange(0, BT // 4)
    token = tl.load(CHUNKS + chunk * 4 + 1) + place // 4 * 16 + place % 4 * 2
    word = tl.arange(0, BLOCK_DV // 4)
    a = load_rows(V, table, token, end, head, word, stride_block, stride_head, stride_token, DV, BLOCK_SIZE)
    b = load_rows(V, table, token + 1, end, head, word, stride_block, stride_head, stride_token, DV, BLOCK_SIZE)
    c = load_rows(V, table, token + 8, end, head, word, stride_block, stride_head, stride_token, DV, BLOCK_SIZE)
    d = load_rows(V, table, token + 9, end, head, word, stride_block, stride_head, stride_token, DV, BLOCK_SIZE)
    target = TURNED + ((chunk * HEADS + head) * DV + word * 4)[:, None] * (BT // 4) + place[None, :]
    mask = (word < DV // 4)[:, None]
    tl.store(target, tl.trans(byte_of_each(a, b, c, d, 0)), mask=mask)
    tl.store(target + BT // 4, tl.trans(byte_of_each(a, b, c, d, 8)), mask=mask)
    tl.store(target + BT // 2, tl.trans(byte_of_each(a, b, c, d, 16)), mask=mask)
    tl.store(target + BT // 4 * 3, tl.trans(byte_of_each(a, b, c, d, 24)), mask=mask)
