"""The formats of DFlash drafters: what each config means, their own tables, and what is refused by name."""

import json
import warnings

import ml_dtypes
import numpy as np
import pytest
import synthetic_checkpoints as synthetic
from drafter_formats_data import (
    ALL_SLIDING,
    SLIDING,
    TARGET_LAYERS,
    flat,
    open_spec,
    qwen3,
    speculators,
    speculators_2,
    without,
    z_lab,
)

import convert
from convert.drafter_config import drafter_config
from convert.errors import ConversionError, ConversionWarning
from convert.hf_config import target_config
from convert.names import drafter_name
from ddtree_jax.checkpoint import load_params
from ddtree_jax.config import DrafterConfig
from ddtree_jax.models.abstract import abstract_params

TAPS, NO, FULL = (2, 7), (False, False), (None, None)
DRAFT_VOCAB = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(synthetic.target_json("qwen3", num_hidden_layers=TARGET_LAYERS)))
    return target_config(folder)


@pytest.fixture
def read(tmp_path, target):
    def read(data, names=(), **options):
        (tmp_path / "config.json").write_text(json.dumps(data))
        return drafter_config(tmp_path, names, target, **options)

    return read


# what it is: (config, taps, causal, windows, block size, mask id); then whether slot 0 predicts, where it does.
VARIANTS = {
    # z-lab. An id is the output of that block; the inner block size wins; b16 drafts 15.
    "nested": (z_lab(), TAPS, NO, FULL, 4, 39),
    "flat": (flat(), TAPS, NO, FULL, 4, 39),
    "inner size wins": (z_lab({"block_size": 8}, block_size=16), TAPS, NO, FULL, 8, 39),
    "outer size alone": (z_lab({"block_size": None}, block_size=10), TAPS, NO, FULL, 10, 39),
    "inner mask and taps win": (
        z_lab({"mask_token_id": 38, "target_layer_ids": [1, 3]}, mask_token_id=1, target_layer_ids=[0, 1]),
        (1, 3), NO, FULL, 4, 38,
    ),
    "taps by default": (without(flat(num_hidden_layers=3), "target_layer_ids"), (1, 4, 6), (False,) * 3, (None,) * 3,
                        4, 39),
    "one tap": (flat(target_layer_ids=[4]), (4,), NO, FULL, 4, 39),
    "tap of the last block": (flat(target_layer_ids=[2, 8]), (2, 8), NO, FULL, 4, 39),
    "more taps than layers": (flat(target_layer_ids=[0, 2, 4, 6]), (0, 2, 4, 6), NO, FULL, 4, 39),
    # Windows and causality.
    "sliding is causal": (z_lab(**SLIDING), TAPS, (True, False), (8, None), 4, 39),
    "DFlash 2 says is_causal false": (z_lab(is_causal=False, **ALL_SLIDING), TAPS, NO, (8, 8), 4, 39),
    "DFlash 2": (
        z_lab({"projector_type": "dflash2"}, architectures=["DFlash2DraftModel"], is_causal=False, **ALL_SLIDING),
        TAPS, NO, (8, 8), 4, 39,
    ),
    "JetSpec: causal in full layers": (z_lab(is_causal=True), TAPS, (True, True), FULL, 4, 39),
    "inner causal": (z_lab({"causal": True}, **SLIDING), TAPS, (True, True), (8, None), 4, 39),
    "inner causal false": (z_lab({"causal": False}, **ALL_SLIDING), TAPS, NO, (8, 8), 4, 39),
    "is_causal wins": (z_lab({"causal": True}, is_causal=False, **SLIDING), TAPS, NO, (8, None), 4, 39),
    "MiMo: use_swa": (z_lab({"use_swa": True, "swa_window_size": 6}, sliding_window=8), TAPS, NO, (6, 6), 4, 39),
    "use_swa with the outer window": (z_lab({"use_swa": True}, sliding_window=8), TAPS, NO, (8, 8), 4, 39),
    "ModelOpt: all full, use_swa": (
        z_lab({"use_swa": True, "swa_window_size": 6, "causal": True}, layer_types=["full_attention"] * 2),
        TAPS, (True, True), (6, 6), 4, 39,
    ),
    "a window that nobody uses": (z_lab(sliding_window=8, use_sliding_window=False), TAPS, NO, FULL, 4, 39),
    # DeepSpec and DSpark: the same file with the other slot layout, on request.
    "DeepSpec": (flat(architectures=["Qwen3DFlashModel"]), TAPS, NO, FULL, 4, 39, True),
    "DSpark": (flat(architectures=["Qwen3DSparkModel"]), TAPS, NO, FULL, 4, 39, True),
    # speculators: ids count from 1; the flag decides about sliding layers only, full ones stay bidirectional.
    "speculators": (speculators(), TAPS, NO, FULL, 4, 39),
    "speculators, other class": (speculators(architectures=["DFlashDraftModel"]), TAPS, NO, FULL, 4, 39),
    "speculators, last block": (speculators(aux_hidden_state_layer_ids=[1, 9]), (0, 8), NO, FULL, 4, 39),
    "speculators, default size": (without(speculators(speculators_config=None), "block_size"), TAPS, NO, FULL, 8, 39),
    "speculators, sliding": (speculators(SLIDING), TAPS, (True, False), (8, None), 4, 39),
    "speculators, not causal": (speculators(ALL_SLIDING, sliding_window_non_causal=True), TAPS, NO, (8, 8), 4, 39),
    "speculators, from the anchor": (speculators(sample_from_anchor=True), TAPS, NO, FULL, 4, 39, True),
    # DFlash 2 in this format: all layers see the whole block, unless the flag says otherwise.
    "speculators, DFlash 2": (speculators_2(SLIDING), TAPS, NO, (8, None), 4, 39),
    "speculators, DFlash 2, other class": (
        speculators_2(ALL_SLIDING, architectures=["DFlash2Speculator"]), TAPS, NO, (8, 8), 4, 39,
    ),
    "speculators, DFlash 2, no flag": (
        without(speculators_2(SLIDING), "sliding_window_non_causal"), TAPS, NO, (8, None), 4, 39,
    ),
    "speculators, DFlash 2, causal": (
        speculators_2(SLIDING, sliding_window_non_causal=False), TAPS, (True, False), (8, None), 4, 39,
    ),
    "speculators, DFlash 2, from the anchor": (
        speculators_2(ALL_SLIDING, sample_from_anchor=True), TAPS, NO, (8, 8), 4, 39, True,
    ),
    # Open Spec: where ids begin is written; a block is one longer than its tokens, unless slot 0 predicts.
    "Open Spec": (open_spec(), TAPS, NO, FULL, 4, 39),
    "Open Spec from 0": (open_spec({"target_layer_start_idx": 0}), (3, 8), NO, FULL, 4, 39),
    "Open Spec, from the anchor": (open_spec({"sample_from_anchor": True}), TAPS, NO, FULL, 3, 39, True),
    "Open Spec, sliding": (open_spec(**SLIDING), TAPS, (True, False), (8, None), 4, 39),
    "Open Spec, not causal": (
        open_spec({"sliding_window_non_causal": True}, **ALL_SLIDING), TAPS, NO, (8, 8), 4, 39,
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_config_means(read, variant):
    data, taps, causal, windows, block_size, mask, *from_anchor = VARIANTS[variant]
    asked = bool(from_anchor) and not {"speculators_config", "speculative_config"} & set(data)
    c = read(data, sample_from_anchor=asked)
    assert (c.target_layer_ids, c.causal, c.sliding_windows) == (taps, causal, windows)
    assert (c.block_size, c.mask_token_id, c.sample_from_anchor) == (block_size, mask, bool(from_anchor))
    assert c.depth == block_size - (0 if from_anchor else 1)
    assert (c.own_embedding, c.own_head, c.draft_vocab_size) == (False, False, None)
    # The input of fc is as wide as there are taps, whatever the depth of the target.
    assert abstract_params(c)["fc"]["weight"].shape == (synthetic.HIDDEN, len(taps) * synthetic.HIDDEN)


@pytest.mark.parametrize("place", ["z-lab", "flat", "speculators", "Open Spec"])
def test_scales(read, place):
    scales = {"output_multiplier": 0.5, "final_logit_softcapping": 20.0, "input_embedding_scale": 3.0}
    data = {
        "z-lab": lambda: z_lab(scales),
        "flat": lambda: flat(**scales),
        "speculators": lambda: speculators(**scales),
        "Open Spec": lambda: open_spec(scales),
    }[place]()
    c = read(data)
    assert (c.output_multiplier, c.logit_softcap, c.embedding_scale) == (0.5, 20.0, 3.0)


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "beta_fast": 32.0}


@pytest.mark.parametrize("make", [flat, lambda **c: speculators(c), lambda **c: open_spec(None, **c)])
@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 150000, "rope_scaling": YARN},
        {"rope_theta": None, "rope_parameters": YARN | {"rope_theta": 150000.0}},
    ],
)
def test_rope_of_the_drafter_and_biases(read, make, spelling):
    """The drafter's own base and scaling, wherever they are written; never the target's."""
    c = read(make(attention_bias=True, **spelling))
    assert (c.rope.theta, c.rope.kind, c.rope.factor, c.rope.original_max_position) == (150000.0, "yarn", 32.0, 64)
    assert c.attention_bias


@pytest.mark.parametrize(
    ("data", "key", "expected", "found"),
    [
        (speculators(speculators_model_type="eagle3"), "speculators_model_type", "'dflash'", "'eagle3'"),
        (speculators(architectures=["Eagle3Speculator"]), "architectures", "['DFlashSpeculator']", "['Eagle3Spec"),
        (without(speculators(), "transformer_layer_config"), "transformer_layer_config", "an object", "nothing"),
        (speculators(aux_hidden_state_layer_ids=[0, 3]), "aux_hidden_state_layer_ids", "1 or more", "[0, 3]"),
        (speculators(aux_hidden_state_layer_ids=[3, 10]), "target_layer_ids", "in 0..8", "[2, 9]"),
        (speculators(mask_token_id=40), "mask_token_id", "0..39", "40"),
        (without(speculators(), "mask_token_id"), "mask_token_id", "an integer", "nothing"),
        (z_lab(num_hidden_layers=10**9), "num_hidden_layers", "at most 1024", "1000000000"),
        (speculators({"num_hidden_layers": 10**9}), "transformer_layer_config.num_hidden_layers", "at most", "10"),
        (open_spec(num_hidden_layers=10**9), "num_hidden_layers", "at most 1024", "1000000000"),
        (speculators(draft_vocab_size=41), "draft_vocab_size", "at most the 40 tokens", "41"),
        (speculators(markov_rank=8), "markov_rank", "nothing", "8"),
        (speculators(block_size=3), "speculators_config.proposal_methods[0].speculative_tokens", "at most the 2", "3"),
        (speculators(dflash_config={"a": 1}), "format", "one format", "speculators_model_type (speculators) and df"),
        (open_spec(open_spec_config_version="0.1.0"), "open_spec_config_version", "'0.0.0'", "'0.1.0'"),
        (open_spec(architectures=["DFlashDraftModel"]), "architectures", "['DflashDraftModel']", "['DFlashDraft"),
        (open_spec({"method": "eagle3"}), "speculative_config.method", "'dflash'", "'eagle3'"),
        (open_spec({"target_layer_start_idx": 2}), "speculative_config.target_layer_start_idx", "0 or 1", "2"),
        (open_spec({"target_layer_start_idx": None}), "speculative_config.target_layer_start_idx", "0 or 1", "None"),
        (open_spec({"target_layer_ids": [0, 3]}), "speculative_config.target_layer_ids", "1 or more", "[0, 3]"),
        (open_spec(speculators_config={"a": 1}), "format", "one format", "speculators_config (speculators) and open"),
    ],
)  # fmt: skip
def test_refused_configs(read, data, key, expected, found):
    with pytest.raises(ConversionError) as caught:
        read(data)
    message = str(caught.value)
    assert f"{key}: expected" in message and expected in message and f", found {found}" in message, message


def test_a_declared_layout_is_not_overruled(read):
    for data in (speculators(), open_spec()):
        with pytest.raises(ConversionError, match=r"sample_from_anchor: expected true, as asked for, found false"):
            read(data, sample_from_anchor=True)
    silent = without(speculators(), "sample_from_anchor")
    with pytest.raises(ConversionError, match=r"found nothing, which means false in this format"):
        read(silent, sample_from_anchor=True)
    assert read(speculators(sample_from_anchor=True), sample_from_anchor=True).sample_from_anchor


def test_sizes_of_dflash_2_in_the_format_of_speculators(read):
    silent = without(speculators_2(), "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    for data, sizes in ((speculators_2(), (2, 4, 3, 5)), (silent, (2, 16, 256, 16))):
        c = read(data)
        assert (c.conv_taps, c.conv_group_size, c.selector_rank, c.selector_top_k) == sizes


@pytest.mark.parametrize("data", [speculators(novelty=1), open_spec({"novelty": 1})])
def test_unknown_settings_warn(read, data):
    with pytest.warns(ConversionWarning, match=r"novelty: not known here, ignored"):
        read(data)


def test_a_missing_vocabulary_size_is_the_default_of_the_format(read):
    # 32000 tokens, which this target does not have.
    with pytest.raises(ConversionError, match=r"draft_vocab_size: expected at most the 40 tokens .*, found 32000"):
        read(without(speculators(), "draft_vocab_size"))


def test_names_of_other_writers():
    assert drafter_name("model.layers.1.mlp.up_proj.weight") == "layers.1.mlp.up_proj.weight"
    assert drafter_name("dflash_module.fc.weight") == drafter_name("encoder.fc.weight") == "fc.weight"
    assert drafter_name("encoder.output_norm_enc.weight") == "hidden_norm.weight"
    assert drafter_name("midlayer.self_attn.q_proj.bias") == "layers.0.self_attn.q_proj.bias"


# Own embedding, head and vocabulary.

IDS = np.array([0, 1, 5, 6, 7, 11, 20, 21, 22, 30, 38, 37])  # not in order at the end: any order is a table

TWICE = np.where(IDS == 5, 1, IDS)


def own_tables(vocabulary=DRAFT_VOCAB, dtype=ml_dtypes.bfloat16):
    rng = np.random.default_rng(3)

    def table(rows):
        return rng.standard_normal((rows, synthetic.HIDDEN), np.float32).astype(dtype)

    return {"embed_tokens.weight": table(synthetic.VOCAB), "lm_head.weight": table(vocabulary)}


def vocabulary_map(ids=IDS, dtype=np.int64):
    marked = np.zeros(synthetic.VOCAB, bool)
    marked[ids[ids < len(marked)]] = True
    return {"d2t": (ids - np.arange(len(ids))).astype(dtype), "t2d": marked}


def write(tmp_path, data, *extra):
    tensors = synthetic.drafter_tensors(qwen3())
    for more in extra:
        tensors |= more
    return synthetic.write_folder(tmp_path / "hf_drafter", data, tensors, tokenizer=False), tensors


def reduced(make):
    size = {"draft_vocab_size": DRAFT_VOCAB}
    return make(**size) if make is speculators else make(size)


@pytest.mark.parametrize("make", [speculators, open_spec])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_own_tables_and_reduced_vocabulary(tmp_path, target, make, dtype):
    source, tensors = write(tmp_path, reduced(make), own_tables(), vocabulary_map(dtype=dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = convert.convert_drafter(source, tmp_path / "out", target=target)
    assert (config.own_embedding, config.own_head, config.draft_vocab_size) == (True, True, DRAFT_VOCAB)
    params = load_params(tmp_path / "out", abstract_params(config))
    np.testing.assert_array_equal(params["embed"]["weight"], tensors["embed_tokens.weight"])
    np.testing.assert_array_equal(params["lm_head"]["weight"], tensors["lm_head.weight"])
    np.testing.assert_array_equal(params["d2t"]["target_ids"], IDS)
    assert params["d2t"]["target_ids"].dtype == np.int32


def test_a_head_of_all_tokens_needs_no_map(tmp_path, target):
    source, _ = write(tmp_path, speculators(), own_tables(synthetic.VOCAB))
    config = convert.convert_drafter(source, tmp_path / "out", target=target)
    assert (config.own_embedding, config.own_head, config.draft_vocab_size) == (True, True, None)
    assert "d2t" not in abstract_params(config)


def test_a_z_lab_config_that_says_no_may_have_tables(tmp_path, target):
    """Only where the config is silent do own tables speak for the other slot layout."""
    source, _ = write(tmp_path, flat(sample_from_anchor=False), own_tables(synthetic.VOCAB))
    config = convert.convert_drafter(source, tmp_path / "out", target=target)
    assert (config.own_embedding, config.own_head, config.sample_from_anchor) == (True, True, False)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (vocabulary_map(IDS + 2), r"d2t\[10\] \+ 10: expected 0\.\.39, found 40"),
        (vocabulary_map(TWICE), r"d2t: expected each token of the target once, found 1 at \[1, 2\]"),
        ({"d2t": vocabulary_map()["d2t"].astype(np.float32)}, r"d2t: dtype: expected I64 or I32 or BOOL, found F32"),
        ({"d2t": np.zeros(11, np.int64)}, r"d2t: shape: expected \(12,\), found \(11,\)"),
        ({"t2d": np.zeros(40, bool)}, r"t2d\[0\]: expected True, as d2t has it, found False"),
        ({"t2d": np.zeros(39, bool)}, r"t2d: shape: expected \(40,\), found \(39,\)"),
        (own_tables(13), r"lm_head\.weight: shape: expected \(12, 16\), found \(13, 16\)"),
        ({"embed_tokens.weight": np.ones((12, 16), np.float32)}, r"embed_tokens\.weight: shape: expected \(40, 16\)"),
        ({"fc.weight": np.ones((16, 32), np.int64)}, r"fc\.weight: dtype: expected BF16 .*, found I64"),
    ],
)  # fmt: skip
def test_refused_tables(tmp_path, target, extra, message):
    source, _ = write(tmp_path, reduced(speculators), own_tables(), vocabulary_map(), extra)
    with pytest.raises(ConversionError, match=message):
        convert.convert_drafter(source, tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["d2t", "lm_head.weight"])
def test_a_reduced_vocabulary_needs_head_and_map(tmp_path, target, missing):
    tensors = without({**own_tables(), **vocabulary_map()}, missing)
    source, _ = write(tmp_path, reduced(speculators), tensors)
    with pytest.raises(ConversionError, match=rf"{missing}: expected a tensor of shape \(12,.*, found no such tensor"):
        convert.convert_drafter(source, tmp_path / "out", target=target)


def test_old_configs_still_load(read):
    data = read(flat()).to_json()
    for key in ("own_embedding", "own_head", "draft_vocab_size"):
        del data[key]
    assert DrafterConfig.from_json(data) == read(flat())
