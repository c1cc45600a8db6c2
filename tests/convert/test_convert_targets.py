"""Targets from Hugging Face folders: every row lands where the Flax tree wants it."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import synthetic_checkpoints as synthetic

import convert
from convert.names import parameters
from ddtree_jax.checkpoint import load_config, load_params
from ddtree_jax.config import RopeConfig, TargetConfig
from ddtree_jax.models.abstract import abstract_params
from ddtree_jax.tokenizer import Tokenizer


def convert_and_load(tmp_path, config, tensors, *, shards=1, **options):
    source = synthetic.write_folder(tmp_path / "source", config, tensors, shards=shards)
    result = convert.convert_target(source, tmp_path / "out", **options)
    assert load_config(tmp_path / "out", "target") == result
    return result, load_params(tmp_path / "out", abstract_params(result))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_tensors_land_in_the_tree(tmp_path, architecture, changes, shards):
    config = synthetic.target_json(architecture, **changes)
    tensors = synthetic.target_tensors(config)
    result, params = convert_and_load(tmp_path, config, tensors, shards=shards)

    def same(leaf, *names):
        np.testing.assert_array_equal(np.asarray(leaf), np.concatenate([tensors[name] for name in names]))

    same(params["embed"]["weight"], "model.embed_tokens.weight")
    same(params["norm"]["weight"], "model.norm.weight")
    assert ("lm_head" in params) == (not config["tie_word_embeddings"])
    if "lm_head" in params:
        same(params["lm_head"]["weight"], "lm_head.weight")
    for i in range(synthetic.LAYERS):
        layer, prefix = params[f"layers_{i}"], f"model.layers.{i}."
        attention, heads = layer["self_attn"], prefix + "self_attn."
        same(layer["input_layernorm"]["weight"], prefix + "input_layernorm.weight")
        same(layer["post_attention_layernorm"]["weight"], prefix + "post_attention_layernorm.weight")
        for kind in ["weight"] + ["bias"] * result.qkv_bias:
            same(attention["qkv_proj"][kind], *(f"{heads}{p}_proj.{kind}" for p in "qkv"))
        for kind in ["weight"] + ["bias"] * result.o_bias:
            same(attention["o_proj"][kind], f"{heads}o_proj.{kind}")
        if architecture == "qwen3":
            same(attention["q_norm"]["weight"], heads + "q_norm.weight")
            same(attention["k_norm"]["weight"], heads + "k_norm.weight")
        gate, up = prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"
        same(layer["mlp"]["gate_up_proj"]["weight"], gate, up)
        same(layer["mlp"]["down_proj"]["weight"], prefix + "mlp.down_proj.weight")


def test_config_is_read(tmp_path):
    source = synthetic.write_folder(
        tmp_path / "source", config := synthetic.target_json("qwen3"), synthetic.target_tensors(config)
    )
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3, 8]}))
    assert convert.convert_target(source, tmp_path / "out") == TargetConfig(
        architecture="qwen3", vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5, rope=RopeConfig(theta=5000.0), qk_norm=True, qkv_bias=False,
        o_bias=False, tie_embeddings=False, sliding_windows=(None, None), max_position=128, stop_token_ids=(7, 3, 8),
        dtype="bfloat16",
    )  # fmt: skip
    description = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (description["source"], description["kind"]) == ("source", "target")
    assert description["parameters"] == sum(t.size for t in synthetic.target_tensors(config).values())
    assert Tokenizer.from_folder(tmp_path / "out").special_tokens == {"eos_token": "d"}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtype_cast(tmp_path, dtype, stored):
    config = synthetic.target_json("llama")
    tensors = synthetic.target_tensors(config, dtype=stored)
    _, params = convert_and_load(tmp_path, config, tensors, dtype=dtype)
    assert all(x.dtype == jnp.dtype(dtype) for x in jax.tree.leaves(params))
    expected = tensors["model.embed_tokens.weight"].astype(dtype)
    np.testing.assert_array_equal(np.asarray(params["embed"]["weight"]), expected)


def test_own_dtype_is_the_default(tmp_path):
    config = synthetic.target_json("llama", torch_dtype="float32")
    result, _ = convert_and_load(tmp_path, config, synthetic.target_tensors(config, dtype=np.float32))
    assert result.dtype == "float32"


def test_tolerated_tensors(tmp_path):
    config = synthetic.target_json("llama", tie_word_embeddings=True)
    tensors = synthetic.target_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    _, params = convert_and_load(tmp_path, config, tensors)
    assert "lm_head" not in params


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_table_equals_flax_tree(tmp_path, architecture, tied, bias):
    from convert.hf_config import target_config

    config = synthetic.target_json(architecture, tie_word_embeddings=tied, attention_bias=bias)
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = target_config(tmp_path)
    assert {p.path: p.shape for p in parameters(result)} == flat_shapes(abstract_params(result))


def flat_shapes(tree):
    leaves = jax.tree.leaves_with_path(tree)
    return {"/".join(key.key for key in path): leaf.shape for path, leaf in leaves}
