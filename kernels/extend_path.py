"""Whether a planned batch takes the fast extend path, and its schedule, made once per plan and used by every layer.

Imports Gluon only where the answer can be yes.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from radixpool.kernels.device_plan import DevicePlan
from radixpool.kernels.extend_plan import (
    DECODE_QUERY_TOKENS,
    FAST_ROWS,
    ExtendConfig,
    ExtendSchedule,
    copies_in_bulk,
    extend_config,
    fp8_config,
    schedule_extend,
    turned_chunks,
    wide_blocks,
    wide_tiles,
)
from radixpool.kernels.plan import ForestPlan
from radixpool.kernels.spec import AttentionSpec, Precision


class FastExtend:
    """The fast path of one plan: configuration, schedule on the device, launch. Valid until the plan is updated."""

    def __init__(
        self, spec: AttentionSpec, on_device: DevicePlan, config: ExtendConfig, schedule: ExtendSchedule, launcher: Any
    ) -> None:  # fmt: skip
        self.spec, self.on_device, self.config, self.launcher = spec, on_device, config, launcher
        self.schedule = launcher.upload(schedule, torch.device(spec.device))
        self.widening: Any = None
        self.turning: Any = None

    def can_read(self, k_pool: Tensor, v_pool: Tensor) -> bool:
        """Return whether the bulk copy engine can read these pools, or copies of their blocks."""
        return self.widening is not None or (copies_in_bulk(k_pool) and copies_in_bulk(v_pool))

    def launch(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, **arguments: Any) -> None:
        """Launch the tall tiles; `arguments` as in `launch_extend`."""
        tables = self.on_device.tables
        places: tuple[Tensor, ...] = ()
        if self.turning is not None:
            v_pool, places = self.turning.values(v_pool, tables), (self.turning.runs, self.turning.places)
        elif self.widening is not None:
            k_pool, v_pool = self.widening.copy(k_pool, v_pool)
            tables = self.widening.tables
        states = self.on_device.workspace
        assert states is not None
        self.launcher.launch_extend(
            q, k_pool, v_pool, self.schedule, spec=self.spec, config=self.config,
            precision="full" if self.turning is None else "fp8", places=places, tables=tables,
            part=states.part, part_lse=states.part_lse, **arguments,
        )  # fmt: skip


def gluon_launcher() -> Any | None:
    """Return the module that launches the fast kernel, or None where Triton has no Gluon for it (before 3.6)."""
    try:
        gluon = importlib.import_module("triton.experimental.gluon.language")
        if "functions_and_args" not in inspect.signature(gluon.warp_specialize).parameters:
            return None
        return importlib.import_module("radixpool.kernels.extend_launch")
    except (ImportError, AttributeError):
        return None


def config_of(plan: ForestPlan, precision: Precision) -> ExtendConfig | None:
    """Return the configuration if this plan has tall tiles that the fast kernel runs, else None.

    Decode keeps the plain kernel: its tall tiles (shared prefixes) leave room on each SM for the narrow ones beside
    them (measured: 70 us against 76 for 64 sharers of 16k). Plans with a capacity keep it too: their grids are fixed
    and their counts are read on the device.
    """
    on_device = plan.device_plan
    if on_device is None or plan.capacity is not None or FAST_ROWS not in on_device.heights:
        return None
    if plan.query_lens.max() <= DECODE_QUERY_TOKENS or torch.device(plan.spec.device).type != "cuda":
        return None
    choose = fp8_config if precision == "fp8" else extend_config
    return choose(plan.spec, plan.device.arch)


def build(plan: ForestPlan, precision: Precision) -> FastExtend | None:
    """Return the fast path of a plan, its schedule on the device; None where the plain kernel runs the tall tiles."""
    config = config_of(plan, precision)
    launcher = gluon_launcher() if config is not None else None
    if config is None or launcher is None:
        return None
    assert plan.forest is not None and plan.device_plan is not None
    schedule = None
    wide_config = wide_tiles(config) if precision == "full" else None
    if wide_config is not None:
        schedule = schedule_extend(
            plan.forest, plan.seq_lens, plan.spec, plan.forest.tall_sms, tile_rows=wide_config.tile_rows
        )  # fmt: skip
    if schedule is not None and wide_config is not None:
        config = wide_config
    else:
        schedule = schedule_extend(plan.forest, plan.seq_lens, plan.spec, plan.forest.tall_sms)
    if schedule is None:
        return None
    fast = FastExtend(plan.spec, plan.device_plan, config, schedule, launcher)
    if precision == "fp8":
        turned = turned_chunks(schedule, plan.block_tables, plan.spec)
        if turned is None:
            return None
        fast.turning = importlib.import_module("radixpool.kernels.extend_turn").Turning(turned, plan.spec)
    elif config.widen:
        wide = wide_blocks(schedule, plan.block_tables, plan.spec)
        if wide is None:
            return None
        fast.widening = importlib.import_module("radixpool.kernels.extend_widen").Widening(wide, plan.spec)
    return fast


def fast_extend(plan: ForestPlan, k_pool: Tensor, v_pool: Tensor, precision: Precision) -> FastExtend | None:
    """Return the fast path for this plan and these pools, or None: then the plain kernel runs the tall tiles too."""
    if plan.fast is False:
        return None
    if plan.fast is None:
        plan.fast = {}
    if precision not in plan.fast:
        plan.fast[precision] = build(plan, precision)
    fast: FastExtend | None = plan.fast[precision]
    return fast if fast is not None and fast.can_read(k_pool, v_pool) else None
