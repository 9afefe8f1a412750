"""Live advice: the manager's shadow over the wire, on the command line, and switched off."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from radixpool.radix import Namespace
from radixpool.rpc.cli import main
from radixpool.rpc.manager import ManagerOptions

ROUNDS = 30


@pytest.fixture
def busy(make_client):
    """A client that asked for three prompts in turn, so that every round after the first hits whole prompts."""
    client = make_client()
    for _ in range(ROUNDS):
        for prompt in range(3):
            tokens = [prompt * 1_000 + i for i in range(32)]
            sequence = client.acquire(tokens, namespace=Namespace(tenant=f"t{prompt % 2}"))
            client.commit(sequence.handle, 32)
            client.release(sequence.handle)
    return client


def test_advice_names_sizes_and_policies_with_what_they_would_hit(busy):
    report = busy.advice()
    sizes = [(a.multiple, a.capacity_blocks) for a in report.advice if a.policy == "lru"]
    assert sizes == [(0.25, 16), (0.5, 32), (1.0, 64), (2.0, 128), (4.0, 256)]
    assert {a.policy for a in report.advice} == {"lru", "arc", "lfu-da", "s3fifo"}
    assert report.state.observed_requests == 3 * ROUNDS
    assert report.state.observed_blocks == 3 * ROUNDS * 8
    by_size = {a.multiple: a.hit_ratio for a in report.advice if a.policy == "lru"}
    assert by_size[0.25] < 0.5  # 16 blocks do not hold three prompts of 8
    assert by_size[1.0] == by_size[4.0] == pytest.approx(1.0 - 1.0 / ROUNDS)  # only the first round misses


def test_advice_is_not_claimed_too_early(make_client):
    client = make_client()
    client.acquire(list(range(16)))
    assert {a.hit_ratio for a in client.advice().advice} == {None}


def test_the_command_prints_a_table_or_json(server, busy):
    shown = CliRunner().invoke(main, ["advise", "--address", server.address])
    assert shown.exit_code == 0, shown.output
    assert "x 0.25" in shown.output
    assert "lru (now)" in shown.output
    raw = CliRunner().invoke(main, ["advise", "--address", server.address, "--json"])
    report = json.loads(raw.output)
    assert report["state"]["observed_requests"] == 3 * ROUNDS
    assert len(report["advice"]) == 8


def test_a_manager_can_do_without(make_server):
    from radixpool.rpc.client import Client

    server = make_server(advice_cpu_share=0.0)
    with Client(server.address) as client:
        client.acquire(list(range(16)))
        assert client.advice().advice == ()
    shown = CliRunner().invoke(main, ["advise", "--address", server.address])
    assert "--advice-cpu-share" in shown.output


def test_the_share_of_the_time_is_checked():
    with pytest.raises(ValueError, match=r"advice_cpu_share must be from 0\.0 to 1\.0, got 1\.5"):
        ManagerOptions(listen="127.0.0.1:0", num_blocks=8, block_size=4, advice_cpu_share=1.5)


def test_a_replaced_policy_is_the_one_whose_sizes_are_tried(make_server):
    from radixpool.rpc.client import Client

    with Client(make_server(policy="s3fifo:small=0.2").address) as client:
        advice = client.advice().advice
    assert [a.policy for a in advice[:5]] == ["s3fifo:small=0.2"] * 5
    assert "lru" in {a.policy for a in advice[5:]}
