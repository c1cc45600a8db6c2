"""GGUF: the same model through a GGUF file and through a Hugging Face folder gives the same parameters."""

import json

import jax
import numpy as np
import pytest
import synthetic_checkpoints as synthetic

import convert
from convert.errors import ConversionWarning
from convert.gguf_source import halves_from_pairs, hf_name
from ddtree_jax.checkpoint import load_params
from ddtree_jax.models.abstract import abstract_params
from ddtree_jax.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf")

# Quantisation blocks are 32 wide, so these models are wider than the other synthetic ones.
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16
TEMPLATE = "{% for m in messages %}<|start|>{{ m['content'] }}{% endfor %}"
BYTES = [chr(b) for b in range(33, 127)] + ["Ġ", "Ċ"]
TOKENS = ["<|start|>", "<|end|>", *BYTES, "12", "Ġa", "ab"]
MERGES = ["1 2", "Ġ a", "a b"]


def tensors(dtype=np.float32, tied=False):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape, np.float32).astype(dtype)

    result = {"model.embed_tokens.weight": draw(len(TOKENS), HIDDEN), "model.norm.weight": draw(HIDDEN)}
    if not tied:
        result["lm_head.weight"] = draw(len(TOKENS), HIDDEN)
    for i in range(2):
        p = f"model.layers.{i}."
        result |= {
            p + "input_layernorm.weight": draw(HIDDEN),
            p + "post_attention_layernorm.weight": draw(HIDDEN),
            p + "self_attn.q_proj.weight": draw(HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.k_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.v_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.o_proj.weight": draw(HIDDEN, HEADS * HEAD_DIM),
            p + "mlp.gate_proj.weight": draw(INTERMEDIATE, HIDDEN),
            p + "mlp.up_proj.weight": draw(INTERMEDIATE, HIDDEN),
            p + "mlp.down_proj.weight": draw(HIDDEN, INTERMEDIATE),
        }
    return result


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name):
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, index, rest = stem.split(".", 3)
        return f"blk.{index}.{GGUF_NAMES[rest]}.weight"
    return f"{GGUF_NAMES[stem]}.weight"


def pairs_from_halves(rows, heads):
    """What llama.cpp does to query and key rows when it writes a file."""
    out = np.empty_like(rows)
    size = rows.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = rows[head * size + i]
            out[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return out


def write_gguf(path, weights, quantisation=None, **metadata):
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
    values = {
        "llama.context_length": 128, "llama.embedding_length": HIDDEN, "llama.block_count": 2,
        "llama.feed_forward_length": INTERMEDIATE, "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS, "llama.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
    }  # fmt: skip
    floats = {"llama.rope.freq_base": 5000.0, "llama.attention.layer_norm_rms_epsilon": 1e-5}
    strings = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.chat_template": TEMPLATE}
    for key, value in (values | floats | strings | metadata).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            add[type(value)](key, value)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    for name, tensor in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = pairs_from_halves(tensor, HEADS if "q_proj" in name else KV_HEADS)
        if quantisation is not None and tensor.ndim == 2:
            raw = gguf.quants.quantize(tensor, quantisation)
            writer.add_tensor(gguf_name(name) if name.endswith(".weight") else name, raw, raw_dtype=quantisation)
        else:
            writer.add_tensor(gguf_name(name) if name.endswith(".weight") else name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def from_gguf(tmp_path, file, **options):
    config = convert.convert_target(file, tmp_path / "from_gguf", **options)
    return config, load_params(tmp_path / "from_gguf", abstract_params(config))


def from_folder(tmp_path, weights, **options):
    config = synthetic.target_json(
        "llama", hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, head_dim=HEAD_DIM, vocab_size=len(TOKENS),
        eos_token_id=1, tie_word_embeddings="lm_head.weight" not in weights,
    )  # fmt: skip
    source = synthetic.write_folder(tmp_path / "hf", config, weights)
    config = convert.convert_target(source, tmp_path / "from_hf", **options)
    return config, load_params(tmp_path / "from_hf", abstract_params(config))


@pytest.mark.parametrize("stored", [np.float32, np.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_same_as_the_folder(tmp_path, stored, tied):
    weights = tensors(stored, tied)
    file = write_gguf(tmp_path / "model.gguf", weights)
    (ours, params), (expected, reference) = from_gguf(tmp_path, file), from_folder(tmp_path, weights)
    assert ours == expected  # the epsilon too: 1e-05, not its float32 neighbour
    jax.tree.map(np.testing.assert_array_equal, params, reference)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_quantised(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    weights = tensors()
    _, params = from_gguf(tmp_path, write_gguf(tmp_path / "model.gguf", weights, kind), dtype="float32")
    # Rows move whole, so quantising before the reordering of rows is quantising after it.
    rounded = {
        n: gguf.quants.dequantize(gguf.quants.quantize(t, kind), kind) if t.ndim == 2 else t for n, t in weights.items()
    }
    _, reference = from_folder(tmp_path, rounded, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, params, reference)
    assert np.abs(np.asarray(params["embed"]["weight"]) - weights["model.embed_tokens.weight"]).max() < 0.5


def test_tokenizer(tmp_path):
    from_gguf(tmp_path, write_gguf(tmp_path / "model.gguf", tensors()))
    tokenizer = Tokenizer.from_folder(tmp_path / "from_gguf")
    assert tokenizer.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}

    def pieces(text):
        return [TOKENS[i] for i in tokenizer.encode(text)]

    assert pieces("ab a") == ["ab", "Ġa"]
    assert pieces("12") == ["1", "2"]  # digits stand alone although "12" is a merge
    assert pieces("<|start|>a<|end|>") == ["<|start|>", "a", "<|end|>"]
    assert tokenizer.decode(tokenizer.encode("<|start|>ab 12\n")) == "ab 12\n"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}]) == "<|start|>a"


def test_other_pre_tokenizer_and_added_tokens(tmp_path):
    metadata = {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_bos_token": True}
    from_gguf(tmp_path, write_gguf(tmp_path / "model.gguf", tensors(), **metadata))
    tokenizer = Tokenizer.from_folder(tmp_path / "from_gguf")
    assert [TOKENS[i] for i in tokenizer.encode("12")] == ["<|start|>", "12"]


@pytest.mark.parametrize(
    ("metadata", "key", "expected", "found"),
    [
        ({"architecture": "gemma"}, "general.architecture", "'llama'", "'gemma'"),
        ({"llama.expert_count": 8}, "llama.expert_count", "nothing", "8"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window", "nothing", "4096"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count", "16", "8"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type", "'none' or 'linear'", "'yarn'"),
        ({"llama.attention.head_count_kv": 3}, "llama.attention.head_count_kv", "a divisor of 4", "3"),
        ({"llama.block_count": None}, "llama.block_count", "a value", "nothing"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model", "'gpt2'", "'llama'"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "tokenizer.ggml.pre", "'gpt-2' or 'smollm'", "'llama-bpe'"),
        ({"llama.block_count": 10**9}, "llama.block_count", "1..1024", "1000000000"),
        ({"tokenizer.ggml.eos_token_id": 999}, "tokenizer.ggml.eos_token_id", "0..", "999"),
        ({"llama.block_count": 3}, "model.layers.2.input_layernorm.weight", "a tensor", "no such tensor"),
        ({"llama.embedding_length": 128, "llama.rope.dimension_count": None}, "shape", "128)", "64)"),
    ],
)
def test_refusals(tmp_path, metadata, key, expected, found):
    file = write_gguf(tmp_path / "model.gguf", tensors(), **metadata)
    with pytest.raises(convert.ConversionError) as caught:
        convert.convert_target(file, tmp_path / "out")
    message = str(caught.value)
    for part in (str(file), key, ": expected ", expected, ", found ", found):
        assert part in message, message
    assert not (tmp_path / "out").exists()


def test_a_file_without_an_end_is_converted_with_a_warning(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", tensors(), **{"tokenizer.ggml.eos_token_id": None})
    with pytest.warns(ConversionWarning, match=r"model\.gguf: tokenizer\.ggml\.eos_token_id: .* at the limit only"):
        config = convert.convert_target(file, tmp_path / "out")
    assert config.stop_token_ids == ()


def test_unknown_tensor_keeps_its_name(tmp_path):
    weights = tensors() | {"rope_freqs.weights": np.ones(8, np.float32)}
    file = write_gguf(tmp_path / "model.gguf", weights)
    with pytest.raises(convert.ConversionError, match=r"rope_freqs\.weights: expected no such tensor"):
        convert.convert_target(file, tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all" * 10])
def test_damaged_file(tmp_path, content):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(convert.ConversionError, match=r"model\.gguf: cannot be read as GGUF"):
        convert.convert_target(file, tmp_path / "out")


def test_truncated_file(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", tensors())
    data = file.read_bytes()
    for keep in (len(data) // 2, len(data) - 8):
        file.write_bytes(data[:keep])
        with pytest.raises(convert.ConversionError, match=r"model\.gguf: cannot be read as GGUF"):
            convert.convert_target(file, tmp_path / "out")


def test_row_order():
    rows = np.arange(2 * HEADS * HEAD_DIM).reshape(-1, 2)
    np.testing.assert_array_equal(halves_from_pairs(pairs_from_halves(rows, HEADS), HEADS), rows)
    np.testing.assert_array_equal(halves_from_pairs(np.arange(4), 1), [0, 2, 1, 3])


def test_names():
    assert hf_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert hf_name("blk.0.attn_q.bias") == "model.layers.0.self_attn.q_proj.bias"
    assert hf_name("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"


def test_config_json_is_complete(tmp_path):
    config, _ = from_gguf(tmp_path, write_gguf(tmp_path / "model.gguf", tensors()))
    description = json.loads((tmp_path / "from_gguf" / "config.json").read_text())
    assert description["source"] == "model.gguf"
    assert description["config"]["stop_token_ids"] == [1] == list(config.stop_token_ids)
