"""Workload generators: seeded, in order, and with the sharing that each is named for."""

from __future__ import annotations

import json

import pytest

from radixpool.rpc.bench.readers import ReadOptions, read_trace
from radixpool.rpc.bench.reference import infinite_hits, lru_curve
from radixpool.rpc.bench.synth import GENERATORS, SynthOptions, describe, generate, to_line
from radixpool.rpc.bench.trace import Record, TraceBuilder


def trace_of(kind, **options):
    options = SynthOptions(**{"num_requests": 600, **options})
    builder = TraceBuilder(name=kind, block_size=options.block_size)
    for request in generate(kind, options):
        builder.add(
            Record(
                keys=request.hash_ids,
                input_tokens=len(request.hash_ids) * options.block_size,
                output_tokens=request.output_tokens,
                arrival_ms=request.arrival_ms,
            )
        )
    return builder.build()


@pytest.mark.parametrize("kind", GENERATORS)
def test_the_same_seed_gives_the_same_lines_and_another_gives_others(kind):
    lines = [
        [to_line(r, block_size=16) for r in generate(kind, SynthOptions(num_requests=50, seed=s))] for s in (1, 1, 2)
    ]
    assert lines[0] == lines[1] != lines[2]


@pytest.mark.parametrize("kind", GENERATORS)
def test_requests_arrive_in_order_at_about_the_rate_asked_for(kind):
    requests = generate(kind, SynthOptions(num_requests=3_000, rate_per_s=10.0))
    times = [request.arrival_ms for request in requests]
    assert times == sorted(times)
    middle = times[len(times) // 2]
    assert 0.3 < 1_500 / (middle / 1e3) / 10.0 < 3.0
    assert describe(kind)


@pytest.mark.parametrize("kind", GENERATORS)
def test_generated_lines_are_a_mooncake_trace(kind, tmp_path):
    path = tmp_path / "made.jsonl"
    options = SynthOptions(num_requests=100, block_size=32)
    path.write_text("".join(to_line(r, block_size=32) + "\n" for r in generate(kind, options)))
    trace = read_trace(str(path), ReadOptions(on_damage="stop"))
    assert (trace.num_requests, trace.block_size) == (100, 32)
    assert set(json.loads(path.read_text().splitlines()[0])) == {
        "timestamp",
        "duration_ms",
        "input_length",
        "output_length",
        "hash_ids",
    }


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        ("shared", 0.5, 0.95),
        ("chat", 0.5, 0.95),
        ("agent", 0.8, 1.0),
        ("tree", 0.8, 1.0),
        ("rag", 0.3, 0.8),
        ("scan", 0.5, 1.0),
    ],
)
def test_each_kind_shares_as_much_as_it_should(kind, low, high):
    trace = trace_of(kind)
    assert low < infinite_hits(trace).sum() / trace.num_refs < high


def test_popularity_follows_zipf():
    uneven, even = (infinite_hits(trace_of("rag", zipf=zipf)).sum() for zipf in (1.5, 0.0))
    assert uneven > even


def test_a_scan_defeats_lru_at_half_its_length():
    trace = trace_of("scan", num_prompts=32, num_requests=1_000)
    curve = lru_curve(trace)
    assert curve[trace.num_nodes // 4] < 0.5 * curve[-1]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_requests": 0}, "num_requests"),
        ({"block_size": 0}, "block_size"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"rate_per_s": 0.0}, "rate_per_s"),
        ({"zipf": -1.0}, "zipf"),
    ],
)
def test_bad_options_are_named(options, field):
    with pytest.raises(ValueError, match=field):
        SynthOptions(**options)


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match=r"shared.*'nosuch'"):
        generate("nosuch")
