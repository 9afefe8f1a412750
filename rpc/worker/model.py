"""A Hugging Face decoder whose attention reads and writes the shared pool.

The model runs unchanged, through transformers' `AttentionInterface` (see `paged_attention.py`). One batch row holds the
new tokens of all sequences one after the other.

On the CPU a token's result does not depend on what shares its step: everything is float32, attention goes sequence by
sequence, and matrix products get at least `min_rows` rows, from which on the library sums each row in the same order
whatever their number (measured at the start, see `rows_for_stable_sums`). That is what makes output with sharing
equal to output without. On a GPU sums depend on the shapes of a step: float32 outputs agree but for ties, bfloat16
leaves more of them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.utils import logging as transformers_logging

from radixpool.kernels import AttentionSpec, ForestPlan, plan_forest
from radixpool.kernels.spec import Backend
from radixpool.rpc.errors import PoolMismatch
from radixpool.rpc.generation import SamplingParams
from radixpool.rpc.pool.device import Device
from radixpool.rpc.pool.geometry import require_equal
from radixpool.rpc.pool.tensors import KvPool
from radixpool.rpc.worker.errors import DeviceLost, OutOfMemory
from radixpool.rpc.worker.graphs import MAX_WHOLE_ROWS, GraphedSteps
from radixpool.rpc.worker.model_source import ModelSource, ModelUnavailable
from radixpool.rpc.worker.paged_attention import ATTENTION, AttentionStep, PagedStep
from radixpool.rpc.worker.pieces import GraphedPieces
from radixpool.rpc.worker.sampling import TokenSampler
from radixpool.rpc.worker.step import Sampler, StepBatch, idle_batch
from radixpool.rpc.worker.step_tensors import (
    POSITIONS,
    SAMPLE_ROWS,
    SLOTS,
    TOKEN_IDS,
    pack_inputs,
    padded_tables,
)

log = logging.getLogger(__name__)

_INTERPRETED = ("triton", "cpu")
_ROW_CANDIDATES = (1, 2, 4, 8, 16, 32)
_PROBE_ROWS = 64
_LAUNCH_BOUND = 1.3
"""A step that takes at most so many times as long as one of a single token is still bound by its launches."""
_TIMED_STEPS = 3
_SHOWN_KEYS = 3


class ModelRunner:
    """Run one model over one pool; a `Runner`. Owned by one thread.

    `backend` overrides which kernels attend (`None`: torch on the CPU, Triton on a GPU).
    """

    def __init__(self, model: Any, pool: KvPool, *, backend: Backend | None = None) -> None:
        config = model.config
        self._model = model
        self._device = next(model.parameters()).device
        self._dtype: torch.dtype = model.dtype
        self._min_rows = rows_for_stable_sums(model)
        self._num_q_heads = config.num_attention_heads
        self._context_tokens: int = config.max_position_embeddings
        self._backend = backend
        self._spec = pool.spec
        self._graphed_rows = 0
        self._graphs: GraphedSteps | None = None
        self._pieces: GraphedPieces | None = None
        if self._device.type == "cuda":
            fuse_norms(model)
        self.use_pool(pool)

    @property
    def min_rows(self) -> int:
        """Return the number of rows that smaller steps are padded to."""
        return self._min_rows

    def use_pool(self, pool: KvPool) -> None:
        """Read and write `pool` from the next step on. Raises `PoolMismatch` unless it is shaped like the first one."""
        require_equal(self._spec, pool.spec)
        self._pool = pool
        self._plan: ForestPlan | None = None
        self._attention = AttentionSpec(
            num_q_heads=self._num_q_heads,
            num_kv_heads=pool.spec.num_kv_heads,
            head_dim=pool.spec.head_dim,
            block_size=pool.spec.block_size,
            q_dtype=self._dtype,
            kv_dtype=pool.k[0].dtype,
            device=self._device,
            backend=self._backend,
        )
        kernels = (self._attention.backend, self._device.type)
        if kernels == _INTERPRETED and self._attention.kv_dtype is torch.float8_e4m3fn:
            raise PoolMismatch(
                "dtype: Triton's interpreter rounds to fp8 wrongly (it loses the carry into the exponent); "
                "use --attention torch on the CPU"
            )
        self._graphs = self._pieces = None  # the former ones read and write the former pool
        if self._graphed_rows:
            self.capture_graphs(self._graphed_rows)

    def capture_graphs(self, max_rows: int) -> None:
        """Run steps of up to `max_rows` tokens as CUDA graphs from now on. Seconds; with Triton kernels on a GPU only.

        Steps of up to 256 tokens as a whole, longer ones in pieces. A model whose forward pass cannot be captured, or
        whose pieces do not fit into memory, runs without, which the log says.
        """
        if self._attention.backend != "triton" or self._device.type != "cuda":
            raise ValueError(f"graphs need Triton kernels on a GPU, got {self._attention.backend} on {self._device}")
        self._graphed_rows = max_rows
        try:
            with torch.inference_mode():
                self._graphs = GraphedSteps(
                    self._compute,
                    self._attention,
                    self._pool,
                    max_rows=min(max_rows, MAX_WHOLE_ROWS),
                    max_blocks=-(-self._context_tokens // self._spec.block_size),
                )
                if max_rows > MAX_WHOLE_ROWS:
                    self._pieces = GraphedPieces(
                        self._hidden, self._attention, self._pool, min_rows=MAX_WHOLE_ROWS + 1, max_rows=max_rows
                    )
        except RuntimeError as error:
            if self._graphs is None and isinstance(error, torch.OutOfMemoryError):
                raise OutOfMemory(f"no memory for CUDA graphs: {error}") from error
            self._wait_for_device()
            which = "no CUDA graphs" if self._graphs is None else f"CUDA graphs up to {MAX_WHOLE_ROWS} tokens only"
            log.warning("%s, steps will be slower: %s", which, error)

    def launch_bound_tokens(self, limit: int) -> int:
        """Return how many tokens a step may have, up to `limit`, before it computes longer than the host launches it.

        Measured on steps without graphs that write nothing. Less than a second for a small model.
        """
        bound, allowed_s = MAX_WHOLE_ROWS, _LAUNCH_BOUND * self._step_time_s(1)
        while bound < limit:
            longer = min(2 * bound, limit)
            if self._step_time_s(longer) > allowed_s:
                break
            bound = longer
        return min(bound, limit)

    def _step_time_s(self, num_tokens: int) -> float:
        batch, times = idle_batch(1, num_tokens, self._spec.block_size), []
        for _ in range(1 + _TIMED_STEPS):  # the first may compile
            start = time.perf_counter()
            self.forward(batch)
            times.append(time.perf_counter() - start)
        return min(times[1:])

    def warm_up(self, num_tokens: int) -> None:
        """Run steps of up to `num_tokens` tokens that write nothing, so that no request waits for a compiler."""
        for num_seqs in (1, 8):
            self.forward(idle_batch(num_seqs, max(num_tokens // num_seqs, 1), self._spec.block_size))

    def sampler(self, sampling: SamplingParams) -> TokenSampler:
        """Return fresh sampling state for one request."""
        return TokenSampler(sampling)

    def forward(self, batch: StepBatch) -> list[int]:
        """Run one step; see `Runner.forward`. It is over when this returns or raises, on the device too."""
        try:
            with torch.inference_mode():
                return _sample(self._logits(batch), batch.samplers)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(str(error)) from error
        except RuntimeError as error:
            if "can't allocate memory" in str(error):  # what torch's CPU allocator says
                raise OutOfMemory(str(error)) from error
            raise
        finally:
            self._wait_for_device()

    def _logits(self, batch: StepBatch) -> torch.Tensor:
        """Return logits `[R, vocab_size]`."""
        if self._graphs is not None and self._graphs.holds(batch):
            return self._graphs.logits(batch)
        if self._pieces is not None and self._pieces.holds(batch.num_tokens):
            return self._logits_by_pieces(batch, self._pieces)
        packed = pack_inputs(batch, max(batch.num_tokens, self._min_rows))
        inputs = torch.from_numpy(packed).to(self._device)
        step = PagedStep(self._pool, self._planned(batch), inputs[SLOTS])
        wanted = len(batch.sample_rows)
        return self._compute(inputs, max(wanted, self._min_rows), step)[:wanted]

    def _logits_by_pieces(self, batch: StepBatch, pieces: GraphedPieces) -> torch.Tensor:
        packed = pack_inputs(batch, pieces.rows_for(batch.num_tokens))
        step = PagedStep(self._pool, self._planned(batch), pieces.inputs[SLOTS, : batch.num_tokens])
        hidden = pieces.hidden(torch.from_numpy(packed), step)
        logits: torch.Tensor = self._model.lm_head(hidden[pieces.inputs[SAMPLE_ROWS, : len(batch.sample_rows)]])
        return logits

    def _compute(self, inputs: torch.Tensor, num_sampled: int, step: AttentionStep) -> torch.Tensor:
        """Return the logits of the first `num_sampled` sample rows."""
        logits: torch.Tensor = self._model.lm_head(self._hidden(inputs, step)[inputs[SAMPLE_ROWS, :num_sampled]])
        return logits

    def _hidden(self, inputs: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Return the last hidden states `[rows, hidden_size]`."""
        hidden: torch.Tensor = self._model.model(
            input_ids=inputs[TOKEN_IDS][None],
            position_ids=inputs[POSITIONS][None],
            use_cache=False,
            paged_step=step,
        ).last_hidden_state[0]
        return hidden

    def _planned(self, batch: StepBatch) -> ForestPlan:
        """Return the plan of this step: that of the last one, moved on."""
        tables = padded_tables(batch, self._spec.block_size)
        if self._plan is None:
            self._plan = plan_forest(tables, batch.context_lens, batch.query_lens, spec=self._attention)
        else:
            self._plan.update(tables, batch.context_lens, batch.query_lens)
        return self._plan

    def _wait_for_device(self) -> None:
        """Return when the device has done what it was given: no KV is written or read after a step is reported as over.

        Raises `DeviceLost` when it cannot go on.
        """
        if self._device.type != "cuda":
            return
        try:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(self._device))
            done.synchronize()
        except RuntimeError as error:
            raise DeviceLost(f"{self._device} has failed: {error}") from error


def computed_in(pool_dtype: torch.dtype, device: Device) -> torch.dtype:
    """Return the element type that a model computes in: float32 on the CPU, the pool's on a GPU, for fp8 bfloat16."""
    if not device.is_cuda:
        return torch.float32
    return torch.bfloat16 if pool_dtype is torch.float8_e4m3fn else pool_dtype


def load_model(source: ModelSource, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Load the weights of `source` for `ModelRunner`. Raises `ModelUnavailable` naming what is wrong with them."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"gguf_file": source.gguf_file} if source.gguf_file else {"use_safetensors": True}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars, which a service's log should not hold
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.directory,
                dtype=dtype,
                attn_implementation=ATTENTION,
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


def fuse_norms(model: Any) -> None:
    """Let each RMSNorm be one kernel instead of six: the same sums in float32, rounded once instead of twice."""
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = functools.partial(_rms_norm, module)  # type: ignore[method-assign]


def _rms_norm(norm: LlamaRMSNorm, hidden: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), norm.weight, norm.variance_epsilon)


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
    return best if sampler.greedy else sampler.sample(logits.float())
