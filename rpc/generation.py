"""What a worker is asked to generate and what it streams back. All frozen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from radixpool.rpc.pool_types import PoolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen: temperature 0 is greedy, top_k 0 keeps all candidates.

    `skip_draws` is for who continues what an earlier call began with the same seed: how many tokens that brought.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_draws: int = 0


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class GenerateStarted:
    """The sequence is admitted; `cached_tokens` of its prompt need no computing."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class GenerateTokens:
    """The new token ids of one step."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerateFinished:
    """The generation ended well."""

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


GenerateEvent: TypeAlias = GenerateStarted | GenerateTokens | GenerateFinished


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker runs and how busy it is."""

    name: str
    model: str
    pool: PoolSpec
    pool_id: bytes
    max_model_tokens: int
    running_sequences: int
    waiting_sequences: int
    completed_steps: int
    computed_tokens: int
    reused_tokens: int
