"""The demo's parts without processes: choosing conversations, sizing the pool, replaying, reporting."""

from __future__ import annotations

import io
import json
import threading

import numpy as np
import pytest
from rich.console import Console

from radixpool.radix import Namespace
from radixpool.rpc.demo.conversations import Conversation, ConversationFile, Message
from radixpool.rpc.demo.prompts import Turn
from radixpool.rpc.demo.replay import Outcome, Replay, Target
from radixpool.rpc.demo.report import Report, as_data, print_report
from radixpool.rpc.demo.run import Chats, DemoOptions, choose_chats, first_turns, fitting_blocks
from radixpool.rpc.errors import LimitExceeded, ManagerUnavailable
from radixpool.rpc.generation import FinishReason, GenerateFinished, GenerateStarted, GenerateTokens, SamplingParams
from radixpool.rpc.inspection import CacheCounters
from radixpool.rpc.pool.memory import PoolMemoryError
from radixpool.rpc.pool_types import KvDtype
from radixpool.rpc.worker.model_source import ModelSource

OPTIONS = DemoOptions(model="m", max_new_tokens=4)


class WordTokenizer:
    """One token a character; the prompt is the concatenation of the messages."""

    def text(self, messages):
        return "".join(message.text for message in messages)

    def encode(self, text):
        return [ord(character) for character in text]


def conversation(name, *lengths):
    """A chat whose n-th user message has so many characters."""
    messages = [m for length in lengths for m in (Message("user", "x" * length), Message("assistant", "y" * 10))]
    return Conversation(name, tuple(messages))


def turn(name, number, length=32):
    return Turn(name, number, np.arange(length, dtype=np.uint32))


def outcome(name, number, *, tokens=(1, 2, 3), cached=16, **rest):
    defaults = {"worker": "w", "ttft_ms": 100.0, "total_ms": 300.0}
    return Outcome(turn=turn(name, number), cached_tokens=cached, tokens=tokens, **(defaults | rest))


def test_the_first_conversations_that_fit_are_taken_whole():
    found = ConversationFile(
        (conversation("long", 50, 60), conversation("a", 20, 30), conversation("b", 20), conversation("c", 20)),
        ("line 9: broken",),
    )
    options = DemoOptions(model="m", max_new_tokens=4, limit=2)
    chats = choose_chats(found, WordTokenizer(), context_tokens=100, options=options)
    assert [chat[0].conversation for chat in chats.chats] == ["a", "b"]
    assert [len(t.tokens) for t in chats.chats[0]] == [20, 60]
    assert chats.notes[0] == "line 9: broken"
    assert chats.notes[1] == "long: skipped, its 124 tokens do not fit the model's context of 100"


def test_no_conversation_that_fits_is_an_error():
    with pytest.raises(ValueError, match="none can be used: long: skipped"):
        choose_chats(
            ConversationFile((conversation("long", 200),), ()), WordTokenizer(), context_tokens=100, options=OPTIONS
        )


def test_a_conversation_that_the_template_refuses_is_named():
    class Picky(WordTokenizer):
        def text(self, messages):
            if len(messages) > 2:
                raise ValueError("the model's chat template refuses it: roles must alternate")
            return super().text(messages)

    found = ConversationFile((conversation("a", 20, 30), conversation("b", 20)), ())
    chats = choose_chats(found, Picky(), context_tokens=100, options=OPTIONS)
    assert [chat[0].conversation for chat in chats.chats] == ["b"]
    assert chats.notes == ("a: skipped, the model's chat template refuses it: roles must alternate",)


SOURCE = ModelSource(
    name="m", revision="r", directory=None, gguf_file=None, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=64,
    context_tokens=10_000, vocab_size=100,
)  # fmt: skip


def test_the_pool_holds_every_conversation_if_the_memory_allows(monkeypatch):
    chats = Chats(tuple((turn(str(n), 1, 8000),) for n in range(3)), ())
    monkeypatch.setattr("radixpool.rpc.demo.run.available_memory_bytes", lambda: 1 << 40)
    assert fitting_blocks(SOURCE, chats, OPTIONS) * 16 >= 2 * 3 * 8004
    block = 2 * 64 * 16 * 4
    monkeypatch.setattr("radixpool.rpc.demo.run.available_memory_bytes", lambda: 1500 * block)
    assert fitting_blocks(SOURCE, chats, OPTIONS) == 600
    monkeypatch.setattr("radixpool.rpc.demo.run.available_memory_bytes", lambda: 1000 * block)
    with pytest.raises(PoolMemoryError, match="the longest conversation needs 501 blocks, 400 fit"):
        fitting_blocks(SOURCE, chats, OPTIONS)


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, [1]), (2, [2]), (3, [2, 1]), (99, [2, 3])])
def test_first_turns_cuts_across_chats(count, expected):
    chats = [[turn("a", 1), turn("a", 2)], [turn("b", 1), turn("b", 2), turn("b", 3)]]
    assert [len(chat) for chat in first_turns(chats, count)] == expected


class FakeClient:
    """Answers, refuses or is out of reach, by the name of the worker."""

    log: list
    lock = threading.Lock()

    def __init__(self, address):
        self.address = address

    def close(self):
        pass

    def generate(self, tokens, sampling, *, namespace):
        with self.lock:
            self.log.append((self.address, len(tokens), namespace))
        if self.address == "dead":
            raise ManagerUnavailable("gone")
        if self.address == "full":
            raise LimitExceeded("too many")
        yield GenerateStarted(len(tokens), 16)
        yield GenerateTokens((5,))
        yield GenerateTokens((6, 7))
        yield GenerateFinished(FinishReason.LENGTH, len(tokens), 16, 3)


@pytest.fixture
def replay(monkeypatch):
    FakeClient.log = []
    monkeypatch.setattr("radixpool.rpc.demo.replay.WorkerClient", FakeClient)

    def run(addresses, chats, frontends=2, **rest):
        targets = [Target(address, address) for address in addresses]
        return Replay(targets, SamplingParams(max_new_tokens=3), **rest).run(chats, frontends=frontends)

    return run


def test_turns_of_a_chat_go_in_order_and_rotate_over_the_workers(replay):
    chats = [[turn("a", n, 10 * n) for n in (1, 2, 3)], [turn("b", n, 10 * n + 1) for n in (1, 2)]]
    seen = []
    outcomes = replay(["one", "two"], chats, on_outcome=seen.append)
    assert [(o.turn.conversation, o.turn.number, o.worker) for o in outcomes] == [
        ("a", 1, "one"), ("a", 2, "two"), ("a", 3, "one"), ("b", 1, "two"), ("b", 2, "one"),
    ]  # fmt: skip
    assert all(o.tokens == (5, 6, 7) and o.cached_tokens == 16 and 0 < o.ttft_ms <= o.total_ms for o in outcomes)
    assert [length for _, length, _ in FakeClient.log if length % 10 == 0] == [10, 20, 30]
    assert len(seen) == 5


def test_a_request_moves_on_from_a_dead_worker(replay):
    outcomes = replay(["dead", "two"], [[turn("a", 1), turn("a", 2)]])
    assert [o.worker for o in outcomes] == ["two", "two"]
    assert not any(o.error for o in outcomes)


def test_errors_become_outcomes_and_the_rest_goes_on(replay):
    (all_dead,) = replay(["dead"], [[turn("a", 1)]])
    assert "dead is out of reach: gone" in all_dead.error
    first, second = replay(["full", "two"], [[turn("a", 1), turn("a", 2)]])
    assert first.error == "too many"
    assert second.tokens


def test_namespaces_are_chosen_by_turn(replay):
    replay(["one"], [[turn("a", 1)]], namespace_of=lambda t: Namespace(cache_salt=f"{t.conversation}{t.number}"))
    assert FakeClient.log[0][2] == Namespace(cache_salt="a1")


COUNTERS = CacheCounters(
    **(dict.fromkeys(CacheCounters.__dataclass_fields__, 0) | {"num_blocks": 99, "cached_blocks": 7})
)


def report(outcomes, unshared=(), repeated=None, **rest):
    repeated = unshared if repeated is None else repeated
    runs = {"outcomes": tuple(outcomes), "repeated": tuple(repeated), "unshared": tuple(unshared)}
    return Report(**{"model": "m", "device": "cpu", "dtype": KvDtype.FLOAT32, "cache": COUNTERS} | runs | rest)


def test_the_data_of_a_report():
    again, alone = outcome("a", 1, ttft_ms=50.0), outcome("a", 1, cached=0, ttft_ms=400.0)
    data = as_data(report([outcome("a", 1, cached=0), outcome("a", 2)], [alone], [again]))
    json.dumps(data)
    assert data["hit_ratio"] == 16 / 64
    assert data["identical_without_sharing"] is True
    first, second = data["requests"]
    assert (first["prompt_tokens"], first["cached_tokens"], first["ttft_ms"], first["output_tokens"]) == (
        32,
        0,
        100.0,
        3,
    )
    assert (first["repeated_ttft_ms"], first["unshared_ttft_ms"], first["identical"]) == (50.0, 400.0, True)
    assert second["tokens_per_s"] == pytest.approx(10.0)
    assert "unshared_ttft_ms" not in second
    assert data["ttft_ms"] == {"median": 100.0, "repeated_with_sharing": 50.0, "repeated_without_sharing": 400.0}
    assert data["blocks"]["cached_blocks"] == 7


@pytest.mark.parametrize(
    ("unshared", "identical"),
    [
        ([], None),
        ([outcome("a", 1)], True),
        ([outcome("a", 1, tokens=(1, 2, 4))], False),
        ([outcome("a", 1, tokens=(), error="gone")], False),
    ],
)
def test_identical_is_said_only_of_what_was_compared(unshared, identical):
    assert report([outcome("a", 1), outcome("a", 2)], unshared).identical is identical


def test_the_repetition_with_sharing_has_to_be_identical_too():
    subject = report([outcome("a", 1)], [outcome("a", 1)], [outcome("a", 1, tokens=(9,))])
    assert subject.identical is False


def test_an_output_in_half_precision_may_differ_and_how_much_is_said():
    first, again, alone = (outcome("a", 1, tokens=tokens) for tokens in ((1, 2, 3), (1, 9, 3), (1, 2, 4)))
    runs = [[first, outcome("b", 1)], [alone], [again]]
    exact, rounded = report(*runs), report(*runs, dtype=KvDtype.BFLOAT16)
    assert (exact.differing_tokens, exact.compared_tokens) == (1 + 2, 6)
    assert not exact.as_promised
    assert rounded.as_promised
    assert rounded.identical is False
    assert as_data(rounded)["differing_tokens"] == 3
    for subject, said in ((exact, "DIFFERENT: 3 of 6 tokens"), (rounded, "bfloat16 rounds by the shapes of a step")):
        text = io.StringIO()
        print_report(subject, Console(file=text, width=160))
        assert said in text.getvalue()


def test_a_failed_request_counts_for_nothing_and_is_shown():
    failed = Outcome(turn=turn("a [x]", 2), worker="w", error="it [broke]")
    subject = report([outcome("a [x]", 1), failed], notes=("worker-1 has died",))
    assert subject.hit_ratio == 0.5
    assert subject.failed == (failed,)
    text = io.StringIO()
    print_report(subject, Console(file=text, width=120))
    shown = text.getvalue()
    assert "a [x], turn 2: it [broke]" in shown
    assert "worker-1 has died" in shown


def test_the_tables_fit_a_narrow_terminal():
    text = io.StringIO()
    outcomes = [outcome("new in town", n, ttft_ms=12_345.0, worker="worker-1") for n in range(1, 4)]
    print_report(report(outcomes, outcomes), Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.count("12,345") == 3 and "new in town" in line and "yes" in line for line in lines) == 3
    assert not any("…" in line for line in lines)
    assert any("identical (3 requests compared, greedy)" in line for line in lines)


def test_no_rate_for_a_single_token():
    assert outcome("a", 1, tokens=(1,)).tokens_per_s is None
