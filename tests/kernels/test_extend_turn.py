"""Turned fp8 values: every chunk holds its keys in the order of the weights, zeros past its end, from any strides."""

import numpy as np
import pytest
import torch

from radixpool.kernels.extend_plan import TURN_TOKENS, TurnedChunks
from radixpool.kernels.extend_turn import Turning

FP8 = torch.float8_e4m3fn
KEYS = [8 * (p % 4 // 2) + 2 * (p % 16 // 4) + p % 2 + p // 16 * 16 for p in range(TURN_TOKENS)]


def test_places_are_a_permutation_of_every_sixteen_keys():
    assert sorted(KEYS[:16]) == list(range(16))
    assert KEYS[:8] == [0, 1, 8, 9, 2, 3, 10, 11]


@pytest.mark.parametrize("layout", ["HND", "NHD", "half"])
@pytest.mark.parametrize(("dim", "block_size"), [(64, 16), (96, 8), (128, 64)])
def test_values_lie_where_the_weights_expect_them(make_batch, device, layout, dim, block_size):
    batch = make_batch(head_dim=64, v_head_dim=dim, block_size=block_size, lens=(300, 200), new=(40, 20), kv_dtype=FP8,
                       layout=layout)  # fmt: skip
    chunks = [[0, 0, 128, 0], [1, 72, 200, 0], [0, 256, 300, 0], [1, 64, 65, 0]]
    turned = TurnedChunks(np.array(chunks, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))
    values = Turning(turned, batch.spec).values(batch.v_pool, batch.tables.to(device))
    assert values.shape == (4, 2, dim, TURN_TOKENS) and values.dtype == FP8
    pool = batch.v_pool.contiguous().cpu().view(torch.uint8)
    for (table, first, end, _), got in zip(chunks, values.cpu().view(torch.uint8), strict=True):
        want = torch.zeros(2, dim, TURN_TOKENS, dtype=torch.uint8)
        for place, key in enumerate(KEYS):
            token = first + key
            if token < end:
                block = int(batch.tables[table, token // block_size])
                want[:, :, place] = pool[block, :, token % block_size]
        assert torch.equal(got, want)
