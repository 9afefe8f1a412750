"""Sends a step that only grows to the device: a message in host memory that the device reads, by one small launch.

A message may be written again when the device has noted its ticket in it. Nobody waits for that: where the oldest
message is still out another one is made, so that there are as many as steps were ever queued at once. They belong to
no plan, as a plan may be dropped before its steps have run.
"""

from __future__ import annotations

import collections
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from triton.compiler import ASTSource
from triton.runtime import driver

from radixpool.kernels.device_step import apply_step
from radixpool.kernels.forest_pack import ALIGN
from radixpool.kernels.launch import next_power_of_two
from radixpool.kernels.native_cut import library
from radixpool.kernels.plan_step import MAX_CHANGES, Message, message_entries
from radixpool.kernels.variant import KernelVariant, Launch

HEADER = ALIGN  # entries before what a step writes: the ticket, and room
LAST_TICKET = 2**31 - 1
WARP_THREADS = 32


class HostMessage(Message):
    """A message in memory that both sides reach, with a ticket before it."""

    __slots__ = ("memory", "memory_address", "ticket", "words")

    def __init__(self, entries: int, device: torch.device) -> None:
        self.memory = torch.zeros(HEADER + entries, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.words, self.memory_address = self.memory.numpy(), self.memory.data_ptr()
        self.ticket = 0
        super().__init__(self.words[HEADER:])

    @property
    def is_back(self) -> bool:
        """Whether the device has read what was sent last."""
        return int(self.words[0]) == self.ticket


Ring = collections.deque[HostMessage]
_RINGS: dict[tuple[torch.device, int], Ring] = {}


@functools.cache
def step_variant() -> KernelVariant:
    """Return the kernel that applies a message."""
    constants = {"HEADER": HEADER, "ALIGN": ALIGN, "MOST": MAX_CHANGES, "BLOCK": MAX_CHANGES}
    return KernelVariant(apply_step, constants, {"num_warps": 32})  # an entry a thread: neighbours are read together


def step_sources() -> Iterator[tuple[str, ASTSource, dict[str, Any]]]:
    """Yield name, source and options of the kernel, as a server compiles it."""
    variant = step_variant()
    pointers = ("MESSAGE", "LENS", "TABLES")
    names = list(enumerate(apply_step.arg_names))
    kinds = {n: "constexpr" if n in variant.constants else "*i32" if n in pointers else "i32" for _, n in names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in names if n in pointers}
    source = ASTSource(apply_step, signature=kinds, constexprs=variant.constants, attrs=attrs)
    yield "plan_step", source, variant.options


class Bound(ctypes.Structure):
    """The launch of one upload's steps; mirrors `Bound` of forest_step.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("launch", "function", "lens", "tables")),
        *((name, ctypes.c_int64) for name in ("threads", "shared_bytes", "num_seqs", "stride")),
    )  # fmt: skip


@functools.cache
def cuda_launch() -> int | None:
    """Return the address of `cuLaunchKernel`, or None where there is no driver."""
    try:
        return ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


class StepSender:
    """Sends the steps of one uploaded plan to its lengths and its tables, rows of `stride` entries.

    Both are named by a tensor and their first entry in it. Steps after the first of a device go from C to the driver,
    which takes a third of the time of Triton's launcher; where that is not possible, they go through Triton.
    """

    __slots__ = ("bound", "bound_address", "device", "entries", "lens", "numbers", "ring", "tables")

    def __init__(self, lens: tuple[Tensor, int], tables: tuple[Tensor, int], *, num_seqs: int, stride: int) -> None:
        self.lens, self.tables, self.numbers = lens, tables, (num_seqs, stride)
        self.device = lens[0].device
        self.entries = message_entries(next_power_of_two(max(1, num_seqs)))
        self.ring = _RINGS.setdefault((self.device, self.entries), Ring())
        self.bind()

    def take(self) -> HostMessage:
        """Return a message to write; it must be sent or given back."""
        try:
            oldest = self.ring.popleft()
        except IndexError:
            return HostMessage(self.entries, self.device)
        if oldest.is_back:
            return oldest
        self.ring.appendleft(oldest)
        return HostMessage(self.entries, self.device)

    def give_back(self, message: HostMessage) -> None:
        """Take back a message that was not sent."""
        self.ring.appendleft(message)

    def send(self, message: HostMessage, num_changes: int) -> None:
        """Have the device apply the message, in the order of the current stream."""
        message.ticket = message.ticket % LAST_TICKET + 1
        if not self.send_directly(message, num_changes):
            self.send_by_triton(message, num_changes)
        self.ring.append(message)

    def bind(self) -> None:
        """Find the launch for C, if the kernel is compiled for this device and asks for no memory of Triton's."""
        kernel, launch = step_variant().compiled.get(self.device.index), cuda_launch()
        self.bound: Bound | None = None
        if kernel is None or launch is None or kernel.metadata.global_scratch_size:
            return
        addresses = (tensor.data_ptr() + begin * tensor.itemsize for tensor, begin in (self.lens, self.tables))
        threads = kernel.metadata.num_warps * WARP_THREADS
        self.bound = Bound(launch, kernel.function, *addresses, threads, kernel.metadata.shared, *self.numbers)
        self.bound_address = ctypes.addressof(self.bound)

    def send_directly(self, message: HostMessage, num_changes: int) -> bool:
        """Launch from C; return False where that is not possible, as in a thread that has not met CUDA yet."""
        code = library()
        if self.bound is None or code is None:
            return False
        stream = driver.active.get_current_stream(self.device.index)
        return not code.radixpool_send(self.bound_address, stream, message.memory_address, num_changes, message.ticket)

    def send_by_triton(self, message: HostMessage, num_changes: int) -> None:
        """Launch through Triton, which compiles the kernel at the first call on a device."""
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self.send_by_triton(message, num_changes)
            return
        places = tuple(tensor.view(-1)[begin:] for tensor, begin in (self.lens, self.tables))
        launch = Launch(step_variant(), (1, 1, 1), places, self.numbers)
        launch.first((message.memory,), (num_changes, message.ticket), self.device.index)
        self.bind()
