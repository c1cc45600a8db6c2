"""The layout of rows by group, the XLA form of the product on any device, and the checks of the public function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_matmul_suite import Case, GroupedMatmulSuite, make_operands

from pallas_kernels.grouped_matmul import group_rows, grouped_matmul, tile_rows
from pallas_kernels.grouped_matmul.groups import most_tiles


class TestXla(GroupedMatmulSuite):
    cases = (
        Case(rows=1, groups=4, columns=5, depth=6, dtype="float32"),
        Case(rows=30, groups=4, columns=8, depth=16, dtype="float32", swiglu=True),
        Case(rows=30, groups=64, columns=8, depth=16, dtype="float32"),
        Case(rows=40, groups=3, columns=7, depth=16, dtype="float32", spread="one"),
        Case(rows=25, groups=5, columns=8, depth=16, dtype="float32", tile=3),
        Case(rows=30, groups=4, columns=8, depth=16),
        Case(rows=30, groups=4, columns=8, depth=16, dtype="float16", swiglu=True),
    )

    def multiply(self, x, matrices, groups, swiglu):
        return jax.jit(lambda *a: grouped_matmul(*a, swiglu=swiglu, implementation="xla"))(x, matrices, groups)


@pytest.mark.parametrize("tile", [1, 3, 8])
def test_every_row_has_a_place_in_a_tile_of_its_group(tile):
    lay_out, rng = jax.jit(group_rows, static_argnums=(1, 2)), np.random.default_rng(tile)
    for _ in range(30):
        group = rng.choice(7, 40, p=rng.dirichlet(np.full(7, 0.3))).astype(np.int32)  # few large groups, some empty
        groups = jax.device_get(lay_out(group, 7, tile))
        assert groups.rows_per_tile == tile
        np.testing.assert_array_equal(groups.source[groups.place], np.arange(40))
        np.testing.assert_array_equal(groups.tile_group[groups.place // tile], group)
        assert groups.tiles.tolist() == [np.sum(-(-np.bincount(group, minlength=7) // tile))]
        assert groups.tiles[0] <= len(groups.tile_group) == most_tiles(40, 7, tile)
        for g in range(7):  # in the order they came in
            assert (np.diff(groups.place[group == g]) == 1).all()


def test_the_number_of_tiles_is_never_more_than_it_must_be():
    """The bound is met: one row in each group but one, which has all the others."""
    group = jnp.asarray([*range(7), *[3] * 16], jnp.int32)
    assert group_rows(group, 7, 8).tiles[0] == most_tiles(23, 7, 8) == 9


@pytest.mark.parametrize("rows,tile", [(8, 8), (128, 8), (512, 8), (1024, 16), (2048, 32), (4096, 64), (10**6, 64)])
def test_tiles_of_a_model_with_128_experts(rows, tile):
    assert tile_rows(rows, 128) == tile


def test_a_row_depends_neither_on_its_neighbours_nor_on_their_number():
    """Bit for bit."""
    case = Case(rows=30, groups=4, columns=64, depth=96, dtype="float32")
    group, x, matrices = make_operands(case)
    matrices = jnp.nan_to_num(matrices)

    @jax.jit
    def product(group, x):
        groups = group_rows(group, case.groups, 8)
        return grouped_matmul(x[groups.source], matrices, groups, implementation="xla")[groups.place]

    everything = np.asarray(product(group, x))
    for keep in (np.arange(29, -1, -2), np.array([7])):
        np.testing.assert_array_equal(product(group[keep], x[keep]), everything[keep])


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("x", lambda x: x[0], "x must be"),
        ("x", lambda x: x[:-1], "x must have the 8 rows"),
        ("x", lambda x: x.astype(jnp.int32), "x must be floating point"),
        ("weight", lambda w: w[:, :, 1:], r"weight must be \[X, O, 6\]"),
        ("weight", lambda w: w.astype(jnp.float16), "weight must be float32 like x"),
        ("swiglu", lambda _: True, "even number of rows"),
        ("implementation", lambda _: "triton", "implementation must be"),
    ],
)
def test_bad_arguments_are_named(name, change, message):
    group, x, matrices = make_operands(Case(rows=1, groups=4, columns=5, depth=6, dtype="float32"))
    groups = group_rows(group, 4, 8)
    arguments = dict(x=x[groups.source], weight=matrices, groups=groups)
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**arguments | {name: change(arguments.get(name))})


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(dtype="float32"), "dtype float32"),
        (dict(columns=96), "96 columns"),
        (dict(depth=96), "rows of 96"),
        (dict(tile=12), "tiles of 12 rows"),
    ],
)
def test_what_the_gpu_kernel_cannot_do_is_named(change, message):
    case = Case(**dict(rows=3, groups=2, columns=64, depth=128, tile=8) | change)
    group, x, matrices = make_operands(case)
    groups = group_rows(group, 2, case.tile)
    with pytest.raises(NotImplementedError, match=message):
        grouped_matmul(x[groups.source], matrices, groups, implementation="mosaic_gpu")
