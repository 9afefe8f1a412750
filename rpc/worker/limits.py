"""What one engine accepts and how it paces itself, and the checks of a request against it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixpool.rpc import limits as wire_limits
from radixpool.rpc.generation import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Sizes of model and pool, and limits of one engine.

    num_blocks, block_size: the pool; block_size is in tokens.
    context_tokens: prompt and answer together.
    token_budget: new tokens in one forward pass; a larger one speeds prompts up and makes decoding wait longer.
    reserve_tokens: room that a request gets ahead of its answer, so that decoding seldom has to ask.
    max_running, max_waiting: sequences; a request beyond both is refused.
    retry_interval_s: how often a refused acquire is repeated while others hold the pool.
    stall_timeout_s: how long a caller's own sequence may wait for a block before it fails.
    """

    num_blocks: int
    block_size: int
    context_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    token_budget: int = 256
    reserve_tokens: int = 64
    max_running: int = 64
    max_waiting: int = 256
    retry_interval_s: float = 0.05
    stall_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "context_tokens", "vocab_size", "token_budget", "max_running"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("reserve_tokens", "max_waiting"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.max_running > wire_limits.MAX_STEP_ROWS:  # each is a row of the report after a pass
            raise ValueError(f"max_running must be at most {wire_limits.MAX_STEP_ROWS}, got {self.max_running}")

    @property
    def pool_tokens(self) -> int:
        """Return how many tokens the whole pool holds."""
        return self.num_blocks * self.block_size


def check_prompt(tokens: npt.NDArray[np.uint32], sampling: SamplingParams, limits: EngineLimits) -> None:
    """Raise ValueError unless the prompt and its answer can ever be computed."""
    if len(tokens) == 0:
        raise ValueError("tokens must hold at least 1 token, got 0")
    largest = int(tokens.argmax())
    if tokens[largest] >= limits.vocab_size:
        raise ValueError(
            f"tokens[{largest}] must be below the vocabulary size {limits.vocab_size}, got {tokens[largest]}"
        )
    total = len(tokens) + sampling.max_new_tokens
    asked = f"{len(tokens)} prompt tokens + max_new_tokens {sampling.max_new_tokens} = {total}"
    if total > limits.context_tokens:
        raise ValueError(f"{asked} is more than the model's context of {limits.context_tokens} tokens")
    if total > limits.pool_tokens:
        raise ValueError(
            f"{asked} is more than the pool's {limits.pool_tokens} tokens "
            f"({limits.num_blocks} blocks of {limits.block_size})"
        )


def check_sampling(sampling: SamplingParams, limits: EngineLimits) -> None:
    """Raise ValueError naming the field, its limit and its value."""
    if sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {sampling.max_new_tokens}")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise ValueError(f"temperature must be a finite number of at least 0, got {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {sampling.top_p}")
    if not 0 <= sampling.skip_draws <= limits.context_tokens:
        raise ValueError(
            f"skip_draws must be 0 to the model's context of {limits.context_tokens} tokens, got {sampling.skip_draws}"
        )
    if sampling.top_k < 0:
        raise ValueError(f"top_k must be at least 0, got {sampling.top_k}")
    for token in sampling.stop_token_ids:
        if not 0 <= token < limits.vocab_size:
            raise ValueError(f"stop_token_ids must be below the vocabulary size {limits.vocab_size}, got {token}")
