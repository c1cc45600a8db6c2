"""Every refusal names the file, the key, the expected and the found, and leaves nothing behind."""

import json
import re
import struct

import ml_dtypes
import numpy as np
import pytest
import synthetic_checkpoints as synthetic
from safetensors.numpy import load_file, save_file

import convert
from convert.safetensors_source import INDEX


@pytest.fixture
def source(tmp_path):
    config = synthetic.target_json("qwen3")
    return synthetic.write_folder(tmp_path / "source", config, synthetic.target_tensors(config))


@pytest.fixture
def sharded(tmp_path):
    config = synthetic.target_json("llama")
    return synthetic.write_folder(tmp_path / "source", config, synthetic.target_tensors(config), shards=2)


def refused(source, *parts, **options):
    """Asserts that the conversion fails with one line that holds `parts`, and that it leaves no trace."""
    out = source.parent / "out"
    before = sorted(source.parent.iterdir())
    with pytest.raises(ValueError) as caught:
        convert.convert_target(source, out, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message, message
    assert sorted(source.parent.iterdir()) == before


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(folder, change, file="model.safetensors"):
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


@pytest.mark.parametrize(
    ("changes", "key", "expected", "found"),
    [
        ({"model_type": "mistral"}, "model_type", "'llama' or 'qwen2' or 'qwen3'", "'mistral'"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "architectures", "Qwen3ForCausalLM", "Classification"),
        ({"architectures": ["DFlashDraftModel"]}, "architectures", "Qwen3ForCausalLM", "convert drafter"),
        ({"hidden_act": "gelu"}, "hidden_act", "'silu'", "'gelu'"),
        ({"mlp_bias": True}, "mlp_bias", "False", "True"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config", "none", "'awq'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "a divisor of 4", "3"),
        ({"num_key_value_heads": None}, "num_key_value_heads", "an integer of 1 or more", "null"),
        ({"head_dim": 7}, "head_dim", "an even number", "7"),
        ({"hidden_size": "16"}, "hidden_size", "an integer of 1 or more", "'16'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", "at most 1024", "1000000000"),
        ({"vocab_size": 0}, "vocab_size", "an integer of 1 or more", "0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings", "true or false", "1"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps", "a finite number", "'tiny'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps", "a finite number", "nan"),
        ({"eos_token_id": 40}, "eos_token_id", "0..39", "40"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype", "'bfloat16'", "'float8_e4m3fn'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type", "'yarn'", "'dynamic'"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_scaling.type", "'default'", "'mrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "a number", "nothing"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "x": 1}}, "rope_scaling.x", "rope kind 'linear'", "1"),
        ({"rope_parameters": {"rope_theta": 7.0}}, "rope_theta", "one value", "5000.0 here and 7.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "1", "0.5"),
        ({"layer_types": ["full_attention"]}, "layer_types", "a list of 2", "['full_attention']"),
        ({"layer_types": ["full_attention", "linear"]}, "layer_types[1]", "sliding_attention", "'linear'"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window", "an integer", "nothing"),
    ],
)
def test_config(source, changes, key, expected, found):
    edit_config(source, **changes)
    refused(source, source / "config.json", f": {key}: expected", expected, ", found ", found)


def test_llama_has_no_window(sharded):
    edit_config(sharded, sliding_window=4096)
    refused(sharded, "config.json: sliding_window: expected None, found 4096")


NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"


def _poison(value):
    def change(tensors):
        tensors[QUERY][3, 2] = value

    return change


@pytest.mark.parametrize(
    ("change", "key", "expected", "found"),
    [
        (lambda t: t.pop(QUERY), QUERY, "a tensor of shape (32, 16)", "no such tensor"),
        (lambda t: t.update(extra=np.ones(3, np.float32)), "extra", "no such tensor", "one of shape (3,)"),
        (lambda t: t.update({QUERY: t[QUERY].T.copy()}), f"{QUERY}: shape", "(32, 16)", "(16, 32)"),
        (lambda t: t.update({QUERY: t[QUERY][:-8].copy()}), f"{QUERY}: shape", "(32, 16)", "(24, 16)"),
        (_poison(np.nan), QUERY, "finite values", "nan at [3, 2]"),
        (_poison(-np.inf), QUERY, "finite values", "-inf at [3, 2]"),
        (lambda t: t.update({NORM: np.ones(16, np.int8)}), f"{NORM}: dtype", "BF16 or F16", "I8"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight", "a tensor of shape (40, 16)", "no such tensor"),
    ],
)
def test_tensors(source, change, key, expected, found):
    edit_tensors(source, change)
    refused(source, source, f": {key}: expected {expected}", f"found {found}")


def test_a_head_of_a_tied_model_must_have_its_shape(source):
    edit_config(source, tie_word_embeddings=True)
    edit_tensors(source, lambda t: t.update({"lm_head.weight": np.ones((39, 16), ml_dtypes.bfloat16)}))
    refused(source, "lm_head.weight: shape: expected (40, 16), found (39, 16)")


def test_overflow_of_the_asked_dtype(source):
    edit_tensors(source, _poison(1e30))
    refused(source, QUERY, "values that float16 can hold", "1e+30", dtype="float16")


def test_index_that_names_a_missing_file(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    refused(sharded, INDEX, "the file model-00002-of-00002.safetensors", "found no such file")


def test_index_that_leads_out_of_the_folder(sharded):
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"a": "../source/model.safetensors"}}))
    refused(sharded, "weight_map.a", "a file name", "'../source/model.safetensors'")


def test_index_and_headers_disagree(sharded):
    index = json.loads((sharded / INDEX).read_text())
    here = index["weight_map"][NORM]
    there = next(f for f in index["weight_map"].values() if f != here)
    (sharded / INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], NORM: there}}))
    refused(sharded, INDEX, NORM, here, there)


def test_tensor_in_two_files(sharded):
    first = sharded / "model-00001-of-00002.safetensors"
    name, tensor = next(iter(load_file(first).items()))
    edit_tensors(sharded, lambda t: t.update({name: tensor}), "model-00002-of-00002.safetensors")
    refused(sharded, name, "each tensor in one file", "model-00001-of-00002.safetensors")


@pytest.mark.parametrize("keep", [4, 100, -40])
def test_truncated_file(source, keep):
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(source, file, "expected", "found")


def test_not_a_safetensors_file(source):
    (source / "model.safetensors").write_bytes(struct.pack("<Q", 3) + b"{]}")
    refused(source, "model.safetensors: header: cannot be read")


def test_size_that_contradicts_the_shape(source):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}}).encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    refused(source, "model.safetensors: a: expected 16 bytes", "found 12")


def test_no_weights(source):
    (source / "model.safetensors").unlink()
    refused(source, source, "*.safetensors: expected at least one file, found none")


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_no_config(source, content):
    (source / "config.json").unlink()
    if content is not None:
        (source / "config.json").write_text(content)
    refused(source, source / "config.json")


def test_no_tokenizer(source):
    (source / "tokenizer.json").unlink()
    refused(source, source / "tokenizer.json", "expected a tokenizer", "found none")


def test_damaged_tokenizer(source):
    (source / "tokenizer.json").write_text("{}")
    refused(source, source / "tokenizer.json", "cannot be read as a tokenizer")


@pytest.mark.parametrize(
    "content,part",
    [(b"{", "not JSON"), (b'{"chat_template": "{% for %}"}', "chat template is not valid"), (b"\xff", "tokenizer")],
)
def test_tokenizer_config_that_could_not_be_loaded(source, content, part):
    (source / "tokenizer_config.json").write_bytes(content)
    refused(source, source, part)


def test_tokenizer_larger_than_the_embedding(source):
    (source / "tokenizer.json").write_text(synthetic.tokenizer_json(41))
    refused(source, "tokenizer.json: highest token id: expected below the 40 rows", "found 40")


@pytest.mark.parametrize("name", ["nothing-here", "./owner/name", "/no/such/place", "a/b/c"])
def test_source_that_is_not_there(tmp_path, name):
    with pytest.raises(convert.ConversionError, match=rf"{re.escape(name)}: expected a folder.*found nothing"):
        convert.convert_target(name, tmp_path / "out")


def test_source_of_another_kind(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(convert.ConversionError, match=r"expected a folder or a \.gguf file, found \.bin"):
        convert.convert_target(tmp_path / "model.bin", tmp_path / "out")


def test_unknown_dtype(source):
    refused(source, "dtype: expected bfloat16 or float32 or float16, found 'int8'", dtype="int8")


def test_out_is_taken(source):
    out = source.parent / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"out: (already exists|will not be overwritten)"):
            convert.convert_target(source, out, overwrite=overwrite)
    assert (out / "thesis.txt").read_text() == "years of work"


def test_source_is_never_overwritten(source):
    with pytest.raises(ValueError, match="will not be overwritten"):
        convert.convert_target(source, source, overwrite=True)
    assert (source / "model.safetensors").exists()
