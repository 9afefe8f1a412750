"""bench/end_to_end.py runs to its end on a small model and says something about each of its questions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "end_to_end.py"


@pytest.mark.slow
def test_every_question_is_answered(tiny_model, tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, str(BENCH), "--model", str(tiny_model), "--repeats", "2", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text())
    cases = {(row["question"], row["case"], row["part"]) for row in rows}
    assert ("ttft", "256 tokens, 50% cached", "all") in cases
    assert ("decode", "4 sequences of 256 tokens", "cache") in cases
    assert ("session", "16 sequences", "session") in cases
    assert ("session", "16 sequences", "in process") in cases
    assert len(rows) == 3 + 3 * 4 + 4 * 2
    assert all(row["q1_ms"] <= row["median_ms"] <= row["q3_ms"] for row in rows)
    assert "quartiles" in done.stdout
