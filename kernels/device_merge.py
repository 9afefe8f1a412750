"""Device code that joins the partial states which several work items gave for one row (see `device_attend.py`).

One thread sums its columns over all parts by itself: no exchange between threads, and all loads of a step in flight
at once. Rows of many parts are shared out over groups of threads that are joined at the end.

Where a plan is WATCHED, a program does not wait for the grids that attend to end, but for its row's words. The lowest
mantissa bit of every word of a state is its phase, which changes from call to call; a reader takes it off, so that the
phase never shows. That is right because
- words are stored and loaded by relaxed stores and loads, each for itself: a word is the old one or the
  new one, and its own phase says which. No word says anything about another, so no fence is needed;
- the programs waited for are running or done. This grid depends on the last one that attends, which lets it start once
  all its own programs have started, and which started in the same way itself. They wait for nothing. So none of those
  that wait here can keep one of them from the device;
- a state is stored once a call and read in this grid only; calls follow one another, as the first grid of a call is an
  ordinary launch. MARKS[0] holds the phase of the last call for those that attend, and changes when they have all
  ended; each program here has a mark of its own, because others may start after that. New plans zero all words.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from radixpool.kernels.device_attend import LN2, LOG2E, NEG_INF

# Polls before a row is given up and becomes NaN: seconds. Only a plan used by two streams at once gets there.
PATIENCE = tl.constexpr(1 << 22)


@triton.jit
def bits_of(x):
    """Return the bits of float32 values."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def load_word(place, mask, old, INTERPRETED: tl.constexpr):
    """Load words by relaxed loads, which the L1 cache does not serve; `old` where the mask is off."""
    if INTERPRETED:
        return bits_of(tl.load(place, mask=mask, other=old.to(tl.float32, bitcast=True)))
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, $3; @p ld.relaxed.gpu.global.b32 $0, [$1]; }",
            "=&r,l,r,r", [place.to(tl.int64), mask.to(tl.int32), old], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def load_words(place, mask, a, b, c, d, INTERPRETED: tl.constexpr):
    """Load four neighbours at each place, each as `load_word` does."""
    if INTERPRETED:
        return (
            load_word(place, mask, a, True), load_word(place + 1, mask, b, True), load_word(place + 2, mask, c, True),
            load_word(place + 3, mask, d, True),
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, $6; mov.b32 $1, $7; mov.b32 $2, $8; mov.b32 $3, $9;"
            " @p ld.relaxed.gpu.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
            "=&r,=&r,=&r,=&r,l,r,r,r,r,r", [place.to(tl.int64), mask.to(tl.int32), a, b, c, d],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def load_states(
    PART, PART_LSE, cells, column, wanted, lses, states, STATE: tl.constexpr, BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return LSE and state at each of `cells` where its bit is set in `wanted`, elsewhere what is given."""
    new_lses = ()
    new_states = ()
    for j in tl.static_range(BLOCK_N):
        here = (wanted >> j) & 1 != 0
        words = load_words(
            PART + cells[j].to(tl.int64) * STATE + column, here, states[4 * j], states[4 * j + 1], states[4 * j + 2],
            states[4 * j + 3], INTERPRETED,
        )  # fmt: skip
        new_lses = new_lses + (load_word(PART_LSE + cells[j], here, lses[j], INTERPRETED),)  # type: ignore[assignment]  # noqa: RUF005
        new_states = new_states + words  # type: ignore[assignment]
    return new_lses, new_states


@triton.jit
def wait_for_any(PART_LSE, cells, wanted, phase, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return once one of the wanted states is there: until shortly before the end, poll next to nothing."""
    tries = 0
    waiting = tl.max(wanted)
    while (waiting != 0) & (tries < PATIENCE):
        fresh = wanted & 0
        for j in tl.static_range(BLOCK_N):
            here = (wanted >> j) & 1 != 0
            lse = load_word(PART_LSE + cells[j], here, wanted & 0, INTERPRETED)
            fresh |= tl.where(here & ((lse & 1) == phase), 1, 0)
        waiting = tl.where(tl.max(fresh) == 0, 1, 0)
        tries += 1


@triton.jit
def missing(lses, states, wanted, phase, BLOCK_N: tl.constexpr):
    """Return which of the wanted states have a word of another phase."""
    stale = wanted & 0
    for j in tl.static_range(BLOCK_N):
        words = (states[4 * j] ^ phase) | (states[4 * j + 1] ^ phase) | (states[4 * j + 2] ^ phase)
        stale |= ((words | (states[4 * j + 3] ^ phase) | (lses[j] ^ phase)) & 1) << j
    return wanted & stale


@triton.jit
def value_of(bits, WATCHED: tl.constexpr):
    """Return the float32 that a word holds, its phase taken off."""
    return (bits & -2 if WATCHED else bits).to(tl.float32, bitcast=True)


@triton.jit
def merge_step(
    PART, PART_LSE, cells, column, inside, start, last, phase, top, total, acc, STATE: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, WATCHED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Fold the states at `cells`, one of every group at a time, into the running maximum, denominator and output."""
    left = tl.zeros_like(column)
    nothing = bits_of(tl.full(column.shape, NEG_INF, tl.float32))
    lses = ()
    states = ()
    for j in tl.static_range(BLOCK_N):
        left |= tl.where(inside & (start + j * GROUPS < last), 1 << j, 0)
        lses = lses + (nothing,)  # type: ignore[assignment]  # noqa: RUF005
        states = states + (left & 0, left & 0, left & 0, left & 0)  # type: ignore[assignment]  # noqa: RUF005
    if WATCHED:
        wait_for_any(PART_LSE, cells, left, phase, BLOCK_N, INTERPRETED)
        tries = 0
        pending = tl.max(left)
        while (pending != 0) & (tries < PATIENCE):
            lses, states = load_states(PART, PART_LSE, cells, column, left, lses, states, STATE, BLOCK_N, INTERPRETED)
            left = missing(lses, states, left, phase, BLOCK_N)
            pending = tl.max(left)
            tries += 1
    else:
        lses, states = load_states(PART, PART_LSE, cells, column, left, lses, states, STATE, BLOCK_N, INTERPRETED)
        left = left & 0
    new_top = top
    for j in tl.static_range(BLOCK_N):
        new_top = tl.maximum(new_top, value_of(lses[j], WATCHED))
    base = tl.where(new_top == NEG_INF, 0.0, new_top)
    shrink = tl.where(left == 0, tl.exp2(top - base), float("nan"))
    total = total * shrink
    a, b, c, d = acc
    a *= shrink
    b *= shrink
    c *= shrink
    d *= shrink
    for j in tl.static_range(BLOCK_N):
        weight = tl.exp2(value_of(lses[j], WATCHED) - base)
        total += weight
        a += value_of(states[4 * j], WATCHED) * weight
        b += value_of(states[4 * j + 1], WATCHED) * weight
        c += value_of(states[4 * j + 2], WATCHED) * weight
        d += value_of(states[4 * j + 3], WATCHED) * weight
    return new_top, total, (a, b, c, d)


@triton.jit
def load_cells(PARTS, start, last, head, HQ: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr):
    """Return the numbers of the next `BLOCK_N` states of each group, counted over parts and heads."""
    cells = ()
    for j in tl.static_range(BLOCK_N):
        at = start + j * GROUPS
        cells = cells + (tl.load(PARTS + at, mask=at < last, other=0) * HQ + head,)  # type: ignore[assignment]  # noqa: RUF005
    return cells


@triton.jit
def merge_partials(
    OUT, LSE, SINKS, PART, PART_LSE, MARKS, ROWS, STARTS, PARTS, COUNTS,
    HQ: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, STATE: tl.constexpr, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    WATCHED: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the partial states of row ROWS[i] for HEADS query heads; grid (rows, num_q_heads / HEADS, rounded up).

    All tensors are [GROUPS * HEADS, BLOCK_DV / 4]: a thread has four neighbouring columns of its states.
    """
    i = tl.program_id(0)
    # Read before it is known whether this program has a row: one load less that waits for another.
    row = tl.load(ROWS + i)
    first = tl.load(STARTS + i)
    last = tl.load(STARTS + i + 1)
    mark = MARKS + 1 + i * tl.num_programs(1) + tl.program_id(1)
    phase = tl.load(mark) ^ 1 if WATCHED else 0
    if i < tl.load(COUNTS):
        COLUMNS: tl.constexpr = BLOCK_DV // 4
        column = (4 * tl.arange(0, COLUMNS))[None, :] + tl.zeros([GROUPS * HEADS, 1], tl.int32)
        lane = tl.arange(0, GROUPS * HEADS)[:, None] + tl.zeros([1, COLUMNS], tl.int32)
        group = lane // HEADS
        head = tl.program_id(1) * HEADS + lane % HEADS
        inside = (head < HQ) & (column < DV)
        top = tl.full([GROUPS * HEADS, COLUMNS], NEG_INF, tl.float32)
        total = tl.zeros([GROUPS * HEADS, COLUMNS], tl.float32)
        acc = (total, total, total, total)
        if HAS_SINKS:
            sink = tl.load(SINKS + head, mask=head < HQ, other=0.0) * LOG2E
            top = tl.where(group == 0, sink, top)
            total = tl.where(group == 0, 1.0, total)
        cells = load_cells(PARTS, first + group, last, head, HQ, BLOCK_N, GROUPS)
        if PDL and not WATCHED:
            gdc_wait()
        for start in range(first, last, BLOCK_N * GROUPS):
            top, total, acc = merge_step(
                PART, PART_LSE, cells, column, inside, start + group, last, phase, top, total, acc, STATE, BLOCK_N,
                GROUPS, WATCHED, INTERPRETED,
            )  # fmt: skip
            cells = load_cells(PARTS, start + BLOCK_N * GROUPS + group, last, head, HQ, BLOCK_N, GROUPS)
        a, b, c, d = acc
        if GROUPS > 1:
            top, total, a, b, c, d = join_groups(top, total, a, b, c, d, GROUPS, HEADS, COLUMNS)
        store_row(OUT, LSE, row, top, total, a, b, c, d, HQ, DV, BLOCK_DV, HEADS, HAS_LSE)
        if WATCHED:
            tl.store(mark, phase)
    if (i == 0) & (tl.program_id(1) == 0):
        # A grid has ended when all its programs have: one that waits for the grids before is enough.
        if PDL:
            gdc_wait()
        if WATCHED:
            tl.store(MARKS, tl.load(MARKS) ^ 1)


@triton.jit
def join_groups(top, total, a, b, c, d, GROUPS: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return maximum, denominator and output over all groups of threads, [HEADS, COLUMNS] each."""
    tops = tl.reshape(top, [GROUPS, HEADS, COLUMNS])
    top = tl.max(tops, 0)
    weights = tl.exp2(tops - tl.where(top == NEG_INF, 0.0, top)[None, :, :])
    total = tl.sum(tl.reshape(total, [GROUPS, HEADS, COLUMNS]) * weights, 0)
    a = tl.sum(tl.reshape(a, [GROUPS, HEADS, COLUMNS]) * weights, 0)
    b = tl.sum(tl.reshape(b, [GROUPS, HEADS, COLUMNS]) * weights, 0)
    c = tl.sum(tl.reshape(c, [GROUPS, HEADS, COLUMNS]) * weights, 0)
    d = tl.sum(tl.reshape(d, [GROUPS, HEADS, COLUMNS]) * weights, 0)
    return top, total, a, b, c, d


@triton.jit
def store_row(
    OUT, LSE, row, top, total, a, b, c, d, HQ: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    HEADS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Write the output, and the natural LSE, of this program's heads of one row."""
    safe = tl.where(total > 0, total, 1.0)
    out = tl.join(tl.join(a / safe, c / safe), tl.join(b / safe, d / safe))
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK_DV)
    target = row.to(tl.int64) * HQ + head
    place = OUT + target[:, None] * DV + column[None, :]
    out = tl.reshape(out, [HEADS, BLOCK_DV]).to(OUT.dtype.element_ty)
    tl.store(place, out, mask=(head < HQ)[:, None] & (column < DV)[None, :])
    if HAS_LSE:
        lse = tl.max(tl.where(total > 0, (top + tl.log2(safe)) * LN2, NEG_INF), 1)
        tl.store(LSE + target, lse, mask=head < HQ)
