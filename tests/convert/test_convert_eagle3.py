"""EAGLE-3 drafters: published names and shapes, the vocabulary, and every deviation refused by name."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
import synthetic_checkpoints as synthetic
from synthetic_checkpoints import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, VOCAB

import convert
from convert.names import parameters
from ddtree_jax.checkpoint import load_config
from ddtree_jax.config import Eagle3Config, RopeConfig, TargetConfig, drafter_from_json, eagle3_taps
from ddtree_jax.loading import Target, load_drafter
from ddtree_jax.models.abstract import abstract_params

LAYERS, DRAFTED = 8, 12  # of the target, and rows of the drafter's head


@pytest.fixture
def target(tmp_path) -> TargetConfig:
    from convert.hf_config import target_config

    (tmp_path / "hf_target").mkdir()
    config = synthetic.target_json("llama", num_hidden_layers=LAYERS)
    (tmp_path / "hf_target" / "config.json").write_text(json.dumps(config))
    return target_config(tmp_path / "hf_target")


def settings(**changes) -> dict:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "draft_vocab_size": DRAFTED,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 128,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 7000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }
    return {k: v for k, v in {**config, **changes}.items() if v is not ...}


def tensors(*, prefix="", layer="midlayer", embedding=False, seed=0) -> dict[str, np.ndarray]:
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.hidden_norm.weight": (HIDDEN,),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}.self_attn.q_proj.weight": (query, 2 * HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (key, 2 * HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (key, 2 * HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, query),
        f"{layer}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFTED, HIDDEN),
    }
    if embedding:
        shapes["embed_tokens.weight"] = (VOCAB, HIDDEN)
    rng = np.random.default_rng(seed)
    out = {k: rng.standard_normal(s, np.float32).astype(ml_dtypes.bfloat16) for k, s in shapes.items()}
    drafted = np.sort(rng.permutation(VOCAB)[:DRAFTED])
    out["d2t"] = drafted - np.arange(DRAFTED)
    out["t2d"] = np.isin(np.arange(VOCAB), drafted)
    return {prefix + name: tensor for name, tensor in out.items()}


def write(tmp_path, config, content):
    return synthetic.write_folder(tmp_path / "hf_drafter", config, content, tokenizer=False)


@pytest.mark.parametrize(
    "changes,layout",
    [
        ({}, {}),
        (dict(architectures=["LlamaForCausalLM"]), {}),  # the first checkpoints
        (dict(architectures=["Eagle3LlamaForCausalLM"]), dict(prefix="model.", layer="layers.0")),
        ({}, dict(embedding=True)),
    ],
)
def test_tensors_land_in_the_tree(tmp_path, target, changes, layout):
    content = tensors(**layout)
    config = convert.convert_drafter(write(tmp_path, settings(**changes), content), tmp_path / "out", target=target)
    assert load_config(tmp_path / "out", "drafter") == config
    assert (config.target_layer_ids, config.rope.theta, config.depth) == ((1, 3, 4), 7000.0, 7)
    assert config.own_embedding == ("embedding" in layout)
    params = load_drafter(tmp_path / "out", Target(target, None)).params
    prefix, layer = layout.get("prefix", ""), layout.get("layer", "midlayer")

    def same(path, *names):
        leaf = params
        for key in path.split("/"):
            leaf = leaf[key]
        np.testing.assert_array_equal(np.asarray(leaf), np.concatenate([content[prefix + name] for name in names]))

    same("fc/weight", "fc.weight")
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        same(f"{norm}/weight", f"{layer}.{norm}.weight")
    same("norm/weight", "norm.weight")
    same("self_attn/q_proj/weight", f"{layer}.self_attn.q_proj.weight")
    same("self_attn/kv_proj/weight", f"{layer}.self_attn.k_proj.weight", f"{layer}.self_attn.v_proj.weight")
    same("self_attn/o_proj/weight", f"{layer}.self_attn.o_proj.weight")
    same("mlp/gate_up_proj/weight", f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight")
    same("mlp/down_proj/weight", f"{layer}.mlp.down_proj.weight")
    same("lm_head/weight", "lm_head.weight")
    ids = params["lm_head"]["target_ids"]
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, np.flatnonzero(content[prefix + "t2d"]))
    if config.own_embedding:
        same("embed/weight", "embed_tokens.weight")


PUBLISHED = Eagle3Config(
    hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500000.0), target_layer_ids=(1, 15, 28), target_hidden_size=4096, target_num_layers=32,
    target_vocab_size=128256, draft_vocab_size=32000,
)  # fmt: skip


@pytest.mark.parametrize(
    "config,size",
    [
        (PUBLISHED, 424_721_664),  # for Llama-3.1-8B
        (dataclasses.replace(PUBLISHED, intermediate_size=12288, target_vocab_size=151936), 399_555_840),  # Qwen3-8B
    ],
)
def test_published_shapes(config, size):
    table = parameters(config)
    names = {name: shape for p in table for name, shape in p.sources}
    assert len(names) == 14  # t2d is the fifteenth of a checkpoint
    assert names["midlayer.self_attn.q_proj.weight"] == (4096, 8192)
    assert names["midlayer.self_attn.v_proj.weight"] == (1024, 8192)
    assert (names["fc.weight"], names["lm_head.weight"]) == ((4096, 12288), (32000, 4096))
    assert sum(p.size for p in table) == size
    abstract = abstract_params(config)
    for p in table:
        leaf = abstract
        for key in p.path.split("/"):
            leaf = leaf[key]
        assert (leaf.shape, leaf.dtype) == (p.shape, p.dtype(config.jax_dtype)), p.path


def test_default_taps():
    """What enters blocks 2, n / 2 and n - 3, as EAGLE's and SGLang's code read them."""
    assert [eagle3_taps(n) for n in (32, 36, 64)] == [(1, 15, 28), (1, 17, 32), (1, 31, 60)]


@pytest.mark.parametrize("listed", [[1, 3, 4], [2, 4, 5]])
@pytest.mark.parametrize("inside", [False, True])
def test_default_taps_may_be_listed_in_either_way(tmp_path, target, listed, inside):
    entry = {"eagle_aux_hidden_state_layer_ids": listed}
    config = settings(**({"eagle_config": entry} if inside else entry))
    assert convert.convert_drafter(
        write(tmp_path, config, tensors()), tmp_path / "out", target=target
    ).target_layer_ids == (1, 3, 4)  # fmt: skip


def test_taps_that_the_caller_names(tmp_path, target):
    source = write(tmp_path, settings(eagle_aux_hidden_state_layer_ids=[0, 3, 6]), tensors())
    with pytest.raises(convert.ConversionError, match=r"eagle_aux_hidden_state_layer_ids: expected blocks \[1, 3, 4\]"):
        convert.convert_drafter(source, tmp_path / "out", target=target)
    config = convert.convert_drafter(source, tmp_path / "out", target=target, taps=(0, 3, 6))
    assert config.target_layer_ids == (0, 3, 6)


def test_a_missing_base_of_the_rotary_angles_is_said(tmp_path, target):
    source = write(tmp_path, settings(rope_theta=...), tensors())
    with pytest.warns(convert.ConversionWarning, match="rope_theta: missing, 10000 is assumed"):
        assert convert.convert_drafter(source, tmp_path / "out", target=target).rope.theta == 10000


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(architectures=["LlamaForCausalLMEagle3", "X"]), "architectures: expected .'LlamaForCausalLMEagle3'."),
        (dict(num_hidden_layers=2), "num_hidden_layers: expected 1, found 2"),
        (dict(attention_bias=True), "attention_bias: expected False, found True"),
        (dict(norm_before_residual=True), "norm_before_residual: expected False, found True"),
        (dict(tie_word_embeddings=True), "tie_word_embeddings: expected False, found True"),
        (dict(use_sliding_window=True, sliding_window=512), "sliding_window: expected None, found 512"),
        (dict(hidden_act="gelu"), "hidden_act: expected 'silu', found 'gelu'"),
        (dict(quantization_config={"quant_method": "gptq"}), "quantization_config: expected none"),
        (dict(draft_vocab_size=...), "draft_vocab_size: expected an integer of 1 or more, found nothing"),
        (dict(draft_vocab_size=VOCAB + 1), "draft_vocab_size: expected 1..40, found 41"),
        (dict(vocab_size=VOCAB + 1), "target_vocab_size: expected 40, found 41"),
        (dict(hidden_size=2 * HIDDEN), "hidden_size: expected 16, found 32"),
        (dict(target_hidden_size=8), "target_hidden_size: expected 16, found 8"),
        (dict(eagle_config={"use_aux_hidden_state": False}), "eagle_config.use_aux_hidden_state: expected True"),
        (dict(rope_scaling={"rope_type": "dynamic"}), "rope_scaling.rope_type: expected"),
    ],
)
def test_settings_that_are_refused(tmp_path, target, changes, message):
    source = write(tmp_path, settings(**changes), tensors())
    with pytest.raises(convert.ConversionError, match=message):
        convert.convert_drafter(source, tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


def changed(name, value):
    def change(content):
        content[name] = value(content[name]) if callable(value) else value
        return {k: v for k, v in content.items() if v is not None}

    return change


@pytest.mark.parametrize(
    "change,message",
    [
        *((changed(name, None), f"{name}: expected a tensor of shape .*, found no such tensor")
          for name in tensors() if name != "t2d"),
        *((changed(name, lambda t: np.concatenate([t, t])), f"{name}: shape: expected") for name in tensors()),
        (changed("midlayer.self_attn.q_norm.weight", np.ones(HEAD_DIM, np.float32)), "q_norm.weight: expected no such"),
        (changed("d2t", lambda t: t.astype(np.float32)), "d2t: dtype: expected I64 .*, found F32"),
        (changed("fc.weight", lambda t: t.astype(np.int64)), "fc.weight: dtype: expected BF16 .*, found I64"),
        (changed("norm.weight", lambda t: t * np.float32("nan")), "norm.weight: expected finite values"),
        (changed("d2t", lambda t: t + np.where(np.arange(DRAFTED) == 3, 100, 0)), "d2t.3. . 3: expected 0..39"),
        (changed("d2t", lambda t: t - t[0] - 1), "d2t.0. . 0: expected 0..39, found -1"),
        (changed("d2t", lambda t: t - np.arange(DRAFTED)), "d2t: expected each token of the target once"),
        (changed("t2d", lambda t: ~t), "t2d.0.: expected .*, as d2t has it"),
    ],
)  # fmt: skip
def test_tensors_that_are_refused(tmp_path, target, change, message):
    source = write(tmp_path, settings(), change(tensors()))
    with pytest.raises(convert.ConversionError, match=message):
        convert.convert_drafter(source, tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


def test_options_of_the_other_kind_are_refused(tmp_path, target):
    source = write(tmp_path, settings(), tensors())
    with pytest.raises(convert.ConversionError, match="sample_from_anchor: expected a DFlash drafter, found another"):
        convert.convert_drafter(source, tmp_path / "out", target=target, sample_from_anchor=True)
    dflash = synthetic.write_folder(tmp_path / "dflash", synthetic.drafter_json(), {}, tokenizer=False)
    with pytest.raises(convert.ConversionError, match="taps: expected an EAGLE-3 drafter"):
        convert.convert_drafter(dflash, tmp_path / "out", target=target, taps=(0, 1, 2))


def test_json_round_trip_and_old_files():
    data = json.loads(json.dumps(PUBLISHED.to_json()))
    assert data["family"] == "eagle3" and drafter_from_json(data) == PUBLISHED
    from ddtree_jax import testing

    dflash = testing.tiny_drafter_config(testing.tiny_target_config())
    assert "family" not in dflash.to_json() and drafter_from_json(json.loads(json.dumps(dflash.to_json()))) == dflash
    for broken, message in (
        (data | {"family": "medusa"}, "family: expected one of .*, found 'medusa'"),
        (data | {"block_size": 8}, r"unknown fields \['block_size'\]"),
        ({k: v for k, v in data.items() if k != "draft_vocab_size"}, r"missing fields \['draft_vocab_size'\]"),
        ([], r"family: expected one of .*, found \[\]"),
    ):
        with pytest.raises(ValueError, match=message):
            drafter_from_json(broken)
