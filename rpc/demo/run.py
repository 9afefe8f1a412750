"""The demo from start to end: processes, conversations, replay with and without sharing, report."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from radixpool.radix import Namespace
from radixpool.rpc.client import Client, ClientOptions, ClientRole
from radixpool.rpc.demo.conversations import Conversation, ConversationFile, own_script, read_conversations
from radixpool.rpc.demo.prompts import TemplateTokenizer, Turn, load_tokenizer, turns
from radixpool.rpc.demo.replay import Outcome, Replay, Target
from radixpool.rpc.demo.report import Report
from radixpool.rpc.demo.supervisor import Process, Supervisor
from radixpool.rpc.generation import SamplingParams
from radixpool.rpc.inspection import TreeView
from radixpool.rpc.pool.cuda import CudaDevice
from radixpool.rpc.pool.device import CPU, Device
from radixpool.rpc.pool.geometry import block_bytes
from radixpool.rpc.pool.memory import PoolMemoryError, available_memory_bytes
from radixpool.rpc.pool_types import KvDtype
from radixpool.rpc.worker.model_source import ModelSource, find_model, pool_spec_for

_MEMORY_SHARE = 0.4
"""How much of the available memory the pool may take when its size is not given."""
_MIN_BLOCKS = 256
_COMPARED_OF_A_FILE = 3
_MAX_TREE_NODES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What to run.

    conversations: a file, or None for the script that ships with the package.
    limit: how many conversations of it; None for all.
    compare: how many requests to run once more without sharing; None for all of the own script, 3 of a file.
    num_blocks: size of the pool; None fits it to the conversations and the memory.
    """

    model: str
    conversations: Path | None = None
    limit: int | None = None
    max_new_tokens: int = 12
    compare: int | None = None
    num_workers: int = 2
    num_frontends: int = 4
    num_blocks: int | None = None
    block_size: int = 16
    device: Device = CPU
    dtype: KvDtype = KvDtype.FLOAT32


@dataclass(frozen=True, slots=True)
class Chats:
    """The conversations that are replayed, as turns, and what was left out and why."""

    chats: tuple[tuple[Turn, ...], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What a run gave: the report, and the tree as it was after the replay."""

    report: Report
    tree: TreeView


def run_demo(options: DemoOptions, *, console: Console) -> DemoResult:
    """Run the demo with progress on `console`.

    Raises `ModelUnavailable`, `ProcessFailed`, `PoolMemoryError`, `CudaUnavailable`, or ValueError for a conversation
    file without any.
    """
    source = find_model(options.model)
    if options.device.cuda_index is not None:
        CudaDevice(options.device.cuda_index)  # before the long way to the first one that needs it
    found = own_script() if options.conversations is None else read_conversations(options.conversations)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tokenizer = _load_tokenizer(source, progress)
        chats = choose_chats(found, tokenizer, context_tokens=source.context_tokens, options=options)
        num_blocks = options.num_blocks or fitting_blocks(source, chats, options)
        with Supervisor() as supervisor:
            manager, workers = _start(supervisor, source, options, num_blocks, progress)
            return _replay(manager, workers, source, chats, options, progress)


def choose_chats(
    found: ConversationFile, tokenizer: TemplateTokenizer, *, context_tokens: int, options: DemoOptions
) -> Chats:
    """Return the first conversations all of whose turns fit the model's context.

    Raises ValueError when none does.
    """
    chats: list[tuple[Turn, ...]] = []
    notes = list(found.problems)
    for conversation in found.conversations:
        if options.limit is not None and len(chats) == options.limit:
            break
        try:
            chat = tuple(turns(conversation, tokenizer))
        except ValueError as error:
            notes.append(f"{conversation.name}: skipped, {error}")
            continue
        longest = max(len(turn.tokens) for turn in chat) + options.max_new_tokens
        if longest <= context_tokens:
            chats.append(chat)
        else:
            notes.append(_too_long(conversation, longest, context_tokens))
    if not chats:
        raise ValueError(f"conversations: none can be used: {notes[-1]}")
    return Chats(tuple(chats), tuple(notes))


def _too_long(conversation: Conversation, longest: int, context_tokens: int) -> str:
    return f"{conversation.name}: skipped, its {longest:,} tokens do not fit the model's context of {context_tokens:,}"


def fitting_blocks(source: ModelSource, chats: Chats, options: DemoOptions) -> int:
    """Return how many blocks hold all conversations, and those compared once more, if the memory allows it.

    Raises `PoolMemoryError` when not even the longest conversation fits.
    """
    lengths = sorted((len(chat[-1].tokens) + options.max_new_tokens for chat in chats.chats), reverse=True)
    generated = sum(len(chat) for chat in chats.chats) * options.max_new_tokens
    at_once = sum(lengths[: options.num_frontends])
    wanted = max((sum(lengths) + generated + at_once) // options.block_size, _MIN_BLOCKS)
    spec = pool_spec_for(source, num_blocks=1, block_size=options.block_size, dtype=options.dtype)
    index = options.device.cuda_index
    available = available_memory_bytes() if index is None else CudaDevice(index).free_bytes()
    affordable = int(available * _MEMORY_SHARE) // block_bytes(spec)
    needed = lengths[0] // options.block_size + 1
    if affordable < needed:
        raise PoolMemoryError(
            f"the longest conversation needs {needed} blocks, {affordable} fit into {_MEMORY_SHARE:.0%} of the "
            "available memory; choose others with --conversations and --limit, or --kv-dtype bfloat16"
        )
    return min(wanted, affordable)


def _load_tokenizer(source: ModelSource, progress: Progress) -> TemplateTokenizer:
    task = progress.add_task("reading the conversations", total=1)
    tokenizer = load_tokenizer(source)
    progress.advance(task)
    return tokenizer


def _start(
    supervisor: Supervisor, source: ModelSource, options: DemoOptions, num_blocks: int, progress: Progress
) -> tuple[Process, list[Process]]:
    task = progress.add_task("starting manager, pool and workers", total=2 + options.num_workers)
    sizes = ["--num-blocks", str(num_blocks), "--block-size", str(options.block_size)]
    manager = supervisor.start("manager", ["serve", "--listen", supervisor.socket_address("manager"), *sizes])
    progress.advance(task)
    common = ["--address", manager.address, "--model", options.model, "--device", str(options.device)]
    supervisor.start("pool", ["pool", *common, "--kv-dtype", options.dtype.option])
    progress.advance(task)
    names = [f"worker-{number}" for number in range(1, options.num_workers + 1)]
    commands = {
        name: ["worker", *common, "--name", name, "--listen", supervisor.socket_address(name)] for name in names
    }
    workers = supervisor.start_all(commands, on_ready=lambda _name: progress.advance(task))
    return manager, workers


def _replay(
    manager: Process,
    workers: Sequence[Process],
    source: ModelSource,
    chats: Chats,
    options: DemoOptions,
    progress: Progress,
) -> DemoResult:
    targets = [Target(worker.name, worker.address) for worker in workers]
    sampling = SamplingParams(max_new_tokens=options.max_new_tokens)
    bar = _RequestBar(progress, "replaying with sharing", sum(map(len, chats.chats)))
    with closing(Replay(targets, sampling, on_outcome=bar.advance)) as replay:
        outcomes = replay.run(chats.chats, frontends=options.num_frontends)
    with Client(manager.address, options=ClientOptions(name="demo", role=ClientRole.OPERATOR)) as client:
        cache, tree = client.stats().cache, client.inspect_tree(max_nodes=_MAX_TREE_NODES)
    chosen = first_turns(chats.chats, _compare_count(chats, options))
    repeated = _replay_once_more(targets, sampling, chosen, _Repeat("again with sharing", _shared), options, progress)
    unshared = _replay_once_more(targets, sampling, chosen, _Repeat("again without sharing", _alone), options, progress)
    died = tuple(f"{worker.name} has died" for worker in workers if not worker.alive)
    report = Report(
        model=source.name,
        device=str(options.device),
        dtype=options.dtype,
        outcomes=tuple(outcomes),
        repeated=tuple(repeated),
        unshared=tuple(unshared),
        cache=cache,
        notes=(*chats.notes, *died),
    )
    return DemoResult(report, tree)


def _compare_count(chats: Chats, options: DemoOptions) -> int:
    if options.compare is not None:
        return options.compare
    return sum(map(len, chats.chats)) if options.conversations is None else _COMPARED_OF_A_FILE


@dataclass(frozen=True, slots=True)
class _Repeat:
    """One more run of some requests: what the progress bar says, and who shares with whom."""

    description: str
    namespace_of: Callable[[Turn], Namespace]


def _replay_once_more(
    targets: Sequence[Target],
    sampling: SamplingParams,
    chosen: Sequence[Sequence[Turn]],
    repeat: _Repeat,
    options: DemoOptions,
    progress: Progress,
) -> list[Outcome]:
    if not chosen:
        return []
    bar = _RequestBar(progress, repeat.description, sum(map(len, chosen)))
    replay = Replay(targets, sampling, namespace_of=repeat.namespace_of, on_outcome=bar.advance)
    with closing(replay):
        return replay.run(chosen, frontends=options.num_frontends)


def first_turns(chats: Iterable[Sequence[Turn]], count: int) -> list[Sequence[Turn]]:
    """Return the first `count` turns, as chats.

    >>> first_turns([["a", "b"], ["c", "d"]], 3)
    [['a', 'b'], ['c']]
    """
    chosen = []
    for chat in chats:
        if count <= 0:
            break
        chosen.append(chat[:count])
        count -= len(chat)
    return chosen


def _shared(_turn: Turn) -> Namespace:
    return Namespace()


def _alone(turn: Turn) -> Namespace:
    """Return a namespace of the request's own: it finds nothing and leaves nothing for others."""
    return Namespace(cache_salt=f"unshared {turn.conversation} {turn.number}")


class _RequestBar:
    """A progress bar of requests that also shows the hit ratio so far. Called from many threads."""

    def __init__(self, progress: Progress, description: str, total: int) -> None:
        self._progress = progress
        self._description = description
        self._task = progress.add_task(description, total=total)
        self._lock = threading.Lock()
        self._prompt_tokens = 0
        self._cached_tokens = 0

    def advance(self, outcome: Outcome) -> None:
        """Count one request."""
        with self._lock:
            self._prompt_tokens += len(outcome.turn.tokens)
            self._cached_tokens += outcome.cached_tokens
            ratio = self._cached_tokens / self._prompt_tokens
        self._progress.update(self._task, advance=1, description=f"{self._description} (hit ratio {ratio:.0%})")
