"""Parts of the fast extend kernel that touch no barrier: masks, softmax, loading queries, storing results (Gluon).

One consumer warpgroup owns 64 or 128 packed rows (query row, head of the GQA group). Scores live in base 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Its name changed between Triton 3.6 and 3.9.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
NEG_INF = gl.constexpr(float("-inf"))
SLACK = gl.constexpr(8.0)  # in the long loop the maximum follows when it would rise by so much: weights up to 2**SLACK
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
    """Sum each row over the columns that one thread holds: [rows, 4], no exchange between threads.

    In the wgmma layout thread `t` of a quad holds columns 8 j + 2 t and 8 j + 2 t + 1 of its rows.
    """
    return gl.sum(gl.sum(p.reshape([p.shape[0], BN // 8, 4, 2]), 3), 1)


@gluon.constexpr_function
def rescale_asm(count, rows):
    """Return assembly that multiplies `count` values by factors, skipped where all factors of the warp are 1.

    A thread holds two of every 64 rows in the wgmma layout; values 0 and 2 of them lie in different ones.
    """
    blocks = range(0, count, count * 64 // rows)
    tests = "".join(f"setp.ne.or.f32 p, ${2 * count + b + i}, 0f3F800000, p;" for b in blocks for i in (0, 2))
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
    count: gl.constexpr = acc.shape[0] * COLUMNS // 128
    return gl.inline_asm_elementwise(
        rescale_asm(count, acc.shape[0]), rescale_constraints(count), [acc, shrink[:, None]], dtype=gl.float32,
        is_pure=True, pack=count,
    )  # fmt: skip


@gluon.constexpr_function
def out_layout(columns):
    """Return the register layout of outputs of so many columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def no_outputs(ROWS: gl.constexpr, DV: gl.constexpr, BDV: gl.constexpr):
    """Return outputs of zeros: one tensor, or a half and a quarter of BDV columns where DV needs no more."""
    if DV * 4 <= BDV * 3:
        half = gl.zeros([ROWS, BDV // 2], gl.float32, out_layout(BDV // 2))
        acc = (half, gl.zeros([ROWS, BDV // 4], gl.float32, out_layout(BDV // 4)))
    else:
        acc = (gl.zeros([ROWS, BDV], gl.float32, out_layout(BDV)),)
    return acc


@gluon.jit
def shrink_outputs(acc, shrink, RARELY: gl.constexpr):
    """Return the outputs times a factor for each row, which is RARELY another than 1."""
    out = ()
    for i in gl.static_range(len(acc)):
        factor = gl.convert_layout(shrink, gl.SliceLayout(1, acc[i].type.layout))
        if RARELY:
            out += (rescale(acc[i], factor, acc[i].shape[1]),)
        else:
            out += (acc[i] * factor[:, None],)
    return out


@gluon.constexpr_function
def pin_asm(count):
    """Return assembly that passes `count` values through a branch that is not taken."""
    change = "".join(f"add.f32 ${i}, ${i}, ${i};" for i in range(count))
    never = f"setp.ne.u32 p, ${2 * count}, 0; vote.sync.any.pred p, p, -1; @!p bra SKIP;"
    return f"{{ .reg .pred p; {never} {change} SKIP: }}"


@gluon.constexpr_function
def pin_constraints(count):
    """Return the operands of `pin_asm`: results, which are the values, and zeros."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * count)


@gluon.jit
def pin(p, BN: gl.constexpr):
    """Return the same weights; ptxas moves nothing that makes them past this place."""
    count: gl.constexpr = p.shape[0] * BN // 128
    zero = gl.program_id(1)  # which the compiler can't know
    return gl.inline_asm_elementwise(
        pin_asm(count), pin_constraints(count), [p, zero], dtype=gl.float32, is_pure=False, pack=count
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
    if BN < 128 and s.shape[0] == 64 and not MASKED:
        p = pin(p, BN)  # else they are computed behind the wait for the product, which they should overlap
    shrink = gl.exp2(top - base)
    part = sum_in_thread(p, BN)
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None] + part
    return p, new_top, total, shrink


@gluon.jit
def load_entry(
    ENTRIES, LIMITS, entry, part_id: gl.constexpr, ROWS: gl.constexpr, G: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Return the fields of an entry, and how many keys each row of one consumer sees."""
    record = ENTRIES + entry * ENTRY
    row_start = gl.load(record)
    num_rows = gl.load(record + 1)
    m = part_id * ROWS + gl.arange(0, ROWS, layout=layout)
    limit = gl.load(LIMITS + row_start + m // G, mask=m // G < num_rows, other=0)
    return (
        row_start, num_rows, gl.load(record + 3), gl.load(record + 4), gl.load(record + 5), gl.load(record + 6),
        gl.load(record + 7), limit,
    )  # fmt: skip


@gluon.jit
def load_queries(
    Q, ENTRIES, ORDER, entry, stride_q_row, stride_q_head, part_id: gl.constexpr, ROWS: gl.constexpr, G: gl.constexpr,
    D: gl.constexpr, BD: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return one consumer's packed rows (row, head of the group) of an entry, zeros where there is none."""
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
def store_columns(
    acc, factor, PART, part, num_rows, head, part_id: gl.constexpr, HQ: gl.constexpr, G: gl.constexpr,
    DV: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Write some columns of a partial output."""
    layout: gl.constexpr = acc.type.layout
    factor = gl.convert_layout(factor, gl.SliceLayout(1, layout))
    m = part_id * acc.shape[0] + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    d = FIRST + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    cell = (part + m // G).to(gl.int64) * HQ + head * G + m % G
    mask = (m // G < num_rows)[:, None] & (d < DV)[None, :]
    gl.store(PART + cell[:, None] * DV + d[None, :], acc * factor[:, None], mask=mask)


@gluon.jit
def store_part(
    acc, top, total, out_scale, PART, PART_LSE, part, num_rows, head, part_id: gl.constexpr, HQ: gl.constexpr,
    G: gl.constexpr, DV: gl.constexpr, row_layout: gl.constexpr,
):  # fmt: skip
    """Write a partial state: the output normalised, and log2 of its denominator."""
    m = part_id * acc[0].shape[0] + gl.arange(0, acc[0].shape[0], layout=row_layout)
    safe = gl.where(total > 0, total, 1.0)
    cell = (part + m // G).to(gl.int64) * HQ + head * G + m % G
    gl.store(PART_LSE + cell, gl.where(total > 0, top + gl.log2(safe), NEG_INF), mask=m // G < num_rows)
    for i in gl.static_range(len(acc)):
        store_columns(
            acc[i], out_scale / safe, PART, part, num_rows, head, part_id, HQ, G, DV, i * (acc[0].shape[1])
        )  # fmt: skip


@gluon.jit
def store_out(
    buffer, acc, top, total, out_scale, OUT, LSE, ORDER, SINKS, num_rows, head, part_id: gl.constexpr, HQ: gl.constexpr,
    G: gl.constexpr, DV: gl.constexpr, BDV: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
    row_layout: gl.constexpr, store_layout: gl.constexpr,
):  # fmt: skip
    """Write finished rows of the output, and their LSE, by way of `buffer` in shared memory."""
    m = part_id * acc[0].shape[0] + gl.arange(0, acc[0].shape[0], layout=row_layout)
    live = m // G < num_rows
    q_head = head * G + m % G
    if HAS_SINKS:
        sink = gl.load(SINKS + q_head, mask=live, other=0.0) * LOG2E
        new_top = gl.maximum(top, sink)
        shrink = gl.exp2(top - new_top)
        total = total * shrink + gl.exp2(sink - new_top)
        acc = shrink_outputs(acc, shrink, False)
        top = new_top
    safe = gl.where(total > 0, total, 1.0)
    if HAS_LSE:
        row = gl.load(ORDER + m // G, mask=live, other=0).to(gl.int64)
        gl.store(LSE + row * HQ + q_head, gl.where(total > 0, (top + gl.log2(safe)) * LN2, NEG_INF), mask=live)
    acc = shrink_outputs(acc, out_scale / safe, False)
    if len(acc) == 2:
        buffer.slice(0, BDV // 2, 1).store(acc[0].to(OUT.dtype.element_ty))
        buffer.slice(BDV // 2, BDV // 4, 1).store(acc[1].to(OUT.dtype.element_ty))
    else:
        buffer.store(acc[0].to(OUT.dtype.element_ty))
    thread_barrier()
    o = buffer.load(store_layout)
    m = part_id * acc[0].shape[0] + gl.arange(0, acc[0].shape[0], layout=gl.SliceLayout(1, store_layout))
    d = gl.arange(0, BDV, layout=gl.SliceLayout(0, store_layout))
    live = m // G < num_rows
    row = gl.load(ORDER + m // G, mask=live, other=0).to(gl.int64)
    cell = row * HQ + head * G + m % G
    gl.store(OUT + cell[:, None] * DV + d[None, :], o, mask=live[:, None] & (d < DV)[None, :])
