"""Configs from JSON: what was written comes back, and whatever is wrong is named."""

import json

import pytest

from ddtree_jax import testing
from ddtree_jax.config import DrafterConfig, RopeConfig, TargetConfig
from ddtree_jax.fields import from_json

TARGETS = {
    "dense": testing.tiny_target_config(rope=RopeConfig(kind="yarn", attention_factor=None, factor=4)),
    "moe": testing.tiny_target_config(moe=testing.tiny_moe()),
    "hybrid": testing.tiny_hybrid_config(rotary_dim=None),
}


@pytest.mark.parametrize("name", TARGETS)
def test_there_and_back(name):
    config = TARGETS[name]
    assert TargetConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    drafter = testing.tiny_drafter_config(config)
    assert DrafterConfig.from_json(json.loads(json.dumps(drafter.to_json()))) == drafter


@pytest.mark.parametrize(
    "name,changes,message",
    [
        ("dense", {"vocab_size": "x"}, "TargetConfig.vocab_size: expected int, found 'x'"),
        ("dense", {"vocab_size": 61.0}, "TargetConfig.vocab_size: expected int, found 61.0"),
        ("dense", {"num_heads": True}, "TargetConfig.num_heads: expected int, found True"),
        ("dense", {"qk_norm": 1}, "TargetConfig.qk_norm: expected bool, found 1"),
        ("dense", {"rms_norm_eps": None}, "TargetConfig.rms_norm_eps: expected float, found None"),
        ("dense", {"dtype": "float99"}, "dtype: expected one of bfloat16, float16, float32, found 'float99'"),
        ("dense", {"rope": 3}, "RopeConfig: expected an object, found 3"),
        ("dense", {"rope": {"theta": "long"}}, "RopeConfig.theta: expected float, found 'long'"),
        ("dense", {"rope": {"base": 1e4}}, r"RopeConfig: unknown fields \['base'\]"),
        ("dense", {"stop_token_ids": "0"}, "TargetConfig.stop_token_ids: expected tuple, found '0'"),
        ("dense", {"stop_token_ids": [9999]}, "stop_token_ids: expected ids in 0..60, found 9999"),
        ("dense", {"sliding_windows": [None, "all", None]}, r"sliding_windows\[1\]: expected int, found 'all'"),
        ("dense", {"num_layers": 4}, "sliding_windows: expected 4 entries, one a layer, found 3"),
        ("dense", {"delta_layers": [0]}, "delta: expected the shape"),
        ("hybrid", {"delta_layers": [0, 7]}, "delta_layers: expected blocks in 0..3, found"),
        ("moe", {"num_layers": 2, "sliding_windows": [None, None]}, "moe.sparse: expected 2 entries, found 3"),
    ],
)
def test_what_is_wrong_is_named(name, changes, message):
    with pytest.raises(ValueError, match=message):
        TargetConfig.from_json(json.loads(json.dumps(TARGETS[name].to_json())) | changes)


def test_a_list_is_no_object():
    with pytest.raises(ValueError, match=r"TargetConfig: expected an object, found \[\]"):
        from_json(TargetConfig, [])


def test_drafters_with_layers_left_out():
    data = testing.tiny_drafter_config(TARGETS["dense"]).to_json()
    with pytest.raises(ValueError, match="causal: expected 2 entries, one a layer, found 1"):
        DrafterConfig.from_json(data | {"causal": [True]})
    with pytest.raises(ValueError, match="missing fields"):
        DrafterConfig.from_json({k: v for k, v in data.items() if k != "block_size"})
