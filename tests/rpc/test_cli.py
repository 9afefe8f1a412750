"""The commands that look into a manager: tables, JSON, exit codes, help."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from radixpool.radix import InvariantViolation, Namespace
from radixpool.rpc.cli import main
from radixpool.rpc.cli.lazy import LazyCommand, LazyGroup
from radixpool.rpc.cli.top import rates_between, screen
from radixpool.rpc.inspection import CacheCounters, ServiceCounters, Stats


@pytest.fixture
def invoke(server):
    def run(*arguments: str):
        return CliRunner(env={"COLUMNS": "200", "RADIXPOOL_ADDRESS": server.address}).invoke(main, arguments)

    return run


@pytest.fixture
def busy(client):
    """Two branches under one prefix, one of them held, in a namespace with a salt."""
    namespace = Namespace(model="llama", tenant="acme", cache_salt="pepper")
    with client.acquire([1, 2, 3, 4, 5, 6, 7, 8, 9], namespace=namespace) as seq:
        seq.commit(9)
    seq = client.acquire([1, 2, 3, 4, 21, 22, 23, 24, 25], namespace=namespace)
    seq.commit(9)
    return seq


def test_stats(invoke, busy):
    table = invoke("stats")
    assert table.exit_code == 0
    assert "64 blocks of 4 tokens" in table.stdout
    assert "22.2% (4 of 18 tokens)" in table.stdout
    document = json.loads(invoke("stats", "--json").stdout)
    assert document["cache"]["held_blocks"] == 3
    assert document["cache"]["cached_blocks"] == 1
    assert document["service"]["num_clients"] == 1


def test_inspect_tree(invoke, busy):
    lines = invoke("inspect", "tree").stdout.splitlines()
    assert lines[0].startswith("model=llama tenant=acme cache_salt=hash:")
    assert lines[1].startswith("└── held 4 tokens from 0, 1 block: 0; holders 1")
    assert lines[2].startswith("    ├── cached 4 tokens from 4, 1 block: 1; holders 0")
    assert lines[3].startswith("    └── held 4 tokens from 4, 1 block: ")
    document = json.loads(invoke("inspect", "tree", "--json").stdout)
    assert [node["level"] for node in document["nodes"]] == [0, 1, 1]
    assert {node["state"] for node in document["nodes"]} == {"held", "cached"}
    assert "… 1 of 3 nodes shown" in invoke("inspect", "tree", "--max-nodes", "1").stdout


def test_inspect_an_empty_tree(invoke):
    assert invoke("inspect", "tree").stdout == "the tree is empty: nothing is committed\n"


def test_inspect_block(invoke, busy):
    block = busy.block_table[1]
    assert "llama" in invoke("inspect", "block", str(block)).stdout
    document = json.loads(invoke("inspect", "block", str(block), "--json").stdout)
    assert (document["state"], document["findable"], document["block_index"]) == ("held", True, 1)
    assert [holder["client_name"] for holder in document["holders"]] == ["test"]
    assert json.loads(invoke("inspect", "block", "63", "--json").stdout)["state"] == "free"


def test_inspect_sequence(invoke, busy):
    assert "test" in invoke("inspect", "sequence").stdout
    (listed,) = json.loads(invoke("inspect", "sequence", "--json").stdout)["sequences"]
    by_number = json.loads(invoke("inspect", "sequence", str(listed["sequence_id"]), "--json").stdout)
    by_handle = json.loads(invoke("inspect", "sequence", busy.handle.hex(), "--json").stdout)
    assert by_number == by_handle
    assert by_number["block_table"] == busy.block_table.tolist()
    assert "block table" in invoke("inspect", "sequence", str(listed["sequence_id"])).stdout


def test_inspect_clients(invoke, busy):
    assert "frontend" in invoke("inspect", "clients").stdout
    (listed,) = json.loads(invoke("inspect", "clients", "--json").stdout)
    assert (listed["name"], listed["num_sequences"]) == ("test", 1)


def test_salts_and_tokens_are_never_shown(invoke, busy):
    for command in (["tree"], ["sequence"], ["block", "0"], ["clients"]):
        for form in ([], ["--json"]):
            assert "pepper" not in invoke("inspect", *command, *form).output


def test_check(invoke, server, monkeypatch):
    assert "all invariants hold" in invoke("check").stdout
    assert json.loads(invoke("check", "--json").stdout)["violations"] == []

    def violated() -> None:
        raise InvariantViolation("one block too many")

    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "check", violated)
        result = invoke("check")
    assert result.exit_code == 1
    assert "one block too many" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["inspect", "block", "64"], 2, "block_id must be from 0 to 63, got 64"),
        (["inspect", "block", "x"], 2, "'x' is not a valid integer"),
        (["inspect", "sequence", "zz"], 2, "SEQUENCE_ID must be a number or a handle of 32 hex digits, got 'zz'"),
        (["inspect", "sequence", "4711"], 1, "unknown sequence 4711"),
        (["inspect", "tree", "--max-nodes", "0"], 2, "0 is not in the range"),
        (["stats", "--address", "unix:/nonexistent/m.sock"], 3, "nobody answers at unix:/nonexistent/m.sock"),
        (["stats", "--address", "nowhere"], 2, "address must be unix:/path or HOST:PORT, got 'nowhere'"),
        (["conjure"], 2, "No such command"),
    ],
)
def test_exit_codes(invoke, arguments, code, message):
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr


def test_help_teaches(invoke):
    text = invoke("--help").stdout
    for word in ("serve", "pool", "worker", "demo", "stats", "inspect", "check", "bench", "Exit codes"):
        assert word in text
    for command in (
        ["serve"],
        ["stats"],
        ["check"],
        ["inspect"],
        *(["inspect", n] for n in ("tree", "block", "sequence")),
    ):
        shown = invoke(*command, "--help")
        assert shown.exit_code == 0
        assert len(shown.stdout) > 300


def test_a_command_brings_its_environment_where_none_is_set(monkeypatch):
    monkeypatch.setenv("RADIXPOOL_TEST_SET", "mine")
    monkeypatch.setenv("RADIXPOOL_TEST_UNSET", "")
    monkeypatch.delenv("RADIXPOOL_TEST_UNSET")
    environment = (("RADIXPOOL_TEST_SET", "theirs"), ("RADIXPOOL_TEST_UNSET", "theirs"))
    command = LazyCommand("radixpool.rpc.cli.stats:stats", "", environment=environment)
    group = LazyGroup("group", lazy_commands={"stats": command})
    assert group.get_command(click.Context(group), "stats") is not None
    assert os.environ["RADIXPOOL_TEST_SET"] == "mine"
    assert os.environ["RADIXPOOL_TEST_UNSET"] == "theirs"


def counters(uptime_ms: int, *, incarnation: int = 1, **cache: int) -> Stats:
    """Return counters of which all but the named ones are 0."""
    return Stats(
        incarnation,
        1,
        CacheCounters(**{field.name: 0 for field in dataclasses.fields(CacheCounters)} | cache),
        ServiceCounters(**{field.name: 0 for field in dataclasses.fields(ServiceCounters)} | {"uptime_ms": uptime_ms}),
        (),
    )


def test_rates_are_by_the_managers_clock():
    before = counters(1_000, queried_tokens=100, hit_tokens=50, admitted_requests=3)
    after = counters(3_000, queried_tokens=300, hit_tokens=200, admitted_requests=7, evicted_blocks=10)
    rates = rates_between(before, after)
    assert (rates.seconds, rates.requests_per_s, rates.tokens_per_s, rates.hit_ratio) == (2.0, 2.0, 100.0, 0.75)
    assert (rates.evicted_blocks_per_s, rates.refused_per_s) == (5.0, 0.0)
    assert rates_between(after, dataclasses.replace(after, service=counters(4_000).service)).hit_ratio is None


@pytest.mark.parametrize("after", [counters(9_000, incarnation=2), counters(1_000)], ids=["restarted", "no time"])
def test_there_are_no_rates_over_a_restart(after):
    assert rates_between(counters(1_000), after) is None


def test_top_in_a_pipe_has_a_line_a_look(invoke, busy):
    first, second = invoke("top", "--count", "2", "--interval", "0.1").stdout.splitlines()
    assert first == "held 3, quarantined 0, cached 1, free 60; hit ratio 22.2% in all"
    assert second.startswith("held 3, quarantined 0, cached 1, free 60; 0.0 requests/s, ")
    assert "hit ratio -, 0 blocks evicted/s" in second


def test_top_in_json(invoke, busy):
    lines = invoke("top", "--count", "2", "--interval", "0.1", "--json").stdout.splitlines()
    first, second = map(json.loads, lines)
    assert first["stats"]["cache"]["held_blocks"] == 3
    assert (first["rates"], second["rates"]["requests_per_s"]) == (None, 0.0)


def test_top_draws_blocks_rates_and_tenants(client, busy, server):
    client.set_quota("acme", max_blocks=32)
    stats = client.stats()
    console = Console(width=100, file=io.StringIO())
    console.print(screen(server.address, stats, rates_between(counters(0), stats), [0.0, None, 1.0], answered=False))
    drawn = console.file.getvalue()
    for text in (server.address, "nobody answers; waiting", "held 3 (4.7%)", "hit ratio  ▁ █", "22.2%", "acme"):
        assert text in drawn


def test_top_goes_on_when_the_manager_comes_back(serve, socket_dir):
    """And says meanwhile that nobody answers."""
    options = ("--listen", f"unix:{socket_dir}/m.sock", "--num-blocks", "64", "--log-level", "error")
    manager = serve(*options)
    command = [sys.executable, "-m", "radixpool.rpc.cli", "top", "--address", manager.address, "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout.readline().startswith("held 0")
        manager.kill()
        while "no answer" not in top.stdout.readline():
            pass
        serve(*options)
        while "held 0" not in top.stdout.readline():
            pass
        top.send_signal(signal.SIGINT)
        assert top.wait(30) == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(invoke, shell):
    assert "_RADIXPOOL_COMPLETE" in invoke("completion", shell).stdout


def test_commands_and_options_are_completed(run_cli):
    def completed(words: str) -> list[str]:
        environment = {"_RADIXPOOL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return [line.partition(",")[2] for line in run_cli().stdout.splitlines()]

    assert completed("radixpool st") == ["stats"]
    assert "--max-nodes" in completed("radixpool inspect tree --m")


def test_evicting(invoke, busy):
    assert invoke("evict", "5", "--dry-run").stdout == "would evict 1 of 5 blocks: 1\n"
    assert json.loads(invoke("evict", "5", "--json").stdout) == {"dry_run": False, "block_ids": [1]}
    assert invoke("evict", "5").stdout == "evicted 0 of 5 blocks\n"


def test_flushing_everything(invoke, busy):
    refused = invoke("flush", "--mode", "idle-only", "--yes")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "cache is busy: 3 blocks held" in refused.stderr
    assert invoke("flush", "--mode", "drain", "--yes").stdout == "freed 1 blocks; 2 are held and stay findable\n"
    document = json.loads(invoke("flush", "--mode", "new-generation", "--yes", "--json").stdout)
    assert document == {"freed_blocks": 0, "held_blocks": 2}
    tree = invoke("inspect", "tree").stdout
    assert tree == "the tree is empty: nothing is committed; 2 flushed runs of blocks with holders left\n"


def test_flushing_one_namespace(invoke, client, busy):
    with client.acquire(range(8), namespace=Namespace(model="llama", tenant="other")) as seq:
        seq.commit(8)
    answer = invoke("flush", "--mode", "drain", "--model", "llama", "--tenant", "other", "--yes")
    assert answer.stdout == "freed 2 blocks; 0 are held and stay findable\n"
    assert client.stats().cache.cached_blocks == 1


def test_a_flush_asks_first(invoke, client, busy, server):
    runner = CliRunner(env={"RADIXPOOL_ADDRESS": server.address})
    refused = runner.invoke(main, ["flush", "--mode", "drain", "--model", "llama"], input="n\n")
    assert refused.exit_code == 1
    assert "flush model=llama (drain)? [y/N]" in refused.stderr
    assert client.stats().cache.cached_blocks == 1


def test_quotas(invoke, client):
    assert invoke("quota", "list").stdout == "no tenant has a quota: all share the pool\n"
    assert invoke("quota", "set", "acme", "--guaranteed", "8", "--max", "32").exit_code == 0
    (usage,) = json.loads(invoke("quota", "list", "--json").stdout)
    assert (usage["tenant"], usage["guaranteed_blocks"], usage["max_blocks"]) == ("acme", 8, 32)
    assert "acme" in invoke("quota", "list").stdout
    assert invoke("quota", "set", "acme").exit_code == 2
    assert invoke("quota", "set", "acme", "--guaranteed", "99").exit_code == 2
    assert invoke("quota", "remove", "acme").exit_code == 0
    assert client.stats().tenants == ()
