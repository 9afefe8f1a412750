"""Random ragged batches against the float64 reference: every mask with every dtype, in `attend` and in `extend`.

Masks and dtypes are parameters, not draws, so that each test compiles few kernels on a GPU. Lengths, sharing and block
order are drawn. Without a GPU the plain kernels run in Triton's interpreter, on short sequences; on a Hopper GPU the
wide cases of `extend` take the fast kernel.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixpool.kernels import alibi_slopes

CUDA = torch.cuda.is_available()
FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.float16, FP8] + ([torch.bfloat16] if CUDA else [])
SCALE = 30 if CUDA else 1  # lengths: the interpreter is slow
HEAD_DIM = 128 if CUDA else 16
EXAMPLES = 8 if CUDA else 3
MASKS = ("causal", "window", "soft_cap", "sinks", "alibi", "all")
CACHED, NEW = st.integers(0, 30), st.integers(0, 14)
EXTENDING = st.tuples(CACHED, NEW).map(lambda x: (SCALE * x[0] + x[1] % 7, SCALE * x[1]))
DECODING = st.tuples(st.integers(0, 60), st.integers(0, 7), st.sampled_from([1, 1, 2, 8, 0])).map(
    lambda x: (SCALE * x[0] + x[1], x[2])
)


@st.composite
def batches(draw, sequence):
    """Draw cached and new tokens of up to five sequences, and groups of them that begin with the same blocks."""
    drawn = draw(st.lists(sequence, min_size=1, max_size=5))
    lens, new = tuple(c + n for c, n in drawn), tuple(n for _, n in drawn)
    shared, depth = [], min(lens) // 16
    members = list(range(len(lens)))
    while depth and len(members) > 1 and draw(st.booleans()):
        shared.insert(0, (members, depth))  # larger groups are written last, so that smaller ones nest in them
        members, depth = members[: draw(st.integers(1, len(members)))], depth + draw(st.integers(0, 2))
        depth = min(depth, min(lens[i] for i in members) // 16)
    return {
        "lens": lens,
        "new": new if any(new) else (1,) * len(new),
        "shared": shared,
        "seed": draw(st.integers(0, 99)),
    }


def masks(name, window, cap, heads, device):
    """Return the options of one kind of mask."""
    each = {
        "window": window,
        "soft_cap": cap,
        "sinks": torch.linspace(-2, 2, heads, device=device),
        "alibi": alibi_slopes(heads, device=device),
    }
    names = each if name == "all" else [n for n in each if n == name]
    return {"alibi_slopes" if n == "alibi" else n: each[n] for n in names}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["attend", "extend"])
@given(data=st.data())
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_mask_and_dtype(make_batch, device, dtype, mask, kind, data):
    drawn = data.draw(batches(DECODING if kind == "attend" else EXTENDING))
    batch = make_batch(heads=(4, 2), head_dim=HEAD_DIM, kv_dtype=dtype, **drawn)
    window, cap = data.draw(st.integers(1, 40 * SCALE)), data.draw(st.floats(0.5, 30.0))
    batch.check(**masks(mask, window, cap, 4, device))


@pytest.mark.parametrize("scales", ["number", "head", "token"])
@pytest.mark.parametrize("kind", ["attend", "extend"])
@given(data=st.data())
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_kind_of_scale(make_batch, device, scales, kind, data):
    drawn = data.draw(batches(DECODING if kind == "attend" else EXTENDING))
    batch = make_batch(heads=(3, 1), head_dim=HEAD_DIM, kv_dtype=FP8, **drawn)
    shape = {"number": (), "head": (1,), "token": tuple(batch.k_pool.shape[:3])}[scales]
    k_scale, v_scale = (torch.rand(shape, device=device) + 0.5 for _ in range(2))
    if scales == "number":
        k_scale, v_scale = k_scale.item(), v_scale.item()
    batch.check(k_scale=k_scale, v_scale=v_scale)


@pytest.mark.parametrize("block_size", [1, 24, 64])
@given(data=st.data())
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_other_block_sizes(make_batch, block_size, data):
    drawn = data.draw(batches(EXTENDING))
    drawn["shared"] = [(rows, depth * 16 // block_size) for rows, depth in drawn["shared"]]
    make_batch(heads=(4, 2), head_dim=HEAD_DIM, block_size=block_size, kv_dtype=torch.float16, **drawn).check()
