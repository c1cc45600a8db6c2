"""The chain by XLA, and which implementation is chosen."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from linear_chain_suite import EPS, Case, LinearChainSuite, make_operands

from pallas_kernels.linear_chain import Turns, api, linear_chain, mosaic_gpu, runs_kernel, supported
from pallas_kernels.linear_chain.config import Chain, Config, Cut, choose

SMALL = Case(rows=4, mixed=128, hidden=256, intermediate=128, projected=64, dtype="float32")


class TestXla(LinearChainSuite):
    cases = (
        SMALL,
        Case(rows=3, mixed=96, hidden=64, intermediate=160, dtype="float32", zero_centred=True),
        Case(rows=17, mixed=128, hidden=128, intermediate=128, projected=96),
    )

    def run(self, case, mixed, stream, weights):
        options = dict(eps=EPS, zero_centred=case.zero_centred, implementation="xla")
        return linear_chain(mixed, stream, weights, Turns(), **options)


def test_chains_of_a_pass_take_turns(monkeypatch):
    """Each gets the next number, and the counters as the one before left them."""
    seen = []

    def run(operands, counters, turn, *, chain, config):
        seen.append((int(turn[0]), int(counters[0])))
        return {}, counters + 10

    monkeypatch.setattr(mosaic_gpu, "run", run)
    turns, between = Turns(), Chain(rows=64, mixed=256, hidden=256, intermediate=256, projected=256)
    for _ in range(3):
        turns.run({}, chain=between, config=choose(between))
    assert seen == [(0, 0), (1, 10), (2, 20)]
    more = dataclasses.replace(between, rows=65)
    with pytest.raises(ValueError, match="workers and consumers as before, 132 and 1, got 132 and 2"):
        turns.run({}, chain=more, config=choose(more))
    last = dataclasses.replace(between, projected=0)
    for _ in range(2):  # as in a drafter
        turns.run({}, chain=last, config=choose(last))
    with pytest.raises(ValueError, match="after a chain without a projection"):
        turns.run({}, chain=between, config=choose(between))
    assert len(seen) == 5


def test_the_kernel_is_chosen_where_it_was_measured_and_runs_at_once(monkeypatch):
    def chosen(chain):
        return api._choose(chain, choose(chain), None)

    measured = Chain(rows=64, mixed=4096, hidden=4096, intermediate=12288, projected=6144)
    assert chosen(measured) == "xla"  # no Hopper GPU here
    monkeypatch.setattr(api.choice, "on_hopper", lambda: True)
    monkeypatch.setattr(api.choice, "multiprocessors", lambda: 132)
    assert chosen(measured) == "mosaic_gpu"
    for other in (dict(dtype="float16"), dict(projected=7168), dict(rows=129)):
        assert chosen(dataclasses.replace(measured, **other)) == "xla"
    monkeypatch.setattr(api.choice, "multiprocessors", lambda: 114)
    assert chosen(measured) == "xla"
    with pytest.raises(NotImplementedError, match="fewer than 132 multiprocessors"):
        api._choose(measured, choose(measured), "mosaic_gpu")


def test_leading_axes_are_kept():
    mixed, stream, weights = make_operands(SMALL)
    total, projected = linear_chain(mixed[None], stream[None], weights, Turns(), eps=EPS)
    assert total.shape == (1, 4, 256) and projected.shape == (1, 4, 64)


def test_arrays_that_contradict_each_other_are_refused_by_name():
    mixed, stream, weights = make_operands(SMALL)
    with pytest.raises(ValueError, match=r"mixed must be \(4, 'A'\) of float32"):
        linear_chain(mixed[:3], stream, weights, Turns(), eps=EPS)
    with pytest.raises(ValueError, match=r"out must be \(128, 128\) of float32"):
        linear_chain(mixed, stream[:, :128], weights, Turns(), eps=EPS)
    with pytest.raises(ValueError, match=r"mixed, stream and down must be \[\.\.\., A\]"):
        linear_chain(mixed[0, 0], stream, weights, Turns(), eps=EPS)
    with pytest.raises(ValueError, match="implementation must be"):
        linear_chain(mixed, stream, weights, Turns(), eps=EPS, implementation="cuda")


def test_what_the_kernel_cannot_do_is_refused_by_name():
    mixed, stream, weights = make_operands(SMALL)
    with pytest.raises(NotImplementedError, match="dtype float32"):
        linear_chain(mixed, stream, weights, Turns(), eps=EPS, implementation="mosaic_gpu")
    assert not supported(mixed, stream, weights, eps=EPS)
    assert not runs_kernel(mixed, stream, weights, eps=EPS)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (mixed, stream, vars(weights)))
    rows = jnp.broadcast_to(half[0][:1], (129, 128)), jnp.broadcast_to(half[1][:1], (129, 256))
    with pytest.raises(NotImplementedError, match="129 rows"):
        linear_chain(*rows, type(weights)(**half[2]), Turns(), eps=EPS, implementation="mosaic_gpu")


def test_sizes_that_do_not_fit_are_refused_by_name():
    chain = Chain(rows=64, mixed=256, hidden=256, intermediate=256)
    good = choose(chain)
    good.check(chain)
    with pytest.raises(ValueError, match=r"out\.splits must be 1\.\.inputs / block"):
        Config(**vars(good) | dict(out=Cut(64, 5))).check(chain)
    with pytest.raises(ValueError, match="consumers must be"):
        Config(**vars(good) | dict(consumers=2)).check(chain)
    narrow = dataclasses.replace(chain, hidden=192)
    with pytest.raises(ValueError, match="hidden must be a multiple of 128"):
        Config(**vars(good) | dict(block=64)).check(narrow)
    assert choose(Chain(rows=1, mixed=256, hidden=192, intermediate=256)) is None  # norms take 128 columns at a time


@pytest.mark.parametrize("rows,whole", [(1, True), (16, True), (64, True), (128, False)])
def test_up_to_64_rows_the_projection_is_left_whole(rows, whole):
    """Attention then norms and rotates it itself; of more rows splits are measured to be faster."""
    chain = Chain(rows=rows, mixed=4096, hidden=4096, intermediate=12288, projected=6144)
    assert (choose(chain).next.splits == 1) == whole
    assert choose(chain).down.splits > 1
