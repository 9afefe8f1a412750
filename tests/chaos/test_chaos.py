"""Processes that are killed and frozen under load, at named steps and at any moment: nothing stale, nothing lost.

CI runs a round of each kind; `make chaos ROUNDS=100` runs many and writes a summary. Every round hurts one process (see
rounds.py), waits until the load is through it, proves the manager's invariants and looks for what was left behind;
every process checks every cached token that it is given (see load.py). `SEED` gives another order and other
passages, `FIRST=37 ROUNDS=100` goes on with round 37.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from pathlib import Path

import pytest

ROUNDS = os.environ.get("RADIXPOOL_CHAOS_ROUNDS")
FIRST = int(os.environ.get("RADIXPOOL_CHAOS_FIRST", "1"))
SEED = int(os.environ.get("RADIXPOOL_CHAOS_SEED", "1"))
SUMMARY = os.environ.get("RADIXPOOL_CHAOS_SUMMARY")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("chaos")]


@pytest.fixture
def house(house_module):
    with tempfile.TemporaryDirectory(prefix="rpchaos", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        house = house_module.House(Path(folder), SEED)
        yield house
        house.destroy()


def test_a_long_plan_has_every_step_and_every_role(rounds):
    planned = rounds.plan(200, SEED)
    assert {(hurt.step, hurt.action) for hurt in planned} >= {(s, a) for s in rounds.STEPS for a in rounds.ACTIONS}
    assert {(hurt.role, hurt.action) for hurt in planned if hurt.step == rounds.ANY_MOMENT} == {
        (role, action) for role in rounds.ROLES for action in rounds.ACTIONS
    }
    assert rounds.plan(20, SEED) == planned[:20], "a round can be run again by its number"
    assert [hurt.role for hurt in rounds.short_plan(SEED)] == ["manager"] * 4 + ["worker"] * 2 + ["holder"] * 2


def test_nothing_stale_and_nothing_lost(house, rounds):
    hurts = rounds.plan(int(ROUNDS), SEED) if ROUNDS else rounds.short_plan(SEED)
    house.prove()
    done = []
    for number, hurt in list(enumerate(hurts, start=1))[FIRST - 1 :]:
        print(f"round {number:3} of {len(hurts)}: {hurt!s:54}", end="", flush=True)
        started, before = time.monotonic(), house.verified_tokens().sum()
        rounds.carry_out(house, hurt, random.Random(f"{SEED} {number}"))
        house.prove()
        seconds, tokens = time.monotonic() - started, int(house.verified_tokens().sum() - before)
        print(f"{seconds:5.1f} s, {tokens:6} cached tokens found right", flush=True)
        done.append({**vars(hurt), "round": number, "seconds": round(seconds, 2), "verified_tokens": tokens})
        _write_summary(done, passed=False)
    house.end()
    _write_summary(done, passed=True)


def _write_summary(done, *, passed):
    """Write what has happened so far, with all that is needed to do it again."""
    if SUMMARY:
        steps = sorted({f"{each['step']}: {each['action']}" for each in done})
        verified = sum(each["verified_tokens"] for each in done)
        summary = {"seed": SEED, "first": FIRST, "rounds": len(done), "passed": passed, "verified_tokens": verified}
        Path(SUMMARY).parent.mkdir(parents=True, exist_ok=True)
        Path(SUMMARY).write_text(json.dumps(summary | {"hurts": steps, "done": done}, indent=1) + "\n")
