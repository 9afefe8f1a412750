"""What `decode.py` and `extend.py` do with a case: check each implementation against float64, time them in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from gpu_timing import time_eager

Call = Callable[[], torch.Tensor]
MOST_ERROR = {torch.float8_e4m3fn: 8e-2}  # relative error by dtype of the pool
MOST_ERROR_OTHERS = 2e-2


class Outcome(Protocol):
    """What a bench notes of one implementation, besides its times."""

    error: float
    failed: str


def right_calls(
    w: Any, ours: Mapping[str, Call], binders: Mapping[str, Callable[[Any], Call]], outcomes: Mapping[str, Outcome]
) -> dict[str, Call]:
    """Run every implementation of a workload once; note its error or why it failed; return those that are right."""
    reference = w.reference()
    most = MOST_ERROR.get(w.case.dtype, MOST_ERROR_OTHERS)
    calls: dict[str, Call] = {}
    for name, outcome in outcomes.items():
        try:
            call = ours[name] if name in ours else binders[name](w)
            outcome.error = w.error(call(), reference)
            torch.cuda.synchronize()
            if not outcome.error < most:
                raise ArithmeticError(f"relative error {outcome.error:.1e}")
            calls[name] = call
        except Exception as error:
            outcome.failed = repr(error)[:160]
    return calls


def time_in_turns(calls: Mapping[str, Call], rounds: int, rep_ms: int) -> dict[str, list[float]]:
    """Return each implementation's median microseconds of every round; rounds alternate between them."""
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            medians[name].append(time_eager(call, rep_ms=rep_ms).us)
    return medians
