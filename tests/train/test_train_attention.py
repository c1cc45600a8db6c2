"""Block attention against a dense softmax: values and gradients, chunked and not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.train.attention import AttentionSpec, block_attention

B, N, SLOTS, HEADS, KV, DIM, LENGTH = 2, 5, 4, 4, 2, 8, 11


def dense(spec, q, k_context, v_context, first, last, k_block, v_block):
    """One query at a time in the most literal form."""
    group = HEADS // KV
    k = jnp.repeat(k_context, group, axis=1)
    v = jnp.repeat(v_context, group, axis=1)
    kb, vb = (jnp.repeat(x, group, axis=3) for x in (k_block, v_block))
    row, slot = jnp.arange(LENGTH), jnp.arange(SLOTS)
    context = (row[None, None, None] >= first[..., None]) & (row[None, None, None] < last[..., None])
    distance = slot[:, None] - slot[None, :]
    block = (distance >= 0) if spec.causal else jnp.ones((SLOTS, SLOTS), bool)
    if spec.window:
        block &= distance < spec.window
    s = jnp.einsum("bnihd,bhsd->bnhis", q, k, precision="highest") * spec.scale
    t = jnp.einsum("bnihd,bnjhd->bnhij", q, kb, precision="highest") * spec.scale
    s = jnp.where(context[:, :, None], s, -jnp.inf)
    t = jnp.where(block[None, None, None], t, -jnp.inf)
    p = jax.nn.softmax(jnp.concatenate([s, t], axis=-1), axis=-1)
    out = jnp.einsum("bnhis,bhsd->bnihd", p[..., :LENGTH], v, precision="highest")
    return out + jnp.einsum("bnhij,bnjhd->bnihd", p[..., LENGTH:], vb, precision="highest")


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    q = normal(B, N, SLOTS, HEADS, DIM)
    context = normal(B, KV, LENGTH, DIM), normal(B, KV, LENGTH, DIM)
    blocks = normal(B, N, SLOTS, KV, DIM), normal(B, N, SLOTS, KV, DIM)
    last = rng.integers(0, LENGTH + 1, (B, N, 1)).astype(np.int32)
    first = np.maximum(0, last - rng.integers(0, 8, (B, N, SLOTS))).astype(np.int32)
    return (q, *context, first, np.broadcast_to(last, first.shape), *blocks)


SPECS = [AttentionSpec(scale=0.3), AttentionSpec(scale=0.3, causal=True, window=2, chunk_bytes=4000)]


@pytest.mark.parametrize("spec", SPECS)
def test_values_and_gradients_equal_a_dense_softmax(spec):
    q, k, v, first, last, kb, vb = inputs()
    weight = jnp.asarray(np.random.default_rng(1).normal(size=q.shape), jnp.float32)

    def loss(function):
        def value(q, k, v, kb, vb):
            out = function(spec, q, k, v, first, last, kb, vb)
            return jnp.sum(weight * out), out

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2, 3, 4), has_aux=True))

    (_, found), found_gradients = loss(block_attention)(q, k, v, kb, vb)
    (_, expected), gradients = loss(dense)(q, k, v, kb, vb)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for name, a, b in zip("q k v kb vb".split(), found_gradients, gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, err_msg=name)


def test_bfloat16_is_close_to_float32():
    attend = jax.jit(block_attention, static_argnums=0)
    exact = attend(SPECS[0], *inputs())
    found = attend(SPECS[0], *(x.astype(jnp.bfloat16) if x.dtype == np.float32 else x for x in inputs()))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=0.05)


def test_queries_that_see_nothing_are_zero_and_have_finite_gradients():
    q, k, v, first, _, _, _ = inputs()
    value = lambda q, k, v: jnp.sum(block_attention(SPECS[0], q, k, v, first, first))  # noqa: E731
    assert jax.jit(value)(q, k, v) == 0
    for gradient in jax.jit(jax.grad(value, argnums=(0, 1, 2)))(q, k, v):
        assert not np.any(gradient)


def test_no_array_holds_all_scores():
    """At 3072 tokens and 512 blocks of 16 the scores of a row are 8192 x 3088 a head: none of that size may exist."""
    spec = AttentionSpec(scale=0.125, chunk_bytes=2**28)
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    args = (shape(1, 512, 16, 32, 128), shape(1, 8, 3072, 128), shape(1, 8, 3072, 128))
    index, block = shape(1, 512, 16, dtype=jnp.int32), shape(1, 512, 16, 8, 128)

    def loss(q, k, v, kb, vb, first, last):
        return jnp.sum(block_attention(spec, q, k, v, first, last, kb, vb).astype(jnp.float32))

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))(*args, block, block, index, index)
    largest = max(v.aval.size * v.aval.dtype.itemsize for v in variables(jaxpr.jaxpr))
    assert largest <= 2**28 < 4 * 32 * 8192 * 3088


def variables(jaxpr):
    for equation in jaxpr.eqns:
        yield from (v for v in equation.outvars if hasattr(v.aval, "dtype"))
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from variables(inner)
