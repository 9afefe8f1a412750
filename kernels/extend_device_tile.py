"""Parts of the fast extend kernel that touch no barrier: masks, softmax, loading queries, storing results (Gluon).

One consumer warpgroup owns 64 packed rows (query row, head of the GQA group). Scores live in base 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
NEG_INF = gl.constexpr(float("-inf"))
SLACK = gl.constexpr(8.0)  # in the long loop the maximum follows when it would rise by so much: weights up to 2**SLACK
ROWS = gl.constexpr(64)  # rows of one consumer: the M of one wgmma
ENTRY = gl.constexpr(8)  # fields of one entry; see extend_plan.py


@gluon.jit
def mask_scores(s, pos, end, limit, lowest, PAGE: gl.constexpr, BN: gl.constexpr, WINDOW: gl.constexpr,
                layout: gl.constexpr):  # fmt: skip
    """Return the scores with what each row may not see at -inf; knows that the last page is shifted (`copy_tile`)."""
    last_page = (end - 1) // PAGE * PAGE
    shift = last_page + PAGE - end
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, layout))[None, :]
    before = n < (gl.minimum(limit, last_page) - pos)[:, None]
    inside = (n >= last_page + shift - pos) & (n < (gl.where(limit > last_page, limit + shift, 0) - pos)[:, None])
    if WINDOW:
        before = before & (n >= (lowest - pos)[:, None])
        inside = inside & (n >= (lowest + shift - pos)[:, None])
    return gl.where(before | inside, s, NEG_INF)


@gluon.jit
def sum_in_thread(p, BN: gl.constexpr):
    """Sum each row over the columns that one thread holds: [ROWS, 4], no exchange between threads.

    In the wgmma layout thread `t` of a quad holds columns 8 j + 2 t and 8 j + 2 t + 1 of its rows.
    """
    return gl.sum(gl.sum(p.reshape([ROWS, BN // 8, 4, 2]), 3), 1)


@gluon.constexpr_function
def rescale_asm(count):
    """Return assembly that multiplies `count` values by factors, skipped where all factors of the warp are 1.

    A thread holds two rows of the wgmma layout; its values 0 and 2 lie in different ones.
    """
    tests = "".join(f"setp.ne.or.f32 p, ${2 * count + i}, 0f3F800000, p;" for i in (0, 2))
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return (
        f"{{ .reg .pred p; setp.ne.u32 p, 0, 0; {tests} vote.sync.any.pred p, p, -1; @!p bra SKIP; {products} SKIP: }}"
    )


@gluon.constexpr_function
def rescale_constraints(count):
    """Return the operands of `rescale_asm`: results, which are the values, and factors."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescale(acc, shrink, COLUMNS: gl.constexpr):
    """Return acc * shrink; a warp whose rows all keep their maximum skips the products."""
    count: gl.constexpr = ROWS * COLUMNS // 128
    return gl.inline_asm_elementwise(
        rescale_asm(count), rescale_constraints(count), [acc, shrink[:, None]], dtype=gl.float32, is_pure=True,
        pack=count,
    )  # fmt: skip


@gluon.jit
def soften(s, top, total, qk_scale, BN: gl.constexpr, MASKED: gl.constexpr, CAP: gl.constexpr):
    """Fold one tile into the online softmax: return probabilities, maximum, partial denominators and shrink factor."""
    scale = qk_scale
    if CAP:
        scale = LOG2E
    new_top = gl.max(s, 1) * scale
    if not MASKED:
        new_top = gl.where(new_top > top + SLACK, new_top, top)
    else:
        new_top = gl.maximum(top, new_top)
    base = new_top
    if MASKED:
        base = gl.where(new_top == NEG_INF, 0.0, new_top)
    p = gl.exp2(s * scale - base[:, None])
    shrink = gl.exp2(top - base)
    part = sum_in_thread(p, BN)
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None] + part
    return p, new_top, total, shrink


@gluon.jit
def load_queries(
    Q, ENTRIES, ORDER, entry, stride_q_row, stride_q_head, part_id: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
    BD: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return one consumer's 64 packed rows (row, head of the group) of an entry, zeros where there is none."""
    record = ENTRIES + entry * ENTRY
    row_start = gl.load(record)
    num_rows = gl.load(record + 1)
    head = gl.load(record + 6)
    m = part_id * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    live = m // G < num_rows
    row = gl.load(ORDER + row_start + m // G, mask=live, other=0).to(gl.int64)
    d = gl.arange(0, BD, layout=gl.SliceLayout(0, layout))
    q_ptr = Q + (row * stride_q_row + (head * G + m % G) * stride_q_head)[:, None] + d[None, :]
    return gl.load(q_ptr, mask=live[:, None] & (d < D)[None, :], other=0.0)


@gluon.jit
def store_part(
    acc, top, total, out_scale, PART, PART_LSE, part, num_rows, head, part_id: gl.constexpr, HQ: gl.constexpr,
    G: gl.constexpr, DV: gl.constexpr, BDV: gl.constexpr, row_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """Write a partial state: the output normalised, and log2 of its denominator."""
    m = part_id * ROWS + gl.arange(0, ROWS, layout=row_layout)
    safe = gl.where(total > 0, total, 1.0)
    cell = (part + m // G).to(gl.int64) * HQ + head * G + m % G
    gl.store(PART_LSE + cell, gl.where(total > 0, top + gl.log2(safe), NEG_INF), mask=m // G < num_rows)
    factor = gl.convert_layout(out_scale / safe, gl.SliceLayout(1, o_layout))
    m = part_id * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, o_layout))
    d = gl.arange(0, BDV, layout=gl.SliceLayout(0, o_layout))
    cell = (part + m // G).to(gl.int64) * HQ + head * G + m % G
    mask = (m // G < num_rows)[:, None] & (d < DV)[None, :]
    gl.store(PART + cell[:, None] * DV + d[None, :], acc * factor[:, None], mask=mask)


@gluon.jit
def store_out(
    acc, top, total, out_scale, OUT, LSE, ORDER, SINKS, num_rows, head, part_id: gl.constexpr, HQ: gl.constexpr,
    G: gl.constexpr, DV: gl.constexpr, BDV: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
    row_layout: gl.constexpr, o_layout: gl.constexpr, store_layout: gl.constexpr,
):  # fmt: skip
    """Write finished rows of the output, and their LSE."""
    m = part_id * ROWS + gl.arange(0, ROWS, layout=row_layout)
    live = m // G < num_rows
    q_head = head * G + m % G
    if HAS_SINKS:
        sink = gl.load(SINKS + q_head, mask=live, other=0.0) * LOG2E
        new_top = gl.maximum(top, sink)
        shrink = gl.exp2(top - new_top)
        total = total * shrink + gl.exp2(sink - new_top)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        top = new_top
    safe = gl.where(total > 0, total, 1.0)
    if HAS_LSE:
        row = gl.load(ORDER + m // G, mask=live, other=0).to(gl.int64)
        gl.store(LSE + row * HQ + q_head, gl.where(total > 0, (top + gl.log2(safe)) * LN2, NEG_INF), mask=live)
    factor = gl.convert_layout(out_scale / safe, gl.SliceLayout(1, o_layout))
    o = gl.convert_layout((acc * factor[:, None]).to(OUT.dtype.element_ty), store_layout)
    m = part_id * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, store_layout))
    d = gl.arange(0, BDV, layout=gl.SliceLayout(0, store_layout))
    live = m // G < num_rows
    row = gl.load(ORDER + m // G, mask=live, other=0).to(gl.int64)
    cell = row * HQ + head * G + m % G
    gl.store(OUT + cell[:, None] * DV + d[None, :], o, mask=live[:, None] & (d < DV)[None, :])
