"""What a block's prefill costs: FLOPs grow with its depth, because its tokens attend to all before them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixpool.rpc.bench.trace import Trace


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """A decoder's prefill cost; the defaults are a Llama-3-8B.

    Attributes:
        parameters: weights that every token passes.
        num_layers: decoder layers.
        hidden_size: query width, i.e. query heads times head dim.
        tokens_per_s: prefill speed for the time to first token, queueing left out.

    """

    parameters: float = 8.0e9
    num_layers: int = 32
    hidden_size: int = 4096
    tokens_per_s: float = 20_000.0

    @property
    def cost_doubles_at_tokens(self) -> float:
        """Return the depth at which a token costs twice what it costs at the root; O(1)."""
        return self.parameters / (2.0 * self.num_layers * self.hidden_size)

    def flops(self, first: npt.ArrayLike, last: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the FLOPs to prefill tokens first..last-1 of a prompt whose first `first` tokens are cached; O(1).

        2 FLOPs a weight and token, and 4 x hidden size a layer for each pair of a token and one not after it.

        >>> float(PrefillModel(parameters=1.0, num_layers=1, hidden_size=1).flops(0, 2))
        16.0
        """
        a, b = np.asarray(first, dtype=float), np.asarray(last, dtype=float)
        pairs = (b * (b + 1.0) - a * (a + 1.0)) / 2.0
        linear, attention = 2.0 * self.parameters, 4.0 * self.num_layers * self.hidden_size
        return np.asarray(linear * (b - a) + attention * pairs, dtype=np.float64)


def hit_tokens(trace: Trace, hits: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return the prompt tokens that each request's hit blocks cover; the last block may be partial. O(n)."""
    return np.minimum(hits.astype(np.int64) * trace.block_size, trace.input_tokens)
