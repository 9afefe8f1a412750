"""Reading conversations: every accepted form, and what is said about the ones that are broken."""

from __future__ import annotations

import gzip
import json
import lzma

import numpy as np
import pytest

from radixpool.rpc.demo.conversations import own_script, parse_conversations, read_conversations
from radixpool.rpc.demo.prompts import turns

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([CHAT, CHAT]),
        json.dumps([{"messages": CHAT}, {"traj": CHAT, "reward": 1.0}], indent=2),
        "\n".join(json.dumps(record) for record in (CHAT, {"messages": CHAT})),
    ],
    ids=["lists", "records", "lines"],
)
def test_reads_lists_and_records(text):
    found = parse_conversations(text)
    assert not found.problems
    assert [[(m.role, m.text) for m in c.messages] for c in found.conversations] == [
        [("user", "hi"), ("assistant", "hello")]
    ] * 2


@pytest.mark.parametrize("text", [json.dumps(CHAT), json.dumps({"messages": CHAT})])
def test_a_single_conversation_is_a_file_too(text):
    assert len(parse_conversations(text).conversations) == 1


def test_reads_compressed_files(tmp_path):
    for name, opener in (("a.json.xz", lzma.open), ("a.jsonl.gz", gzip.open)):
        with opener(tmp_path / name, "wt") as file:
            file.write(json.dumps(CHAT) + "\n")
        assert len(read_conversations(tmp_path / name).conversations) == 1


def test_a_broken_line_is_named_and_the_rest_is_used():
    text = "\n".join([json.dumps(CHAT), '{"messages": [', json.dumps({"x": 1}), json.dumps(CHAT)])
    found = parse_conversations(text)
    assert len(found.conversations) == 2
    assert found.problems[0].startswith("line 2: not JSON")
    assert found.problems[1] == "line 3: a record must hold a list under messages or traj"


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ([], "messages must be a list with at least 1 message"),
        ({"messages": "x"}, "messages must be a list"),
        ([1], r"messages\[0\] must be an object, got 1"),
        ([{"role": "king", "content": "x"}], r"messages\[0\].role must be one of .*, got 'king'"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be text"),
        ([{"role": "user", "content": "x"}], "at least 1 of role assistant"),
        ([*CHAT, {"role": "assistant", "tool_calls": [{"id": 1}]}], r"messages\[2\].tool_calls must name a function"),
        ([*CHAT, {"role": "assistant", "tool_calls": 7}], r"messages\[2\].tool_calls must be a list"),
    ],
)
def test_a_broken_record_is_named_with_field_and_value(record, problem):
    found = parse_conversations(json.dumps([CHAT, record]) if record else json.dumps([{"messages": CHAT}, record]))
    assert len(found.conversations) == 1
    assert len(found.problems) == 1
    import re

    assert re.match(f"record 2: .*{problem}", found.problems[0]), found.problems[0]


@pytest.mark.parametrize("content", [b"", b"not json at all\n", b"\xff\xfe\x00"])
def test_a_file_without_any_conversation_is_an_error(tmp_path, content):
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match="conversations: "):
        read_conversations(tmp_path / "bad.jsonl")


def test_a_file_that_is_not_what_its_name_says(tmp_path):
    (tmp_path / "bad.json.xz").write_text("plain")
    (tmp_path / "bad.json.gz").write_text("plain")
    for name in ("bad.json.xz", "bad.json.gz", "missing.json"):
        with pytest.raises(ValueError, match=f"cannot read .*{name}"):
            read_conversations(tmp_path / name)


def test_tool_calls_and_results_become_text():
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"x": 1}'}}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image_url"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "name": "find", "content": "found"},
        {"role": "user", "content": "thanks"},
        {"role": "assistant", "content": "welcome"},
    ]
    (conversation,) = parse_conversations(json.dumps([chat])).conversations
    assert [(m.role, m.text) for m in conversation.messages] == [
        ("user", "look\n[image_url]"),
        ("assistant", 'Call find: {"x": 1}'),
        ("user", "Result of find: found\nthanks"),
        ("assistant", "welcome"),
    ]


def test_equal_names_are_told_apart():
    record = {"name": "n", "messages": CHAT}
    names = [c.name for c in parse_conversations(json.dumps([record] * 3)).conversations]
    assert names == ["n", "n (2)", "n (3)"]


class CharTokenizer:
    """One token per character, with a template that merges nothing; `unstable` rewrites history."""

    def __init__(self, unstable=False):
        self.unstable = unstable

    def text(self, messages):
        head = f"<{len(messages)}>" if self.unstable else ""
        return head + "".join(f"[{m.role}]{m.text}" for m in messages) + "[assistant]"

    def encode(self, text):
        return [ord(character) for character in text]


@pytest.mark.parametrize("unstable", [False, True])
def test_turns_render_the_history_before_each_assistant_message(unstable):
    chat = [{"role": "system", "content": "s"}, *CHAT, {"role": "user", "content": "more"}, *CHAT[1:]]
    (conversation,) = parse_conversations(json.dumps([chat])).conversations
    tokenizer = CharTokenizer(unstable)
    found = list(turns(conversation, tokenizer))
    assert [turn.number for turn in found] == [1, 2]
    texts = ["".join(map(chr, turn.tokens)) for turn in found]
    assert texts == [tokenizer.text(conversation.messages[:2]), tokenizer.text(conversation.messages[:4])]
    assert found[0].tokens.dtype == np.uint32


def test_a_turn_continues_the_one_before_token_for_token():
    class Merging(CharTokenizer):
        """Like BPE: what it makes of a text depends on where the text is cut."""

        def encode(self, text):
            return [sum(map(ord, text[i : i + 3])) for i in range(0, len(text), 3)]

    (conversation,) = parse_conversations(json.dumps([[*CHAT, *CHAT, *CHAT]])).conversations
    first, second, third = turns(conversation, Merging())
    assert second.tokens[: len(first.tokens)].tolist() == first.tokens.tolist()
    assert third.tokens[: len(second.tokens)].tolist() == second.tokens.tolist()


def test_the_own_script_is_whole_and_shares_one_system_prompt():
    script = own_script()
    assert not script.problems
    assert len(script.conversations) >= 4
    assert len({c.messages[0] for c in script.conversations}) == 1
    assert script.conversations[0].messages[0].role == "system"
    assert all(sum(m.role == "assistant" for m in c.messages) >= 3 for c in script.conversations)
