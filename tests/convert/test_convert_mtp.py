"""The prediction layer inside Qwen3.5, Qwen3.6 and Qwen3-Next targets: names, order of rows, refusals."""

import json

import ml_dtypes
import numpy as np
import pytest
import synthetic_checkpoints as synthetic
from synthetic_checkpoints import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS

import convert
from convert.hf_config import target_config
from convert.names import parameters
from ddtree_jax.config import MoEConfig, MTPConfig, RopeConfig, drafter_from_json
from ddtree_jax.loading import Target, load_drafter
from ddtree_jax.models.abstract import abstract_params

QUERY, KEY = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
SHAPES = {
    "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
    "mtp.pre_fc_norm_embedding.weight": (HIDDEN,),
    "mtp.pre_fc_norm_hidden.weight": (HIDDEN,),
    "mtp.norm.weight": (HIDDEN,),
    "mtp.layers.0.input_layernorm.weight": (HIDDEN,),
    "mtp.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "mtp.layers.0.self_attn.q_proj.weight": (2 * QUERY, HIDDEN),
    "mtp.layers.0.self_attn.k_proj.weight": (KEY, HIDDEN),
    "mtp.layers.0.self_attn.v_proj.weight": (KEY, HIDDEN),
    "mtp.layers.0.self_attn.o_proj.weight": (HIDDEN, QUERY),
    "mtp.layers.0.self_attn.q_norm.weight": (HEAD_DIM,),
    "mtp.layers.0.self_attn.k_norm.weight": (HEAD_DIM,),
    "mtp.layers.0.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
    "mtp.layers.0.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
    "mtp.layers.0.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
}


def write(tmp_path, architecture="qwen3_5", tensors=None, **changes):
    """(folder with target and layer, config of the target, tensors of the layer)."""
    config = synthetic.hybrid_json(architecture, **changes)
    rng = np.random.default_rng(1)
    layer = {k: rng.standard_normal(s, np.float32).astype(ml_dtypes.bfloat16) for k, s in SHAPES.items()}
    layer = layer if tensors is None else tensors(layer)
    content = synthetic.hybrid_tensors(config) | {"model.visual.pos_embed.weight": np.ones((2, 2), np.float32)} | layer
    folder = synthetic.write_folder(tmp_path / "hf", config, content)
    fitted = synthetic.write_folder(tmp_path / "fitted", synthetic.hybrid_json(architecture), {})
    return folder, target_config(fitted), layer


@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_5_text", "qwen3_next"])
def test_tensors_land_in_the_tree(tmp_path, architecture):
    folder, target, layer = write(tmp_path, architecture)
    config = convert.convert_drafter(folder, tmp_path / "out", target=target)
    assert (config.rotary_dim, config.rope.theta, config.moe, config.depth) == (HEAD_DIM // 2, 5000.0, None, 3)
    params = load_drafter(tmp_path / "out", Target(target, None)).params

    def same(path, *names):
        leaf = params
        for key in path.split("/"):
            leaf = leaf[key]
        expected = np.concatenate([layer[f"mtp.{name}.weight"] for name in names])
        np.testing.assert_array_equal(np.asarray(leaf["weight"]), expected)

    for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        same(name, name)
    for name in ("input_layernorm", "post_attention_layernorm"):
        same(name, f"layers.0.{name}")
    for name in ("q_norm", "k_norm", "o_proj"):
        same(f"self_attn/{name}", f"layers.0.self_attn.{name}")
    same("self_attn/kv_proj", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj")
    same("mlp/gate_up_proj", "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj")
    same("mlp/down_proj", "layers.0.mlp.down_proj")
    # The source has [query, gate] of each head in turn.
    stored = layer["mtp.layers.0.self_attn.q_proj.weight"].reshape(HEADS, 2, HEAD_DIM, HIDDEN)
    ordered = stored.swapaxes(0, 1).reshape(2 * QUERY, HIDDEN)
    np.testing.assert_array_equal(np.asarray(params["self_attn"]["q_proj"]["weight"]), ordered)


@pytest.mark.parametrize(
    "moe,tensors,size",
    [
        (None, 15, 424_699_392),  # Qwen3.6-27B
        (
            MoEConfig(
                sparse=(True,), num_experts=4, experts_per_token=2, intermediate_size=512, renormalise=True,
                shared_intermediate_size=512,
            ),
            12 + 1 + 4 * 3 + 4,
            None,
        ),
    ],
)  # fmt: skip
def test_published_shapes(moe, tensors, size):
    config = MTPConfig(
        hidden_size=5120, intermediate_size=17408, num_heads=24, num_kv_heads=4, head_dim=256, rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e7), rotary_dim=64, moe=moe, target_hidden_size=5120, target_num_layers=64,
        target_vocab_size=248320,
    )  # fmt: skip
    table = parameters(config)
    names = {name: shape for p in table for name, shape in p.sources}
    assert len(names) == tensors
    assert names["mtp.fc.weight"] == (5120, 10240) and names["mtp.layers.0.self_attn.q_proj.weight"] == (12288, 5120)
    assert size is None or sum(p.size for p in table) == size
    abstract = abstract_params(config)
    for p in table:
        leaf = abstract
        for key in p.path.split("/"):
            leaf = leaf[key]
        assert (leaf.shape, leaf.dtype) == (p.shape, p.dtype(config.jax_dtype)), p.path
    assert drafter_from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    "changes,tensors,message",
    [
        (dict(mtp_num_hidden_layers=2), None, "mtp_num_hidden_layers: expected 1, found 2"),
        (dict(mtp_use_dedicated_embeddings=True), None, "mtp_use_dedicated_embeddings: expected False, found True"),
        (dict(vocab_size=41), None, "target_vocab_size: expected 40, found 41"),
        ({}, lambda layer: {}, "mtp.pre_fc_norm_embedding.weight: expected a tensor of shape"),
        ({}, lambda layer: layer | {"mtp.layers.1.norm.weight": np.ones(3, np.float32)}, "layers.1.norm.weight: expe"),
        ({}, lambda layer: layer | {"mtp.fc.weight": np.ones((3, 3), np.float32)}, "mtp.fc.weight: shape: expected"),
    ],
)
def test_refusals(tmp_path, changes, tensors, message):
    folder, target, _ = write(tmp_path, tensors=tensors, **changes)
    with pytest.raises(convert.ConversionError, match=message):
        convert.convert_drafter(folder, tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()
