"""What is done to the house in a round: one process is killed or frozen, at a named step or at any moment."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass
from typing import Any

from radixpool.rpc.failpoints import ACTIONS, STEPS

ANY_MOMENT = "any moment"
TAKEN_OVER = "another takes over"
ROLES = ("manager", "worker", "frontend", "holder")
ROLE_OF_PREFIX = {"worker": "worker", "session": "worker", "client": "frontend", "holder": "holder"}
"""Whose steps they are, by the first part of the name; all others are the manager's."""
AT_ITS_START = ("recovery", "manager.bound", "register", "pool", "holder", "worker.registered", "worker.attached")
RARE = (*AT_ITS_START, "manager", "sweep", "commit.remapped", "directory.removed")
FREQUENT_PASSAGES = 40
KINDS_IN_CI = ("directory.store", "commit", "recovery", "sweep", "worker.step", "session", "holder", TAKEN_OVER)


@dataclass(frozen=True)
class Hurt:
    """One round. `passage` counts from the start of the process that is hurt."""

    role: str
    step: str
    action: str
    passage: int = 1

    def __str__(self) -> str:
        done = {"kill": "killed", "stop": "frozen"}[self.action]
        where = f"at {self.step}" if self.step == ANY_MOMENT else f"{self.step}, passage {self.passage}"
        return f"{self.role} {done}: {where}"


def all_hurts(chance: random.Random) -> list[Hurt]:
    """Return each action at each step and at any moment of each role, in an order that `chance` gives."""
    hurts = [Hurt(role_of(step), step, action, _passage(step, chance)) for step in STEPS for action in ACTIONS]
    hurts += [Hurt(role, ANY_MOMENT, action) for role in ROLES for action in ACTIONS for _ in range(2)]
    hurts += [Hurt("holder", TAKEN_OVER, "stop")] * 2
    chance.shuffle(hurts)
    return hurts


def plan(num_rounds: int, seed: int) -> list[Hurt]:
    """Return the first rounds of everything once, then everything again in another order, and so on."""
    chance = random.Random(seed)
    hurts: list[Hurt] = []
    while len(hurts) < num_rounds:
        hurts += all_hurts(chance)
    return hurts[:num_rounds]


def short_plan(seed: int) -> list[Hurt]:
    """Return one round of each kind that a few rounds are to have."""
    hurts = all_hurts(random.Random(seed))
    return [next(hurt for hurt in hurts if hurt.step.startswith(kind)) for kind in KINDS_IN_CI]


def role_of(step: str) -> str:
    return ROLE_OF_PREFIX.get(step.partition(".")[0], "manager")


def _passage(step: str, chance: random.Random) -> int:
    return 1 if step.startswith(RARE) else chance.randrange(1, FREQUENT_PASSAGES)


def carry_out(house: Any, hurt: Hurt, chance: random.Random) -> None:
    """Hurt one process, and start again what was killed. Fails when the step is not reached."""
    name = chance.choice([name for name in house.members if name.startswith(hurt.role)])
    time.sleep(chance.random() * 0.2)
    if hurt.step == TAKEN_OVER:
        take_over(house, name)
    elif hurt.step != ANY_MOMENT:
        hurt_at_step(house, name, hurt, chance)
    elif hurt.action == "kill":
        house.kill(name)
        house.start(name)
    else:
        house.freeze(name)


def hurt_at_step(house: Any, name: str, hurt: Hurt, chance: random.Random) -> None:
    """Let a process begin anew, armed, and do what leads to the step."""
    house.kill(name)
    process = house.start(name, failpoints=f"{hurt.step}={hurt.action}@{hurt.passage}").process
    lead_to(house, hurt.step, chance)
    if hurt.action == "kill":
        house.wait_for(lambda: process.poll() is not None, str(hurt))
        assert process.returncode == -signal.SIGKILL, f"{hurt} ended with {process.returncode}\n{house.logs()}"
    else:
        house.wait_for(lambda: process.poll() is not None or house.members[name].is_frozen, str(hurt))
        assert process.poll() is None, f"{hurt} ended with {process.returncode}\n{house.logs()}"
        house.thaw(name)
    if hurt.step in ("manager.draining", "manager.stopped"):
        expected = -signal.SIGKILL if hurt.action == "kill" else 0
        assert process.wait(60) == expected, house.logs()
    if process.poll() is not None:
        house.start(name)


def lead_to(house: Any, step: str, chance: random.Random) -> None:
    """Do what makes the load, or the house, come to a step that it does not pass by itself."""
    if step in ("manager.draining", "manager.stopped"):
        house.prove()
        house.members["manager"].process.terminate()
    elif step == "sweep.slice":
        house.prove()
        house.kill("frontend-1")
        house.kill("worker-1")
        house.start("frontend-1")
        house.start("worker-1")
    elif step == "pool.emptied":
        house.prove()
        house.kill("holder")
        house.start("holder")
    elif step == "holder.handing_out":
        name = chance.choice(["worker-2", "frontend-2"])
        house.kill(name)
        house.start(name)


def take_over(house: Any, name: str) -> None:
    """Let a second pool holder take the place of a frozen one, which has to give way when it wakes."""
    old = house.members[name].process
    old.send_signal(signal.SIGSTOP)
    house.start(name)
    house.wait_for(lambda: "ready" in house.members[name].log.read_text().rpartition("---")[2], "a second holder")
    old.send_signal(signal.SIGCONT)
    assert old.wait(60) == 1, house.logs()
