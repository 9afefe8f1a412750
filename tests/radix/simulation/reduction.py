"""Runs of the simulation: what a seed stands for, what went wrong, and the fewest actions that still go wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from radixpool.radix.replay import Operation

from .deployment import Action, Simulation


def actions_of(seed: int, count: int) -> list[Action]:
    """Return the actions that a seed stands for."""
    rng = random.Random(seed)
    return [(rng.randrange(10_000), *(rng.randrange(10_000) for _ in range(3))) for _ in range(count)]


@dataclass
class Failure:
    """A failing run, reduced."""

    seed: int
    error: Exception
    actions: list[Action] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {type(self.error).__name__}: {str(self.error).splitlines()[0]}"]
        lines += [f"shortest log found, {len(self.actions)} actions: {self.actions}"]
        return "\n".join(lines + [f"  {operation.to_json()}" for operation in self.operations])


def run(seed: int, actions: list[Action], policy: str) -> tuple[Exception | None, Simulation]:
    """Run a simulation; return what went wrong, if anything."""
    simulation = Simulation(seed, policy)
    try:
        for action in actions:
            simulation.act(action)
        simulation.drain()
    except Exception as error:
        return error, simulation
    return None, simulation


def shortest(seed: int, actions: list[Action], policy: str) -> Failure:
    """Reduce failing actions by leaving out ever smaller pieces, as long as the run still fails."""
    error, simulation = run(seed, actions, policy)
    assert error is not None
    size = len(actions) // 2
    while size:
        at = 0
        while at < len(actions):
            fewer = actions[:at] + actions[at + size :]
            found, attempt = run(seed, fewer, policy)
            if found is not None:
                actions, error, simulation = fewer, found, attempt
            else:
                at += size
        size //= 2
    return Failure(seed, error, actions, simulation.log)
