"""Device code that joins the partial states which several work items gave for one row (see `device_attend.py`).

One thread sums its columns over all parts by itself: no exchange between threads, and all loads of a step in flight
at once. Rows of many parts are shared out over groups of threads that are joined at the end.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from radixpool.kernels.device_attend import LN2, LOG2E, NEG_INF


@triton.jit
def merge_step(
    PART, PART_LSE, cells, head, there, dv, inside, start, last, top, total, acc, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Fold the states at `cells`, one of every group at a time, into the running maximum, denominator and output."""
    states = ()
    lses = ()
    for j in tl.static_range(BLOCK_N):
        here = there & (start + j * GROUPS < last)
        lses = lses + (tl.load(PART_LSE + cells[j] + head, mask=here, other=NEG_INF),)  # type: ignore[assignment]  # noqa: RUF005
        place = PART + (cells[j] + head)[:, None] * DV + dv[None, :]
        states = states + (tl.load(place, mask=inside & here[:, None], other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    new_top = top
    for j in tl.static_range(BLOCK_N):
        new_top = tl.maximum(new_top, lses[j])
    base = tl.where(new_top == NEG_INF, 0.0, new_top)
    shrink = tl.exp2(top - base)
    total = total * shrink
    acc = acc * shrink[:, None]
    for j in tl.static_range(BLOCK_N):
        weight = tl.exp2(lses[j] - base)
        total += weight
        acc += states[j] * weight[:, None]
    return new_top, total, acc


@triton.jit
def load_cells(PARTS, start, last, HQ: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr):
    """Return where the next `BLOCK_N` states of each group begin, in heads."""
    cells = ()
    for j in tl.static_range(BLOCK_N):
        at = start + j * GROUPS
        cells = cells + (tl.load(PARTS + at, mask=at < last, other=0).to(tl.int64) * HQ,)  # type: ignore[assignment]  # noqa: RUF005
    return cells


@triton.jit
def merge_partials(
    OUT, LSE, SINKS, PART, PART_LSE, ROWS, STARTS, PARTS, COUNTS,
    HQ: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the partial states of row ROWS[i] for HEADS query heads; grid (rows, num_q_heads / HEADS, rounded up)."""
    i = tl.program_id(0)
    # Read before it is known whether this program has a row: one load less that waits for another.
    row = tl.load(ROWS + i)
    first = tl.load(STARTS + i)
    last = tl.load(STARTS + i + 1)
    if i < tl.load(COUNTS):
        lane = tl.arange(0, GROUPS * HEADS)
        group = lane // HEADS
        head = tl.program_id(1) * HEADS + lane % HEADS
        dv = tl.arange(0, BLOCK_DV)
        there = head < HQ
        inside = there[:, None] & (dv < DV)[None, :]
        top = tl.full([GROUPS * HEADS], NEG_INF, tl.float32)
        total = tl.zeros([GROUPS * HEADS], tl.float32)
        if HAS_SINKS:
            sink = tl.load(SINKS + head, mask=there, other=0.0) * LOG2E
            top = tl.where(group == 0, sink, top)
            total = tl.where(group == 0, 1.0, total)
        acc = tl.zeros([GROUPS * HEADS, BLOCK_DV], tl.float32)
        cells = load_cells(PARTS, first + group, last, HQ, BLOCK_N, GROUPS)
        if PDL:
            gdc_wait()
        for start in range(first, last, BLOCK_N * GROUPS):
            top, total, acc = merge_step(
                PART, PART_LSE, cells, head, there, dv, inside, start + group, last, top, total, acc, DV, BLOCK_N,
                GROUPS,
            )  # fmt: skip
            cells = load_cells(PARTS, start + BLOCK_N * GROUPS + group, last, HQ, BLOCK_N, GROUPS)
        if GROUPS > 1:
            tops = tl.reshape(top, [GROUPS, HEADS])
            best = tl.max(tops, 0)
            weights = tl.exp2(tops - tl.where(best == NEG_INF, 0.0, best)[None, :])
            total = tl.sum(tl.reshape(total, [GROUPS, HEADS]) * weights, 0)
            acc = tl.sum(tl.reshape(acc, [GROUPS, HEADS, BLOCK_DV]) * weights[:, :, None], 0)
            top = best
            head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
            there = head < HQ
            inside = there[:, None] & (dv < DV)[None, :]
        safe = tl.where(total > 0, total, 1.0)
        target = row.to(tl.int64) * HQ + head
        out = (acc / safe[:, None]).to(OUT.dtype.element_ty)
        tl.store(OUT + target[:, None] * DV + dv[None, :], out, mask=inside)
        if HAS_LSE:
            tl.store(LSE + target, tl.where(total > 0, (top + tl.log2(safe)) * LN2, NEG_INF), mask=there)
    elif PDL:
        gdc_wait()
