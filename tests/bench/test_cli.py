"""`radixpool bench`: what people type, and the files and errors that they get."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from radixpool.rpc.bench import grid
from radixpool.rpc.bench.cli import command
from radixpool.rpc.bench.reference import lru_curve
from radixpool.rpc.bench.synth import SynthOptions, generate, to_line


@pytest.fixture(scope="session")
def chat(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "chat.jsonl"
    path.write_text("".join(to_line(r, block_size=16) + "\n" for r in generate("chat", SynthOptions(num_requests=300))))
    return str(path)


def invoke(*arguments: str, **options):
    return CliRunner().invoke(command, list(arguments), **options)


def test_all_policies_and_references_stand_in_one_table(chat):
    result = invoke("policies", chat, "-c", "500,2k")
    assert result.exit_code == 0, result.output
    assert "300 requests" in result.stdout
    for name in (*grid.DEFAULT_POLICIES, *grid.REFERENCES):
        assert name in result.stdout
    assert "…" not in result.stdout  # nothing is cut off at 80 columns


def test_results_are_written_in_every_form(chat, tmp_path):
    out = tmp_path / "out"
    result = invoke(
        "policies", chat, "-p", "lru", "-p", "s3fifo:small=0.3", "-c", "500,2000", "-o", str(out), "--seed", "3"
    )
    assert result.exit_code == 0, result.output
    rows = json.loads((out / "results.json").read_text())
    assert {(row["policy"], row["capacity_blocks"]) for row in rows if row["kind"] == "policy"} == {
        (policy, capacity) for policy in ("lru", "s3fifo:small=0.3") for capacity in (500, 2_000)
    }
    lru = next(row for row in rows if row["policy"] == "lru" and row["capacity_blocks"] == 2_000)
    assert lru["hit_ratio"] == lru["hits"] / lru["refs"]
    assert lru["seed"] == 3
    assert len(lru["trace_sha256"]) == 64
    assert lru["gap_closed"] in (0.0, None)
    assert lru["equal_lru_capacity_blocks"] <= 2_000
    with (out / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [int(line["hits"]) for line in table] == [row["hits"] for row in rows]
    for plot in ("mrc.png", "over_time.png"):
        with Image.open(out / plot) as image:
            assert min(image.size) > 400
            assert len(image.convert("RGB").getcolors(maxcolors=1 << 24)) > 50  # lines, not a blank canvas
    report = (out / "report.html").read_text()
    assert report.count("data:image/png;base64,") == 2
    assert f"{lru['hit_ratio']:.4f}" in report
    assert "http://" not in report
    assert "https://" not in report


def test_without_the_plotting_packages_it_says_what_to_install(chat, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "radixpool.rpc.bench.plots", raising=False)
    trace, out = tmp_path / "mine [bench].jsonl", tmp_path / "out [bold]"
    trace.write_bytes(Path(chat).read_bytes())
    result = invoke("policies", str(trace), "-p", "lru", "-c", "500", "-o", str(out))
    assert result.exit_code == 0, result.output
    assert "pip install 'radixpool[bench]'" in " ".join(result.stderr.split())
    assert f"wrote results.csv, results.json to {out}" in result.stderr.replace("\n", " ").replace("  ", " ")
    assert "mine [bench]: 300 requests" in result.stdout, "what looks like markup is shown as it is"


def test_json_goes_to_stdout_alone(chat):
    result = invoke("policies", chat, "-p", "lru", "-c", "700", "--no-references", "--json")
    (row,) = json.loads(result.stdout)
    assert (row["policy"], row["capacity_blocks"]) == ("lru", 700)


def test_two_processes_give_what_one_gives(chat):
    arguments = ("policies", chat, "-p", "lru", "-p", "random", "-c", "400,900", "--json", "--seed", "5")
    one, two = (json.loads(invoke(*arguments, "-j", jobs).stdout) for jobs in ("1", "2"))
    for row in one + two:
        row["seconds"] = row["refs_per_s"] = None
    assert one == two


def test_a_generated_workload_can_be_piped_in(chat):
    made = invoke("synth", "shared", "-n", "50", "--seed", "2")
    assert made.exit_code == 0
    result = invoke("policies", "-", "-p", "lru", "-c", "1k", "--json", input=made.stdout)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)[0]["trace"] == "stdin"


def test_the_default_capacities_hold_the_largest_request(chat):
    rows = json.loads(invoke("policies", chat, "-p", "lru", "--json").stdout)
    facts = rows[0]["trace_facts"]
    assert min(row["capacity_blocks"] for row in rows) >= facts["largest_request_blocks"]
    assert all(row["refused_requests"] == 0 for row in rows)


def test_capacities_too_small_are_warned_of(chat):
    result = invoke("policies", chat, "-p", "lru", "-c", "10")
    assert "fewer than the largest request" in result.stdout.replace("\n", " ")


def test_timed_replay_leaves_out_the_optima_and_warns_of_a_small_pool(chat):
    result = invoke("policies", chat, "-p", "lru", "-c", "300", "--timing", "timed", "--json")
    rows = json.loads(result.stdout)
    assert not [row for row in rows if row["kind"] == "optimum"]
    assert rows[0]["gap_closed"] is None
    running = next(row for row in rows if row["policy"] == "running-only")
    assert running["hits"] > 0


def test_the_warm_up_is_left_out(chat):
    cold, warm = (
        json.loads(invoke("policies", chat, "-p", "lru", "-c", "2k", "--warmup", share, "--json").stdout)[0]
        for share in ("0", "0.5")
    )
    assert warm["refs"] < cold["refs"]
    assert warm["hit_ratio"] > cold["hit_ratio"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", "nosuch"), "nosuch"),
        (("-p", "s3fifo:smal=0.1"), "smal"),
        (("-p", "s3fifo:small=2"), "small"),
        (("-p", "lru", "-c", "0"), "at least 1"),
        (("-p", "lru", "-c", "many"), "many"),
        (("--tokenizer", "/nosuch/tokenizer.json"), "tokenizer"),
    ],
)
def test_bad_options_are_one_clear_error(chat, arguments, message):
    result = invoke("policies", chat, *arguments)
    assert result.exit_code != 0
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_damaged_line_is_named_and_strict_stops(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"hash_ids": [1], "input_length": 4}\n{"hash_ids": 7}\n')
    result = invoke("policies", str(path), "-p", "lru", "-c", "4")
    assert result.exit_code == 0
    assert "line 2: field hash_ids" in result.stdout.replace("\n", " ")
    strict = invoke("policies", str(path), "-p", "lru", "--strict")
    assert strict.exit_code == 1
    assert "bad.jsonl:2: field hash_ids" in strict.output.replace("\n", "")


def test_a_missing_file_is_one_clear_error():
    result = invoke("policies", "/nosuch/trace.jsonl")
    assert result.exit_code == 1
    assert "/nosuch/trace.jsonl" in result.output


def test_synth_writes_a_file_and_help_teaches(tmp_path):
    path = tmp_path / "agent.jsonl"
    assert invoke("synth", "agent", "-n", "20", "-o", str(path)).exit_code == 0
    assert len(path.read_text().splitlines()) == 20
    assert "Examples" in invoke("policies", "--help").output
    assert "tree-of-thought" in invoke("synth", "--help").output


def test_equal_capacity_is_read_from_the_exact_lru_curve(chat):
    from radixpool.rpc.bench.readers import read_trace

    rows = json.loads(invoke("policies", chat, "-p", "lru", "-p", "random", "-c", "800", "--json").stdout)
    curve = lru_curve(read_trace(chat))
    row = next(row for row in rows if row["policy"] == "random")
    size = row["equal_lru_capacity_blocks"]
    assert curve[size] >= row["hits"] > curve[size - 1]
