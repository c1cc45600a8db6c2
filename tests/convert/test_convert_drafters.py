"""DFlash drafters: the tree, the published counts, the fit to the target, and the way back."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
import synthetic_checkpoints as synthetic
from safetensors.numpy import load_file, save_file

import convert
from convert.export import export_drafter
from convert.names import parameters
from ddtree_jax.checkpoint import load_params
from ddtree_jax.config import DrafterConfig, RopeConfig
from ddtree_jax.models.abstract import abstract_params, init_params


@pytest.fixture
def target(tmp_path):
    config = synthetic.target_json("qwen3")
    source = synthetic.write_folder(tmp_path / "hf_target", config, synthetic.target_tensors(config))
    from convert.hf_config import target_config

    return target_config(source)


def write_drafter(tmp_path, prefix="", **changes):
    config = synthetic.drafter_json(**changes)
    tensors = {prefix + name: t for name, t in synthetic.drafter_tensors(config).items()}
    return synthetic.write_folder(tmp_path / "hf_drafter", config, tensors, tokenizer=False), tensors


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("bias", [False, True])
def test_tensors_land_in_the_tree(tmp_path, target, prefix, bias):
    source, tensors = write_drafter(tmp_path, prefix, attention_bias=bias)
    config = convert.convert_drafter(source, tmp_path / "out", target=target)
    params = load_params(tmp_path / "out", abstract_params(config))

    def same(leaf, *names):
        np.testing.assert_array_equal(np.asarray(leaf), np.concatenate([tensors[prefix + name] for name in names]))

    same(params["fc"]["weight"], "fc.weight")
    same(params["hidden_norm"]["weight"], "hidden_norm.weight")
    same(params["norm"]["weight"], "norm.weight")
    for i in range(synthetic.LAYERS):
        attention, heads = params[f"layers_{i}"]["self_attn"], f"layers.{i}.self_attn."
        for kind in ["weight"] + ["bias"] * bias:
            same(attention["qkv_proj"][kind], *(f"{heads}{name}_proj.{kind}" for name in "qkv"))
            same(attention["o_proj"][kind], f"{heads}o_proj.{kind}")
        same(params[f"layers_{i}"]["mlp"]["gate_up_proj"]["weight"], *(
            f"layers.{i}.mlp.{name}_proj.weight" for name in ("gate", "up")
        ))  # fmt: skip


def published(**changes) -> DrafterConfig:
    """Qwen3-4B-DFlash-b16."""
    values = dict(
        hidden_size=2560, intermediate_size=9728, num_layers=5, num_heads=32, num_kv_heads=8, head_dim=128,
        rms_norm_eps=1e-6, rope=RopeConfig(theta=1e6), attention_bias=False, block_size=16, mask_token_id=151669,
        target_layer_ids=(1, 9, 17, 25, 33), target_hidden_size=2560, target_num_layers=36, target_vocab_size=151936,
        causal=(False,) * 5, sliding_windows=(None,) * 5,
    )  # fmt: skip
    return DrafterConfig(**values | changes)


def published_names(layers: int) -> list[str]:
    """As listed in the headers of the published files, in the order of a forward pass."""
    layer = (
        "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_norm",
        "self_attn.k_norm", "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj",
    )  # fmt: skip
    inside = [f"layers.{i}.{name}.weight" for i in range(layers) for name in layer]
    return ["fc.weight", "hidden_norm.weight", *inside, "norm.weight"]


@pytest.mark.parametrize(
    ("config", "tensors", "size"),
    [
        (published(), 58, 537_427_200),
        (published(hidden_size=4096, target_hidden_size=4096, intermediate_size=12288), 58, 1_048_626_432),
        (
            # Qwen3.5-4B-DFlash r2: six layers, eight taps.
            published(
                num_layers=6, intermediate_size=9216, target_layer_ids=(1, 5, 9, 13, 17, 21, 25, 29),
                causal=(True,) * 5 + (False,), sliding_windows=(4096,) * 5 + (None,),
            ),
            69, 634_425_856,
        ),
        (
            # Qwen3-Coder-30B-A3B-DFlash.
            published(
                hidden_size=2048, target_hidden_size=2048, intermediate_size=6144, num_layers=8, num_kv_heads=4,
                target_layer_ids=(1, 12, 23, 34, 45), causal=(False,) * 8, sliding_windows=(None,) * 8,
            ),
            91, 473_995_264,
        ),
    ],
)  # fmt: skip
def test_published_counts(config, tensors, size):
    table = parameters(config)
    assert sum(len(p.sources) for p in table) == tensors
    assert sum(p.size for p in table) == size
    assert [name for p in table for name, _ in p.sources] == published_names(config.num_layers)
    leaves = jax.tree.leaves_with_path(abstract_params(config))
    assert {p.path: p.shape for p in table} == {"/".join(k.key for k in path): leaf.shape for path, leaf in leaves}


def refused(source, target, *parts, **options):
    out = source.parent / "out"
    before = sorted(source.parent.iterdir())
    with pytest.raises(ValueError) as caught:
        convert.convert_drafter(source, out, target=target, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message, message
    assert sorted(source.parent.iterdir()) == before


INNER = {"mask_token_id": 39, "target_layer_ids": [0, 1]}


@pytest.mark.parametrize(
    ("changes", "key", "expected", "found"),
    [
        # Fit to the target.
        ({"dflash_config": INNER | {"target_layer_ids": [1, 0]}}, "target_layer_ids", "ascending", "[1, 0]"),
        ({"dflash_config": INNER | {"target_layer_ids": [0, 0]}}, "target_layer_ids", "ascending", "[0, 0]"),
        ({"dflash_config": INNER | {"target_layer_ids": [0, 2]}}, "target_layer_ids", "in 0..1", "[0, 2]"),
        ({"dflash_config": INNER | {"target_layer_ids": [-1, 0]}}, "target_layer_ids", "in 0..1", "[-1, 0]"),
        ({"dflash_config": INNER | {"target_layer_ids": []}}, "target_layer_ids", "in 0..1", "[]"),
        ({"dflash_config": INNER | {"target_layer_ids": [1]}}, "fc.weight: shape", "(16, 16)", "(16, 32)"),
        ({"dflash_config": INNER | {"mask_token_id": 40}}, "mask_token_id", "0..39", "40"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "mask_token_id", "an integer", "nothing"),
        ({"dflash_config": {"mask_token": "<mask>"}}, "mask_token_id", "an integer", "only the text mask_token"),
        ({"hidden_size": 32}, "hidden_size", "16", "32"),
        ({"target_hidden_size": 32}, "target_hidden_size", "16", "32"),
        ({"vocab_size": 41}, "target_vocab_size", "40", "41"),
        ({"num_target_layers": 3}, "target_num_layers", "2", "3"),
        # Other formats and variants.
        (
            {"speculators_model_type": "dflash"},
            "format",
            "one format",
            "speculators_model_type (speculators) and dflash_",
        ),
        ({"open_spec_config_version": "0.0.0"}, "format", "one format", "(Open Spec) and dflash_config (z-lab)"),
        ({"architectures": ["DFlash3DraftModel"]}, "architectures", "DFlash2DraftModel", "DFlash3DraftModel"),
        ({"architectures": None}, "architectures", "DFlashDraftModel", "[]"),
        ({"dflash_config": INNER | {"projector_type": "domino"}}, "projector_type", "nothing", "'domino'"),
        ({"dflash_config": INNER | {"selector_rank": 256}}, "selector_rank", "nothing", "256"),
        ({"dflash_config": INNER | {"attention_sink_bias": True}}, "attention_sink_bias", "nothing", "True"),
        ({"dflash_config": INNER | {"attention_value_scale": 0.612}}, "attention_value_scale", "nothing", "0.612"),
        ({"markov_rank": 256}, "markov_rank", "nothing", "256"),
        ({"hidden_act": "gelu"}, "hidden_act", "'silu'", "'gelu'"),
        ({"block_size": 1}, "block_size", "2 or more", "1"),
        ({"dflash_config": [1]}, "dflash_config", "an object", "list"),
        # The slot layout.
        ({"sample_from_anchor": True}, "slot layout", "slot 0", "sample_from_anchor: true"),
        ({"dflash_config": INNER | {"sample_from_anchor": True}}, "slot layout", "slot 0", "sample_from_anchor: true"),
        ({"architectures": ["Qwen3DFlashModel"]}, "slot layout", "slot 0", "--sample-from-anchor"),
    ],
)
def test_config(tmp_path, target, changes, key, expected, found):
    source, _ = write_drafter(tmp_path)
    file = source / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    refused(source, target, source, f"{key}: expected", expected, ", found ", found)


def test_own_embedding_is_a_sign_of_the_slot_layout(tmp_path, target):
    source, tensors = write_drafter(tmp_path)
    table = np.ones((synthetic.VOCAB, synthetic.HIDDEN), np.float32)
    save_file(tensors | {"embed_tokens.weight": table, "lm_head.weight": table}, source / "model.safetensors")
    refused(source, target, "slot layout", "its own embed_tokens.weight", "--sample-from-anchor")
    config = convert.convert_drafter(source, tmp_path / "out", target=target, sample_from_anchor=True)
    assert config.sample_from_anchor and config.depth == 4


def test_declared_z_lab_layout_contradicts_the_flag(tmp_path, target):
    source, _ = write_drafter(tmp_path, sample_from_anchor=False)
    refused(source, target, "sample_from_anchor: expected true", "found false", sample_from_anchor=True)


def test_mask_embedding_file(tmp_path, target):
    source, _ = write_drafter(tmp_path)
    (source / "mask_embedding.pt").write_bytes(b"")
    refused(source, target, "mask_embedding.pt")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda t: t.pop("hidden_norm.weight"), ("hidden_norm.weight: expected a tensor of shape (16,)", "no such")),
        (lambda t: t.update(extra=t["fc.weight"].copy()), ("extra: expected no such tensor, found one of (16, 32)",)),
        (lambda t: t.update({"model.fc.weight": t["fc.weight"].copy()}), ("fc.weight: expected one tensor", "both")),
    ],
)
def test_tensors(tmp_path, target, change, parts):
    source, tensors = write_drafter(tmp_path)
    change(tensors)
    save_file(tensors, source / "model.safetensors")
    refused(source, target, *(part.replace("of (16", "of shape (16") for part in parts))


def test_a_target_folder_is_needed(tmp_path, target):
    source, _ = write_drafter(tmp_path)
    refused(source, tmp_path / "nowhere", "nowhere: expected a checkpoint folder, found nothing there")
    config = convert.convert_drafter(source, tmp_path / "drafter", target=target)
    assert config.target_vocab_size == synthetic.VOCAB
    refused(source, tmp_path / "drafter", "kind: expected 'target', found 'drafter'")


WAYS = [
    {},
    {"attention_bias": True},
    {"causal": (False, False), "sliding_windows": (8, 8), "logit_softcap": 30.0, "output_multiplier": 0.2},
    {"causal": (True, False), "sliding_windows": (8, None), "embedding_scale": 2.0},
    {"causal": (True, True)},
    {"sample_from_anchor": True},
    {"sample_from_anchor": True, "own_embedding": True, "own_head": True},
    {"own_embedding": True},
    {"conv_taps": 2, "conv_group_size": 4, "selector_rank": 3, "selector_top_k": 5, "causal": (False, False)},
    {"conv_taps": 3, "conv_group_size": 8},
    {"selector_rank": 3},
    {"rope": RopeConfig(theta=7.0, kind="linear", factor=2.0)},
    {"rope": RopeConfig(theta=7.0, kind="yarn", factor=4.0, original_max_position=64, truncate=False, mscale=1.0)},
    {"rope": RopeConfig(theta=7.0, kind="llama3", factor=4.0, original_max_position=64)},
]


@pytest.mark.parametrize("changes", WAYS)
def test_export_comes_back_bit_for_bit(tmp_path, target, changes):
    values = dict(
        hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-6,
        rope=RopeConfig(theta=5000.0), attention_bias=False, block_size=4, mask_token_id=39, target_layer_ids=(0, 1),
        target_hidden_size=16, target_num_layers=2, target_vocab_size=40, causal=(False, False),
        sliding_windows=(None, None),
    )  # fmt: skip
    config = DrafterConfig(**values | changes)
    params = init_params(config, jax.random.key(0))
    export_drafter(config, params, tmp_path / "exported")
    back = convert.convert_drafter(
        tmp_path / "exported", tmp_path / "out", target=target, sample_from_anchor=config.sample_from_anchor
    )
    assert back == config
    loaded = load_params(tmp_path / "out", abstract_params(back))
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_export_names_are_those_of_the_layout(tmp_path, target):
    source, tensors = write_drafter(tmp_path)
    config = convert.convert_drafter(source, tmp_path / "out", target=target)
    export_drafter(config, load_params(tmp_path / "out", abstract_params(config)), tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(exported[name], tensor)


def test_export_refusals(tmp_path):
    config = published(num_layers=2, causal=(True, False), sliding_windows=(None, None))
    with pytest.raises(ValueError, match=r"causal: expected all equal.*, found \[True, False\]"):
        export_drafter(config, {}, tmp_path / "x")
    windows = dataclasses.replace(config, causal=(True, True), sliding_windows=(4, 8))
    with pytest.raises(ValueError, match=r"sliding_windows: expected one size.*, found \[4, 8\]"):
        export_drafter(windows, {}, tmp_path / "x")
    plain = dataclasses.replace(config, causal=(False, False))
    reduced = dataclasses.replace(plain, own_head=True, draft_vocab_size=100)
    with pytest.raises(ValueError, match=r"draft_vocab_size: expected none .*, found 100"):
        export_drafter(reduced, {}, tmp_path / "x")
    with pytest.raises(ValueError, match=r"params: fc/weight: expected an array of shape .*, found none"):
        export_drafter(plain, {}, tmp_path / "x")
    with pytest.raises(ValueError, match=r"fc/weight: shape: expected .*, found \(3,\)"):
        export_drafter(plain, {"fc": {"weight": np.ones(3)}}, tmp_path / "x")
    (tmp_path / "taken").mkdir()
    with pytest.raises(ValueError, match=re.escape("taken: already exists")):
        export_drafter(plain, {}, tmp_path / "taken")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_published_tables_of_a_reduced_vocabulary():
    """A speculators drafter for Qwen3.5-4B with 24576 tokens of its own."""
    config = published(own_embedding=True, own_head=True, draft_vocab_size=24576, target_vocab_size=248320)
    shapes = {name: shape for p in parameters(config) for name, shape in p.sources}
    assert shapes["embed_tokens.weight"] == (248320, 2560)
    assert shapes["lm_head.weight"] == (24576, 2560)
    assert shapes["d2t"] == (24576,)
    assert shapes.keys() - {"embed_tokens.weight", "lm_head.weight", "d2t"} == set(published_names(5))
    leaves = jax.tree.leaves_with_path(abstract_params(config))
    assert {p.path: p.shape for p in parameters(config)} == {"/".join(k.key for k in p): x.shape for p, x in leaves}


def test_published_biases():
    """gpt-oss-20b-DFlash: biases on all four projections, 15 tensors a layer."""
    config = published(
        hidden_size=2880, target_hidden_size=2880, intermediate_size=7680, num_layers=8, num_heads=64, head_dim=64,
        attention_bias=True, causal=(False,) * 8, sliding_windows=(None,) * 8, block_size=8, mask_token_id=200000,
        rope=RopeConfig(theta=150000.0, kind="yarn", factor=32.0, original_max_position=4096),
    )  # fmt: skip
    names = {name for p in parameters(config) for name, _ in p.sources}
    biases = {f"layers.{i}.self_attn.{p}_proj.bias" for i in range(8) for p in "qkvo"}
    assert names == set(published_names(8)) | biases
    assert len(names) == 123
