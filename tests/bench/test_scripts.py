"""The benchmark scripts run to their end on small cases, so that a change of the library cannot break them unseen."""

from __future__ import annotations

import importlib
import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from radixpool.rpc.bench.synth import SynthOptions, generate, to_line

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def load(monkeypatch):
    """Return a function that imports a script of bench/, which is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]


@pytest.fixture
def small_workloads(load, monkeypatch):
    """Shrink the workloads of the tree benchmark, so that they still evict."""
    workloads = load("tree_workloads")
    for name in workloads.WORKLOADS:
        small = workloads.Workload(name, 16_384 if name == "chat" else 10_240, 80, fill=60)
        monkeypatch.setitem(workloads.WORKLOADS, name, small)


def rows_of(command, arguments, out: Path) -> list[dict]:
    result = CliRunner().invoke(command, [*arguments, "--repeats", "1", "--json", str(out)])
    assert result.exception is None, result.output
    rows = json.loads(out.read_text())
    assert all(row["low"] <= row["median"] <= row["high"] for row in rows)
    return rows


@pytest.mark.usefixtures("small_workloads")
def test_the_tree_benchmark(load, monkeypatch, tmp_path):
    tree = load("tree")
    monkeypatch.setattr(tree, "SIZES", (1_000,))
    monkeypatch.setattr(tree, "DEPTHS", (1, 4))
    monkeypatch.setattr(tree, "HIT_TOKENS", (64, 4_096))
    table, plot = tmp_path / "tree.csv", tmp_path / "tree.png"
    rows = rows_of(tree.main, ["--csv", str(table), "--plot", str(plot)], tmp_path / "tree.json")
    found = {(row["question"], str(row["case"]), row["figure"]): row["median"] for row in rows}
    for name in tree.WORKLOADS:
        assert found["workload", name, "lifecycles_per_s"] > 0
        assert 0 <= found["workload", name, "hit_ratio"] < 1
    assert found["workload", "random", "evict_us_per_block"] > 0  # the pool is full: it did evict
    assert ("workload", "large", "bytes_per_block") in found
    assert found["one-block runs on the path", "4", "runs"] == 4 + 4  # with the branch below each
    assert found["tokens hit in one run", "4096", "acquire_us"] > 0
    assert found["blocks in the cache", "1000", "evict_one_us"] > 0
    assert len(table.read_text().splitlines()) == len(rows) + 1
    with Image.open(plot) as image:
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 24)) > 50  # lines, not a blank canvas


@pytest.mark.usefixtures("small_workloads")
def test_the_directory_benchmark(load, tmp_path):
    directory = load("directory")
    arguments = ["--folder", str(tmp_path), "--recovery-blocks", "16384", "--only", "lifecycle", "--only", "recovery"]
    rows = rows_of(directory.main, arguments, tmp_path / "directory.json")
    assert {row["question"] for row in rows} == {"lifecycle", "recovery"}
    restored = {row["case"]: row["median"] for row in rows if row["figure"] == "restored_blocks"}
    assert restored.pop("workload large") > 0
    assert set(restored.values()) == {16_384}  # every other shape fills the pool
    assert [path.name for path in tmp_path.iterdir()] == ["directory.json"]


def test_the_policy_benchmark(tmp_path):
    traces = tmp_path / "shared" / "traces"
    traces.mkdir(parents=True)
    lines = "".join(to_line(r, block_size=512) + "\n" for r in generate("chat", SynthOptions(num_requests=60)))
    for name in ("mooncake_conversation_trace", "mooncake_synthetic_trace", "cc_64conv", "tau_airline"):
        (traces / f"{name}.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    out = tmp_path / "out"
    command = [sys.executable, str(BENCH / "policies.py"), "--rounds", "1", "--jobs", "1", "--out", str(out)]
    environment = {"RADIXPOOL_SHARED": str(traces.parent), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "block references/s" in done.stdout
    assert {path.name for path in out.iterdir()} == {
        "results.csv", "results.json", "mrc.png", "over_time.png", "report.html", "speed.csv"
    }  # fmt: skip
    rows = json.loads((out / "results.json").read_text())
    assert len({row["trace"] for row in rows}) == 4


def test_the_event_benchmark():
    command = [sys.executable, str(BENCH / "kv_events.py"), "--blocks", "512", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "with     a publisher: p50" in done.stdout
