"""What a batch of attention looks like before any tensor exists: heads, sizes, dtypes, device, backend.

`AttentionSpec` is built once per model. It owns the choice of the backend, which is a pure function of
the device: `torch` on the CPU, `triton` on CUDA. `backend="triton"` on the CPU means Triton's interpreter
(`TRITON_INTERPRET=1`), which is for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Backend = Literal["torch", "triton"]
Precision = Literal["full", "fp8"]

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
MAX_GROUP_SIZE = 128
KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
Q_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose_backend(device: torch.device | str, override: Backend | None = None) -> Backend:
    """Return the backend for `device`: `override` if given, else `triton` on CUDA and `torch` elsewhere.

    >>> choose_backend("cpu"), choose_backend("cuda:0"), choose_backend("cpu", "triton")
    ('torch', 'triton', 'triton')
    """
    if override is not None:
        if override not in ("torch", "triton"):
            raise ValueError(f"backend: expected 'torch' or 'triton', got {override!r}")
        return override
    return "triton" if torch.device(device).type == "cuda" else "torch"


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Heads, sizes and dtypes of one model's attention on one device.

    `head_dim` is the width of Q and K, `v_head_dim` (default: the same) that of V and of the output.
    `block_size` is in tokens. `backend=None` chooses by device.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    v_head_dim: int = 0
    q_dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    backend: Backend | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "v_head_dim", self.v_head_dim or self.head_dim)
        object.__setattr__(self, "device", torch.device(self.device))
        object.__setattr__(self, "backend", choose_backend(self.device, self.backend))
        for name in ("num_q_heads", "num_kv_heads", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of num_kv_heads={self.num_kv_heads}, got {self.num_q_heads}"
            )
        if self.group_size > MAX_GROUP_SIZE:
            raise ValueError(f"num_q_heads: at most {MAX_GROUP_SIZE} query heads a KV head, got {self.group_size}")
        for name in ("head_dim", "v_head_dim"):
            if not MIN_HEAD_DIM <= getattr(self, name) <= MAX_HEAD_DIM:
                raise ValueError(f"{name}: expected {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {getattr(self, name)}")
        if self.q_dtype not in Q_DTYPES:
            raise TypeError(f"q_dtype: expected one of {Q_DTYPES}, got {self.q_dtype}")
        if self.kv_dtype not in KV_DTYPES:
            raise TypeError(f"kv_dtype: expected one of {KV_DTYPES}, got {self.kv_dtype}")

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token costs in one KV head."""
        return (self.head_dim + self.v_head_dim) * self.kv_dtype.itemsize
