"""--device and what follows from it, for the commands that hold a pool or run a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from radixpool.rpc.pool.device import CPU, Device
from radixpool.rpc.pool.geometry import DTYPE_BYTES
from radixpool.rpc.pool_types import KvDtype

Command = TypeVar("Command", bound=Callable[..., Any])


class DeviceType(click.ParamType[Device]):
    """`cpu`, `cuda` or `cuda:N`."""

    name = "DEVICE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Device:
        """Return the device."""
        try:
            return value if isinstance(value, Device) else Device.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def device_option(help_text: str) -> Callable[[Command], Command]:
    """Add --device."""
    return click.option("--device", type=DeviceType(), default=CPU, show_default=True, help=help_text)


def graphed_tokens_option(command: Command) -> Command:
    """Add --graphed-tokens."""
    return click.option(
        "--graphed-tokens",
        type=click.IntRange(0),
        help="On a GPU: run steps of up to so many tokens as CUDA graphs; 0 for none."
        "  [default: as long as a step takes longer to launch than to compute, measured at the start]",
    )(command)


def dtype_option(command: Command) -> Command:
    """Add --kv-dtype; `pool_dtype` says what it is when it is left out."""
    return click.option(
        "--kv-dtype",
        "--dtype",
        "dtype",
        type=click.Choice([dtype.option for dtype in DTYPE_BYTES]),
        help="Element type of the pool. float32 keeps exactly what a float32 model computes; bfloat16 and float16 take "
        "half the memory, fp8_e4m3 a quarter. On a GPU the model computes in it too, over fp8_e4m3 in bfloat16."
        "  [default: float32 on the CPU, bfloat16 on a GPU]",
    )(command)


def scale_option(which: str) -> Callable[[Command], Command]:
    """Add --k-scale or --v-scale, of an fp8 pool."""
    return click.option(
        f"--{which}-scale",
        type=click.FloatRange(0, min_open=True),
        help=f"fp8_e4m3 stores {which.upper()} divided by this number, up to 448: raise it if larger values occur."
        "  [default: 1]",
    )


def pool_dtype(dtype: str | None, device: Device) -> KvDtype:
    """Return the element type that --kv-dtype asks for on `device`."""
    if dtype is not None:
        return next(known for known in DTYPE_BYTES if known.option == dtype)
    return KvDtype.BFLOAT16 if device.is_cuda else KvDtype.FLOAT32
