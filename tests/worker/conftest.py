"""A model without weights: its next token depends on every byte of KV it reads, so wrong sharing shows at once."""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from radixpool.radix import Namespace, RadixCache
from radixpool.rpc.client import Client, WorkerClient
from radixpool.rpc.errors import ManagerUnavailable
from radixpool.rpc.generation import GenerateFinished, GenerateStarted, GenerateTokens, SamplingParams
from radixpool.rpc.operations import StepReport
from radixpool.rpc.worker.cache_port import CacheLost, LocalPort
from radixpool.rpc.worker.engine import Engine
from radixpool.rpc.worker.limits import EngineLimits
from radixpool.rpc.worker.model_source import find_model
from radixpool.rpc.worker.requests import GenerateCall, HandleSource, PromptSource
from radixpool.rpc.worker.step import NO_SLOT, StepBatch

VOCAB = 50
EMPTY = -1


def next_token(tokens: Sequence[int]) -> int:
    """What the model without weights says after `tokens`."""
    return zlib.crc32(np.asarray(tokens, np.int64).tobytes()) % VOCAB


def continuation(prompt: Sequence[int], sampling: SamplingParams, eos: frozenset[int] = frozenset()) -> list[int]:
    """The right answer, computed without any cache."""
    tokens, ends = list(prompt), set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos)
    while len(tokens) - len(prompt) < sampling.max_new_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


class EchoRunner:
    """A `Runner` whose KV of a token is the token itself, in a paged pool of numpy."""

    def __init__(self, num_blocks: int, block_size: int, *, on_forward=lambda _batch: None) -> None:
        self.on_forward = on_forward
        self.pool = np.full((num_blocks, block_size), EMPTY, np.int64)
        self.computed_tokens = 0
        self.fail_with: list[Exception] = []

    def sampler(self, sampling: SamplingParams) -> object:
        return sampling

    def forward(self, batch: StepBatch) -> list[int]:
        self.on_forward(batch)
        if self.fail_with:
            raise self.fail_with.pop()
        self.computed_tokens += batch.num_tokens
        written = batch.slot_mapping != NO_SLOT
        slots = batch.slot_mapping[written]
        assert len(np.unique(slots)) == len(slots), "two tokens of one step share a slot"
        self.pool.reshape(-1)[slots] = batch.token_ids[written]
        ends = np.cumsum(batch.query_lens)
        return [self._next(batch, int(np.searchsorted(ends, row + 1))) for row in batch.sample_rows]

    def _next(self, batch: StepBatch, sequence: int) -> int:
        read = self.pool[batch.block_tables[sequence]].reshape(-1)[: batch.context_lens[sequence]]
        return next_token(read.tolist())


class CheckedPort(LocalPort):
    """Holds the engine to the contract of step reports: they never go back, and a step begins only after a batch that
    announced it and named every sequence of the step."""

    def __init__(self, cache: RadixCache) -> None:
        super().__init__(cache)
        self.reports: list[StepReport] = []
        self.named: set[bytes | None] = set()
        self.lost_in = -1
        self.reply_lost = False

    def void(self) -> None:
        """The manager has gone: nothing that it handed out is valid any more."""
        for sequence in list(self._cache.sequences()):
            self._cache.release(sequence)
        self._sequences.clear()

    def batch(self, operations, /, *, steps=None):
        """The engine's calls carry `steps`; those of a test do not, and never fail."""
        if steps is None:
            return super().batch(operations)
        self.lost_in -= 1
        if self.lost_in == 0 and not self.reply_lost:
            raise CacheLost("injected, before the batch ran")
        results = super().batch(operations)
        if self.lost_in == 0:
            raise CacheLost("injected, after the batch ran")
        self._check(steps)
        for operation, result in zip(operations, results, strict=True):
            self.named.update(getattr(operation, "handles", ()) or {getattr(operation, "handle", None)})
            self.named.add(getattr(result, "handle", None))
        return results

    def step(self, step, operations=(), /, *, steps):
        """Like `batch`, for the columns of a step."""
        self.lost_in -= 1
        if self.lost_in == 0 and not self.reply_lost:
            raise CacheLost("injected, before the step ran")
        stepped = super().step(step, operations)
        if self.lost_in == 0:
            raise CacheLost("injected, after the step ran")
        self._check(steps)
        self.named.update(step.handles)
        return stepped

    def _check(self, steps: StepReport) -> None:
        last = self.reports[-1] if self.reports else StepReport(0, 0)
        assert last.completed_step <= steps.completed_step <= steps.launched_step <= steps.completed_step + 1
        assert last.launched_step <= steps.launched_step
        if steps.launched_step > last.launched_step:
            self.named.clear()
        self.reports.append(steps)

    def check_launch(self, handles: set[bytes]) -> None:
        """Called when a pass begins."""
        report = self.reports[-1]
        assert report.launched_step == report.completed_step + 1, "a step that was not announced"
        assert handles <= self.named, "a step touches a sequence that the batch before it did not name"


class Harness:
    """An engine over a `RadixCache` of this process, driven step by step, with a clock that the test moves."""

    def __init__(self, *, num_blocks: int = 64, block_size: int = 4, **limits: object) -> None:
        self.cache = RadixCache(num_blocks=num_blocks, block_size=block_size)
        self.port = CheckedPort(self.cache)
        self.runner = EchoRunner(num_blocks, block_size, on_forward=self._check_launch)
        self.now = 0.0
        self.steps = 0
        self.losses = 0
        self.cache.add_worker("engine")
        sizes = {"context_tokens": 10_000, "vocab_size": VOCAB, "retry_interval_s": 0.0} | limits
        self.limits = EngineLimits(num_blocks=num_blocks, block_size=block_size, **sizes)  # type: ignore[arg-type]
        self.engine = Engine(self.port, self.runner, limits=self.limits, clock=lambda: self.now)

    def _check_launch(self, batch: StepBatch) -> None:
        handles = {sequence.block_table.tobytes(): sequence.handle for sequence in self.engine._running}
        self.port.check_launch({handles[table.tobytes()] for table in batch.block_tables})

    def submit(
        self, prompt: Sequence[int], max_new_tokens: int = 4, *, namespace: Namespace | None = None, **sampling: object
    ) -> GenerateCall:
        source = PromptSource(np.asarray(prompt, np.uint32), namespace or Namespace())
        call = GenerateCall(source, SamplingParams(max_new_tokens=max_new_tokens, **sampling))  # type: ignore[arg-type]
        self.engine.submit(call)
        return call

    def submit_handle(self, handle: bytes, max_new_tokens: int = 4) -> GenerateCall:
        call = GenerateCall(HandleSource(handle), SamplingParams(max_new_tokens=max_new_tokens))
        self.engine.submit(call)
        return call

    def step(self) -> bool:
        try:
            progressed = self.engine.step()
        except CacheLost as lost:
            self.engine.interrupt(lost)
            self.port.void()
            self.losses += 1
            progressed = True
        self.cache.complete_step("engine", self.steps)
        self.steps += 1
        self.engine.check()
        self.cache.check()
        return progressed

    def drain(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.step() and not self.engine.status().running_sequences + self.engine.status().waiting_sequences:
                return
        raise AssertionError("the engine does not come to an end")


class Answer:
    """What a call has got so far."""

    def __init__(self, call: GenerateCall) -> None:
        self.tokens: list[int] = []
        self.started: GenerateStarted | None = None
        self.finished: GenerateFinished | None = None
        self.error: Exception | None = None
        while not call.events.empty():
            assert self.finished is None, "an event after the end"
            assert self.error is None, "an event after the end"
            self._take(call.events.get())

    def _take(self, event: object) -> None:
        match event:
            case GenerateStarted():
                assert self.started is None
                self.started = event
            case GenerateTokens(tokens):
                assert self.started is not None
                self.tokens += tokens
            case GenerateFinished():
                self.finished = event
                assert event.output_tokens == len(self.tokens)
            case Exception():
                self.error = event


class ProcessSystem:
    """One manager, one pool, some workers, each a process of its own. `options` go to pool and workers."""

    BLOCK = 16
    NUM_BLOCKS = 256
    LEASE_MS = 1500

    def __init__(self, supervisor, model, workers=2, *, pool_options=(), worker_options=()):
        self.supervisor = supervisor
        self.model = str(model)
        self.pool_options = pool_options
        self.worker_options = worker_options
        source = find_model(self.model)
        self.namespace = Namespace(model=source.name, revision=source.revision)
        self.names = (f"process-{number}" for number in itertools.count())
        self.address = supervisor.socket_address("manager")
        self.directory = self.address.removeprefix("unix:").removesuffix(".sock") + ".directory"
        self.manager = self.start_manager()
        self.pool = self.start_pool()
        self.workers = self.start_workers(workers)
        self.client = Client(self.manager.address)

    def start_manager(self):
        sizes = ["--num-blocks", str(self.NUM_BLOCKS), "--block-size", str(self.BLOCK)]
        where = ["--listen", self.address, "--directory", self.directory, "--lease-ttl-ms", str(self.LEASE_MS)]
        return self.supervisor.start(next(self.names), ["serve", *where, *sizes])

    def start_pool(self):
        common = ["--address", self.address, "--model", self.model]
        return self.supervisor.start(next(self.names), ["pool", *common, *self.pool_options])

    def start_workers(self, count, *options):
        commands = {}
        for _ in range(count):
            name = next(self.names)
            listen = self.supervisor.socket_address(name)
            common = ["--address", self.address, "--model", self.model, "--listen", listen]
            commands[name] = ["worker", *common, *self.worker_options, *options]
        return self.supervisor.start_all(commands)

    def generate(self, worker, tokens, n=4, **rest):
        with WorkerClient(worker.address) as client:
            return Generated(client.generate(tokens, SamplingParams(max_new_tokens=n), **rest))

    def matched(self, tokens):
        return self.client.match(tokens, namespace=self.namespace).cached_tokens

    def wait(self, condition, timeout_s=20.0):
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if condition():
                    return
            except ManagerUnavailable:
                pass
            assert time.monotonic() < deadline, "it does not happen"
            time.sleep(0.05)


class Generated:
    """What a stream of a worker brought."""

    def __init__(self, events):
        self.tokens = []
        for event in events:
            match event:
                case GenerateStarted(_, cached):
                    self.cached = cached
                case GenerateTokens(tokens):
                    self.tokens += tokens
                case GenerateFinished():
                    self.finished = True


def named_memory(pid: int) -> list[str]:
    """Shared memory with a name that process `pid` maps or has open: what could stay in /dev/shm once it is killed."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    files = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return [place for place in maps + files if "/dev/shm" in place and not place.endswith("(deleted)")]


@pytest.fixture
def named_memory_of():
    return named_memory


@pytest.fixture(scope="session")
def process_system() -> type[ProcessSystem]:
    return ProcessSystem


@pytest.fixture(scope="session")
def generated() -> type[Generated]:
    return Generated


@pytest.fixture
def make_harness() -> type[Harness]:
    return Harness


@pytest.fixture
def answer_of() -> type[Answer]:
    return Answer


@pytest.fixture
def expected_tokens():
    return continuation


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A directory with a random Llama of two layers, as `save_pretrained` writes it."""
    torch = pytest.importorskip("torch", reason="needs the worker extra")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,  # wide, so that the most likely token is rarely a close call
    )
    directory = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
