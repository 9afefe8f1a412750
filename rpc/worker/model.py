"""A Hugging Face decoder whose attention reads and writes the shared pool.

The model runs unchanged, through transformers' `AttentionInterface`: it hands over rotated Q and K and the V of the new
tokens, and this module writes K and V to their slots and attends over the block tables. One batch row holds the new
tokens of all sequences one after the other.

On the CPU a token's result does not depend on what shares its step: everything is float32, attention goes sequence by
sequence, and matrix products get at least `min_rows` rows, from which on the library sums each row in the same order
whatever their number (measured at the start, see `rows_for_stable_sums`). That is what makes output with sharing
equal to output without.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from radixpool.kernels import AttentionSpec, ForestPlan, extend, plan_forest, write_kv
from radixpool.rpc.generation import SamplingParams
from radixpool.rpc.pool.geometry import require_equal
from radixpool.rpc.pool.tensors import KvPool
from radixpool.rpc.worker.errors import OutOfMemory
from radixpool.rpc.worker.model_source import ModelSource, ModelUnavailable
from radixpool.rpc.worker.sampling import TokenSampler
from radixpool.rpc.worker.step import NO_SLOT, Sampler, StepBatch

_ATTENTION = "radixpool_paged"
_ROW_CANDIDATES = (1, 2, 4, 8, 16, 32)
_PROBE_ROWS = 64
_SHOWN_KEYS = 3


class PagedStep:
    """What every layer of one forward pass needs: where new KV goes, and the plan of the attention."""

    __slots__ = ("plan", "pool", "slots")

    def __init__(self, pool: KvPool, plan: ForestPlan, slots: torch.Tensor) -> None:
        self.pool = pool
        self.plan = plan
        self.slots = slots


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged_step: PagedStep,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Write this layer's KV and attend; query `[1, H, T, D]`, key and value `[1, KVH, T, D]`, out `[1, T, H, D]`."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    k_pool, v_pool = paged_step.pool.k[layer], paged_step.pool.v[layer]
    k, v, q = (tensor[0].transpose(0, 1).contiguous() for tensor in (key, value, query))
    write_kv(k.to(k_pool.dtype), v.to(v_pool.dtype), k_pool, v_pool, paged_step.slots)
    planned = paged_step.plan.num_rows  # rows beyond it are padding
    out = torch.zeros_like(q)
    out[:planned] = extend(q[:planned], k_pool, v_pool, paged_step.plan, scale=scaling)
    return out[None], None


AttentionInterface.register(_ATTENTION, paged_attention)
AttentionMaskInterface.register(_ATTENTION, lambda *_args, **_kwargs: None)


class ModelRunner:
    """Run one model over one pool; a `Runner`. Owned by one thread."""

    def __init__(self, model: Any, pool: KvPool) -> None:
        config = model.config
        self._model = model
        self._device = next(model.parameters()).device
        self._dtype: torch.dtype = model.dtype
        self._min_rows = rows_for_stable_sums(model)
        self._num_q_heads = config.num_attention_heads
        self._spec = pool.spec
        self.use_pool(pool)

    @property
    def min_rows(self) -> int:
        """Return the number of rows that smaller steps are padded to."""
        return self._min_rows

    def use_pool(self, pool: KvPool) -> None:
        """Read and write `pool` from the next step on. Raises `PoolMismatch` unless it is shaped like the first one."""
        require_equal(self._spec, pool.spec)
        self._pool = pool
        self._attention = AttentionSpec(
            num_q_heads=self._num_q_heads,
            num_kv_heads=pool.spec.num_kv_heads,
            head_dim=pool.spec.head_dim,
            block_size=pool.spec.block_size,
            q_dtype=self._dtype,
            kv_dtype=pool.k[0].dtype,
            device=self._device,
        )

    def sampler(self, sampling: SamplingParams) -> TokenSampler:
        """Return fresh sampling state for one request."""
        return TokenSampler(sampling)

    def forward(self, batch: StepBatch) -> list[int]:
        """Run one step; see `Runner.forward`."""
        try:
            with torch.inference_mode():
                return _sample(self._logits(batch), batch.samplers)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(str(error)) from error
        except RuntimeError as error:
            if "can't allocate memory" in str(error):  # what torch's CPU allocator says
                raise OutOfMemory(str(error)) from error
            raise

    def _logits(self, batch: StepBatch) -> torch.Tensor:
        """Return float32 logits `[R, vocab_size]`."""
        step = self._paged_step(batch)
        hidden = self._model.model(
            input_ids=self._padded(batch.token_ids, 0)[None],
            position_ids=self._padded(batch.positions, 0)[None],
            use_cache=False,
            paged_step=step,
        ).last_hidden_state[0]
        wanted = hidden[self._padded(batch.sample_rows, 0)]
        logits: torch.Tensor = self._model.lm_head(wanted)[: len(batch.sample_rows)]
        return logits.float()

    def _paged_step(self, batch: StepBatch) -> PagedStep:
        tables = np.zeros((len(batch.block_tables), max(map(len, batch.block_tables))), np.int32)
        for row, table in zip(tables, batch.block_tables, strict=True):
            row[: len(table)] = table
        plan = plan_forest(tables, batch.context_lens, batch.query_lens, spec=self._attention)
        return PagedStep(self._pool, plan, self._padded(batch.slot_mapping, NO_SLOT))

    def _padded(self, values: np.ndarray[Any, np.dtype[np.int64]], fill: int) -> torch.Tensor:
        missing = max(self._min_rows - len(values), 0)
        return torch.from_numpy(np.pad(values, (0, missing), constant_values=fill)).to(self._device)


def load_model(source: ModelSource, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Load the weights of `source` for `ModelRunner`. Raises `ModelUnavailable` naming what is wrong with them."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"gguf_file": source.gguf_file} if source.gguf_file else {"use_safetensors": True}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars, which a service's log should not hold
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.directory,
                dtype=dtype,
                attn_implementation=_ATTENTION,
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelUnavailable(f"model {source.name}: cannot be loaded from {source.directory}: {error}") from error
    model, loading = loaded
    if loading["missing_keys"]:  # transformers would go on with random weights
        missing = ", ".join(sorted(loading["missing_keys"])[:_SHOWN_KEYS])
        raise ModelUnavailable(f"model {source.name}: {len(loading['missing_keys'])} weights are missing: {missing}")
    return model.eval().to(device)


def end_of_sequence_ids(model: Any) -> frozenset[int]:
    """Return the token ids after which the model has nothing more to say."""
    ids: set[int] = set()
    for config in (model.generation_config, model.config):
        value = config.eos_token_id
        ids.update([value] if isinstance(value, int) else value or [])
    return frozenset(ids)


def rows_for_stable_sums(model: Any) -> int:
    """Return from how many rows on a matrix product gives each row the same bits, whatever their number.

    BLAS libraries take another path, with another order of summation, for very few rows (MKL on AVX-512: fewer than 4).
    Tried out on the model's own matrices; the largest candidate when none is stable. 1 on other devices than the CPU.
    """
    linears = {tuple(module.weight.shape): module for module in model.modules() if isinstance(module, torch.nn.Linear)}
    if next(model.parameters()).device.type != "cpu":
        return 1
    with torch.inference_mode():
        return max(map(_stable_rows, linears.values()), default=1)


def _stable_rows(linear: torch.nn.Linear) -> int:
    probe = torch.sin(torch.arange(_PROBE_ROWS * linear.in_features, dtype=torch.float32))
    rows = probe.view(_PROBE_ROWS, linear.in_features).to(linear.weight.dtype)
    expected = linear(rows)
    unstable = [n for n in range(1, _ROW_CANDIDATES[-1]) if not torch.equal(linear(rows[:n]), expected[:n])]
    first_stable = max(unstable, default=0) + 1
    return min(n for n in _ROW_CANDIDATES if n >= first_stable)


def _sample(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    greedy = logits.argmax(-1).tolist()
    return [_next(row, best, sampler) for row, best, sampler in zip(logits, greedy, samplers, strict=True)]


def _next(logits: torch.Tensor, best: int, sampler: Sampler) -> int:
    assert isinstance(sampler, TokenSampler)
    return best if sampler.greedy else sampler.sample(logits)
