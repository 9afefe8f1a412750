"""The sampled shadow: its estimates against exact replay, its bounds on memory and time, its determinism."""

from __future__ import annotations

import os
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixpool.radix import PoolExhausted, RadixCache
from radixpool.radix.advise import Advisor
from radixpool.radix.groupsample import GroupSample

SHARED = Path(os.environ.get("RADIXPOOL_SHARED", Path(__file__).resolve().parents[3] / "shared"))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class MillisecondLooks(Clock):
    """CPU time of which every look, between two readings, takes a millisecond."""

    looking = True

    def __call__(self) -> float:
        self.looking = not self.looking
        self.now += 0.001 * self.looking
        return self.now


def advisor(num_blocks: int, block_size: int = 1, **options) -> Advisor:
    return Advisor(num_blocks, block_size, **{"clock": Clock(), "cpu_clock": Clock(), **options})


def chats(num_requests: int, *, seed: int = 0, sessions: int = 300) -> list[bytes]:
    """Conversations that grow, under a few shared prompts, as packed tokens."""
    draw = random.Random(seed)
    prompts = [[draw.getrandbits(32) for _ in range(40)] for _ in range(8)]
    histories: dict[int, list[int]] = {}
    made = []
    for _ in range(num_requests):
        session = min(int(draw.expovariate(1.0 / sessions)), 20 * sessions)
        path = histories.get(session) or draw.choice(prompts)
        path = path + [draw.getrandbits(32) for _ in range(draw.randint(1, 12))]
        histories[session] = path
        if len(path) > 200:
            del histories[session]
        made.append(np.array(path, dtype="<u4").tobytes())
    return made


def exact(requests: list[bytes], policy: str, num_blocks: int) -> float:
    cache = RadixCache(num_blocks, 1, policy=policy)
    hits = refs = 0
    for tokens in requests:
        refs += len(tokens) >> 2
        try:
            seq = cache.acquire(tokens, max_hit=len(tokens) >> 2)
        except PoolExhausted:
            continue
        hits += seq.cached_tokens
        cache.commit(seq, len(tokens) >> 2)
        cache.release(seq)
    return hits / refs


def test_a_small_cache_is_shadowed_exactly():
    requests = chats(600)
    shadow = advisor(1_000, sample_blocks=1_000)
    for tokens in requests:
        shadow.observe(tokens)
    for advice in shadow.advice():
        assert advice.hit_ratio == pytest.approx(exact(requests, advice.policy, advice.capacity_blocks), abs=1e-9)


def test_a_sampled_shadow_is_within_three_hundredths_of_exact_replay():
    requests = chats(4_000)
    shadow = advisor(8_000, sample_blocks=1_024)
    for tokens in requests:
        shadow.observe(tokens)
    assert shadow.state().block_rate == pytest.approx(0.128)
    for advice in shadow.advice():
        assert advice.hit_ratio == pytest.approx(exact(requests, advice.policy, advice.capacity_blocks), abs=0.03)


@pytest.mark.parametrize(
    ("name", "num_blocks", "num_requests"),
    [
        ("mooncake_conversation_trace", 10_000, 4_000),
        ("mooncake_synthetic_trace", 8_000, None),
        ("cc_64conv", 5_000, 2_000),
        ("tau_airline", 1_600, None),
    ],
)
def test_real_traces_are_estimated_within_a_fortieth(name, num_blocks, num_requests):
    if not (SHARED / "traces" / f"{name}.jsonl.xz").is_file():
        pytest.skip(f"no real traces here: {SHARED} is absent (set RADIXPOOL_SHARED)")
    import json
    import lzma

    numbers: dict[tuple[int, int], int] = {}
    requests = []
    with lzma.open(SHARED / "traces" / f"{name}.jsonl.xz", "rt") as file:
        for line in file:
            parent, path = -1, []
            for key in json.loads(line)["hash_ids"]:
                parent = numbers.setdefault((parent, key), len(numbers))
                path.append(parent)
            requests.append(np.array(path, dtype="<u4").tobytes())
            if len(requests) == num_requests:
                break
    shadow = advisor(num_blocks, multiples=(0.5, 1.0, 2.0), policies=("arc", "lfu-da"))
    for tokens in requests:
        shadow.observe(tokens)
    for advice in shadow.advice():
        assert advice.hit_ratio == pytest.approx(exact(requests, advice.policy, advice.capacity_blocks), abs=0.025)


def test_groups_of_requests_stand_for_all_when_there_are_many():
    requests = chats(20_000, sessions=2_000)
    shadow = advisor(100_000, sample_blocks=1_024, multiples=(0.25, 1.0), policies=())
    shadow._start_miniatures(0.25)
    for tokens in requests:
        shadow.observe(tokens)
    state = shadow.state()
    assert state.group_rate == 0.25
    for advice in shadow.advice():
        assert advice.hit_ratio == pytest.approx(exact(requests, "lru", advice.capacity_blocks), abs=0.04)


def test_it_takes_no_more_than_its_share_of_the_time():
    clock, cpu = Clock(), MillisecondLooks()
    shadow = Advisor(1_000_000, 1, clock=clock, cpu_clock=cpu, cpu_share=0.01)
    spent = 0.0
    for tokens in chats(8_000):
        clock.now += 0.001
        before = cpu.now
        shadow.observe(tokens)
        spent += cpu.now - before
    state = shadow.state()
    assert state.group_rate == 1 / 16
    assert state.skipped_requests > 4_000
    assert spent < 0.01 * clock.now + 5 * 0.021  # its share, and a burst at each of five rates
    assert state.observed_requests == 8_000


def test_quiet_times_are_not_saved_up_beyond_a_burst():
    clock = Clock()
    shadow = Advisor(1_000, 1, clock=clock, cpu_clock=MillisecondLooks(), cpu_share=0.01)
    clock.now += 3_600.0  # would be 36 s
    for tokens in chats(1_000):
        shadow.observe(tokens)
    assert 0.02 <= shadow.state().cpu_seconds < 0.06
    assert shadow.state().skipped_requests > 300


def test_groups_are_not_thinned_below_what_a_small_cache_needs():
    def cpu_clock() -> float:
        cpu_clock.now += 1.0
        return cpu_clock.now

    cpu_clock.now = 0.0
    shadow = advisor(2_000, cpu_clock=cpu_clock)
    for tokens in chats(1_000):
        shadow.observe(tokens)
    assert shadow.state().group_rate == 1.0
    assert shadow.state().skipped_requests > 0


def test_a_million_blocks_are_shadowed_in_eight_mebibytes():
    requests = chats(3_000, sessions=5_000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        shadow = advisor(1_000_000, sample_blocks=1_024)
        shadow._block_rate = 0.02  # as many sampled blocks as a long day brings
        shadow._threshold = np.uint64(int(0.02 * 2**64))
        for tokens in requests:
            shadow.observe(tokens)
        assert tracemalloc.get_traced_memory()[0] - before < 8 << 20
    finally:
        tracemalloc.stop()


def test_two_shadows_of_the_same_requests_agree_and_reset_forgets():
    requests = chats(1_500)
    one, two = advisor(4_000), advisor(4_000)
    for tokens in requests:
        one.observe(tokens)
        two.observe(tokens)
    assert one.advice() == two.advice()
    assert one.state() == two.state()
    one.reset()
    assert one.state().observed_requests == 0
    assert {advice.hit_ratio for advice in one.advice()} == {None}


def test_nothing_is_claimed_before_enough_was_sampled():
    shadow = advisor(1_000_000)
    shadow.observe(b"\1\0\0\0" * 100)
    assert {advice.hit_ratio for advice in shadow.advice()} == {None}


def test_namespaces_share_nothing():
    tokens = np.arange(600, dtype="<u4").tobytes()
    roomy = advisor(2_000, sample_blocks=2_000, multiples=(1.0,), policies=())
    for namespace in (1, 2, 1):
        roomy.observe(tokens, namespace=namespace)
    assert roomy.advice()[0].hit_ratio == pytest.approx(1 / 3)


@settings(max_examples=50, deadline=None)
@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=64), cut=st.integers(1, 8))
def test_a_blocks_hash_depends_on_its_path_and_on_nothing_after_it(tokens, cut):
    shadow = advisor(100, 2)
    packed = np.array(tokens, dtype="<u4").tobytes()
    whole = shadow._path_hashes(packed, len(tokens) // 2)
    assert whole[: cut // 2].tolist() == shadow._path_hashes(packed, cut // 2).tolist()
    changed = np.array([tokens[0] ^ 1, *tokens[1:]], dtype="<u4").tobytes()
    assert not set(whole.tolist()) & set(shadow._path_hashes(changed, len(tokens) // 2).tolist())


def test_partial_blocks_are_not_references():
    shadow = advisor(100, 4)
    shadow.observe(b"\0" * 4 * 3)
    assert shadow.state().observed_blocks == 0
    shadow.observe(b"\0" * 4 * 7)
    assert shadow.state().observed_blocks == 1


def test_a_group_is_looked_at_always_or_never_however_long_it_grows():
    groups = GroupSample(4)
    groups.rate = 0.5
    draw = random.Random(1)
    beginnings = [draw.getrandbits(32).to_bytes(4, "little") for _ in range(200)]
    first = {beginning: groups.look_at(beginning * 2, 0) for beginning in beginnings}
    assert {groups.look_at(b + b * n, 0) == first[b] for b in beginnings for n in range(1, 9)} == {True}
    assert 60 < sum(shared is not None for shared in first.values()) < 140


def test_a_beginning_that_everybody_has_says_nothing():
    groups = GroupSample(4)
    groups.rate = 0.5
    draw = random.Random(2)
    prompt = b"".join(draw.getrandbits(32).to_bytes(4, "little") for _ in range(30))
    outcomes = [groups.look_at(prompt + draw.getrandbits(320).to_bytes(40, "little"), 0) for _ in range(1_000)]
    settled = outcomes[500:]
    assert 150 < sum(shared is not None for shared in settled) < 350
    assert {shared for shared in settled if shared is not None} == {30}


def test_the_counts_of_groups_are_bounded():
    groups = GroupSample(4)
    groups.rate = 0.5
    for i in range(50_000):
        groups.look_at(i.to_bytes(4, "little"), 0)
    assert len(groups._counts) <= 4_097


@pytest.mark.parametrize(
    ("options", "message"),
    [({"cpu_share": 0.0}, "cpu_share"), ({"cpu_share": 1.5}, "cpu_share"), ({"sample_blocks": 0}, "sample_blocks"),
     ({"multiples": (1.0, -1.0)}, "multiples"), ({"policy": "nosuch"}, "nosuch")],
)  # fmt: skip
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        advisor(100, **options)


def test_a_request_too_long_for_a_miniature_misses_and_disturbs_nothing():
    shadow = advisor(100, sample_blocks=100, multiples=(0.25, 4.0), policies=())
    tokens = np.arange(60, dtype="<u4").tobytes()
    for _ in range(20):
        shadow.observe(tokens)
    small, large = shadow.advice()
    assert small.hit_ratio == 0.0
    assert large.hit_ratio == pytest.approx(0.95)
