"""The engine against a cache of this process and a model whose output shows every wrong byte of KV."""

from __future__ import annotations

import pytest

from radixpool.radix import Namespace, PoolExhausted, UnknownSequence
from radixpool.rpc.errors import LimitExceeded
from radixpool.rpc.generation import FinishReason, GenerateFinished, GenerateTokens, SamplingParams
from radixpool.rpc.limits import MAX_STEP_ROWS
from radixpool.rpc.operations import Acquire, Acquired, GetBlockTables, Release
from radixpool.rpc.worker.cache_port import CacheLost
from radixpool.rpc.worker.errors import DeviceLost, InternalError, OutOfMemory
from radixpool.rpc.worker.limits import EngineLimits


def greedy(n: int, **rest: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=n, **rest)  # type: ignore[arg-type]


def test_generates_what_the_model_says(make_harness, answer_of, expected_tokens):
    harness = make_harness()
    prompt = list(range(11))
    call = harness.submit(prompt, 6)
    harness.drain()
    answer = answer_of(call)
    assert answer.tokens == expected_tokens(prompt, greedy(6))
    assert answer.finished.reason is FinishReason.LENGTH
    assert (answer.finished.prompt_tokens, answer.finished.cached_tokens) == (11, 0)
    assert harness.cache.stats().held_blocks == 0


def test_a_cached_prefix_is_not_computed_again(make_harness, answer_of, expected_tokens):
    harness = make_harness()
    shared = list(range(16))
    harness.submit([*shared, 40], 1)
    harness.drain()
    before = harness.runner.computed_tokens
    call = harness.submit([*shared, 41, 42], 3)
    harness.drain()
    answer = answer_of(call)
    assert answer.started.cached_tokens == 16
    assert harness.runner.computed_tokens - before == 2 + 2  # the rest of the prompt, and two of the three new tokens
    assert answer.tokens == expected_tokens([*shared, 41, 42], greedy(3))


def test_generated_tokens_are_cached_for_the_next_turn(make_harness, answer_of):
    harness = make_harness()
    first = harness.submit(list(range(8)), 9)
    harness.drain()
    history = [*range(8), *answer_of(first).tokens]
    second = harness.submit([*history, 7, 7], 1)
    harness.drain()
    assert answer_of(second).started.cached_tokens == 16  # 17 tokens of history, the last was never computed


def test_decode_rows_and_prompt_chunks_share_one_step(make_harness, answer_of, expected_tokens):
    harness = make_harness(token_budget=8)
    first = harness.submit([1, 2, 3], 20)
    harness.step()
    long_prompt = [n % 50 for n in range(40)]
    second = harness.submit(long_prompt, 2)
    seen = []
    while not answer_of_peek(harness, second):
        tokens_before = harness.runner.computed_tokens
        harness.step()
        seen.append(harness.runner.computed_tokens - tokens_before)
    assert max(seen) <= 8
    assert seen[0] == 5  # one decode row and a chunk up to a block boundary
    harness.drain()
    assert answer_of(first).tokens == expected_tokens([1, 2, 3], greedy(20))
    assert answer_of(second).tokens == expected_tokens(long_prompt, greedy(2))


def answer_of_peek(harness, call):
    return call.events.qsize() > 1  # started and the first token


def test_equal_prefixes_that_arrive_together_are_computed_once(make_harness, answer_of):
    harness = make_harness(token_budget=16)
    shared = [n % 50 for n in range(40)]
    calls = [harness.submit([*shared, n], 2) for n in range(4)]
    harness.drain()
    assert [answer_of(call).started.cached_tokens for call in calls] == [0, 40, 40, 40]


def test_waiting_for_a_prefix_ends_when_its_producer_is_cancelled(make_harness, answer_of, expected_tokens):
    harness = make_harness(token_budget=8)
    shared = [n % 50 for n in range(40)]
    producer = harness.submit([*shared, 1], 2)
    waiter = harness.submit([*shared, 2], 2)
    harness.step()
    harness.engine.cancel(producer)
    harness.drain()
    answer = answer_of(waiter)
    assert answer.tokens == expected_tokens([*shared, 2], greedy(2))
    assert answer.started.cached_tokens == 8  # what the producer had committed


def test_namespaces_do_not_share(make_harness, answer_of):
    harness = make_harness()
    prompt = list(range(20))
    calls = []
    for salt in ("a", "b", "a"):
        calls.append(harness.submit(prompt, 1, namespace=Namespace(cache_salt=salt)))
        harness.drain()
    assert [answer_of(call).started.cached_tokens for call in calls] == [0, 0, 16]


def test_twins_are_remapped_and_their_output_stays_right(make_harness, answer_of, expected_tokens):
    harness = make_harness()
    prompt = list(range(12))
    acquired = harness.port.batch([Acquire(prompt, Namespace())])[0]
    borrowed = harness.submit_handle(acquired.handle, 8)  # acquired before anything was cached
    own = harness.submit(prompt, 8)
    harness.drain()
    assert answer_of(borrowed).tokens == answer_of(own).tokens == expected_tokens(prompt, greedy(8))
    assert harness.cache.stats().remapped_blocks > 0


def test_a_borrowed_sequence_is_extended_and_stays_the_callers(make_harness, answer_of, expected_tokens):
    harness = make_harness()
    prompt = list(range(9))
    acquired = harness.port.batch([Acquire(prompt, Namespace())])[0]
    assert isinstance(acquired, Acquired)
    call = harness.submit_handle(acquired.handle, 5)
    harness.drain()
    answer = answer_of(call)
    assert answer.tokens == expected_tokens(prompt, greedy(5))
    view = harness.port.batch([GetBlockTables((acquired.handle,))])[0].sequences[0]
    assert view.tokens.tolist() == prompt + answer.tokens
    more = harness.submit_handle(acquired.handle, 3)  # and can be continued
    harness.drain()
    assert answer_of(more).tokens == expected_tokens(prompt + answer.tokens, greedy(3))


def test_a_fork_is_right_whether_or_not_its_copy_order_was_run(make_harness, answer_of, expected_tokens):
    """A frontend that forks in the middle of a block has no hand on the pool: the worker computes the block's rest."""
    harness = make_harness()
    prompt = list(range(9))
    acquired = harness.port.batch([Acquire(prompt, Namespace())])[0]
    call = harness.submit_handle(acquired.handle, 5)
    harness.drain()
    tokens = prompt + answer_of(call).tokens
    source = harness.port._sequences[acquired.handle]
    harness.cache.commit(source, 13)
    forked = harness.cache.fork(source)
    assert forked.copies, "the fork has to begin in the middle of a block"
    handle = forked.handles[0].to_bytes(16, "little")
    harness.port._sequences[handle] = next(s for s in harness.cache.sequences() if s.handle == forked.handles[0])
    other, more = harness.submit_handle(handle, 6), harness.submit_handle(acquired.handle, 6)
    harness.drain()
    assert answer_of(other).tokens == answer_of(more).tokens == expected_tokens(tokens, greedy(6))


def test_one_sequence_cannot_be_generated_from_twice_at_once(make_harness, answer_of):
    harness = make_harness()
    acquired = harness.port.batch([Acquire(list(range(9)), Namespace())])[0]
    first = harness.submit_handle(acquired.handle, 5)
    second = harness.submit_handle(acquired.handle, 5)
    harness.drain()
    assert answer_of(first).error is None
    assert "already" in str(answer_of(second).error)


def test_an_unknown_handle_fails_alone(make_harness, answer_of):
    harness = make_harness()
    bad = harness.submit_handle(bytes(16), 5)
    good = harness.submit([1, 2, 3], 2)
    harness.drain()
    assert isinstance(answer_of(bad).error, UnknownSequence)
    assert answer_of(good).finished


def test_requests_wait_for_blocks_and_then_run(make_harness, answer_of, expected_tokens):
    harness = make_harness(num_blocks=8, reserve_tokens=8)
    blocker = harness.port.batch([Acquire([9] * 24, Namespace())])[0]
    call = harness.submit(list(range(10)), 4)
    for _ in range(5):
        assert not harness.step()
    assert harness.engine.status().waiting_sequences == 1
    harness.cache.release(harness.port._sequence(blocker.handle))
    harness.drain()
    assert answer_of(call).tokens == expected_tokens(list(range(10)), greedy(4))


def test_the_youngest_starts_over_when_the_pool_is_short(make_harness, answer_of, expected_tokens):
    harness = make_harness(num_blocks=10, reserve_tokens=0)
    prompts = [[n] * 9 for n in range(3)]
    calls = [harness.submit(prompt, 20) for prompt in prompts]
    harness.drain()
    assert harness.engine.status().preemptions > 0
    for call, prompt in zip(calls, prompts, strict=True):
        assert answer_of(call).tokens == expected_tokens(prompt, greedy(20))
    assert harness.cache.stats().held_blocks == 0


def test_a_refused_request_does_not_hold_up_a_borrowed_one_whose_blocks_it_waits_for(
    make_harness, answer_of, expected_tokens
):
    harness = make_harness(num_blocks=8, reserve_tokens=0)
    handle = harness.port.batch([Acquire([1] * 20, Namespace(), reserve=8)])[0].handle
    own = harness.submit([2] * 9, 3)  # first in the queue, but there are not enough blocks
    borrowed = harness.submit_handle(handle, 4)
    for _ in range(6):
        harness.step()
    assert answer_of(borrowed).tokens == expected_tokens([1] * 20, greedy(4))
    harness.port.batch([Release(handle)])
    harness.drain()
    assert answer_of(own).tokens == expected_tokens([2] * 9, greedy(3))


def test_a_borrowed_sequence_that_gets_no_block_fails_after_the_stall_timeout(make_harness, answer_of):
    harness = make_harness(num_blocks=4, stall_timeout_s=30.0)
    acquired = harness.port.batch([Acquire([1] * 8, Namespace())])[0]
    harness.port.batch([Acquire([2] * 8, Namespace())])  # somebody else holds the rest
    call = harness.submit_handle(acquired.handle, 5)
    for _ in range(10):
        harness.now += 10
        harness.step()
    answer = answer_of(call)
    assert isinstance(answer.error, LimitExceeded)
    assert len(answer.tokens) == 1
    assert harness.engine.status().running_sequences == 0


def test_the_last_token_of_a_borrowed_sequence_comes_with_the_end(make_harness, answer_of, expected_tokens):
    """Whoever had it and lost the sequence before the end would let a worker go on behind it."""
    harness = make_harness(num_blocks=4)
    acquired = harness.port.batch([Acquire([1] * 8, Namespace())])[0]
    other = harness.port.batch([Acquire([2] * 8, Namespace())])[0]
    call = harness.submit_handle(acquired.handle, 1)
    harness.step()
    harness.step()
    answer = answer_of(call)
    assert answer.started is not None
    assert answer.tokens == []
    harness.port.batch([Release(other.handle)])
    harness.step()
    events = [call.events.get_nowait() for _ in range(call.events.qsize())]
    assert [type(event) for event in events] == [GenerateTokens, GenerateFinished]
    assert list(events[0].tokens) == expected_tokens([1] * 8, greedy(1))


def test_more_running_sequences_than_a_step_has_rows_are_refused():
    sizes = {"num_blocks": 1, "block_size": 1, "context_tokens": 1, "vocab_size": 1}
    EngineLimits(**sizes, max_running=MAX_STEP_ROWS)
    with pytest.raises(ValueError, match=f"max_running must be at most {MAX_STEP_ROWS}, got {MAX_STEP_ROWS + 1}"):
        EngineLimits(**sizes, max_running=MAX_STEP_ROWS + 1)


def test_cancelling_gives_the_blocks_back_and_keeps_what_was_committed(make_harness, answer_of):
    harness = make_harness(token_budget=8)
    prompt = [n % 50 for n in range(40)]
    call = harness.submit(prompt, 5)
    for _ in range(3):
        harness.step()
    harness.engine.cancel(call)
    harness.drain()
    assert answer_of(call).finished is None
    stats = harness.cache.stats()
    assert (stats.held_blocks, stats.num_sequences) == (0, 0)
    assert harness.cache.match(prompt).tokens == 24
    harness.engine.cancel(call)  # harmless
    harness.drain()


@pytest.mark.parametrize("stop", ["eos", "stop_token_ids", "ignore_eos"])
def test_ends_at_stop_tokens(make_harness, answer_of, expected_tokens, stop):
    full = expected_tokens([5, 6, 7], greedy(30))
    token = full[4]
    eos = frozenset({token}) if stop != "stop_token_ids" else frozenset()
    harness = make_harness(eos_token_ids=eos)
    ids = (token,) if stop == "stop_token_ids" else ()
    call = harness.submit([5, 6, 7], 30, stop_token_ids=ids, ignore_eos=stop == "ignore_eos")
    harness.drain()
    answer = answer_of(call)
    if stop == "ignore_eos":
        assert answer.tokens == full
    else:
        assert answer.tokens == full[: full.index(token) + 1]
        assert answer.finished.reason is FinishReason.STOP


def test_a_failed_pass_fails_its_requests_and_no_others(make_harness, answer_of, caplog):
    harness = make_harness()
    doomed = harness.submit([1, 2, 3], 5)
    harness.runner.fail_with = [RuntimeError("boom")]
    harness.step()
    later = harness.submit([1, 2, 3], 5)
    harness.drain()
    assert isinstance(answer_of(doomed).error, InternalError)
    assert answer_of(later).finished
    assert harness.cache.stats().held_blocks == 0
    assert "boom" in caplog.text


def test_a_lost_device_is_no_error_of_one_request(make_harness, answer_of):
    """It ends the engine, which whoever drives it hears; the requests end with it and not one by one."""
    harness = make_harness()
    call = harness.submit(range(11))
    harness.runner.fail_with = [DeviceLost("cuda:0 has failed")]
    with pytest.raises(DeviceLost):
        harness.step()
    assert answer_of(call).error is None
    harness.engine.fail_all(DeviceLost("cuda:0 has failed"))
    assert isinstance(answer_of(call).error, DeviceLost)


def test_out_of_memory_shrinks_the_step_and_loses_nothing(make_harness, answer_of, expected_tokens):
    harness = make_harness(token_budget=64)
    prompt = [n % 50 for n in range(60)]
    call = harness.submit(prompt, 3)
    harness.runner.fail_with = [OutOfMemory("no"), OutOfMemory("no")]
    harness.drain()
    assert answer_of(call).tokens == expected_tokens(prompt, greedy(3))


def test_out_of_memory_with_a_single_token_fails_that_request(make_harness, answer_of):
    harness = make_harness(token_budget=1)
    call = harness.submit([1], 3)
    harness.runner.fail_with = [OutOfMemory("no")]
    harness.drain()
    assert isinstance(answer_of(call).error, OutOfMemory)


def test_owned_requests_survive_the_loss_of_the_manager(make_harness, answer_of, expected_tokens):
    harness = make_harness()
    borrowed_handle = harness.port.batch([Acquire([3] * 9, Namespace())])[0].handle
    own = harness.submit(list(range(10)), 12)
    borrowed = harness.submit_handle(borrowed_handle, 12)
    for _ in range(4):
        harness.step()
    harness.engine.interrupt(CacheLost("gone"))
    for sequence in list(harness.cache.sequences()):  # the manager drops what a dead lease held
        harness.cache.release(sequence)
    harness.drain()
    assert answer_of(own).tokens == expected_tokens(list(range(10)), greedy(12))
    assert isinstance(answer_of(borrowed).error, CacheLost)


def test_a_token_computed_after_the_lease_was_lost_is_thrown_away(make_harness, answer_of, expected_tokens):
    harness = make_harness()
    prompt = list(range(10))
    call = harness.submit(prompt, 12)
    harness.step()
    harness.step()
    (sequence,) = harness.cache.sequences()
    harness.cache.release(sequence)  # the lease is over
    harness.port._sequences.clear()
    harness.cache.evict(64)
    harness.runner.pool[:] = 7  # and others have written to its blocks
    harness.drain()
    assert answer_of(call).tokens == expected_tokens(prompt, greedy(12))


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "tokens must hold at least 1 token, got 0"),
        ([1, 99], {}, r"tokens\[1\] must be below the vocabulary size 50, got 99"),
        ([1] * 90, {"max_new_tokens": 20}, "more than the model's context of 100 tokens"),
        ([1] * 60, {"max_new_tokens": 20}, "more than the pool's 64 tokens"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ([1], {"temperature": -1.0}, "temperature must be a finite number of at least 0, got -1.0"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ([1], {"skip_draws": 2**31}, "skip_draws must be 0 to the model's context of .* tokens, got 2147483648"),
        ([1], {"top_p": 1.5}, "top_p"),
        ([1], {"top_k": -1}, "top_k"),
        ([1], {"stop_token_ids": (50,)}, "stop_token_ids must be below the vocabulary size 50, got 50"),
    ],
)
def test_bad_requests_are_refused_before_they_touch_anything(make_harness, prompt, sampling, message):
    harness = make_harness(num_blocks=16, block_size=4, context_tokens=100)
    with pytest.raises(ValueError, match=message):
        harness.submit(prompt, **sampling)
    assert harness.engine.status().waiting_sequences == 0


def test_more_than_max_waiting_is_refused(make_harness):
    harness = make_harness(max_waiting=2)
    harness.submit([1])
    harness.submit([1])
    with pytest.raises(LimitExceeded, match="at most 2"):
        harness.submit([1])


def test_a_borrowed_prompt_beyond_the_model_is_refused(make_harness, answer_of):
    harness = make_harness(context_tokens=10)
    handle = harness.port.batch([Acquire([1] * 9, Namespace())])[0].handle
    call = harness.submit_handle(handle, 4)
    harness.drain()
    assert "context of 10 tokens" in str(answer_of(call).error)


def test_pool_exhausted_is_what_the_cache_says(make_harness):
    harness = make_harness(num_blocks=2)
    assert isinstance(harness.port.batch([Acquire([1] * 100, Namespace())])[0], PoolExhausted)


def test_a_damaged_block_is_computed_anew(make_harness, answer_of, expected_tokens):
    harness = make_harness()
    prompt = list(range(10))
    call = harness.submit(prompt, 12)
    for _ in range(3):
        harness.step()
    (sequence,) = harness.cache.sequences()
    damaged = sequence.block_table[1]
    harness.runner.pool[damaged] = 7
    harness.cache.invalidate(sequence, 1)
    harness.drain()
    assert answer_of(call).tokens == expected_tokens(prompt, greedy(12))


def test_a_resting_engine_has_no_step_under_way(make_harness, answer_of):
    """Every test here checks that a step was announced and its sequences named; this one, that it is over at rest."""
    harness = make_harness(token_budget=8)
    handle = harness.port.batch([Acquire([9] * 7, Namespace())])[0].handle
    calls = [harness.submit([n] * 30, 6) for n in range(4)] + [harness.submit_handle(handle, 5)]
    harness.drain()
    calls.append(harness.submit([1] * 9, 3))
    harness.drain()
    last = harness.port.reports[-1]
    assert last.completed_step == last.launched_step > harness.engine.status().completed_steps
    assert all(answer_of(call).finished for call in calls)
