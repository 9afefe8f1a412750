"""Rotary position embedding, as a value that `write_kv` can fuse and `apply_rope` applies alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RoPE:
    """Angles of this step's tokens: `cos`, `sin` `[T, rotary_dim / 2]`; `rotary_dim` columns of each head turn.

    `interleaved=False` pairs column `i` with `i + rotary_dim / 2` (Llama, NeoX), `True` pairs `2i` with `2i + 1`
    (GPT-J).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.cos.ndim != 2 or self.cos.shape != self.sin.shape:
            raise ValueError(
                f"rope: expected cos and sin of one shape [tokens, rotary_dim / 2], got {tuple(self.cos.shape)} and "
                f"{tuple(self.sin.shape)}"
            )
