"""The workloads of the tree benchmark: prompts as uint32 arrays, the same for every engine.

* shared: one of 64 prompts of 4,096 tokens + 512 of one's own; the pool of 65,536 blocks evicts all the time
* random: 4,096 tokens that nobody shares, same pool
* chat: 500 sessions of up to 20 turns of 300 tokens, each turn repeating what was said; 262,144 blocks
* large: `shared` over a pool of 1,000,000 blocks that is full before the clock starts (about 30,000 leaves)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

BLOCK_SIZE = 16
IN_FLIGHT = 32  # requests that are held at a time
VOCABULARY = 128_000
Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Workload:
    """A named stream of prompts. `fill` prompts come before the clock starts."""

    name: str
    num_blocks: int
    requests: int
    fill: int

    def prompts(self, seed: int) -> Iterator[Tokens]:
        """Yield prompts without end (chat: 10,000); one seed gives the same prompts everywhere."""
        rng = np.random.default_rng(seed)
        if self.name == "random":
            return (_random(rng, 4096) for _ in count())
        return _chat(rng) if self.name == "chat" else _shared(rng)


def _random(rng: np.random.Generator, length: int) -> Tokens:
    return rng.integers(0, VOCABULARY, length, dtype=np.uint32)


def _shared(rng: np.random.Generator) -> Iterator[Tokens]:
    prompts = [_random(rng, 4096) for _ in range(64)]
    while True:
        yield np.concatenate([prompts[int(rng.integers(64))], _random(rng, 512)])


def _chat(rng: np.random.Generator) -> Iterator[Tokens]:
    history: list[Tokens] = [np.empty(0, np.uint32)] * 500
    turns = [0] * 500
    open_sessions = list(range(500))
    while open_sessions:
        at = int(rng.integers(len(open_sessions)))
        session = open_sessions[at]
        history[session] = np.concatenate([history[session], _random(rng, 300)])
        turns[session] += 1
        if turns[session] == 20:
            open_sessions[at] = open_sessions[-1]
            open_sessions.pop()
        yield history[session]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("shared", 65_536, 4_000, fill=2_000),
        Workload("random", 65_536, 1_000, fill=300),
        Workload("chat", 262_144, 4_000, fill=1_000),
        Workload("large", 1_000_000, 1_000, fill=(1_000_000 - 64 * 256) // 32 + IN_FLIGHT),
    )
}
