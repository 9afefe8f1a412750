"""Sends a step that only grows to the device: a message in host memory that the device reads, by one small launch.

A message may be written again when the device has noted its ticket in it. Nobody waits for that: where the oldest
message is still out another one is made, so that there are as many as steps were ever queued at once. They belong to
no plan, as a plan may be dropped before its steps have run.
"""

from __future__ import annotations

import collections
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
from radixpool.kernels.plan_step import MAX_CHANGES, Message, message_entries
from radixpool.kernels.variant import INTERPRETED, KernelVariant, Launch

HEADER = ALIGN  # entries before what a step writes: the ticket, and room
LAST_TICKET = 2**31 - 1


class HostMessage(Message):
    """A message in memory that both sides reach, with a ticket before it."""

    __slots__ = ("memory", "ticket", "words")

    def __init__(self, entries: int, device: torch.device) -> None:
        self.memory = torch.zeros(HEADER + entries, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.words = self.memory.numpy()
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


class StepSender:
    """Sends the steps of one uploaded plan: to its `lens` and its `tables` `[num_seqs, stride]` on the device."""

    __slots__ = ("device", "entries", "launch", "ring")

    def __init__(self, lens: Tensor, tables: Tensor, *, num_seqs: int) -> None:
        self.device = tables.device
        self.entries = message_entries(next_power_of_two(max(1, num_seqs)))
        self.ring = _RINGS.setdefault((self.device, self.entries), Ring())
        self.launch = Launch(step_variant(), (1, 1, 1), (lens, tables), (num_seqs, tables.stride(0)))

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
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self.send(message, num_changes)
            return
        message.ticket = message.ticket % LAST_TICKET + 1
        numbers = num_changes, message.ticket
        if INTERPRETED or self.launch.kernel is None:
            self.launch.first((message.memory,), numbers, self.device.index)
        else:
            stream = driver.active.get_current_stream(self.device.index)
            self.launch.again([message.memory.data_ptr()], numbers, stream)
        self.ring.append(message)
