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
        default=256,
        show_default=True,
        help="On a GPU: run steps of up to so many tokens as CUDA graphs; 0 for none.",
    )(command)


def dtype_option(command: Command) -> Command:
    """Add --dtype; `pool_dtype` says what it is when it is left out."""
    return click.option(
        "--dtype",
        type=click.Choice([dtype.value for dtype in DTYPE_BYTES]),
        help="Element type of the pool. float32 keeps exactly what a float32 model computes; the others take half the "
        "memory. On a GPU the model computes in it too.  [default: float32 on the CPU, bfloat16 on a GPU]",
    )(command)


def pool_dtype(dtype: str | None, device: Device) -> KvDtype:
    """Return the element type that --dtype asks for on `device`."""
    if dtype is not None:
        return KvDtype(dtype)
    return KvDtype.BFLOAT16 if device.is_cuda else KvDtype.FLOAT32
