"""Choose the next token from logits: temperature, top-k and top-p, each request with its own random stream."""

from __future__ import annotations

import torch

from radixpool.rpc.generation import SamplingParams


class TokenSampler:
    """Sampling state of one request.

    With a seed the tokens depend on the logits and the seed alone: not on the batch, the worker, or a preemption.
    """

    __slots__ = ("_generator", "_params")

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()  # on the CPU, so that one seed means one stream on every device
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed % 2**63)
            for _ in range(params.skip_draws):
                self._draw()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self._params.temperature == 0

    def sample(self, logits: torch.Tensor) -> int:
        """Return a token drawn from float32 `logits` `[vocab_size]`; advances the random stream by one. O(V log V)."""
        probabilities, tokens = candidates(logits.cpu(), self._params)
        cumulative = probabilities.cumsum(0)
        point = self._draw() * cumulative[-1]
        index = int(torch.searchsorted(cumulative, point, right=True).clamp(max=len(tokens) - 1))
        return int(tokens[index])

    def _draw(self) -> torch.Tensor:
        return torch.rand((), generator=self._generator)


def candidates(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that may be drawn, most likely first, and their probabilities (not normalised after the cut).

    top_k keeps the k most likely tokens, then top_p the fewest of those whose probability reaches p.
    """
    # The largest becomes 0: divided by a tiny temperature it would be infinite, and the softmax not a number.
    scores, tokens = ((logits - logits.max()) / params.temperature).sort(descending=True, stable=True)
    if params.top_k:
        scores, tokens = scores[: params.top_k], tokens[: params.top_k]
    probabilities = scores.softmax(0)
    if params.top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        keep = max(int((before < params.top_p).sum()), 1)
        probabilities, tokens = probabilities[:keep], tokens[:keep]
    return probabilities, tokens
