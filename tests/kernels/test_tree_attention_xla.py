"""The XLA form of tree attention, on any device, and the checks of the public function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suite import Case, TreeAttentionSuite, in_layers, make_operands, to_pages

from pallas_kernels.tree_attention import paged_tree_attention, tree_attention

_SMALL = dict(heads=4, kv_heads=2, head_dim=16, capacity=40)


class TestXla(TreeAttentionSuite):
    cases = (
        Case(nodes=1, **_SMALL, lengths=(0, 1, 40)),
        Case(nodes=5, **_SMALL, lengths=(13,), dtype="float32"),
        Case(nodes=5, **_SMALL, lengths=(13,), dtype="float16"),
        Case(nodes=33, **_SMALL, lengths=(40, 7), dead=4),
        Case(nodes=33, **_SMALL, lengths=(40, 7), dead=4, dtype="float32"),
        Case(nodes=64, **_SMALL, lengths=(0, 20), mask="causal"),
        Case(nodes=16, **_SMALL, lengths=(31,), mask="full", dtype="float32"),
        Case(nodes=40, **_SMALL, lengths=(33, 5), sliding_window=9, dtype="float32"),
        Case(nodes=40, **_SMALL, lengths=(33, 5), sliding_window=1, dtype="float32"),
        Case(nodes=40, **_SMALL, lengths=(33, 5), sliding_window=9, positions=True, dtype="float32"),
        Case(nodes=12, **_SMALL, lengths=(33,), softcap=1.5, dtype="float32"),
        Case(nodes=12, heads=15, kv_heads=3, head_dim=8, capacity=0, lengths=(0, 0), dtype="float32"),
        Case(nodes=130, heads=7, kv_heads=1, head_dim=24, capacity=64, lengths=(50,), sliding_window=30, softcap=4.0),
        Case(nodes=6, **_SMALL, lengths=(0, 33), page_rows=16, dtype="float32"),
        Case(nodes=6, **_SMALL, lengths=(0, 33), layer=2, dtype="float32"),
    )

    def attend(self, case, operands, options):
        function = tree_attention
        if case.page_rows:
            function, operands = paged_tree_attention, to_pages(case, operands)
        operands, options = in_layers(case, operands, options)
        return jax.jit(lambda *a: function(*a, **options, implementation="xla"))(*operands)


def test_a_node_that_sees_nothing_yields_zeros():
    case = Case(nodes=2, **_SMALL, lengths=(0,))
    operands, options = make_operands(case)
    out = tree_attention(*operands[:6], jnp.zeros_like(operands[6]), **options, implementation="xla")
    np.testing.assert_array_equal(np.asarray(out).astype(np.float32), 0)


def test_keys_and_values_are_not_repeated_for_the_group():
    case = Case(nodes=4, heads=16, kv_heads=1, head_dim=8, capacity=1000, lengths=(1000,), dtype="float32")
    operands, options = make_operands(case)
    text = jax.jit(lambda *a: tree_attention(*a, **options, implementation="xla")).lower(*operands).as_text()
    assert "16x1000x8" not in text


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("q", lambda x: x[0], "q must be"),
        ("k_cache", lambda x: x[:, :, :, :8], "k_cache must have shape"),
        ("k_cache", lambda x: jnp.concatenate([x, x[:, :1]], axis=1), "multiple of key/value heads"),
        ("v_cache", lambda x: x[:, :, :8], "v_cache must have shape"),
        ("v_tree", lambda x: x.astype(jnp.float16), "v_tree must be bfloat16 like q"),
        ("lengths", lambda x: x.astype(jnp.uint32), "lengths must be int32"),
        ("ancestors", lambda x: x.astype(jnp.int32), "ancestors must be uint32"),
        ("ancestors", lambda x: jnp.concatenate([x, x], axis=2), "ancestors must have shape"),
        ("positions", lambda _: jnp.zeros((1, 4), jnp.int32), "positions must have shape"),
        ("sliding_window", lambda _: 0, "sliding_window must be"),
        ("softcap", lambda _: 0.0, "softcap must be"),
        ("implementation", lambda _: "cuda", "implementation must be"),
        ("layer", lambda _: 0, r"layer 0 needs a k_cache \[M, B, K, C, D\]"),
    ],
)
def test_bad_arguments_are_named(name, change, message):
    operands, options = make_operands(Case(nodes=5, **_SMALL, lengths=(13,)))
    names = ("q", "k_cache", "v_cache", "lengths", "k_tree", "v_tree", "ancestors")
    arguments = dict(zip(names, operands)) | options
    arguments[name] = change(arguments.get(name))
    with pytest.raises(ValueError, match=message):
        tree_attention(**arguments)


def test_what_the_gpu_kernel_cannot_do_is_named():
    operands, options = make_operands(Case(nodes=5, **_SMALL, lengths=(13,)))
    with pytest.raises(NotImplementedError, match="head_dim 16"):
        tree_attention(*operands, **options, implementation="mosaic_gpu")
    wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in operands]
    with pytest.raises(NotImplementedError, match="float32"):
        tree_attention(*wide, **options, implementation="mosaic_gpu")
    odd, options = make_operands(Case(nodes=5, heads=4, kv_heads=2, head_dim=64, capacity=41, lengths=(13,)))
    with pytest.raises(NotImplementedError, match="41 rows"):
        tree_attention(*odd, **options, implementation="mosaic_gpu")
