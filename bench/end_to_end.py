"""What does sharing save a request, and what does it cost a step? Engine, cache and a real model, on one core.

    python bench/end_to_end.py                      SmolLM2-135M on the CPU, about five minutes
    python bench/end_to_end.py --model DIR --json out.json
    python bench/end_to_end.py --device cuda        on a GPU, in bfloat16

Three questions, each with medians and quartiles over repeats whose cases alternate:
  ttft     time to the first token against prompt length and the share of it that is cached
  decode   time of a decode step against batch size, and how much of it is model, cache and engine; the sequences share
           a long system prompt, or have one each of the same length
  session  the cache's part of a decode step over a manager's session, against the same in this process

Times of the engine on the CPU are CPU time of its thread (the model runs on it alone), so that a busy machine does not
count; those on a GPU and those of the session are wall time, because others do the work.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from radixpool import Namespace, RadixCache
from radixpool.rpc.cli.device_option import device_option, dtype_option, graphed_tokens_option, pool_dtype
from radixpool.rpc.client import Client, Session
from radixpool.rpc.demo.supervisor import Supervisor
from radixpool.rpc.generation import GenerateTokens, SamplingParams
from radixpool.rpc.operations import Acquire, Release
from radixpool.rpc.pool.device import Device
from radixpool.rpc.pool.tensors import private_pool
from radixpool.rpc.pool_types import KvDtype
from radixpool.rpc.step_columns import Step
from radixpool.rpc.worker.cache_port import LocalPort
from radixpool.rpc.worker.engine import Engine
from radixpool.rpc.worker.limits import EngineLimits
from radixpool.rpc.worker.model import ModelRunner, computed_in, load_model
from radixpool.rpc.worker.model_source import find_model, pool_spec_for
from radixpool.rpc.worker.process import capture_graphs
from radixpool.rpc.worker.requests import GenerateCall, PromptSource

BLOCK_SIZE = 16
QUESTIONS = ("ttft", "decode", "session")
CACHED_SHARES = (0.0, 0.5, 1.0)
SESSION_BATCHES = (1, 4, 16, 64)
SESSION_STEPS = 300
console = Console(stderr=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much a device is given to do. `shared` says whose system prompt is whose, by the name of the case."""

    num_blocks: int
    prompt_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    decode_context: int
    decode_steps: int
    token_budget: int
    shared: dict[str, bool]


CPU_SIZES = Sizes(
    num_blocks=1024,
    prompt_tokens=(256, 1024, 2048),
    batches=(1, 4, 16),
    decode_context=512,
    decode_steps=12,
    token_budget=256,
    shared={"": True},
)
GPU_SIZES = Sizes(
    num_blocks=20_480,
    prompt_tokens=(1024, 4096, 8000),
    batches=(1, 16, 64),
    decode_context=4096,
    decode_steps=40,
    token_budget=4096,
    shared={", one system prompt": True, ", a system prompt each": False},
)


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
    tokens_per_s: float | None = None


class Stopwatch:
    """Add up the time that a wrapped call takes, by `clock` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.spent_ms = 0.0
        self.clock = clock

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            start = self.clock()
            try:
                return call(*args, **options)
            finally:
                self.spent_ms += (self.clock() - start) * 1000

        return timed


class Bench:
    """One engine over a cache of this process, with stopwatches around the model and the cache."""

    def __init__(
        self, model_name: str, device: Device, dtype: KvDtype, sizes: Sizes, graphed_tokens: int | None
    ) -> None:
        source = find_model(model_name)
        spec = pool_spec_for(source, num_blocks=sizes.num_blocks, block_size=BLOCK_SIZE, dtype=dtype)
        pool = private_pool(spec, str(device))
        model = load_model(source, dtype=computed_in(pool.k[0].dtype, device), device=str(device))
        runner = ModelRunner(model, pool)
        if device.is_cuda:
            capture_graphs(runner, graphed_tokens, token_budget=sizes.token_budget)
            runner.warm_up(sizes.token_budget)
        port = LocalPort(RadixCache(num_blocks=sizes.num_blocks, block_size=BLOCK_SIZE))
        self.clock = time.perf_counter if device.is_cuda else time.thread_time
        self.model, self.cache = Stopwatch(self.clock), Stopwatch(self.clock)
        runner.forward = self.model.wrap(runner.forward)  # type: ignore[method-assign]
        port.batch = self.cache.wrap(port.batch)  # type: ignore[method-assign]
        port.step = self.cache.wrap(port.step)  # type: ignore[method-assign]
        limits = EngineLimits(
            num_blocks=sizes.num_blocks,
            block_size=BLOCK_SIZE,
            context_tokens=source.context_tokens,
            vocab_size=source.vocab_size,
            token_budget=sizes.token_budget,
        )
        self.engine = Engine(port, runner, limits=limits)
        self.sizes = sizes
        self.vocab_size = source.vocab_size
        self.prompt_tokens = [length for length in sizes.prompt_tokens if length < source.context_tokens]
        self.decode_context = min(sizes.decode_context, source.context_tokens // 2)
        self._draw = np.random.default_rng(0)
        self._salts = map(str, itertools.count())

    def tokens(self, count: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return self._draw.integers(100, self.vocab_size, count, dtype=np.uint32)

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
        start = self.clock()
        while not self.has_token(call):
            self.engine.step()
        spent = (self.clock() - start) * 1000
        self.drain()
        return spent

    @staticmethod
    def has_token(call: GenerateCall) -> bool:
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
    parts: dict[tuple[int, str, str], list[float]] = {}
    for _ in range(repeats):
        for batch, (name, shared) in itertools.product(bench.sizes.batches, bench.sizes.shared.items()):
            for part, value in decode_times(bench, batch, shared=shared):
                parts.setdefault((batch, name, part), []).append(value)
            advance()
    for (batch, name, part), values in parts.items():
        measured = row("decode", f"{batch} sequences of {bench.decode_context} tokens{name}", part, values)
        speed = 1000 * batch / measured.median_ms if part == "all" else None
        yield replace(measured, tokens_per_s=speed)


def decode_times(bench: Bench, batch: int, *, shared: bool) -> Iterator[tuple[str, float]]:
    """Decode with `batch` sequences; what each step took as a whole and in its parts, in milliseconds."""
    steps, namespace = bench.sizes.decode_steps, bench.fresh()
    prefix = bench.tokens(bench.decode_context - 16)
    prefilling = []
    for _sequence in range(batch):
        mine = namespace if shared else bench.fresh()
        prefilling.append(bench.submit(np.concatenate((prefix, bench.tokens(16))), mine, steps + 2 * batch))
    while prefilling:
        bench.engine.step()
        prefilling = [call for call in prefilling if not bench.has_token(call)]
    for _step in range(steps - 4):
        bench.model.spent_ms = bench.cache.spent_ms = 0.0
        start = bench.clock()
        bench.engine.step()
        whole = (bench.clock() - start) * 1000
        yield "all", whole
        yield "model", bench.model.spent_ms
        yield "cache", bench.cache.spent_ms
        yield "engine", whole - bench.model.spent_ms - bench.cache.spent_ms
    bench.drain()


def measure_session(context: int, advance: Callable[[], None]) -> Iterator[Row]:
    """Time what a decode step asks of the cache: one extend a sequence, a commit for one in `BLOCK_SIZE` of them."""
    with Supervisor() as supervisor:
        listen = supervisor.socket_address("manager")
        manager = supervisor.start("manager", ["serve", "--listen", listen, "--num-blocks", "65536"])
        with Client(manager.address) as client, client.session() as session:
            local = LocalPort(RadixCache(num_blocks=65536, block_size=BLOCK_SIZE))
            for batch in SESSION_BATCHES:
                for part, port in (("session", session), ("in process", local)):
                    yield row("session", f"{batch} sequences", part, list(decode_steps(port, batch, context)))
                advance()


def decode_steps(port: Session | LocalPort, batch: int, context: int) -> Iterator[float]:
    handles = [port.batch([Acquire([number] * context, Namespace())])[0].handle for number in range(batch)]  # type: ignore[union-attr]
    numbers = np.arange(batch)
    for done in range(SESSION_STEPS):
        length = context + done
        upto = np.where((length + numbers) % BLOCK_SIZE == 0, length, 0)
        start = time.perf_counter()
        stepped = port.step(Step(handles=handles, tokens=np.full(batch, done), commit_upto_tokens=upto))
        yield (time.perf_counter() - start) * 1000
        for error in stepped.errors.values():
            raise error
    port.batch([Release(handle) for handle in handles])


def row(question: str, case: str, part: str, values: Sequence[float]) -> Row:
    q1, median, q3 = statistics.quantiles(values, n=4)
    return Row(question=question, case=case, part=part, median_ms=median, q1_ms=q1, q3_ms=q3, repeats=len(values))


def show(rows: Sequence[Row]) -> None:
    table = Table("question", "case", "part", "median ms", "quartiles", "n", "tokens/s")
    for item in rows:
        quartiles = f"{item.q1_ms:,.2f} to {item.q3_ms:,.2f}"
        speed = "" if item.tokens_per_s is None else f"{item.tokens_per_s:,.0f}"
        table.add_row(
            item.question, item.case, item.part, f"{item.median_ms:,.2f}", quartiles, str(item.repeats), speed
        )
    Console().print(table)


@click.command(help=__doc__)
@click.option("--model", default="smollm2", show_default=True)
@device_option("Where the model runs.")
@dtype_option
@graphed_tokens_option
@click.option(
    "--prompt-tokens",
    type=click.IntRange(64),
    multiple=True,
    help="Prompt length of the ttft question; may be given several times.  "
    "[default: 256, 1024, 2048 on the CPU, 1024, 4096, 8000 on a GPU]",
)
@click.option(
    "--question",
    "questions",
    type=click.Choice(QUESTIONS),
    multiple=True,
    default=QUESTIONS,
    show_default=True,
    help="What to measure; may be given several times.",
)
@click.option("--repeats", type=click.IntRange(2), default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows here too.")
def main(
    model: str,
    device: Device,
    dtype: str | None,
    graphed_tokens: int | None,
    prompt_tokens: tuple[int, ...],
    questions: tuple[str, ...],
    repeats: int,
    json_file: Path | None,
) -> None:
    torch.set_num_threads(1)
    sizes = GPU_SIZES if device.is_cuda else CPU_SIZES
    if prompt_tokens:
        sizes = replace(sizes, prompt_tokens=prompt_tokens)
    with Progress(console=console) as progress:
        task = progress.add_task("loading the model", total=None)
        bench = Bench(model, device, pool_dtype(dtype, device), sizes, graphed_tokens)
        measures = {
            "ttft": (repeats * len(bench.prompt_tokens) * len(CACHED_SHARES), partial(measure_ttft, bench, repeats)),
            "decode": (repeats * len(sizes.batches) * len(sizes.shared), partial(measure_decode, bench, repeats)),
            "session": (len(SESSION_BATCHES), partial(measure_session, bench.decode_context)),
        }
        progress.update(task, total=sum(measures[question][0] for question in questions))
        rows = []
        for question in questions:
            progress.update(task, description=question)
            rows += measures[question][1](lambda: progress.advance(task))
    show(rows)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(item) for item in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
