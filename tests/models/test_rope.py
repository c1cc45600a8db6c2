"""Rotary embeddings against transformers' own frequencies, and far beyond any declared context."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.config import RopeConfig
from ddtree_jax.models.rope import inverse_frequencies, rope_tables
from pallas_kernels.fused_norm import apply_rope

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "goldens" / "rope.json").read_text())
NAMES = {"rope_type": "kind", "rope_theta": "theta", "original_max_position_embeddings": "original_max_position"}


def config_of(case: dict) -> RopeConfig:
    return RopeConfig(**{NAMES.get(k, k): v for k, v in case["rope_parameters"].items()})


@pytest.fixture(params=sorted(GOLDEN))
def case(request) -> dict:
    return GOLDEN[request.param]


def test_golden_covers_every_kind():
    assert {c["rope_parameters"]["rope_type"] for c in GOLDEN.values()} == {"default", "linear", "llama3", "yarn"}


def test_inverse_frequencies(case):
    inv_freq, factor = inverse_frequencies(config_of(case), case["head_dim"])
    assert inv_freq.dtype == np.float32
    assert inv_freq.shape == (case["head_dim"] // 2,)
    # Four units in the last place: two roundings of a power, two of a blend.
    np.testing.assert_allclose(inv_freq, np.float32(case["inv_freq"]), rtol=4 * 2.0**-24, atol=0)
    assert factor == pytest.approx(case["attention_factor"], rel=1e-7)


def test_cos_and_sin_at_far_positions(case):
    positions = np.array([case["positions"]], np.int32)
    cos, sin = rope_tables(config_of(case), jnp.asarray(positions), case["head_dim"])
    # An angle of a radians is known to a * 2^-23 or so in float32, in transformers as here: that is the tolerance.
    angle = positions[0].astype(np.float64)[:, None] * np.array(case["inv_freq"])[None, :]
    allowed = case["attention_factor"] * (1e-6 + 3 * angle * 2.0**-23)
    assert np.all(np.abs(np.asarray(cos[0]) - case["cos"]) <= allowed)
    assert np.all(np.abs(np.asarray(sin[0]) - case["sin"]) <= allowed)


def test_tables_beyond_the_declared_context_stay_on_the_unit_circle(case):
    cos, sin = rope_tables(config_of(case), jnp.asarray([[3_000_000]], jnp.int32), case["head_dim"])
    np.testing.assert_allclose(np.hypot(cos, sin), case["attention_factor"], rtol=1e-6)


def test_truncate_and_mscales_matter():
    """The settings that a converter could drop unnoticed do change the result."""
    base = config_of(GOLDEN["yarn_gpt_oss"])
    rounded = RopeConfig(**{**vars(base), "truncate": True})
    assert np.abs(inverse_frequencies(base, 64)[0] / inverse_frequencies(rounded, 64)[0] - 1).max() > 1e-3
    assert GOLDEN["yarn_equal_mscales"]["attention_factor"] == 1.0
    assert GOLDEN["yarn_mscale_pair"]["attention_factor"] < 0.96


def test_apply_rope_is_a_rotation_that_depends_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 2, 16)), jnp.float32) for _ in range(2))
    config = RopeConfig(theta=10000.0)

    def score(query_position, key_position):
        rotated = [
            apply_rope(x, *rope_tables(config, jnp.asarray([[p]], jnp.int32), 16))
            for x, p in ((q, query_position), (k, key_position))
        ]
        return np.asarray(jnp.sum(rotated[0] * rotated[1], axis=-1))

    np.testing.assert_allclose(score(9, 4), score(109, 104), atol=2e-5)
    assert np.abs(score(9, 4) - score(9, 5)).max() > 0.05


def test_partial_rotary_leaves_the_rest_alone():
    x = jnp.arange(24, dtype=jnp.float32).reshape(1, 1, 1, 24)
    y = apply_rope(x, *rope_tables(RopeConfig(), jnp.asarray([[7]], jnp.int32), 8))
    np.testing.assert_array_equal(y[..., 8:], x[..., 8:])
    assert np.abs(np.asarray(y - x))[..., :8].min() > 0


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="dynamic"):
        inverse_frequencies(RopeConfig(kind="dynamic"), 8)
