import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tree_oracle import HAND, log

from ddtree_jax.tree import accept, build_tree, chain_tree, format_tree, plot_tree

jit_build = jax.jit(build_tree, static_argnums=1)

DRAWING = """\
'a' 1 ●
├─ 'a' 0.55
│  ├─ 'a' 0.341
│  │  └─ 'a' 0.164
│  └─ 'b' 0.116
└─ 'b' 0.3 ●
   └─ 'a' 0.186 ●"""


@pytest.fixture
def tree():
    probs = np.stack([np.full_like(HAND, 0.25), HAND])
    return jit_build(jnp.asarray(log(probs), jnp.float32), 7)


@pytest.fixture
def acceptance(tree):
    return jax.jit(accept, static_argnames="max_path")(
        tree, jnp.array([[3] * 7, [1, 5, 9, 0, 2, 9, 9]], jnp.int32), max_path=4
    )


def test_text_drawing(tree, acceptance):
    assert format_tree(tree, slot=1, decode="abcd".__getitem__, accepted=acceptance) == DRAWING
    assert format_tree(tree, slot=1, decode="abcd".__getitem__, accepted=[0, 3, 4]) == DRAWING
    plain = format_tree(tree, slot=1)
    assert "●" not in plain and plain.splitlines()[0] == "0 1"


def test_padding_is_left_out_and_chains_may_be_long():
    tree = jit_build(jnp.zeros((1, 1, 1), jnp.float32), 5)
    assert format_tree(tree) == "0 1\n└─ 0 1"
    depths = 1100  # beyond Python's recursion limit
    chain = chain_tree(
        jnp.ones((1, depths), jnp.int32), jnp.zeros((1, depths), jnp.float32), jnp.zeros((1,), jnp.int32)
    )
    assert len(format_tree(chain).splitlines()) == depths + 1


def test_no_such_slot(tree):
    for slot in (-1, 2):
        with pytest.raises(IndexError, match="batch of 2"):
            format_tree(tree, slot=slot)


def test_figure(tree, acceptance):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ax = plot_tree(tree, slot=1, decode="abcd".__getitem__, accepted=acceptance)
    ax.figure.canvas.draw()
    places = ax.collections[0].get_offsets()
    np.testing.assert_array_equal(places[:, 0], tree.depth[1])
    assert len({tuple(place) for place in places.tolist()}) == 7, "nodes must not cover each other"
    assert [line.get_linewidth() for line in ax.lines].count(2.5) == 2  # the accepted edges
    _, own = plt.subplots()
    assert plot_tree(tree, ax=own) is own
    plt.close("all")


def test_figure_without_matplotlib(tree, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"ddtree_jax\[demo\]"):
        plot_tree(tree)
