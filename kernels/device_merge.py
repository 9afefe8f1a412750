"""Device code that joins the partial states which several work items gave for one row (see `device_attend.py`).

One thread sums its columns over all parts by itself: no exchange between threads, and all loads of a step in flight
at once. Rows of many parts are shared out over groups of threads that are joined at the end.

Where a plan is WATCHED, a program waits for the words of its row, not for the grids that attend to end. The lowest
mantissa bit of every word of a state is its phase, which changes from call to call; a reader takes it off, so that it
never shows. That is right because
- words are stored and loaded by relaxed operations, each for itself: a word is the old one or the new one, and its own
  phase says which. No word says anything about another, so that no fence is needed;
- the programs waited for are running or done, and wait for nothing themselves. The grids of a call are a chain in
  which each may start once all programs of the one before have started (or, without dependent launches, ended). So
  programs that wait here keep none of those they wait for off the device;
- a state is stored once a call and read by this grid only, and calls follow one another: the first grid of a call is an
  ordinary launch. MARKS[0] is the phase of the last call, for those that attend, and changes when they have all ended.
  A program here may start after that, so that each has a mark of its own: 2 + the phase of its last call;
- a new cut zeroes all marks. States may hold words of any phase then: a program without a mark waits for the grids.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from radixpool.kernels.device_attend import LN2, LOG2E, NEG_INF

# Polls before a row is given up and becomes NaN: about a second. Only a plan used by two streams at once gets there.
PATIENCE = tl.constexpr(1 << 20)


@triton.jit
def bits_of(x):
    """Return the bits of float32 values."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def load_word(BASE, offset, mask, old, INTERPRETED: tl.constexpr):
    """Load words by relaxed loads, which the L1 cache does not serve; `old` where the mask is off."""
    if INTERPRETED:
        word = bits_of(tl.load(BASE + offset, mask=mask, other=old.to(tl.float32, bitcast=True)))
    else:
        word = tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 a; setp.ne.b32 p, $3, 0; mad.wide.u32 a, $2, 4, $1; mov.b32 $0, $4;"
            " @p ld.relaxed.gpu.global.b32 $0, [a]; }",
            "=&r,l,r,r,r", [BASE.to(tl.int64), offset, mask.to(tl.int32), old], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return word


@triton.jit
def load_words(BASE, offset, mask, a, b, c, d, INTERPRETED: tl.constexpr):
    """Load four neighbours at each place, each as `load_word` does."""
    if INTERPRETED:
        words = (
            load_word(BASE, offset, mask, a, True), load_word(BASE, offset + 1, mask, b, True),
            load_word(BASE, offset + 2, mask, c, True), load_word(BASE, offset + 3, mask, d, True),
        )  # fmt: skip
    else:
        words = tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 a; setp.ne.b32 p, $6, 0; mad.wide.u32 a, $5, 4, $4;"
            " mov.b32 $0, $7; mov.b32 $1, $8; mov.b32 $2, $9; mov.b32 $3, $10;"
            " @p ld.relaxed.gpu.global.v4.b32 {$0, $1, $2, $3}, [a]; }",
            "=&r,=&r,=&r,=&r,l,r,r,r,r,r,r", [BASE.to(tl.int64), offset, mask.to(tl.int32), a, b, c, d],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return words


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
            PART, cells[j] * STATE + column, here, states[4 * j], states[4 * j + 1], states[4 * j + 2],
            states[4 * j + 3], INTERPRETED,
        )  # fmt: skip
        new_lses = new_lses + (load_word(PART_LSE, cells[j], here, lses[j], INTERPRETED),)  # type: ignore[assignment]  # noqa: RUF005
        new_states = new_states + words
    return new_lses, new_states


@triton.jit
def either(a, b):
    """Return the bits set in one of two integers."""
    return a | b


@triton.jit
def wait_for_any(PART_LSE, cells, wanted, phase, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr):
    """Wait until one of the wanted states is there, as far as its LSE tells (a cheap poll); return how many polls."""
    tries = 0
    waiting = True
    while waiting & (tries < PATIENCE):
        fresh = wanted & 0
        for j in tl.static_range(BLOCK_N):
            here = (wanted >> j) & 1 != 0
            lse = load_word(PART_LSE, cells[j], here, wanted & 0, INTERPRETED)
            fresh |= tl.where(here & ((lse & 1) == phase), 1, 0)
        waiting = tl.max(fresh) == 0
        tries += 1
    return tries


@triton.jit
def missing(lses, states, wanted, phase, BLOCK_N: tl.constexpr):
    """Return which of the wanted states have a word of another phase."""
    stale = wanted & 0
    for j in tl.static_range(BLOCK_N):
        words = (states[4 * j] ^ phase) | (states[4 * j + 1] ^ phase) | (states[4 * j + 2] ^ phase)
        stale |= ((words | (states[4 * j + 3] ^ phase) | (lses[j] ^ phase)) & 1) << j
    return wanted & stale


@triton.jit
def value_of(bits):
    """Return the float32 that a word holds, its phase taken off."""
    return (bits & -2).to(tl.float32, bitcast=True)


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
        tries = 0
        wanted = left
        pending = True
        while pending & (tries < PATIENCE):
            lses, states = load_states(PART, PART_LSE, cells, column, left, lses, states, STATE, BLOCK_N, INTERPRETED)
            left = missing(lses, states, left, phase, BLOCK_N)
            found = tl.reduce(tl.where(left != 0, 1, 0) | tl.where(left != wanted, 2, 0), None, either)
            pending = found & 1 != 0
            if found == 1:
                tries += wait_for_any(PART_LSE, cells, left, phase, BLOCK_N, INTERPRETED)
            tries += 1
    else:
        lses, states = load_states(PART, PART_LSE, cells, column, left, lses, states, STATE, BLOCK_N, INTERPRETED)
        left = left & 0
    new_top = top
    for j in tl.static_range(BLOCK_N):
        new_top = tl.maximum(new_top, value_of(lses[j]))
    base = tl.where(new_top == NEG_INF, 0.0, new_top)
    shrink = tl.where(left == 0, tl.exp2(top - base), float("nan"))
    total = total * shrink
    a, b, c, d = acc
    a *= shrink
    b *= shrink
    c *= shrink
    d *= shrink
    for j in tl.static_range(BLOCK_N):
        weight = tl.exp2(value_of(lses[j]) - base)
        total += weight
        a += value_of(states[4 * j]) * weight
        b += value_of(states[4 * j + 1]) * weight
        c += value_of(states[4 * j + 2]) * weight
        d += value_of(states[4 * j + 3]) * weight
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
    place = MARKS + 1 + i * tl.num_programs(1) + tl.program_id(1)
    mark = tl.load(place) if WATCHED else 0
    phase = (mark & 1) ^ 1
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
        if mark == 0:  # noqa: SIM102 - the other is known at compile time
            if PDL:
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
            tl.store(place, 2 | phase)
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
