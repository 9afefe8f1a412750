"""A generation from a caller's own sequence goes on when the sequence is lost: same tokens, one stream of events.

Every test that takes `run` is run by both clients.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from radixpool.radix import PoolExhausted
from radixpool.radix.errors import UnknownSequence
from radixpool.rpc.client import AsyncClient, Client
from radixpool.rpc.client.continuing import (
    MAX_LOSSES_IN_A_ROW,
    Continuation,
    Generate,
    continue_through_losses,
    continue_through_losses_async,
)
from radixpool.rpc.errors import ManagerUnavailable, ProtocolError, SequenceLost
from radixpool.rpc.generation import (
    FinishReason,
    GenerateEvent,
    GenerateFinished,
    GenerateStarted,
    GenerateTokens,
    SamplingParams,
)
from radixpool.rpc.manager import ManagerServer

PROMPT = list(range(10))


class Worker:
    """Continues sequences like a worker: the next token follows from all before it. `losses` say after how many."""

    def __init__(self, client: Client, *losses: int) -> None:
        self._client = client
        self._losses = list(losses)
        self.asked: list[tuple[int, int]] = []
        self.prompts: list[list[int]] = []

    def generate(self, handle: bytes, sampling: SamplingParams) -> Iterator[GenerateEvent]:
        (view,) = self._client.get_block_tables([handle]).sequences
        if isinstance(view, Exception):
            raise view
        self.asked.append((sampling.max_new_tokens, sampling.skip_draws))
        tokens = view.tokens.tolist()
        self.prompts.append(list(tokens))
        yield GenerateStarted(len(tokens), view.cached_tokens)
        lost_after = self._losses.pop(0) if self._losses else None
        for count in range(sampling.max_new_tokens):
            if count == lost_after:
                self._client.release(handle)
                raise SequenceLost("with the manager")
            tokens.append(sum(tokens) % 97 + len(tokens))
            self._client.extend(handle, tokens[-1:])
            self._client.commit(handle, len(tokens) - 1)
            yield GenerateTokens((tokens[-1],))
        yield GenerateFinished(FinishReason.LENGTH, view.cached_tokens, 0, sampling.max_new_tokens)


Run: TypeAlias = Callable[..., list[GenerateEvent]]


def run_blocking(address: str, generate: Generate, num_tokens: int = 12) -> list[GenerateEvent]:
    with Client(address) as owner, owner.acquire(PROMPT) as sequence:
        return list(continue_through_losses(generate, sequence, SamplingParams(max_new_tokens=num_tokens)))


def run_asyncio(address: str, generate: Generate, num_tokens: int = 12) -> list[GenerateEvent]:
    async def generate_async(handle: bytes, sampling: SamplingParams) -> AsyncGenerator[GenerateEvent, None]:
        for event in generate(handle, sampling):
            yield event

    async def read() -> list[GenerateEvent]:
        async with AsyncClient(address) as owner, await owner.acquire(PROMPT) as sequence:
            sampling = SamplingParams(max_new_tokens=num_tokens)
            return [event async for event in continue_through_losses_async(generate_async, sequence, sampling)]

    return asyncio.run(read())


@pytest.fixture(params=[run_blocking, run_asyncio], ids=["blocking", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param


def tokens_of(events: list[GenerateEvent]) -> list[int]:
    return [token for event in events if isinstance(event, GenerateTokens) for token in event.tokens]


@pytest.mark.parametrize("losses", [(), (0,), (5,), (1, 3, 0, 2), (12,)])
def test_whoever_reads_sees_one_generation(make_server: Callable[..., Any], run: Run, losses: tuple[int, ...]) -> None:
    first, second = make_server().address, make_server().address
    with Client(first) as client:
        expected = tokens_of(run(first, Worker(client).generate))
    with Client(second) as client:
        events = run(second, Worker(client, *losses).generate)
        assert tokens_of(events) == expected
        assert [type(event) for event in events if not isinstance(event, GenerateTokens)] == [
            GenerateStarted,
            GenerateFinished,
        ]
        assert events[0] == GenerateStarted(10, 0)
        assert events[-1] == GenerateFinished(FinishReason.LENGTH, 10, 0, 12)
        assert client.stats().cache.num_sequences == 0


def test_the_worker_is_asked_for_the_rest_and_finds_what_was_committed(
    server: ManagerServer, client: Client, run: Run
) -> None:
    worker = Worker(client, 6)
    run(server.address, worker.generate)
    assert worker.asked == [(12, 0), (6, 6)]
    assert worker.prompts[1][:10] == PROMPT
    assert len(worker.prompts[1]) == 16
    assert client.stats().cache.hit_tokens >= 12, "three blocks of the first part"


def test_a_sequence_that_a_worker_has_grown_before_is_continued_from_there(client: Client) -> None:
    """The caller's own idea of it is older than the manager's."""
    with client.acquire(PROMPT) as sequence:
        first = Worker(client)
        said = tokens_of(list(first.generate(sequence.handle, SamplingParams(max_new_tokens=4))))
        second = Worker(client, 2)
        list(continue_through_losses(second.generate, sequence, SamplingParams(max_new_tokens=6)))
        assert second.prompts[0] == PROMPT + said
        assert second.prompts[1][:14] == PROMPT + said
        assert sequence.num_tokens == 16


def test_a_sequence_lost_before_it_begins_is_acquired_again(client: Client) -> None:
    with client.acquire(PROMPT) as sequence:
        client.release(sequence.handle)
        events = list(continue_through_losses(Worker(client).generate, sequence, SamplingParams(max_new_tokens=3)))
    assert len(tokens_of(events)) == 3


async def test_a_sequence_lost_before_it_begins_is_acquired_again_by_asyncio(
    server: ManagerServer, client: Client
) -> None:
    async def generate(handle: bytes, sampling: SamplingParams) -> AsyncGenerator[GenerateEvent, None]:
        for event in Worker(client).generate(handle, sampling):
            yield event

    async with AsyncClient(server.address) as owner, await owner.acquire(PROMPT) as sequence:
        await owner.release(sequence.handle)
        sampling = SamplingParams(max_new_tokens=3)
        events = [event async for event in continue_through_losses_async(generate, sequence, sampling)]
        assert sequence.num_tokens == len(PROMPT), "what comes after the last loss is not asked for"
    assert len(tokens_of(events)) == 3


def test_losses_without_a_token_in_between_come_to_an_end(server: ManagerServer, client: Client, run: Run) -> None:
    worker = Worker(client, *[0] * 100)
    with pytest.raises(SequenceLost):
        run(server.address, worker.generate)
    assert len(worker.asked) == MAX_LOSSES_IN_A_ROW + 1


def test_losses_are_counted_anew_after_each_token() -> None:
    generation = Continuation(SamplingParams(max_new_tokens=100))
    generation.take(GenerateStarted(10, 0))
    for token in range(20):
        for _ in range(MAX_LOSSES_IN_A_ROW):
            assert generation.lost(SequenceLost("again")) is None
        generation.take(GenerateTokens((token,)))
        assert generation.tokens_since() == token.to_bytes(4, "little")
    assert generation.rest() == SamplingParams(max_new_tokens=80, skip_draws=20)


@pytest.mark.parametrize(
    "error",
    [ManagerUnavailable("the worker"), ValueError("tokens"), PoolExhausted(3, allocatable_blocks=1, num_blocks=4)],
)
def test_other_errors_are_the_callers(server: ManagerServer, client: Client, run: Run, error: Exception) -> None:
    def generate(_handle: bytes, _sampling: SamplingParams) -> Iterator[GenerateEvent]:
        yield GenerateStarted(10, 0)
        raise error

    with pytest.raises(type(error)):
        run(server.address, generate)


@pytest.mark.parametrize("error", [SequenceLost("with the manager"), ManagerUnavailable("the worker")])
def test_what_is_lost_after_the_last_event_is_no_matter(
    server: ManagerServer, client: Client, run: Run, error: Exception
) -> None:
    """Its reader has everything; the sequence is not acquired once more either."""

    def generate(_handle: bytes, _sampling: SamplingParams) -> Iterator[GenerateEvent]:
        yield GenerateStarted(10, 0)
        yield GenerateTokens((7,))
        yield GenerateFinished(FinishReason.STOP, 10, 0, 1)
        raise error

    assert tokens_of(run(server.address, generate)) == [7]
    assert client.stats().cache.admitted_requests == 1


def test_a_stream_that_just_ends_is_an_error(server: ManagerServer, client: Client, run: Run) -> None:
    def generate(_handle: bytes, _sampling: SamplingParams) -> Iterator[GenerateEvent]:
        yield GenerateStarted(10, 0)

    with pytest.raises(ProtocolError, match="ended in the middle"):
        run(server.address, generate)


def test_it_waits_for_room_to_acquire_again(
    server: ManagerServer, client: Client, make_client: Callable[..., Client], run: Run
) -> None:
    """After a restart the blocks that the former life held are fenced for a moment."""
    hog, other = make_client(), []

    def generate(handle: bytes, sampling: SamplingParams) -> Iterator[GenerateEvent]:
        if not other:
            client.release(handle)
            other.append(hog.acquire(range(500, 500 + 4 * 64)))
            threading.Timer(0.3, other[0].release).start()
            raise UnknownSequence("gone")
        yield from Worker(client).generate(handle, sampling)

    started = time.monotonic()
    assert len(tokens_of(run(server.address, generate, 2))) == 2
    assert time.monotonic() - started >= 0.3


def test_it_does_not_wait_for_room_that_can_never_be(server: ManagerServer, client: Client, run: Run) -> None:
    """The pool has 64 blocks of 4 tokens; the sequence has grown beyond them while it was lost."""

    def generate(_handle: bytes, _sampling: SamplingParams) -> Iterator[GenerateEvent]:
        yield GenerateStarted(10, 0)
        yield GenerateTokens(tuple(range(4 * 64)))
        raise SequenceLost("with the manager")

    started = time.monotonic()
    with pytest.raises(PoolExhausted, match="64"):
        run(server.address, generate, 1000)
    assert time.monotonic() - started < 5


def test_it_goes_on_through_a_killed_manager(serve: Callable[..., Any], socket_dir: Path, run: Run) -> None:
    """The manager of another process dies by SIGKILL in the middle, twice, and is started again."""
    where = ("--listen", f"unix:{socket_dir}/m.sock", "--directory", f"{socket_dir}/d", "--lease-ttl-ms", "1000")
    options = (*where, "--num-blocks", "64", "--block-size", "4", "--log-level", "error")
    managers = [serve(*options)]
    with Client(managers[0].address) as client:
        expected = tokens_of(run(managers[0].address, Worker(client).generate))
        worker = Worker(client)

        def generate(handle: bytes, sampling: SamplingParams) -> Iterator[GenerateEvent]:
            for count, event in enumerate(worker.generate(handle, sampling)):
                yield event
                if count == 4 and len(managers) < 3:
                    managers[-1].kill()
                    managers.append(serve(*options))

        events = run(managers[0].address, generate)
        assert tokens_of(events) == expected
        assert len(managers) == 3, "it was killed twice"
        assert [asked for asked, _ in worker.asked] == [12, 8, 4]
        assert isinstance(events[-1], GenerateFinished)
        assert client.acquire(PROMPT).cached_tokens == 8, "the next request finds what was computed before"
        assert client.check().violations == ()
