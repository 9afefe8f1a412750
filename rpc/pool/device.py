"""Where a pool lies and a model runs: the CPU, or one GPU. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """The CPU, or the GPU with this number among those that the process sees (CUDA_VISIBLE_DEVICES).

    >>> str(Device.parse("cuda")), Device.parse("cpu").is_cuda
    ('cuda:0', False)
    """

    cuda_index: int | None = None

    @classmethod
    def parse(cls, text: str) -> Device:
        """Return the device that `cpu`, `cuda` or `cuda:N` names. Raises ValueError."""
        kind, colon, number = text.partition(":")
        if text == "cpu":
            return cls()
        if kind == "cuda" and (not colon or (number.isascii() and number.isdecimal())):
            return cls(int(number or 0))
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {text!r}")

    @property
    def is_cuda(self) -> bool:
        """Whether this is a GPU."""
        return self.cuda_index is not None

    def __str__(self) -> str:
        return "cpu" if self.cuda_index is None else f"cuda:{self.cuda_index}"


CPU = Device()
