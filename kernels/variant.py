"""One compiled variant of a Triton kernel, launched without Triton's argument binding.

Binding sixty arguments costs more than 100 us of Python, several times the kernel. What Triton would specialise on
(pointer alignment, divisible integers) is the key of a small dictionary here; a hit launches the compiled kernel at
once.
"""

from __future__ import annotations

import functools
import operator
import os
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from radixpool.kernels.cache_hints import with_hints

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def specialisation(value: Any) -> Any:
    """Return what Triton's compilation depends on in one run-time argument."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return "one" if value == 1 else value % 16 == 0, value < 2**31  # not 1, which equals True
    return None


def alignment_of(addresses: list[int]) -> int | tuple[bool, ...]:
    """Return which addresses are multiples of 16, which Triton compiles for; 0 if all are.

    >>> alignment_of([32, 64]), alignment_of([32, 40]), alignment_of([40, 32])
    (0, (True, False), (False, True))
    """
    if functools.reduce(operator.or_, addresses) % 16 == 0:
        return 0
    return tuple(a % 16 == 0 for a in addresses)


class KernelVariant:
    """A `@triton.jit` function with its compile-time arguments and options fixed. Run-time arguments come first."""

    __slots__ = ("compiled", "constants", "function", "options", "values")

    def __init__(self, function: Any, constants: dict[str, Any], options: dict[str, Any]) -> None:
        self.function, self.constants = function, constants
        self.options = {"enable_fp_fusion": True, **options}
        names = function.arg_names
        self.values = tuple(constants[name] for name in names[len(names) - len(constants) :])
        self.compiled: dict[Any, Any] = {}

    def kernel_for(self, arguments: tuple[Any, ...], kind: Any) -> Any:
        """Return the kernel compiled for these arguments; `kind` tells apart what `specialisation` of them would."""
        kernel = self.compiled.get(kind)
        if kernel is None:
            compile_with = functools.partial(self.compile, arguments)
            evicts = self.constants.get("EVICT_FIRST", False)
            kernel = with_hints(compile_with, self.options) if evicts else compile_with(self.options)
            self.compiled[kind] = kernel
        return kernel

    def compile(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Compile for these arguments, or take what Triton has in its cache."""
        return self.function.warmup(*arguments, grid=(1,), **self.constants, **options)

    def launch(self, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        """Launch on the current stream of the first argument's device; compiles at the first call of its kind."""
        if INTERPRETED:
            self.function[grid](*arguments, **self.constants)
            return
        device = arguments[0].device.index
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.launch(grid, arguments)
            return
        kernel = self.kernel_for(arguments, (device, tuple(map(specialisation, arguments))))
        kernel[grid](*arguments, *self.values)


class Launch:
    """A variant with its grid and the arguments that stay from call to call; used on one device.

    After the first time it hands addresses to Triton's launcher in place of tensors, which would ask each tensor for
    its address and the driver for each address: more work than the launch itself.
    """

    __slots__ = ("fixed", "grid", "kernel", "numbers", "variant")

    def __init__(
        self, variant: KernelVariant, grid: tuple[int, int, int], fixed: tuple[Tensor, ...], numbers: tuple[int, ...]
    ) -> None:  # fmt: skip
        self.variant, self.grid, self.fixed, self.numbers = variant, grid, fixed, numbers
        self.kernel: Any = None

    def prepare(self, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], kind: Any) -> None:
        """Compile for these arguments: tensors, then numbers."""
        if not INTERPRETED:
            self.kernel = self.variant.kernel_for((*tensors, *numbers, *self.fixed, *self.numbers), kind)

    def first(self, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], kind: Any) -> None:
        """Launch with tensors; from now on `again` serves all calls of this kind."""
        arguments = (*tensors, *numbers, *self.fixed, *self.numbers)
        if INTERPRETED:
            self.variant.function[self.grid](*arguments, **self.variant.constants)
            return
        if self.kernel is None:
            self.prepare(tensors, numbers, kind)
        self.kernel[self.grid](*arguments, *self.variant.values)
        self.numbers = (*(t.data_ptr() for t in self.fixed), *self.numbers, *self.variant.values)

    def again(self, addresses: list[int], numbers: tuple[float, ...], stream: int) -> None:
        """Launch with the addresses of the tensors."""
        kernel, hook = self.kernel, knobs.runtime.launch_enter_hook
        if getattr(hook, "calls", hook):  # a profiler listens
            kernel[self.grid](*addresses, *numbers, *self.numbers)
            return
        kernel.run(
            *self.grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *addresses, *numbers,
            *self.numbers,
        )  # fmt: skip
