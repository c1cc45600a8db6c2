"""Mixture-of-experts targets: both layouts of the experts, the published shape, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest
import synthetic_checkpoints as synthetic
from test_convert_refusals import edit_config, edit_tensors, refused
from test_convert_targets import convert_and_load, flat_shapes

from convert.hf_config import target_config
from convert.names import parameters
from convert.pipeline import check_names
from convert.source import TensorInfo
from ddtree_jax.config import MoEConfig
from ddtree_jax.models.abstract import abstract_params

# config.json of Qwen3-30B-A3B and Qwen3-Coder-30B-A3B, but for the length of the context.
QWEN3_30B_A3B = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", attention_bias=False, decoder_sparse_step=1,
    eos_token_id=151645, head_dim=128, hidden_act="silu", hidden_size=2048, intermediate_size=6144,
    max_position_embeddings=262144, max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768,
    norm_topk_prob=True, num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_hidden_layers=48,
    num_key_value_heads=4, output_router_logits=False, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=10000000,
    router_aux_loss_coef=0.001, sliding_window=None, tie_word_embeddings=False, torch_dtype="bfloat16",
    use_sliding_window=False, vocab_size=151936,
)  # fmt: skip


def published_tensors():
    """Names and shapes as the files of Qwen3-30B-A3B have them."""
    shapes = {"model.embed_tokens.weight": (151936, 2048), "lm_head.weight": (151936, 2048)}
    shapes["model.norm.weight"] = (2048,)
    for i in range(48):
        layer = f"model.layers.{i}."
        shapes |= {layer + "input_layernorm.weight": (2048,), layer + "post_attention_layernorm.weight": (2048,)}
        shapes |= {f"{layer}self_attn.{n}_norm.weight": (128,) for n in "qk"}
        shapes |= {f"{layer}self_attn.{n}_proj.weight": (512, 2048) for n in "kv"}
        shapes |= {layer + "self_attn.q_proj.weight": (4096, 2048), layer + "self_attn.o_proj.weight": (2048, 4096)}
        shapes |= {layer + "mlp.gate.weight": (128, 2048)}
        for j in range(128):
            shapes |= {f"{layer}mlp.experts.{j}.{n}_proj.weight": (768, 2048) for n in ("gate", "up")}
            shapes |= {f"{layer}mlp.experts.{j}.down_proj.weight": (2048, 768)}
    return shapes


class ShapesOnly:
    def __init__(self, shapes, file):
        self.tensors = {name: TensorInfo(file, shape, "BF16") for name, shape in shapes.items()}


def test_the_published_checkpoint_fits(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    config, shapes = target_config(tmp_path), published_tensors()
    assert len(shapes) == 18867
    check_names(ShapesOnly(shapes, tmp_path), config, file=tmp_path)
    assert sum(p.size for p in parameters(config)) == sum(map(int, map(np.prod, shapes.values()))) == 30_532_122_624
    assert {p.path: p.shape for p in parameters(config)} == flat_shapes(abstract_params(config))
    assert config.moe == MoEConfig(
        sparse=(True,) * 48, num_experts=128, experts_per_token=8, intermediate_size=768, renormalise=True
    )
    del shapes["model.layers.31.mlp.experts.99.up_proj.weight"]
    with pytest.raises(ValueError, match=r"layers\.31\.mlp\.experts\.99\.up_proj\.weight: .* \(768, 2048\), found no"):
        check_names(ShapesOnly(shapes, tmp_path), config, file=tmp_path)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("changes", [{}, {"mlp_only_layers": [0]}])
def test_experts_land_in_the_tree(tmp_path, changes, fused):
    config = synthetic.target_json("qwen3_moe", **changes)
    tensors = synthetic.target_tensors(config, fused_experts=fused)
    result, params = convert_and_load(tmp_path, config, tensors, shards=2)
    dense = changes.get("mlp_only_layers", [])
    assert result.moe.sparse == tuple(i not in dense for i in range(synthetic.LAYERS))
    assert {p.path: p.shape for p in parameters(result)} == flat_shapes(abstract_params(result))
    for i in range(synthetic.LAYERS):
        mlp, prefix = params[f"layers_{i}"]["mlp"], f"model.layers.{i}.mlp."
        if i in dense:
            assert mlp["gate_up_proj"]["weight"].shape == (2 * synthetic.INTERMEDIATE, synthetic.HIDDEN)
            continue
        np.testing.assert_array_equal(np.asarray(mlp["gate"]["weight"]), tensors[prefix + "gate.weight"])
        for j in range(synthetic.EXPERTS):
            if fused:
                gate_up, down = (tensors[f"{prefix}experts.{name}_proj"][j] for name in ("gate_up", "down"))
            else:
                gate, up, down = (tensors[f"{prefix}experts.{j}.{n}_proj.weight"] for n in ("gate", "up", "down"))
                gate_up = np.concatenate([gate, up])
            np.testing.assert_array_equal(np.asarray(mlp["gate_up_proj"]["weight"][j]), gate_up)
            np.testing.assert_array_equal(np.asarray(mlp["down_proj"]["weight"][j]), down)


def test_a_shared_expert_has_its_place_in_the_tables(tmp_path):
    """No checkpoint with one is converted yet; its names and its modules agree already."""
    (tmp_path / "config.json").write_text(json.dumps(synthetic.target_json("qwen3_moe")))
    config = target_config(tmp_path)
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, shared_intermediate_size=20))
    table = {p.path: p for p in parameters(config)}
    assert {path: p.shape for path, p in table.items()} == flat_shapes(abstract_params(config))
    gate = table["layers_1/mlp/shared_expert_gate/weight"]
    assert gate.sources == (("model.layers.1.mlp.shared_expert_gate.weight", (1, synthetic.HIDDEN)),)


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, (True,) * 5),
        ({"decoder_sparse_step": 2}, (False, True, False, True, False)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 3]}, (False, True, False, False, False)),
        ({"mlp_only_layers": None}, (True,) * 5),
    ],
)
def test_which_layers_have_experts(tmp_path, changes, sparse):
    (tmp_path / "config.json").write_text(
        json.dumps(synthetic.target_json("qwen3_moe", num_hidden_layers=5, **changes))
    )
    assert target_config(tmp_path).moe.sparse == sparse


def test_without_a_sparse_layer_the_target_is_dense(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(synthetic.target_json("qwen3_moe", mlp_only_layers=[0, 1])))
    assert target_config(tmp_path).moe is None


def test_a_router_spelled_out_is_the_same(tmp_path):
    router = {"scoring_func": "softmax", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    found = []
    for changes in ({}, router, dict.fromkeys(router)):
        (tmp_path / "config.json").write_text(json.dumps(synthetic.target_json("qwen3_moe", **changes)))
        found.append(target_config(tmp_path))
    assert found[0] == found[1] == found[2]


def test_the_later_name_of_the_number_of_experts(tmp_path):
    config = synthetic.target_json("qwen3_moe", num_experts=None, num_local_experts=7)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert target_config(tmp_path).moe.num_experts == 7


@pytest.fixture
def source(tmp_path):
    config = synthetic.target_json("qwen3_moe")
    return synthetic.write_folder(tmp_path / "source", config, synthetic.target_tensors(config))


@pytest.fixture
def fused(tmp_path):
    config = synthetic.target_json("qwen3_moe")
    return synthetic.write_folder(tmp_path / "source", config, synthetic.target_tensors(config, fused_experts=True))


@pytest.mark.parametrize(
    ("changes", "key", "expected", "found"),
    [
        ({"num_experts": None}, "num_local_experts", "an integer of 1 or more", "nothing"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok", "at most the 4 experts", "5"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok", "an integer of 1 or more", "null"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size", "an integer of 1 or more", "0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob", "true or false", "1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step", "an integer of 1 or more", "0"),
        ({"mlp_only_layers": [2]}, "mlp_only_layers", "layers in 0..1", "2"),
        ({"scoring_func": "sigmoid"}, "scoring_func", "'softmax'", "'sigmoid'"),
        ({"n_group": 4}, "n_group", "1", "4"),
        ({"topk_group": 2}, "topk_group", "1", "2"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor", "1", "2.5"),
        ({"num_experts": 10**9}, "num_experts", "at most 4096", "1000000000"),
        ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window", "False", "True"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures", "Qwen3MoeForCausalLM", "Qwen3ForCausalLM"),
    ],
)
def test_config_refusals(source, changes, key, expected, found):
    edit_config(source, **changes)
    refused(source, source / "config.json", f": {key}: expected", expected, ", found ", found)


UP, DOWN = "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.experts.2.down_proj.weight"
FIFTH = "model.layers.0.mlp.experts.4.gate_proj.weight"


def _poison(tensors):
    tensors[DOWN][5, 7] = np.nan


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda t: t.pop(UP), (f"{UP}: expected a tensor of shape (12, 16), found no such tensor",)),
        (lambda t: t.update({FIFTH: t[UP]}), (f"{FIFTH}: expected no such tensor, found one of shape (12, 16)",)),
        (lambda t: t.update({DOWN: t[DOWN].T.copy()}), (f"{DOWN}: shape: expected (16, 12), found (12, 16)",)),
        (lambda t: t.pop("model.layers.0.mlp.gate.weight"), ("layers.0.mlp.gate.weight: expected", "no such tensor")),
        (_poison, (f"{DOWN}: expected finite values, found nan at [5, 7]",)),
    ],
)
def test_tensor_refusals(source, change, parts):
    edit_tensors(source, change)
    refused(source, *parts)


FUSED = "model.layers.1.mlp.experts.gate_up_proj"


def _cut(tensors):
    tensors[FUSED] = tensors[FUSED][:, :-4].copy()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda t: t.update({FUSED: t[FUSED][:3].copy()}), ("experts.3.gate_proj.weight: expected", "no such tensor")),
        (_cut, ("layers.1.mlp.experts.0.gate_proj.weight: shape: expected (12, 16), found (10, 16)",)),
        (lambda t: t.update({FUSED: t[FUSED][0].copy()}), ("experts.0.gate_proj.weight: expected", "no such tensor")),
        (lambda t: t.update({UP: t[FUSED][3, 12:].copy()}), (f"{UP}: expected one tensor, found it alone and in",)),
    ],
)
def test_refusals_of_the_fused_layout(fused, change, parts):
    edit_tensors(fused, change)
    refused(fused, *parts)
