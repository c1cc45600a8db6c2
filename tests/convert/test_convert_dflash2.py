"""DFlash 2: its tensors, its settings, and what is refused by name."""

import json

import jax
import numpy as np
import pytest
import synthetic_checkpoints as synthetic
from drafter_formats_data import ALL_SLIDING, speculators_2, z_lab

import convert
from convert.errors import ConversionError
from convert.hf_config import target_config
from convert.names import parameters
from ddtree_jax.checkpoint import load_params
from ddtree_jax.config import DrafterConfig, RopeConfig
from ddtree_jax.models.abstract import abstract_params

SIZES = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 3, "selector_top_k": 5}
HIDDEN, VOCAB = synthetic.HIDDEN, synthetic.VOCAB


def config_json(inner=None, **changes):
    settings = SIZES | {"projector_type": "dflash2"} | (inner or {})
    return z_lab(settings, **{"architectures": ["DFlash2DraftModel"], "is_causal": False, **ALL_SLIDING, **changes})


def extra_shapes(taps=2, group=4, rank=3):
    """As in the headers of the published files."""
    shapes = {
        "candidate_selector.predecessor_codebook": (VOCAB, rank),
        "candidate_selector.successor_codebook": (VOCAB, rank),
        "candidate_selector.hidden_projection.weight": (rank, HIDDEN),
    }
    for i in range(synthetic.LAYERS):
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{i}.{name}.base_kernel"] = (2, taps, HIDDEN)
            shapes[f"layers.{i}.{name}.kernel_projection.weight"] = (2 * taps * HIDDEN // group, HIDDEN)
    return shapes


@pytest.fixture
def target(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(synthetic.target_json("qwen3", num_hidden_layers=9)))
    return target_config(tmp_path / "target")


def write(tmp_path, data, change=lambda tensors: None):
    tensors = synthetic.drafter_tensors({}) | synthetic._random(extra_shapes(), 5, "float32")
    change(tensors)
    return synthetic.write_folder(tmp_path / "hf_drafter", data, tensors, tokenizer=False), tensors


OWN = {
    "embed_tokens.weight": np.full((VOCAB, HIDDEN), 0.5, np.float32),
    "lm_head.weight": np.full((VOCAB, HIDDEN), 0.25, np.float32),
}


@pytest.mark.parametrize("own", [{}, OWN], ids=["tables of the target", "own tables"])
@pytest.mark.parametrize("data", [config_json(sample_from_anchor=False), speculators_2(ALL_SLIDING)],
                         ids=["z-lab", "speculators"])  # fmt: skip
def test_tensors_land_in_the_tree(tmp_path, target, data, own):
    source, tensors = write(tmp_path, data, lambda tensors: tensors.update(own))
    config = convert.convert_drafter(source, tmp_path / "out", target=target, dtype="float32")
    assert (config.conv_taps, config.conv_group_size, config.selector_rank, config.selector_top_k) == (2, 4, 3, 5)
    assert (config.causal, config.sliding_windows, config.block_size) == ((False, False), (8, 8), 4)
    assert (config.own_embedding, config.own_head, config.draft_vocab_size) == (bool(own), bool(own), None)
    params = load_params(tmp_path / "out", abstract_params(config))
    for i in range(synthetic.LAYERS):
        for name in ("attention_conv", "mlp_conv"):
            conv, source_name = params[f"layers_{i}"][name], f"layers.{i}.{name}"
            np.testing.assert_array_equal(conv["base_kernel"], tensors[f"{source_name}.base_kernel"])
            weight = tensors[f"{source_name}.kernel_projection.weight"]
            np.testing.assert_array_equal(conv["kernel_projection"]["weight"], weight)
    for name, table in (("embed", "embed_tokens.weight"), ("lm_head", "lm_head.weight")):
        if own:
            np.testing.assert_array_equal(params[name]["weight"], own[table])
    selector = params["candidate_selector"]
    for name in ("predecessor_codebook", "successor_codebook"):
        np.testing.assert_array_equal(selector[name], tensors[f"candidate_selector.{name}"])
    weight = tensors["candidate_selector.hidden_projection.weight"]
    np.testing.assert_array_equal(selector["hidden_projection"]["weight"], weight)


@pytest.mark.parametrize(
    ("data", "change", "message"),
    [
        # Plain DFlash must not carry what it would ignore, nor DFlash 2 lack anything.
        (config_json(architectures=["DFlashDraftModel"]), {}, r"projector_type: expected nothing, found 'dflash2'"),
        (config_json({"projector_type": None}, architectures=["DFlashDraftModel"]), {},
         r"conv_kernel_size: expected nothing, found 2"),
        (config_json({"projector_type": "domino"}), {}, r"projector_type: expected nothing, found 'domino'"),
        (config_json({"conv_group_size": 5}), {}, r"conv_group_size: expected a divisor of hidden_size 16, found 5"),
        (config_json({"selector_top_k": 0}), {}, r"selector_top_k: expected an integer of 1 or more, found 0"),
        (config_json({"selector_rank": None}), {},
         r"candidate_selector\.hidden_projection\.weight: shape: expected \(256, 16\), found \(3, 16\)"),
        (config_json({"selector_rank": 0}), {}, r"candidate_selector\.\w+(\.weight)?: expected no such tensor"),
        (config_json({"conv_kernel_size": 3}), {}, r"attention_conv\.base_kernel: shape: expected \(2, 3, 16\)"),
        (config_json(), {"layers.1.mlp_conv.base_kernel": None}, r"layers\.1\.mlp_conv\.base_kernel: expected a tensor "
         r"of shape \(2, 2, 16\), found no such tensor"),
        (config_json(), {"layers.0.mlp_conv.kernel_projection.weight": (8, 16)},
         r"mlp_conv\.kernel_projection\.weight: shape: expected \(16, 16\), found \(8, 16\)"),
        (config_json(), {"candidate_selector.successor_codebook.weight": (40, 3)},
         r"successor_codebook\.weight: expected no such tensor, found one of shape \(40, 3\)"),
        # The other layout: model type, class and algorithm go together, and what the sizes promise must be there.
        (speculators_2(speculators_model_type="dflash"), {}, r"architectures: expected \['DFlashSpeculator'\] or .*, "
         r"found \['DFlash2DraftModel'\]"),
        (speculators_2(speculators_model_type="dflash", architectures=["DFlashSpeculator"], speculators_config=None),
         {}, r"conv_kernel_size: expected nothing, found 2"),
        (speculators_2(architectures=["DFlashSpeculator"]), {}, r"architectures: expected \['DFlash2Speculator'\] or "),
        (speculators_2(speculators_config={"algorithm": "dflash"}), {},
         r"speculators_config\.algorithm: expected 'dflash2', found 'dflash'"),
        (speculators_2(draft_vocab_size=12), {},
         r"draft_vocab_size: expected none beside a candidate selector, found 12"),
        (speculators_2(draft_ffn_type="moe"), {}, r"draft_ffn_type: expected nothing, found 'moe'"),
        (speculators_2(conv_group_size=8), {},
         r"kernel_projection\.weight: shape: expected \(8, 16\), found \(16, 16\)"),
        (speculators_2(), {"candidate_selector.successor_codebook": None},
         r"candidate_selector\.successor_codebook: expected a tensor of shape \(40, 3\), found no such tensor"),
    ],
)  # fmt: skip
def test_refusals(tmp_path, target, data, change, message):
    def apply(tensors):
        for name, shape in change.items():
            tensors.pop(name, None)
            if shape is not None:
                tensors[name] = np.ones(shape, np.float32)

    source, _ = write(tmp_path, data, apply)
    with pytest.raises(ConversionError, match=message):
        convert.convert_drafter(source, tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("hidden", "intermediate", "vocabulary", "size"),
    [
        (5120, 17408, 248320, 1_924_404_480),  # Qwen3.8-27B-DFlash2
        (6656, 19968, 202048, 2_772_159_744),  # Muse-Glimmer-30B-DFlash2
    ],
)
def test_published_counts(hidden, intermediate, vocabulary, size):
    config = DrafterConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_layers=5, num_heads=32, num_kv_heads=8, head_dim=128,
        rms_norm_eps=1e-6, rope=RopeConfig(theta=1e7), attention_bias=False, block_size=8, mask_token_id=0,
        target_layer_ids=(5, 19, 33, 47, 61), target_hidden_size=hidden, target_num_layers=64,
        target_vocab_size=vocabulary, causal=(False,) * 5, sliding_windows=(2048,) * 5, conv_taps=2, selector_rank=256,
    )  # fmt: skip
    table = parameters(config)
    assert sum(p.size for p in table) == size
    assert sum(len(p.sources) for p in table) == 58 + 5 * 4 + 3
    leaves = jax.tree.leaves_with_path(abstract_params(config))
    assert {p.path: p.shape for p in table} == {"/".join(k.key for k in path): leaf.shape for path, leaf in leaves}
