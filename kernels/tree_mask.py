"""Masks of draft trees: which of its sequence's new tokens each query token sees.

The new tokens of a sequence (at most 64) are the nodes of a tree, or of any other order in which a node sees earlier
ones only. One int64 a row holds bit `j` for query token `j` of the same sequence, the row's own bit included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_TREE_NODES = 64


@dataclass(frozen=True, slots=True)
class TreeMask:
    """`nodes` int64 `[num_rows]`, in the order of the plan's rows. Made once per step and shared by all layers."""

    nodes: Tensor
    _by_window: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.nodes.ndim != 1:
            raise ValueError(f"nodes: expected shape [num_rows], got {tuple(self.nodes.shape)}")
        if self.nodes.dtype != torch.int64:
            raise TypeError(f"nodes: expected dtype torch.int64, got {self.nodes.dtype}")

    @classmethod
    def from_parents(cls, parents: Sequence[Sequence[int]], *, device: torch.device | str = "cpu") -> TreeMask:
        """Build the mask from each sequence's parents: `parents[i][j] < j` is node `j`'s parent, -1 for a root.

        A node sees its ancestors and itself. A chain is `[-1, 0, 1, ...]`, which masks nothing beyond causality.

        >>> TreeMask.from_parents([[-1, 0, 0]]).nodes.tolist()
        [1, 3, 5]
        """
        rows: list[int] = []
        for i, tree in enumerate(parents):
            if len(tree) > MAX_TREE_NODES:
                raise ValueError(f"parents[{i}]: expected at most {MAX_TREE_NODES} nodes, got {len(tree)}")
            seen: list[int] = []
            for j, parent in enumerate(tree):
                if not -1 <= parent < j:
                    raise ValueError(f"parents[{i}][{j}]: expected -1 to {j - 1}, got {parent}")
                seen.append((seen[parent] if parent >= 0 else 0) | 1 << j)
            rows += seen
        signed = [row - 2**64 if row >= 2**63 else row for row in rows]
        return cls(torch.tensor(signed, dtype=torch.int64, device=device))

    def bits(self) -> Tensor:
        """Return bool `[num_rows, 64]`."""
        return (self.nodes[:, None] >> torch.arange(MAX_TREE_NODES, device=self.nodes.device)) & 1 != 0

    def within(self, window: int) -> tuple[Tensor, Tensor]:
        """Return int64 nodes and int32 depths `[num_rows]`; with a window, of each row's last `window` nodes only.

        A node's place for the window is its depth, the number of nodes on its path, not its index: siblings are at
        equal distance from what both follow. Kept, so that only the first layer of a step computes it.
        """
        if window not in self._by_window:
            bits = self.bits()
            depths = bits.sum(1, dtype=torch.int32)
            nodes = self.nodes
            if window:
                later = bits.flip(1).cumsum(1).flip(1)
                places = torch.arange(MAX_TREE_NODES, device=nodes.device)
                nodes = ((bits & (later <= window)).to(torch.int64) << places).sum(1)
            self._by_window[window] = nodes, depths
        return self._by_window[window]
