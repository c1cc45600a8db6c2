"""Reading config.json: rotary settings, windows, causality, block size and taps, place by place."""

import json

import pytest
import synthetic_checkpoints as synthetic

from convert.drafter_config import drafter_config
from convert.drafter_formats import attention_kinds
from convert.errors import ConversionError, ConversionWarning
from convert.fields import Fields
from convert.hf_config import sliding_windows, target_config
from convert.rope_config import rope_config
from ddtree_jax.config import RopeConfig, default_taps


def fields(**data):
    return Fields("config.json", data)


LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, RopeConfig(theta=10000.0)),
        ({"rope_theta": 1000000, "rope_scaling": None}, RopeConfig(theta=1e6)),
        ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}}, RopeConfig(theta=1e7)),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 5.0}}, RopeConfig(theta=5.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position=8192),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position=8192),
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, RopeConfig(kind="linear", factor=4.0)),
        (
            {"rope_theta": 150000, "rope_scaling": {"rope_type": "yarn", "truncate": False, **YARN}},
            RopeConfig(theta=150000.0, kind="yarn", factor=32.0, original_max_position=4096, truncate=False),
        ),
        (
            {"max_position_embeddings": 2048, "rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 1.5}},
            RopeConfig(kind="yarn", factor=2.0, original_max_position=2048, attention_factor=1.5),
        ),
        (
            {"rope_scaling": {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, **YARN}},
            RopeConfig(kind="yarn", factor=32.0, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0),
        ),
    ],
)
def test_rope(data, expected):
    assert rope_config(fields(**data)) == expected


def test_rope_spellings_that_differ():
    with pytest.raises(ConversionError, match=r"rope_scaling: expected only one .*, found both"):
        rope_config(fields(rope_scaling={"type": "linear", "factor": 2}, rope_parameters={"rope_theta": 1.0}))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, (None, None, None)),
        ({"sliding_window": 8}, (None, None, None)),
        ({"sliding_window": 8, "use_sliding_window": False}, (None, None, None)),
        ({"sliding_window": 8, "use_sliding_window": True}, (None, None, None)),  # max_window_layers is 28
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8, 8)),
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (None, None, None)),
        ({"layer_types": ["full_attention"] * 3, "sliding_window": 8, "use_sliding_window": True}, (None,) * 3),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}, (8, None, 8, None)),
    ],
)
def test_sliding_windows(data, expected):
    assert sliding_windows(fields(**data), len(expected)) == expected


def test_sliding_windows_that_contradict():
    data = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8, "use_sliding_window": False}
    with pytest.raises(ConversionError, match=r"use_sliding_window: expected true .*, found false"):
        sliding_windows(fields(**data), 3)


MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
FULL = {"layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize(
    ("data", "causal", "windows"),
    [
        # No layer types: full and not causal.
        ({}, (False, False), (None, None)),
        (FULL, (False, False), (None, None)),
        # Sliding layers are causal, full ones are not.
        (MIXED, (True, False), (8, None)),
        # is_causal decides for all layers, then dflash_config.causal.
        ({**MIXED, "is_causal": False}, (False, False), (8, None)),
        ({**MIXED, "is_causal": True}, (True, True), (8, None)),
        ({**MIXED, "dflash_config": {"causal": True}}, (True, True), (8, None)),
        ({**MIXED, "is_causal": False, "dflash_config": {"causal": True}}, (False, False), (8, None)),
        ({"dflash_config": {"causal": True}}, (True, True), (None, None)),
        # use_swa: every layer slides and is not causal, unless told.
        ({"dflash_config": {"use_swa": True, "swa_window_size": 4}, "sliding_window": 8}, (False, False), (4, 4)),
        ({"dflash_config": {"use_swa": True}, "sliding_window": 8}, (False, False), (8, 8)),
        ({**FULL, "dflash_config": {"use_swa": True, "swa_window_size": 4, "causal": True}}, (True, True), (4, 4)),
        ({"dflash_config": {"use_swa": False}, "sliding_window": 8}, (False, False), (None, None)),
        # Hugging Face fills in missing layer types from use_sliding_window and max_window_layers.
        ({"sliding_window": 8, "use_sliding_window": True}, (False, False), (None, None)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, (True, True), (8, 8)),
    ],
)
def test_attention_kinds_of_a_drafter(data, causal, windows):
    assert attention_kinds(fields(**data), 2) == (causal, windows)


def test_use_swa_beside_sliding_layers():
    with pytest.raises(ConversionError, match=r"layer_types: expected no sliding layers .*, found \['sliding"):
        attention_kinds(fields(**MIXED, dflash_config={"use_swa": True}), 2)


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (32, 5, (1, 8, 15, 22, 29)),
        (36, 1, (18,)),
        (9, 3, (1, 4, 6)),  # 3.5 rounds to 4
        (7, 3, (1, 2, 4)),  # 2.5 rounds to 2
    ],
)
def test_default_taps(target_layers, draft_layers, expected):
    assert default_taps(target_layers, draft_layers) == expected


@pytest.fixture
def read_drafter(tmp_path):
    target_folder, folder = tmp_path / "target", tmp_path / "drafter"
    target_folder.mkdir()
    folder.mkdir()
    (target_folder / "config.json").write_text(json.dumps(synthetic.target_json("qwen3", num_hidden_layers=9)))
    target = target_config(target_folder)

    def read(data, **options):
        (folder / "config.json").write_text(json.dumps({"num_target_layers": 9, **data}))
        return drafter_config(folder, (), target, **options)

    return read


def places(**changes):
    config = synthetic.drafter_json()
    for key in ("num_target_layers", "block_size"):
        del config[key]
    inner = changes.pop("dflash_config", None)
    return {**config, **changes} | ({} if inner is None else {"dflash_config": config["dflash_config"] | inner})


def test_inner_settings_win(read_drafter):
    assert read_drafter(places(block_size=16, dflash_config={"block_size": 8})).block_size == 8
    assert read_drafter(places(block_size=10)).block_size == 10


def test_missing_block_size(read_drafter):
    with pytest.warns(ConversionWarning, match=r"config\.json: block_size: missing, 16 is assumed"):
        assert read_drafter(places()).block_size == 16


def test_settings_at_the_top_level(read_drafter):
    config = places(block_size=4, mask_token_id=5, target_layer_ids=[2, 7], output_multiplier=0.5)
    del config["dflash_config"]
    result = read_drafter(config | {"final_logit_softcapping": 30.0, "input_embedding_scale": 2})
    assert (result.mask_token_id, result.target_layer_ids) == (5, (2, 7))
    assert (result.output_multiplier, result.logit_softcap, result.embedding_scale) == (0.5, 30.0, 2.0)


def test_default_taps_are_used(read_drafter):
    config = places(block_size=4, mask_token_id=5, num_hidden_layers=3)
    del config["dflash_config"]
    assert read_drafter(config).target_layer_ids == (1, 4, 6)


def test_zero_softcap_is_none(read_drafter):
    assert read_drafter(places(block_size=4, dflash_config={"final_logit_softcapping": 0})).logit_softcap is None


def test_unknown_inner_setting_warns(read_drafter):
    with pytest.warns(ConversionWarning, match=r"dflash_config\.novelty: not known here, ignored"):
        read_drafter(places(block_size=4, dflash_config={"novelty": 1}))
