"""What does sharing save a request, and what does it cost a step? Engine, cache and a real model, on one core.

    python bench/end_to_end.py                      SmolLM2-135M on the CPU, about five minutes
    python bench/end_to_end.py --model DIR --json out.json

Three questions, each with medians and quartiles over repeats whose cases alternate:
  ttft     time to the first token against prompt length and the share of it that is cached
  decode   time of a decode step against batch size, and how much of it is model, cache and engine
  session  the cache's part of a decode step over a manager's session, against the same in this process

Times of the engine are CPU time of its thread (the model runs on it alone), so that a busy machine does not count;
those of the session are wall time, because other processes do the work.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from radixpool import Namespace, RadixCache
from radixpool.rpc.client import Client
from radixpool.rpc.demo.supervisor import Supervisor
from radixpool.rpc.generation import GenerateTokens, SamplingParams
from radixpool.rpc.operations import Acquire, Commit, Extend, Operation, Release
from radixpool.rpc.pool.tensors import private_pool
from radixpool.rpc.pool_types import KvDtype
from radixpool.rpc.worker.cache_port import CachePort, LocalPort
from radixpool.rpc.worker.engine import Engine
from radixpool.rpc.worker.limits import EngineLimits
from radixpool.rpc.worker.model import ModelRunner, load_model
from radixpool.rpc.worker.model_source import find_model, pool_spec_for
from radixpool.rpc.worker.requests import GenerateCall, PromptSource

BLOCK_SIZE = 16
NUM_BLOCKS = 1024
PROMPT_TOKENS = (256, 1024, 2048)
CACHED_SHARES = (0.0, 0.5, 1.0)
BATCH_SIZES = (1, 4, 16)
DECODE_CONTEXT = 512
DECODE_STEPS = 12
SESSION_BATCHES = (1, 4, 16, 64)
SESSION_STEPS = 300
console = Console(stderr=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure: median and quartiles in milliseconds over `repeats`."""

    question: str
    case: str
    part: str
    median_ms: float
    q1_ms: float
    q3_ms: float
    repeats: int


class Stopwatch:
    """Add up the CPU time that a wrapped call takes."""

    def __init__(self) -> None:
        self.spent_ms = 0.0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                self.spent_ms += (time.thread_time() - start) * 1000

        return timed


class Bench:
    """One engine over a cache of this process, with stopwatches around the model and the cache."""

    def __init__(self, model_name: str, prompt_tokens: Sequence[int]) -> None:
        source = find_model(model_name)
        spec = pool_spec_for(source, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=KvDtype.FLOAT32)
        runner = ModelRunner(load_model(source), private_pool(spec))
        port = LocalPort(RadixCache(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE))
        self.model, self.cache = Stopwatch(), Stopwatch()
        runner.forward = self.model.wrap(runner.forward)  # type: ignore[method-assign]
        port.batch = self.cache.wrap(port.batch)  # type: ignore[method-assign]
        limits = EngineLimits(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            context_tokens=source.context_tokens,
            vocab_size=source.vocab_size,
        )
        self.engine = Engine(port, runner, limits=limits)
        self.vocab_size = source.vocab_size
        self.prompt_tokens = [length for length in prompt_tokens if length < source.context_tokens]
        self.decode_context = min(DECODE_CONTEXT, source.context_tokens // 2)
        self._draw = random.Random(0)
        self._salts = map(str, itertools.count())

    def tokens(self, count: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return np.asarray([self._draw.randrange(100, self.vocab_size) for _ in range(count)], np.uint32)

    def fresh(self) -> Namespace:
        return Namespace(cache_salt=next(self._salts))

    def submit(self, tokens: np.ndarray[Any, Any], namespace: Namespace, new: int = 1) -> GenerateCall:
        call = GenerateCall(PromptSource(tokens, namespace), SamplingParams(max_new_tokens=new, ignore_eos=True))
        self.engine.submit(call)
        return call

    def drain(self) -> None:
        while self.engine.status().running_sequences + self.engine.status().waiting_sequences:
            self.engine.step()

    def time_to_first_token(self, tokens: np.ndarray[Any, Any], namespace: Namespace) -> float:
        call = self.submit(tokens, namespace)
        start = time.thread_time()
        while not self._has_token(call):
            self.engine.step()
        spent = (time.thread_time() - start) * 1000
        self.drain()
        return spent

    @staticmethod
    def _has_token(call: GenerateCall) -> bool:
        while not call.events.empty():
            event = call.events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, GenerateTokens):
                return True
        return False


def measure_ttft(bench: Bench, repeats: int, advance: Callable[[], None]) -> Iterator[Row]:
    cases = list(itertools.product(bench.prompt_tokens, CACHED_SHARES))
    times: dict[tuple[int, float], list[float]] = {case: [] for case in cases}
    for _ in range(repeats):
        for length, share in cases:
            namespace, tokens = bench.fresh(), bench.tokens(length)
            if share:
                bench.submit(tokens[: int(length * share)], namespace)
                bench.drain()
            times[length, share].append(bench.time_to_first_token(tokens, namespace))
            advance()
    for (length, share), values in times.items():
        yield row("ttft", f"{length} tokens, {share:.0%} cached", "all", values)


def measure_decode(bench: Bench, repeats: int, advance: Callable[[], None]) -> Iterator[Row]:
    parts: dict[tuple[int, str], list[float]] = {}
    for _ in range(repeats):
        for batch in BATCH_SIZES:
            namespace, prefix = bench.fresh(), bench.tokens(bench.decode_context - 16)
            for _sequence in range(batch):
                bench.submit(np.concatenate((prefix, bench.tokens(16))), namespace, DECODE_STEPS + 8)
            while bench.engine.status().waiting_sequences or bench.engine.status().running_sequences < batch:
                bench.engine.step()
            bench.engine.step()
            for _step in range(DECODE_STEPS - 4):
                bench.model.spent_ms = bench.cache.spent_ms = 0.0
                start = time.thread_time()
                bench.engine.step()
                whole = (time.thread_time() - start) * 1000
                rest = whole - bench.model.spent_ms - bench.cache.spent_ms
                for part, value in (
                    ("all", whole),
                    ("model", bench.model.spent_ms),
                    ("cache", bench.cache.spent_ms),
                    ("engine", rest),
                ):
                    parts.setdefault((batch, part), []).append(value)
            bench.drain()
            advance()
    for (batch, part), values in parts.items():
        yield row("decode", f"{batch} sequences of {bench.decode_context} tokens", part, values)


def measure_session(advance: Callable[[], None]) -> Iterator[Row]:
    """Time what a decode step asks of the cache: one extend a sequence, a commit for one in `BLOCK_SIZE` of them."""
    with Supervisor() as supervisor:
        listen = supervisor.socket_address("manager")
        manager = supervisor.start("manager", ["serve", "--listen", listen, "--num-blocks", "65536"])
        with Client(manager.address) as client, client.session() as session:
            local = LocalPort(RadixCache(num_blocks=65536, block_size=BLOCK_SIZE))
            for batch in SESSION_BATCHES:
                for part, port in (("session", session), ("in process", local)):
                    yield row("session", f"{batch} sequences", part, list(decode_steps(port, batch)))
                advance()


def decode_steps(port: CachePort, batch: int) -> Iterator[float]:
    handles = [port.batch([Acquire([number] * DECODE_CONTEXT, Namespace())])[0].handle for number in range(batch)]  # type: ignore[union-attr]
    for step in range(SESSION_STEPS):
        operations: list[Operation] = []
        for number, handle in enumerate(handles):
            length = DECODE_CONTEXT + step
            if (length + number) % BLOCK_SIZE == 0:
                operations.append(Commit(handle, length))
            operations.append(Extend(handle, [step]))
        start = time.perf_counter()
        results = port.batch(operations)
        yield (time.perf_counter() - start) * 1000
        for result in results:
            if isinstance(result, Exception):
                raise result
    port.batch([Release(handle) for handle in handles])


def row(question: str, case: str, part: str, values: Sequence[float]) -> Row:
    q1, median, q3 = statistics.quantiles(values, n=4)
    return Row(question=question, case=case, part=part, median_ms=median, q1_ms=q1, q3_ms=q3, repeats=len(values))


def show(rows: Sequence[Row]) -> None:
    table = Table("question", "case", "part", "median ms", "quartiles", "n")
    for item in rows:
        quartiles = f"{item.q1_ms:,.2f} to {item.q3_ms:,.2f}"
        table.add_row(item.question, item.case, item.part, f"{item.median_ms:,.2f}", quartiles, str(item.repeats))
    Console().print(table)


@click.command(help=__doc__)
@click.option("--model", default="smollm2", show_default=True)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(64),
    multiple=True,
    default=PROMPT_TOKENS,
    show_default=True,
    help="Prompt length of the ttft question; may be given several times.",
)
@click.option("--repeats", type=click.IntRange(2), default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows here too.")
def main(model: str, prompt_tokens: tuple[int, ...], repeats: int, json_file: Path | None) -> None:
    torch.set_num_threads(1)
    with Progress(console=console) as progress:
        task = progress.add_task("loading the model", total=None)
        bench = Bench(model, prompt_tokens)
        runs = repeats * (len(bench.prompt_tokens) * len(CACHED_SHARES) + len(BATCH_SIZES)) + len(SESSION_BATCHES)
        progress.update(task, total=runs)

        def advance() -> None:
            progress.advance(task)

        rows = []
        for name, measured in (
            ("time to first token", measure_ttft(bench, repeats, advance)),
            ("decode steps", measure_decode(bench, repeats, advance)),
            ("session", measure_session(advance)),
        ):
            progress.update(task, description=name)
            rows += measured
    show(rows)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(item) for item in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
