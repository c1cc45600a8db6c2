"""Which methods, widths and trees a comparison runs, and their names."""

import dataclasses

import pytest

import ddtree_jax as dt
from ddtree_jax import testing
from ddtree_jax.config import possible_methods
from ddtree_jax.decode.plan import make_plan
from ddtree_jax.evaluation.variants import Variant, variants
from ddtree_jax.tree import PRESETS

TARGET = dt.Target(testing.tiny_target_config(), None)
DRAFTER = dt.Drafter(testing.tiny_drafter_config(TARGET.config), None)
BASE = dt.DecodeConfig(max_new_tokens=9)


def names(methods, widths=(16, 64), trees=(None,), drafter=DRAFTER):
    return [v.name for v in variants(methods, widths, trees, BASE, TARGET, drafter)]


def test_all_methods_of_a_pair():
    assert names(possible_methods(DRAFTER.config)) == [
        "autoregressive", "lookup", "lookup_tree-16", "lookup_tree-64", "dflash", "static_tree-26-eagle-1",
        "ddtree-16", "ddtree-64",
    ]  # fmt: skip
    assert names(possible_methods(None), widths=(8,), drafter=None) == ["autoregressive", "lookup", "lookup_tree-8"]


def test_a_tree_keeps_its_name_however_it_is_written():
    spelt = ["eagle-1", str(PRESETS["eagle-1"]), str(list(reversed(PRESETS["eagle-1"])))]
    assert names(["static_tree"], trees=spelt) == ["static_tree-26-eagle-1"]
    first, second = names(["static_tree"], trees=["[(0,), (1,)]", "[(0,), (0, 0)]"])  # two trees of one width
    assert first != second and first.startswith("static_tree-3-") and second.startswith("static_tree-3-")
    assert names(["static_tree"], trees=["[(1,), (0,)]"]) == [first]


def test_widths_given_twice_run_once():
    assert names(["ddtree", "ddtree"], widths=(16, 16)) == ["ddtree-16"]


def test_configs_can_be_planned():
    for variant in variants(possible_methods(DRAFTER.config), (16,), ["medusa-vicuna-7b"], BASE, TARGET, DRAFTER):
        config = variant.config(BASE)
        assert (config.method, config.max_new_tokens) == (variant.method, 9)
        plan = make_plan(config, TARGET.config, DRAFTER.config, [3])
        if variant.method == "static_tree":
            assert plan.loop.proposer.shape.choices == PRESETS["medusa-vicuna-7b"]
    assert Variant("ddtree", 16).config(BASE).num_nodes == 16


def test_auto_is_for_methods_that_can():
    both = names(["lookup_tree", "ddtree"], widths=(16, "auto"))
    assert both == ["lookup_tree-16", "ddtree-16", "ddtree-auto"]
    base = dataclasses.replace(BASE, widths=(4, 8))
    (auto,) = variants(["ddtree"], ("auto",), (None,), base, TARGET, DRAFTER)
    assert auto.name == "ddtree-auto-of-4-8"
    assert make_plan(auto.config(BASE), TARGET.config, DRAFTER.config, [3]).loop.widths == (4, 8)
    with pytest.raises(ValueError, match=r"method 'lookup_tree' cannot choose its width \(auto\)"):
        variants(["autoregressive", "lookup_tree"], ("auto",), (None,), BASE, TARGET, DRAFTER)


@pytest.mark.parametrize(
    "methods,trees,drafter,message",
    [
        (["greedy"], (None,), DRAFTER, "method 'greedy' is unknown; known: autoregressive, lookup"),
        (["static_tree"], (None,), None, "method 'static_tree' needs a drafter"),
        (["static_tree"], ("[(1,), (0, 0)]",), DRAFTER, r"\(0, 0\) is there without its parent \(0,\)"),
    ],
)
def test_refusals(methods, trees, drafter, message):
    with pytest.raises(ValueError, match=message):
        names(methods, trees=trees, drafter=drafter)
