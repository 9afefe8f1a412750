"""One compiled variant of a Triton kernel, launched without Triton's argument binding.

Binding sixty arguments costs more than 100 us of Python, several times the kernel. What Triton would specialise on
(pointer alignment, divisible integers) is the key of a small dictionary here; a hit launches the compiled kernel at
once.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def specialisation(value: Any) -> Any:
    """Return what Triton's compilation depends on in one run-time argument."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return 1 if value == 1 else value % 16 == 0, value < 2**31
    return None


class KernelVariant:
    """A `@triton.jit` function with its compile-time arguments and options fixed. Run-time arguments come first."""

    __slots__ = ("compiled", "constants", "function", "options", "values")

    def __init__(self, function: Any, constants: dict[str, Any], options: dict[str, Any]) -> None:
        self.function, self.constants = function, constants
        self.options = {"enable_fp_fusion": True, **options}
        names = function.arg_names
        self.values = tuple(constants[name] for name in names[len(names) - len(constants) :])
        self.compiled: dict[Any, Any] = {}

    def launch(self, grid: tuple[int, int, int], arguments: tuple[Any, ...], kind: Any = None) -> None:
        """Launch on the current stream of the first argument's device; compiles at the first call of its kind.

        `kind` must tell apart whatever `specialisation` of the arguments would; by default it is that.
        """
        if INTERPRETED:
            self.function[grid](*arguments, **self.constants)
            return
        device = arguments[0].device.index
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.launch(grid, arguments, kind)
            return
        key = (device, tuple(map(specialisation, arguments)) if kind is None else kind)
        kernel = self.compiled.get(key)
        if kernel is None:
            self.compiled[key] = self.function[grid](*arguments, **self.constants, **self.options)
        else:
            kernel[grid](*arguments, *self.values)
