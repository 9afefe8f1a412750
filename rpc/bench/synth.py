"""Generate workloads whose sharing is known: six shapes of LLM traffic, from one seed.

Requests come out as Mooncake lines (`timestamp` ms, `input_length`, `output_length`, `duration_ms`, `hash_ids`), in
arrival order. Same kind, options and seed: same bytes, on every machine (`random.Random`, no hashing).
"""

from __future__ import annotations

import itertools
import json
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_MS_PER_OUTPUT_TOKEN = 20.0


@dataclass(frozen=True, slots=True)
class SynthOptions:
    """Size and pace of a workload.

    Attributes:
        num_requests: requests to generate.
        rate_per_s: requests a second (sessions start at the rate that gives this on average).
        block_size: tokens a block.
        num_prompts: shared prompts (system prompts, agent kinds or documents) of the workload.
        zipf: exponent of their popularity; 0 is uniform.
        seed: of everything random.

    """

    num_requests: int = 10_000
    rate_per_s: float = 5.0
    block_size: int = 16
    num_prompts: int = 64
    zipf: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "block_size", "num_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.rate_per_s <= 0 or self.zipf < 0:
            raise ValueError(f"rate_per_s must be above 0 and zipf at least 0, got {self.rate_per_s}, {self.zipf}")


@dataclass(frozen=True, slots=True)
class SynthRequest:
    """One generated request: arrival in ms, block ids of the prompt, tokens of the output."""

    arrival_ms: float
    hash_ids: list[int]
    output_tokens: int


@dataclass(slots=True)
class _World:
    """The random source, the clock of arrivals and the counter of fresh block ids."""

    options: SynthOptions
    rng: random.Random
    now_ms: float = 0.0
    _ids: Iterator[int] = field(default_factory=itertools.count)
    _popularity: list[float] = field(default_factory=list)

    def blocks(self, count: int) -> list[int]:
        return list(itertools.islice(self._ids, count))

    def library(self, low: int, high: int) -> list[list[int]]:
        """Return the workload's shared prompts, `low` to `high` blocks each."""
        return [self.blocks(self.rng.randint(low, high)) for _ in range(self.options.num_prompts)]

    def tick(self, requests_each: float = 1.0) -> float:
        """Advance to the next Poisson arrival of something that makes `requests_each` requests on average."""
        self.now_ms += self.rng.expovariate(self.options.rate_per_s / requests_each) * 1e3
        return self.now_ms

    def pick(self) -> int:
        """Return the index of a shared prompt, Zipf-distributed."""
        if not self._popularity:
            weights = (1.0 / rank**self.options.zipf for rank in range(1, self.options.num_prompts + 1))
            self._popularity = list(itertools.accumulate(weights))
        return bisect_left(self._popularity, self.rng.random() * self._popularity[-1])

    def output(self) -> int:
        return 1 + int(self.rng.expovariate(1.0 / 200.0))


def _shared(world: _World) -> Iterator[SynthRequest]:
    """Shared system prompts with Zipf popularity, each followed by a question of its own."""
    prompts = world.library(32, 256)
    while True:
        own = world.blocks(world.rng.randint(1, 32))
        yield SynthRequest(world.tick(), prompts[world.pick()] + own, world.output())


def _chat(world: _World) -> Iterator[SynthRequest]:
    """Multi-turn chats: a shared system prompt, then a history that grows by each question and answer."""
    prompts = world.library(8, 64)
    mean_turns = 6.0
    while True:
        time, path = world.tick(mean_turns), prompts[world.pick()]
        while True:
            path = path + world.blocks(world.rng.randint(1, 16))
            output = world.output()
            yield SynthRequest(time, path, output)
            if world.rng.random() < 1.0 / mean_turns:
                break
            path = path + world.blocks(output // world.options.block_size)
            time += output * _MS_PER_OUTPUT_TOKEN + world.rng.expovariate(1.0 / 45_000.0)


def _agent(world: _World) -> Iterator[SynthRequest]:
    """Agent loops: a long tool prompt, a step every few seconds, and a summary when the context is full."""
    prompts = world.library(64, 256)
    mean_steps, full_blocks = 30.0, 2_000
    while True:
        time, prompt = world.tick(mean_steps), prompts[world.pick()]
        path = prompt + world.blocks(world.rng.randint(4, 32))
        while True:
            output = world.output()
            yield SynthRequest(time, path, output)
            if world.rng.random() < 1.0 / mean_steps:
                break
            path = path + world.blocks(output // world.options.block_size + world.rng.randint(2, 64))
            if len(path) > full_blocks:
                path = prompt + world.blocks(48)
            time += output * _MS_PER_OUTPUT_TOKEN + world.rng.expovariate(1.0 / 4_000.0)


def _tree(world: _World) -> Iterator[SynthRequest]:
    """Tree-of-thought: each level of a search expands its best thoughts; siblings come together."""
    prompts = world.library(16, 64)
    breadth, beam, depth = 4, 2, 4
    requests_each = breadth * (1.0 + beam * (depth - 1))
    while True:
        time = world.tick(requests_each)
        kept = [prompts[world.pick()] + world.blocks(world.rng.randint(4, 32))]
        for _ in range(depth):
            children = []
            for path in kept:
                for _ in range(breadth):
                    yield SynthRequest(time, path, world.output())
                    children.append(path + world.blocks(world.rng.randint(4, 16)))
            kept = world.rng.sample(children, min(beam, len(children)))
            time += 4_000.0 + world.rng.expovariate(1.0 / 2_000.0)


def _rag(world: _World) -> Iterator[SynthRequest]:
    """RAG: one system prompt, then four documents in rank order, then a question; order limits the sharing."""
    system, documents = world.blocks(32), world.library(16, 64)
    while True:
        chosen = dict.fromkeys(world.pick() for _ in range(4))
        context = list(itertools.chain.from_iterable(documents[index] for index in chosen))
        yield SynthRequest(world.tick(), system + context + world.blocks(world.rng.randint(1, 8)), world.output())


def _scan(world: _World) -> Iterator[SynthRequest]:
    """Set interactive users of shared prompts against a batch job that loops over long documents in order."""
    prompts, loop = world.library(32, 128), world.library(128, 512)
    for turn in itertools.count():
        if turn % 2:
            yield SynthRequest(world.tick(), loop[(turn // 2) % len(loop)], world.output())
        else:
            own = world.blocks(world.rng.randint(1, 16))
            yield SynthRequest(world.tick(), prompts[world.pick()] + own, world.output())


GENERATORS: dict[str, Callable[[_World], Iterator[SynthRequest]]] = {
    "shared": _shared,
    "chat": _chat,
    "agent": _agent,
    "tree": _tree,
    "rag": _rag,
    "scan": _scan,
}


def describe(kind: str) -> str:
    """Return the one line that says what the workload is."""
    return (GENERATORS[kind].__doc__ or "").splitlines()[0]


def generate(kind: str, options: SynthOptions | None = None) -> list[SynthRequest]:
    """Return the workload `kind` in arrival order; O(blocks + n log n). Raises `ValueError` for an unknown kind."""
    if kind not in GENERATORS:
        raise ValueError(f"kind must be one of {', '.join(GENERATORS)}, got {kind!r}")
    options = options or SynthOptions()
    world = _World(options, random.Random(options.seed))
    made = list(itertools.islice(GENERATORS[kind](world), options.num_requests))
    return sorted(made, key=lambda request: request.arrival_ms)


def to_line(request: SynthRequest, *, block_size: int) -> str:
    """Write the request as one Mooncake JSON line, without the newline."""
    return json.dumps(
        {
            "timestamp": round(request.arrival_ms),
            "duration_ms": round(request.output_tokens * _MS_PER_OUTPUT_TOKEN),
            "input_length": len(request.hash_ids) * block_size,
            "output_length": request.output_tokens,
            "hash_ids": request.hash_ids,
        },
        separators=(",", ":"),
    )
