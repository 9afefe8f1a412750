"""Trace readers: every format, every packing, every kind of damage, named by line and field."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import sys

import pytest

from radixpool.rpc.bench.readers import ReadOptions, detect_format, read_trace
from radixpool.rpc.bench.reference import infinite_hits
from radixpool.rpc.bench.tokenizers import load_tokenizer
from radixpool.rpc.bench.trace import TraceError

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 10, "hash_ids": [0, 1, 2]},
    {"timestamp": 5, "input_length": 1000, "output_length": 600, "hash_ids": [0, 1]},
    {"timestamp": 9, "input_length": 700, "output_length": 1, "hash_ids": [7, 1]},
]


@pytest.fixture
def write(tmp_path):
    def write(lines, name="trace.jsonl", pack=lambda data: data):
        path = tmp_path / name
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n"
        path.write_bytes(pack(text.encode()))
        return str(path)

    return write


def paths(trace):
    return trace.paths()


def test_mooncake_blocks_are_pairs_of_parent_and_id(write):
    trace = read_trace(write(MOONCAKE))
    assert trace.block_size == 512
    assert paths(trace) == [[0, 1, 2], [0, 1], [3, 4]]  # 1 under 7 is another block than 1 under 0
    assert trace.parents.tolist() == [-1, 0, 1, -1, 3]
    assert trace.arrival_ms.tolist() == [0.0, 5.0, 9.0]
    assert trace.input_tokens.tolist() == [1100, 1000, 700]
    assert (trace.num_requests, trace.num_refs, trace.largest_request) == (3, 7, 3)


def test_outputs_are_inserted_under_fresh_keys_when_the_trace_does_not_name_them(write):
    trace = read_trace(write(MOONCAKE), ReadOptions(insert="prompt+output"))
    assert [len(path) for path in paths(trace)] == [3, 4, 2]  # 1600 tokens are four blocks of 512
    assert trace.prompt_blocks.tolist() == [3, 2, 2]
    assert trace.num_refs == 7


def test_qwen_times_are_seconds(write):
    line = {
        "chat_id": 1,
        "parent_chat_id": -1,
        "timestamp": 1.5,
        "input_length": 40,
        "output_length": 3,
        "type": "text",
        "turn": 1,
        "hash_ids": [5, 6, 7],
    }
    trace = read_trace(write([line, {**line, "timestamp": 2.5}]))
    assert trace.block_size == 16
    assert trace.arrival_ms.tolist() == [0.0, 1000.0]


def test_tokens_are_cut_into_full_blocks_and_outputs_are_known(write):
    lines = [{"tokens": list(range(7)), "output_tokens": [7, 8]}, {"tokens": list(range(9))}]
    trace = read_trace(write(lines), ReadOptions(block_size=4))
    assert paths(trace) == [[0], [0, 1]]
    both = read_trace(write(lines), ReadOptions(block_size=4, insert="prompt+output"))
    assert paths(both) == [[0, 1], [0, 1]]  # the first request's output completes the block that the second asks for
    assert both.prompt_blocks.tolist() == [1, 2]


def test_text_becomes_bytes_or_tokens(write):
    lines = [{"text": "aaaabbbb"}, {"prompt": "aaaacccc"}, {"input": "aaaa", "output": "bbbb"}]
    trace = read_trace(write(lines), ReadOptions(block_size=4))
    assert paths(trace) == [[0, 1], [0, 2], [0]]
    words = ReadOptions(block_size=1, tokenize=lambda text: [len(word) for word in text.split()])
    assert read_trace(write([{"text": "to be or"}, {"text": "to bee"}]), words).num_refs == 5


def test_each_assistant_message_is_a_request_for_what_stands_before_it(write):
    messages = [
        {"role": "system", "content": "s" * 20},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]},
        {"role": "tool", "content": [{"type": "text", "text": "42"}]},
        {"role": "assistant", "content": "bye"},
    ]
    trace = read_trace(write([{"messages": messages}, {"traj": messages[:2]}]), ReadOptions(block_size=8))
    assert trace.num_requests == 3
    first, second, alone = paths(trace)
    assert second[: len(first)] == first == alone
    assert len(second) > len(first)


def test_a_real_conversation_file_gives_one_request_for_each_assistant_turn(trace_path, tmp_path):
    raw = lzma.decompress(trace_path("tau_bench_gpt4o_airline.json.xz").read_bytes())
    path = tmp_path / "tau.jsonl"
    path.write_text("\n".join(json.dumps(conversation) for conversation in json.loads(raw)))
    trace = read_trace(str(path), ReadOptions(block_size=64))
    assert trace.num_requests == 2_454
    assert infinite_hits(trace).sum() / trace.num_refs == pytest.approx(0.94, abs=0.02)


def test_a_real_trace_of_text_is_read(trace_path):
    trace = read_trace(str(trace_path("lmcache_agent_taubench.jsonl.xz")), ReadOptions(block_size=64))
    assert trace.num_requests == 471
    assert not trace.damaged
    assert 0 < trace.arrival_ms.max() < 24 * 3_600e3  # microseconds since 1970 became milliseconds from the start


STORED = {"type": "BlockStored", "parent_block_hash": None, "token_ids": [], "block_size": 16, "lora_id": None}


def test_kv_events_become_requests_by_chain(write):
    lines = [
        {"ts": 0.0, "events": [{**STORED, "block_hashes": [1, 2]}]},
        {"ts": 0.1, "events": [{**STORED, "block_hashes": [3], "parent_block_hash": 2}]},  # goes on: same request
        [60.0, [["BlockStored", [4], 2, [], 16, None, "GPU"], ["BlockRemoved", [1]]], 0],  # branches: another one
        {"ts": 90.0, "events": [{"type": "AllBlocksCleared"}]},
        {
            "ts": 120.0,
            "events": [{**STORED, "block_hashes": ["0xff"], "parent_block_hash": 3}],
        },  # later turn of the first
    ]
    trace = read_trace(write(lines))
    assert trace.block_size == 16
    assert paths(trace) == [[0, 1, 2], [0, 1, 3], [0, 1, 2, 4]]
    assert trace.arrival_ms.tolist() == [0.0, 60_000.0, 120_000.0]
    assert trace.duration_ms[0] == pytest.approx(100.0)


def test_single_events_without_times_are_read(write):
    trace = read_trace(
        write([{**STORED, "block_hashes": [1]}, {**STORED, "block_hashes": [2], "parent_block_hash": 1}])
    )
    assert paths(trace) == [[0, 1]]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({**STORED, "block_hashes": []}, "block_hashes"),
        ({**STORED, "block_hashes": [2], "parent_block_hash": 77}, "parent_block_hash.*77.*never stored"),
        ({**STORED, "block_hashes": [1], "parent_block_hash": 1}, "its own parent"),
        ({**STORED, "block_hashes": [2], "block_size": 0}, "block_size.*0"),
        ({**STORED, "block_hashes": [[2]]}, "block_hashes"),
        ({"ts": "now", "events": []}, "field ts"),
        ({"ts": 0.0, "events": 3}, "field events"),
        ({"ts": 0.0, "events": [{"type": "Other"}]}, "field type"),
    ],
)
def test_a_damaged_event_is_named(write, event, message):
    source = write([{**STORED, "block_hashes": [1]}, event])
    with pytest.raises(TraceError, match=f":2: .*{message}"):
        read_trace(source, ReadOptions(format="events", on_damage="stop"))


def recorded():
    """Return a cache that records, and the lines of its log."""
    from radixpool.radix.replay import RecordedCache

    lines = []
    return RecordedCache(64, 4, sink=lambda operation: lines.append(operation.to_json())), lines


def test_our_own_operation_log_is_a_trace(write):
    from radixpool.radix import Namespace, PoolExhausted

    cache, lines = recorded()
    first = cache.acquire(list(range(10)))
    cache.commit(first, 10)
    cache.extend(first, [10, 11])
    cache.commit(first, 12)
    second = cache.acquire(list(range(12)))
    with pytest.raises(PoolExhausted):
        cache.acquire(list(range(1_000)))
    cache.release(first)
    cache.acquire(list(range(8)), namespace=Namespace(tenant="other"))
    cache.release(second)
    trace = read_trace(write(lines), ReadOptions(insert="prompt+output"))
    assert trace.block_size == 4
    assert paths(trace) == [[0, 1, 2], [0, 1, 2], [3, 4]]  # another namespace is another tree
    assert trace.prompt_blocks.tolist() == [2, 3, 2]
    assert trace.input_tokens.tolist() == [10, 12, 8]
    assert trace.duration_ms.tolist() == [6.0, 4.0, 1.0]


def test_media_over_a_block_are_part_of_its_key(write):
    cache, lines = recorded()
    for digest in (b"a" * 16, b"b" * 16):
        cache.release(cache.acquire(list(range(12)), media=[(5, 2, digest)]))
    assert paths(read_trace(write(lines))) == [[0, 1, 2], [0, 3, 4]]


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ({"name": "acquire", "arguments": {"tokens": "!"}, "answer": {}}, "arguments.tokens"),
        ({"name": "acquire", "arguments": {"tokens": "AAA="}, "answer": {}}, "2 bytes"),
        ({"name": "acquire", "arguments": {"tokens": "AAAAAA=="}, "answer": {}}, "field answer"),
        ({"name": "release", "arguments": {}, "answer": None}, "arguments.seq"),
        ({"name": "release"}, "expected an operation"),
    ],
)
def test_a_damaged_operation_is_named(write, operation, message):
    cache, lines = recorded()
    cache.acquire([1, 2, 3, 4])
    source = write([*lines, operation])
    with pytest.raises(TraceError, match=f":2: .*{message}"):
        read_trace(source, ReadOptions(on_damage="stop"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"hash_ids": [0', "not JSON"),
        ([1, 2], "expected a JSON object"),
        ({"input_length": 4}, "field hash_ids"),
        ({"input_length": 4, "hash_ids": [1.5]}, r"field hash_ids\[0\]: .* 1\.5"),
        ({"input_length": -4, "hash_ids": [1]}, "field input_length: .* -4"),
        ({"input_length": 4, "hash_ids": [1], "timestamp": "x"}, "field timestamp"),
        ({"input_length": 4, "hash_ids": [1], "duration_ms": -1}, "field duration_ms"),
        ({"input_length": 4, "hash_ids": [1], "output_length": True}, "field output_length"),
    ],
)
def test_a_damaged_line_is_skipped_by_name_or_stops(write, line, reason):
    import re

    source = write([MOONCAKE[0], line, MOONCAKE[1]])
    trace = read_trace(source)
    assert trace.num_requests == 2
    assert [damage.line for damage in trace.damaged] == [2]
    assert re.search(reason, trace.damaged[0].reason)
    with pytest.raises(TraceError, match=f"trace.jsonl:2: .*{reason}"):
        read_trace(source, ReadOptions(on_damage="stop"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"tokens": 3}, "field tokens"),
        ({"tokens": [-1]}, r"tokens\[0\].*-1"),
        ({"tokens": [1 << 32]}, r"tokens\[0\].*4294967296"),
        ({"text": 3}, "field tokens"),
    ],
)
def test_damaged_tokens_are_named(write, line, reason):
    with pytest.raises(TraceError, match=reason):
        read_trace(write([{"tokens": [1]}, line]), ReadOptions(on_damage="stop"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [({"text": 3}, "field text"), ({"messages": "hi"}, "field messages"), ({"messages": [{"content": "x"}]}, "role")],
)
def test_damaged_text_is_named(write, line, reason):
    kind = "text" if "text" in line else "messages"
    with pytest.raises(TraceError, match=reason):
        read_trace(write([line]), ReadOptions(format=kind, on_damage="stop"))


def test_the_format_is_told_by_the_first_whole_line(write):
    assert read_trace(write(["{broken", *MOONCAKE])).num_requests == 3
    assert detect_format({"tokens": [1]}) == "tokens"
    with pytest.raises(ValueError, match="cannot tell the format"):
        detect_format({"something": 1})


@pytest.mark.parametrize("suffix", ["gz", "xz", "zst"])
def test_packed_traces_are_read_by_content(write, suffix):
    pack = {"gz": gzip.compress, "xz": lzma.compress, "zst": _zstd}[suffix]
    plain = read_trace(write(MOONCAKE, "plain.jsonl"))
    packed = read_trace(write(MOONCAKE, "wrongly_named.txt", pack))
    assert paths(packed) == paths(plain)
    assert packed.sha256 != plain.sha256


@pytest.mark.parametrize("suffix", ["gz", "xz", "zst"])
def test_a_stream_cut_short_keeps_its_whole_lines_or_stops(write, suffix):
    import random

    draw = random.Random(1)
    lines = [{**MOONCAKE[0], "hash_ids": [draw.getrandbits(60) for _ in range(3)]} for _ in range(8_000)]
    pack = {"gz": gzip.compress, "xz": lzma.compress, "zst": _zstd}[suffix]
    source = write(lines, f"cut.jsonl.{suffix}", lambda data: pack(data)[: -len(pack(data)) // 3])
    trace = read_trace(source)
    assert 0 < trace.num_requests < 8_000
    assert len(trace.damaged) >= 1
    with pytest.raises(TraceError, match=r"cut\.jsonl"):
        read_trace(source, ReadOptions(on_damage="stop"))


def _zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="the extra bench is not installed")
    return zstandard.compress(data)


def test_stdin_is_read(write, monkeypatch):
    text = "\n".join(map(json.dumps, MOONCAKE))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    trace = read_trace("-")
    assert (trace.name, trace.num_requests) == ("stdin", 3)


def test_a_limit_ends_the_reading(write):
    assert read_trace(write(MOONCAKE), ReadOptions(limit=2)).num_requests == 2


def test_requests_are_sorted_by_arrival_and_those_without_time_stay_in_place(write):
    lines = [{**MOONCAKE[0], "timestamp": 10}, {**MOONCAKE[1], "timestamp": 2}]
    trace = read_trace(write(lines))
    assert trace.reordered == 2
    assert trace.prompt_blocks.tolist() == [2, 3]
    untimed = [{key: value for key, value in line.items() if key != "timestamp"} for line in MOONCAKE]
    assert read_trace(write(untimed)).prompt_blocks.tolist() == [3, 2, 2]


def test_a_missing_or_empty_file_is_an_error(write, tmp_path):
    with pytest.raises(TraceError, match="nosuch"):
        read_trace(str(tmp_path / "nosuch.jsonl"))
    with pytest.raises(TraceError, match="no request"):
        read_trace(write([""]))
    with pytest.raises(TraceError, match=r"no request.*line 1.*not JSON"):
        read_trace(write(["junk"]))


def test_head_keeps_the_first_requests_and_their_blocks(write):
    trace = read_trace(write(MOONCAKE)).head(2)
    assert paths(trace) == [[0, 1, 2], [0, 1]]
    assert trace.num_nodes == 3


def test_packed_paths_are_little_endian_symbols(write):
    assert read_trace(write(MOONCAKE)).packed_paths()[1] == b"\x00\x00\x00\x00\x01\x00\x00\x00"


def test_a_tokenizer_that_is_not_there_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    assert load_tokenizer("bytes")("é") == [195, 169]
    with pytest.raises(ValueError, match="tokenizer"):
        load_tokenizer(str(tmp_path))
