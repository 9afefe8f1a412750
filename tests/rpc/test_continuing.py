"""A generation from a caller's own sequence goes on when the sequence is lost: same tokens, one stream of events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from radixpool.radix import PoolExhausted
from radixpool.radix.errors import UnknownSequence
from radixpool.rpc.client import Client
from radixpool.rpc.client.continuing import MAX_LOSSES_IN_A_ROW, continue_through_losses
from radixpool.rpc.errors import ManagerUnavailable, ProtocolError, SequenceLost
from radixpool.rpc.generation import (
    FinishReason,
    GenerateEvent,
    GenerateFinished,
    GenerateStarted,
    GenerateTokens,
    SamplingParams,
)

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


def run(worker: Worker, client: Client, num_tokens: int = 12) -> list[GenerateEvent]:
    with client.acquire(PROMPT) as sequence:
        return list(continue_through_losses(worker.generate, sequence, SamplingParams(max_new_tokens=num_tokens)))


def tokens_of(events: list[GenerateEvent]) -> list[int]:
    return [token for event in events if isinstance(event, GenerateTokens) for token in event.tokens]


@pytest.mark.parametrize("losses", [(), (0,), (5,), (1, 3, 0, 2), (12,)])
def test_whoever_reads_sees_one_generation(make_server: Callable[..., object], losses: tuple[int, ...]) -> None:
    with Client(make_server().address) as client:
        expected = tokens_of(run(Worker(client), client))
    with Client(make_server().address) as client:
        events = run(Worker(client, *losses), client)
        assert tokens_of(events) == expected
        assert [type(event) for event in events if not isinstance(event, GenerateTokens)] == [
            GenerateStarted,
            GenerateFinished,
        ]
        assert events[0] == GenerateStarted(10, 0)
        assert events[-1] == GenerateFinished(FinishReason.LENGTH, 10, 0, 12)
        assert client.stats().cache.num_sequences == 0


def test_the_worker_is_asked_for_the_rest_and_finds_what_was_committed(client: Client) -> None:
    worker = Worker(client, 6)
    run(worker, client)
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


def test_losses_without_a_token_in_between_come_to_an_end(client: Client) -> None:
    worker = Worker(client, *[0] * 100)
    with pytest.raises(SequenceLost):
        run(worker, client)
    assert len(worker.asked) == MAX_LOSSES_IN_A_ROW + 1


@pytest.mark.parametrize(
    "error",
    [ManagerUnavailable("the worker"), ValueError("tokens"), PoolExhausted(3, allocatable_blocks=1, num_blocks=4)],
)
def test_other_errors_are_the_callers(client: Client, error: Exception) -> None:
    def generate(_handle: bytes, _sampling: SamplingParams) -> Iterator[GenerateEvent]:
        yield GenerateStarted(10, 0)
        raise error

    with client.acquire(PROMPT) as sequence, pytest.raises(type(error)):
        list(continue_through_losses(generate, sequence, SamplingParams(max_new_tokens=3)))


def test_a_stream_that_just_ends_is_an_error(client: Client) -> None:
    def generate(_handle: bytes, _sampling: SamplingParams) -> Iterator[GenerateEvent]:
        yield GenerateStarted(10, 0)

    with client.acquire(PROMPT) as sequence, pytest.raises(ProtocolError, match="ended in the middle"):
        list(continue_through_losses(generate, sequence, SamplingParams(max_new_tokens=3)))


def test_it_waits_for_room_to_acquire_again(client: Client, make_client: Callable[..., Client]) -> None:
    """After a restart the blocks that the former life held are fenced for a moment."""
    hog, other = make_client(), []
    with client.acquire(PROMPT) as sequence:

        def generate(handle: bytes, sampling: SamplingParams) -> Iterator[GenerateEvent]:
            if not other:
                client.release(handle)
                other.append(hog.acquire(range(500, 500 + 4 * 64)))
                threading.Timer(0.3, other[0].release).start()
                raise UnknownSequence("gone")
            yield from Worker(client).generate(handle, sampling)

        started = time.monotonic()
        events = list(continue_through_losses(generate, sequence, SamplingParams(max_new_tokens=2)))
    assert len(tokens_of(events)) == 2
    assert time.monotonic() - started >= 0.3
