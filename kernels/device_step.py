"""Device code of a step that only grows: takes new lengths and changed table entries out of a message."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_changes", "ticket", "num_seqs", "stride_table"])
def apply_step(
    MESSAGE, num_changes, ticket, LENS, TABLES, num_seqs, stride_table, HEADER: tl.constexpr, ALIGN: tl.constexpr,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply one message and note its ticket in it, which gives the memory back to the host; one program.

    The message lies in host memory: it is read past the caches, which may hold the one before.
    """
    i = tl.arange(0, BLOCK)
    lens = MESSAGE + HEADER
    for start in range(0, num_seqs, BLOCK):
        live = start + i < num_seqs
        tl.store(LENS + start + i, tl.load(lens + start + i, mask=live, volatile=True), mask=live)
    rows = lens + (num_seqs + ALIGN - 1) // ALIGN * ALIGN
    for start in range(0, num_changes, BLOCK):
        live = start + i < num_changes
        row = tl.load(rows + start + i, mask=live, volatile=True).to(tl.int64)
        column = tl.load(rows + MOST + start + i, mask=live, volatile=True)
        block = tl.load(rows + 2 * MOST + start + i, mask=live, volatile=True)
        tl.store(TABLES + row * stride_table + column, block, mask=live)
    tl.debug_barrier()
    tl.store(MESSAGE, ticket)
