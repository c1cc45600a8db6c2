"""Draws follow the target's law, and depend on (seed, absolute position) alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from ddtree_jax.decode.sampling import draw


def draw_one(logits, *, depth=0, position=5, depths=1, seeds, temperature=1.0):
    batch = len(seeds)
    return draw(
        jnp.broadcast_to(jnp.asarray(logits, jnp.float32)[None, None], (batch, 1, len(logits))),
        jnp.full((batch, 1), depth, jnp.int32),
        first_position=jnp.full((batch,), position, jnp.int32),
        num_depths=depths,
        seeds=jnp.asarray(seeds, jnp.uint32),
        temperature=jnp.float32(temperature),
    )[:, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_law(temperature):
    logits = np.array([1.0, 0.0, 2.0, -1.0, 0.5])
    seeds = np.arange(20_000, dtype=np.uint32)
    counts = np.bincount(np.asarray(draw_one(logits, seeds=seeds, temperature=temperature)), minlength=5)
    p = np.exp(logits / temperature)
    assert stats.chisquare(counts, p / p.sum() * len(seeds)).pvalue > 1e-3


def test_neighbouring_positions_are_independent():
    seeds = np.arange(20_000, dtype=np.uint32)
    logits = np.zeros(3)
    a = np.asarray(draw_one(logits, seeds=seeds, position=5))
    b = np.asarray(draw_one(logits, seeds=seeds, position=6))
    table = np.histogram2d(a, b, bins=(3, 3))[0]
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_only_seed_and_position_matter():
    logits = jax.random.normal(jax.random.key(0), (40,))
    seeds = np.arange(50, dtype=np.uint32)
    at_root = draw_one(logits, seeds=seeds, position=9)
    deep = draw_one(logits, seeds=seeds, position=5, depth=4, depths=8)
    np.testing.assert_array_equal(at_root, deep)
    assert len(set(np.asarray(at_root).tolist())) > 5


def test_draws_do_not_depend_on_the_batch_nor_on_the_default_generator():
    logits = jax.random.normal(jax.random.key(0), (40,))
    seeds = np.arange(6, dtype=np.uint32)
    with jax.default_prng_impl("rbg"):  # its bits change with the shape of a vmap
        together = draw_one(logits, seeds=seeds)
        alone = [int(draw_one(logits, seeds=seeds[i : i + 1], depth=4, position=1, depths=8)[0]) for i in range(6)]
    assert together.tolist() == alone == draw_one(logits, seeds=seeds).tolist()
