"""Hybrid targets (Qwen3.5, Qwen3.6, Qwen3-Next) from Hugging Face folders, and the drafters that belong to them."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import synthetic_checkpoints as synthetic

import convert
from convert.drafter_config import drafter_config
from convert.hf_config import target_config
from convert.names import ignored, parameters
from ddtree_jax.checkpoint import load_config, load_params
from ddtree_jax.config import DeltaConfig, TargetConfig
from ddtree_jax.models.abstract import abstract_params, check_fits

ARCHITECTURES = sorted(synthetic.HYBRID_CLASSES)


def write(tmp_path, architecture, edit=None, **changes):
    config = synthetic.hybrid_json(architecture, **changes)
    tensors = synthetic.hybrid_tensors(config)
    if edit is not None:
        edit(tensors)
    return synthetic.write_folder(tmp_path / "source", config, tensors), tensors


def unpack(tensors, prefix):
    """Rows of Qwen3-Next's packed projections by what they are, in the order of transformers' own unpacking."""
    s, group = synthetic, synthetic.VALUE_HEADS // synthetic.KEY_HEADS
    values = group * s.VALUE_DIM
    qkvz = tensors[f"{prefix}in_proj_qkvz.weight"].reshape(s.KEY_HEADS, -1, s.HIDDEN)
    ba = tensors[f"{prefix}in_proj_ba.weight"].reshape(s.KEY_HEADS, 2 * group, s.HIDDEN)
    q, k, v, z = np.split(qkvz, (s.KEY_DIM, 2 * s.KEY_DIM, 2 * s.KEY_DIM + values), axis=1)
    b, a = np.split(ba, 2, axis=1)
    return {name: x.reshape(-1, s.HIDDEN) for name, x in dict(q=q, k=k, v=v, z=z, b=b, a=a).items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensors_land_in_the_tree(tmp_path, architecture):
    source, tensors = write(tmp_path, architecture)
    result = convert.convert_target(source, tmp_path / "out")
    assert load_config(tmp_path / "out", "target") == result
    params = load_params(tmp_path / "out", abstract_params(result))
    model = "model.language_model." if architecture == "qwen3_5" else "model."

    def same(leaf, *arrays):
        np.testing.assert_array_equal(np.asarray(leaf), np.concatenate(arrays))

    mixer, prefix = params["layers_0"]["linear_attn"], f"{model}layers.0.linear_attn."
    if architecture == "qwen3_next":
        same(mixer["in_proj"]["weight"], *(unpack(tensors, prefix)[name] for name in "qkvbaz"))
    else:
        same(mixer["in_proj"]["weight"], *(tensors[f"{prefix}in_proj_{n}.weight"] for n in ("qkv", "b", "a", "z")))
    same(mixer["conv1d"], tensors[f"{prefix}conv1d.weight"])
    same(mixer["A_log"], tensors[f"{prefix}A_log"])
    same(mixer["dt_bias"], tensors[f"{prefix}dt_bias"].astype(np.float32))
    same(mixer["norm"]["weight"], tensors[f"{prefix}norm.weight"])
    same(mixer["out_proj"]["weight"], tensors[f"{prefix}out_proj.weight"])

    attention, prefix = params["layers_1"]["self_attn"], f"{model}layers.1.self_attn."
    turns = tensors[f"{prefix}q_proj.weight"].reshape(synthetic.HEADS, 2, synthetic.HEAD_DIM, synthetic.HIDDEN)
    query, gate = (turns[:, i].reshape(-1, synthetic.HIDDEN) for i in range(2))
    key, value = (tensors[f"{prefix}{n}_proj.weight"] for n in "kv")
    same(attention["qkv_proj"]["weight"], query, key, value, gate)
    same(attention["k_norm"]["weight"], tensors[f"{prefix}k_norm.weight"])
    same(params["layers_0"]["mlp"]["down_proj"]["weight"], tensors[f"{model}layers.0.mlp.down_proj.weight"])
    same(params["layers_0"]["input_layernorm"]["weight"], tensors[f"{model}layers.0.input_layernorm.weight"])
    same(params["norm"]["weight"], tensors[f"{model}norm.weight"])
    same(params["lm_head"]["weight"], tensors["lm_head.weight"])


def test_config_is_read(tmp_path):
    source, _ = write(tmp_path, "qwen3_5")
    result = target_config(source)
    assert result.delta == DeltaConfig(
        num_key_heads=2, num_value_heads=6, key_head_dim=4, value_head_dim=3, conv_kernel=4
    )  # fmt: skip
    assert (result.delta_layers, result.rotary_dim, result.rope.theta) == ((0,), 4, 5000.0)
    assert (result.zero_centred_norms, result.attention_gate, result.qk_norm, result.head_dim) == (True, True, True, 8)
    assert (result.dtype, result.stop_token_ids, result.sliding_windows) == ("bfloat16", (3,), (None, None))
    assert TargetConfig.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_configs_of_dense_checkpoints_still_load(tmp_path):
    """A config.json written before there were hybrids has none of their fields."""
    (tmp_path / "config.json").write_text(json.dumps(synthetic.target_json("qwen3")))
    dense = target_config(tmp_path)
    new = ("rotary_dim", "zero_centred_norms", "attention_gate", "delta_layers", "delta")
    assert TargetConfig.from_json({k: v for k, v in dense.to_json().items() if k not in new}) == dense


def test_few_parameters_stay_float32(tmp_path):
    source, _ = write(tmp_path, "qwen3_5")
    result = convert.convert_target(source, tmp_path / "out", dtype="float16")
    params = load_params(tmp_path / "out", abstract_params(result))
    wide = {"/".join(k.key for k in path) for path, x in jax.tree.leaves_with_path(params) if x.dtype == jnp.float32}
    assert wide == {"layers_0/linear_attn/A_log", "layers_0/linear_attn/dt_bias"}


def test_vision_and_multi_token_prediction_are_skipped(tmp_path):
    def edit(tensors):
        for name in ("model.visual.blocks.0.attn.qkv.weight", "model.visual.pos_embed.weight", "mtp.fc.weight"):
            tensors[name] = np.ones((2, 2), ml_dtypes.bfloat16)

    source, tensors = write(tmp_path, "qwen3_5", edit)
    assert sum(ignored(target_config(source), name) for name in tensors) == 3
    convert.convert_target(source, tmp_path / "out")


def refused(source, *parts):
    before = sorted(source.parent.iterdir())
    with pytest.raises(ValueError) as caught:
        convert.convert_target(source, source.parent / "out")
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message, message
    assert sorted(source.parent.iterdir()) == before


PREFIX = "model.language_model.layers.0.linear_attn."


@pytest.mark.parametrize(
    ("edit", "key", "expected", "found"),
    [
        (lambda t: t.pop(f"{PREFIX}A_log"), f"{PREFIX}A_log", "a tensor of shape (6,)", "no such tensor"),
        (
            lambda t: t.update({f"{PREFIX}conv1d.weight": t[f"{PREFIX}conv1d.weight"][..., :3].copy()}),
            f"{PREFIX}conv1d.weight: shape", "(34, 1, 4)", "(34, 1, 3)",
        ),
        (lambda t: t.update({f"{PREFIX}in_proj_ba.weight": np.ones((12, 16), np.float32)}),
         f"{PREFIX}in_proj_ba.weight", "no such tensor", "one of shape (12, 16)"),
        (lambda t: t.update({"model.audio.x": np.ones(3, np.float32)}), "model.audio.x", "no such tensor", "(3,)"),
        (lambda t: t.update({"visual.x": np.ones(3, np.float32)}), "visual.x", "no such tensor", "(3,)"),
    ],
)  # fmt: skip
def test_refused_tensors(tmp_path, edit, key, expected, found):
    source, _ = write(tmp_path, "qwen3_5", edit)
    refused(source, f": {key}: expected {expected}", "found", found)


@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize(
    ("changes", "key", "expected", "found"),
    [
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types[1]", "full_attention", "'sliding"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads", "a multiple of 2 key heads", "5"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim", "an integer of 1 or more", "null"),
        ({"attn_output_gate": False}, "attn_output_gate", "True", "False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type", "'swish'", "'sigmoid'"),
        ({"sliding_window": 4096}, "sliding_window", "None", "4096"),
        ({"rope_parameters": {"partial_rotary_factor": 0.4}}, "rope_parameters.partial_rotary_factor", "even", "0.4"),
        ({"rope_parameters": {"rope_type": "default", "x": 1}}, "rope_parameters.x", "rope kind 'default'", "1"),
        ({"hidden_act": "gelu"}, "hidden_act", "'silu'", "'gelu'"),
    ],
)
def test_refused_settings(tmp_path, architecture, changes, key, expected, found):
    source, _ = write(tmp_path, architecture)
    (source / "config.json").write_text(json.dumps(synthetic.hybrid_json(architecture, **changes)))
    place = "text_config." if architecture == "qwen3_5" else ""
    refused(source, source / "config.json", f": {place}{key}: expected", expected, ", found ", found)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("qwen3_next", {"num_experts": 8}, "num_experts_per_tok: expected an integer"),
        ("qwen3_next", {"num_experts": -1}, "num_experts: expected an integer of 0 or more"),
        ("qwen3_next", {"architectures": ["Qwen3_5ForCausalLM"]}, "architectures: expected ['Qwen3NextForCausalLM']"),
        ("qwen3_5", {"tie_word_embeddings": True}, "text_config.tie_word_embeddings: expected False, as outside"),
    ],
)
def test_refused_variants(tmp_path, architecture, changes, message):
    source, _ = write(tmp_path, architecture)
    (source / "config.json").write_text(json.dumps(synthetic.hybrid_json(architecture, **changes)))
    refused(source, source / "config.json", message)


def test_dense_layers_of_a_mixture_are_no_mixture(tmp_path):
    changes = dict(num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8)
    source, _ = write(tmp_path, "qwen3_next", num_experts=8, mlp_only_layers=[0, 1], **changes)
    convert.convert_target(source, tmp_path / "out")


# Layers, hidden, mlp, heads, kv heads, value heads, tied: the published sizes; and their parameters, in billions.
SIZES = {
    "0.8B": (24, 1024, 3584, 8, 2, 16, True, 0.75),
    "2B": (24, 2048, 6144, 8, 2, 16, True, 1.88),
    "4B": (32, 2560, 9216, 16, 4, 32, True, 4.21),
    "9B": (32, 4096, 12288, 16, 4, 32, False, 8.95),
    "27B": (64, 5120, 17408, 24, 4, 48, False, 26.9),
}


def published(tmp_path, size) -> TargetConfig:
    layers, hidden, mlp, heads, kv_heads, value_heads, tied, _ = SIZES[size]
    text = {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 256,
        "full_attention_interval": 4, "attn_output_gate": True, "attention_bias": False, "hidden_act": "silu",
        "linear_num_key_heads": 16, "linear_num_value_heads": value_heads, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144, "eos_token_id": 248044, "dtype": "bfloat16", "tie_word_embeddings": tied,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    }  # fmt: skip
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 248056}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": text, "tie_word_embeddings": tied}))
    return target_config(tmp_path)


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes(tmp_path, size):
    config = published(tmp_path, size)
    layers, *_, value_heads, tied, billions = SIZES[size]
    table = parameters(config)
    flat = {"/".join(k.key for k in path): x for path, x in jax.tree.leaves_with_path(abstract_params(config))}
    assert {p.path: p.shape for p in table} == {path: x.shape for path, x in flat.items()}
    assert {p.path: p.dtype(config.jax_dtype) for p in table} == {path: x.dtype for path, x in flat.items()}
    assert sum(p.size for p in table) / 1e9 == pytest.approx(billions, rel=5e-3)
    assert len(config.delta_layers) == layers * 3 // 4 and config.rotary_dim == 64
    assert config.delta.conv_channels == 4096 + 128 * value_heads
    # 14 tensors a Gated DeltaNet layer, 11 an attention layer, embedding, last norm and head.
    sources = [name for p in table for name, _ in p.sources]
    assert len(set(sources)) == len(sources) == 14 * len(config.delta_layers) + 11 * layers // 4 + (2 if tied else 3)
    if size == "27B":
        assert len(sources) == 851
        attention = flat["layers_3/self_attn/qkv_proj/weight"]
        assert attention.shape == (12288 + 2 * 1024, 5120)
        assert flat["layers_0/linear_attn/in_proj/weight"].shape == (10240 + 6144 + 2 * 48, 5120)


# Six layers, five of them sliding, eight taps; the block size inside dflash_config, and the mask tokens of revisions.
DRAFTERS = {
    "Qwen3.5-4B": ("4B", 6, 4096, (1, 5, 9, 13, 17, 21, 25, 29), 248077, 69),
    "Qwen3.5-27B": ("27B", 6, 4096, (1, 10, 18, 27, 35, 44, 52, 61), 248070, 69),
    "Qwen3.6-27B": ("27B", 5, 2048, (1, 16, 31, 46, 61), 248070, 58),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_published_drafters_fit(tmp_path, name):
    size, layers, window, taps, mask, tensors = DRAFTERS[name]
    target = published(tmp_path, size)
    data = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size, "num_hidden_layers": layers, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 248320,
        "max_position_embeddings": 262144, "rope_theta": 10000000, "rope_scaling": None, "attention_bias": False,
        "layer_types": ["sliding_attention"] * (layers - 1) + ["full_attention"], "use_sliding_window": True,
        "sliding_window": window, "num_target_layers": target.num_layers, "dtype": "bfloat16",
        "dflash_config": {"block_size": 16, "mask_token_id": mask, "target_layer_ids": list(taps)},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(data))
    config = drafter_config(tmp_path, (), target)
    check_fits(config, target)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (16, mask, taps)
    assert config.sliding_windows == (window,) * (layers - 1) + (None,) and config.causal == (True,) * (layers - 1) + (
        False,
    )
    table = parameters(config)
    assert sum(len(p.sources) for p in table) == tensors
    flat = {"/".join(k.key for k in path): x.shape for path, x in jax.tree.leaves_with_path(abstract_params(config))}
    assert {p.path: p.shape for p in table} == flat


def test_a_drafter_of_a_hybrid_converts(tmp_path):
    source, _ = write(tmp_path, "qwen3_5")
    target = convert.convert_target(source, tmp_path / "target")
    inner = {"mask_token_id": 39, "target_layer_ids": [0, 1], "block_size": 8}
    data = synthetic.drafter_json(dflash_config=inner, layer_types=["sliding_attention", "full_attention"])
    data |= {"use_sliding_window": True, "sliding_window": 16, "block_size": None}
    folder = synthetic.write_folder(tmp_path / "drafter", data, synthetic.drafter_tensors(data), tokenizer=False)
    result = convert.convert_drafter(folder, tmp_path / "out", target=tmp_path / "target")
    assert (result.block_size, result.sliding_windows, result.causal) == (8, (16, None), (True, False))
    check_fits(result, target)
