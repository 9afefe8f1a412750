"""ALiBi: attention with linear biases in place of position embeddings (Press et al., ICLR 2022, arXiv 2108.12409)."""

from __future__ import annotations

import torch
from torch import Tensor


def alibi_slopes(num_heads: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Return the paper's slope of each query head, float32 `[num_heads]`, for `attend` and `extend`.

    A power of two n has 2^(-8/n), 2^(-16/n), ..., 2^-8. Other counts take the slopes of the next lower power of two,
    then every second one of twice that power, as the authors' code does.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    >>> alibi_slopes(6).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    """
    if num_heads < 1:
        raise ValueError(f"num_heads: expected at least 1, got {num_heads}")
    power = 1 << (num_heads.bit_length() - 1)
    exponents = torch.arange(1, power + 1, dtype=torch.float64) * (8 / power)
    between = torch.arange(1, 2 * power, 2, dtype=torch.float64) * (4 / power)
    return torch.exp2(-torch.cat([exponents, between[: num_heads - power]])).to(device, torch.float32)
