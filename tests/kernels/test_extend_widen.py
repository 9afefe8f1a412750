"""Copies of fp8 blocks in the dtype of Q: exact, from any strides."""

import numpy as np
import pytest
import torch

from radixpool.kernels.extend_plan import WideBlocks
from radixpool.kernels.extend_widen import Widening

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("layout", ["HND", "NHD", "half"])
@pytest.mark.parametrize("q_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (96, 64)])
def test_copies_are_exact(make_batch, device, layout, q_dtype, dims):
    batch = make_batch(head_dim=dims[0], v_head_dim=dims[1], lens=(100,), new=(40,), kv_dtype=FP8, q_dtype=q_dtype,
                       layout=layout)  # fmt: skip
    ids = batch.tables[0, [3, 0, 5]].numpy()  # whole blocks: the interpreter gives no NaN for an fp8 NaN
    widening = Widening(WideBlocks(ids, np.zeros((1, 1), np.int32)), batch.spec)
    for wide, pool in zip(widening.copy(batch.k_pool, batch.v_pool), (batch.k_pool, batch.v_pool), strict=True):
        want = pool.contiguous().view(torch.uint8)[torch.from_numpy(ids).long().to(device)].view(FP8).to(q_dtype)
        assert wide.dtype == q_dtype and wide.is_contiguous()
        torch.testing.assert_close(wide, want, atol=0, rtol=0)
