"""The mixture-of-experts block: routing, the sum over experts, and what it may not depend on."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import GOLDENS

from ddtree_jax import testing
from ddtree_jax.config import MoEConfig, TargetConfig
from ddtree_jax.models.abstract import abstract_params
from ddtree_jax.models.moe import MoE, route

CONFIG = MoEConfig(
    sparse=(True,), num_experts=10, experts_per_token=3, intermediate_size=12, renormalise=True,
    shared_intermediate_size=20,
)  # fmt: skip


@functools.cache
def golden():
    """(arrays, parameters of the block in our tree)."""
    with np.load(GOLDENS / "moe_block.npz") as data:
        arrays = dict(data)
    shared = [arrays[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up")]
    params = {
        "gate": {"weight": arrays["gate.weight"]},
        "gate_up_proj": {"weight": arrays["experts.gate_up_proj"]},
        "down_proj": {"weight": arrays["experts.down_proj"]},
        "shared_expert": {
            "gate_up_proj": {"weight": np.concatenate(shared)},
            "down_proj": {"weight": arrays["shared_expert.down_proj.weight"]},
        },
        "shared_expert_gate": {"weight": arrays["shared_expert_gate.weight"]},
    }
    return arrays, jax.tree.map(jnp.asarray, params)


@functools.partial(jax.jit, static_argnums=0)
def block(config, params, x):
    return MoE(config, x.shape[-1], x.dtype).apply({"params": params}, x)


def test_the_block_of_qwen3_5_equals_transformers():
    arrays, params = golden()
    out = block(CONFIG, params, jnp.asarray(arrays["x"]))
    assert np.abs(np.asarray(out) - arrays["out"]).max() <= 1e-4
    # The tolerance means something: without the shared expert the result is another.
    without = dataclasses.replace(CONFIG, shared_intermediate_size=0)
    assert np.abs(np.asarray(block(without, params, jnp.asarray(arrays["x"]))) - arrays["out"]).max() > 0.1


def test_routing_equals_transformers():
    arrays, params = golden()
    logits = jnp.asarray(arrays["x"].reshape(18, -1) @ arrays["gate.weight"].T)
    experts, weights = route(logits, 3, True)
    np.testing.assert_array_equal(experts, arrays["experts"])
    np.testing.assert_allclose(weights, arrays["weights"], atol=1e-6)
    _, plain = route(logits, 3, False)
    probabilities = np.asarray(jax.nn.softmax(logits, axis=-1))
    np.testing.assert_allclose(plain, np.take_along_axis(probabilities, arrays["experts"], axis=1), atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ties_go_to_the_lowest_index(dtype):
    logits = jnp.asarray([[0, 2, 2, 1, 2, 1], [3, 3, 3, 3, 3, 3]], dtype)
    experts, weights = route(logits, 4, True)
    np.testing.assert_array_equal(experts, [[1, 2, 4, 3], [0, 1, 2, 3]])
    assert weights.dtype == dtype
    np.testing.assert_array_equal(weights[1].astype(jnp.float32), 0.25)


def test_the_softmax_of_bfloat16_logits_is_float32():
    logits = jnp.asarray([[8.0, 0.0, 0.0, 0.0]], jnp.bfloat16)
    _, weights = route(logits, 1, False)
    expected = np.exp(8.0) / (np.exp(8.0) + 3)
    assert weights[0, 0] == jnp.asarray(expected, jnp.bfloat16)


def test_a_token_depends_on_itself_alone():
    """Of many tokens any one changed leaves the others as they were, bit for bit, even where they share an expert."""
    arrays, params = golden()
    x = np.array(arrays["x"])
    x[1] = x[0, :1]  # nine tokens that choose the same experts
    before = np.asarray(block(CONFIG, params, jnp.asarray(x)))
    for token in range(9):
        changed = x.copy()
        changed[0, token] = -changed[0, token]
        after = np.asarray(block(CONFIG, params, jnp.asarray(changed)))
        others = np.arange(9) != token
        np.testing.assert_array_equal(after[0, others], before[0, others])
        np.testing.assert_array_equal(after[1], before[1])
        assert np.abs(after[0, token] - before[0, token]).max() > 0.1


def test_experts_that_no_token_chose_do_not_count():
    arrays, params = golden()
    x = jnp.asarray(arrays["x"][:, :1])
    unused = np.setdiff1d(np.arange(10), arrays["experts"].reshape(2, 9, 3)[:, 0])
    assert len(unused) >= 4
    poisoned = params | {
        name: {"weight": params[name]["weight"].at[unused].set(jnp.nan)} for name in ("gate_up_proj", "down_proj")
    }
    np.testing.assert_array_equal(block(CONFIG, poisoned, x), block(CONFIG, params, x))


def test_config_goes_through_json():
    config = testing.tiny_target_config(moe=testing.tiny_moe())
    data = json.loads(json.dumps(config.to_json()))
    assert TargetConfig.from_json(data) == config
    hash(TargetConfig.from_json(data))  # a static argument
    data["moe"]["capacity"] = 2
    with pytest.raises(ValueError, match=r"MoEConfig: unknown fields \['capacity'\]"):
        TargetConfig.from_json(data)
    del data["moe"]["capacity"], data["moe"]["sparse"]
    with pytest.raises(ValueError, match=r"MoEConfig: .*missing fields \['sparse'\]"):
        TargetConfig.from_json(data)


def test_a_config_from_before_mixtures_of_experts_still_loads():
    config = testing.tiny_target_config()
    data = config.to_json()
    del data["moe"]
    assert TargetConfig.from_json(data) == config


def test_layers_without_experts_keep_the_dense_block():
    params = abstract_params(testing.tiny_target_config(moe=testing.tiny_moe()))
    assert set(params["layers_0"]["mlp"]) == {"gate_up_proj", "down_proj"}
    assert params["layers_0"]["mlp"]["down_proj"]["weight"].shape == (32, 48)
    assert params["layers_1"]["mlp"]["down_proj"]["weight"].shape == (16, 32, 12)
    assert "shared_expert" in params["layers_2"]["mlp"]
