"""The loop with drafters that run once a depth lowers for a Hopper GPU on a machine without one, kernels included."""

import dataclasses

import pytest
from loop_lowering import kernel_operands, lower_loop

import ddtree_jax as dt
from ddtree_jax import testing
from ddtree_jax.config import DeltaConfig

TARGET_HEADS = dict(num_heads=6, num_kv_heads=2, head_dim=64)
DRAFTER_HEADS = dict(num_heads=4, num_kv_heads=2, head_dim=128)  # others, so that its kernels can be told apart
FAMILIES = {"eagle3": testing.tiny_eagle3, "mtp": testing.tiny_mtp}
# Settings, rows of the drafter's attention at each step, nodes that the target verifies.
METHODS = {
    "best_path": (dict(draft_depth=3), (1, 2, 3), 4),
    "static_tree": (dict(tree_choices=((0,), (1,), (2,), (0, 0), (1, 0), (0, 0, 0))), (1, 3, 4), 7),
    "eagle2": (dict(draft_depth=3, num_nodes=32, branching=3), (1, 4, 7), 32),
}
CHUNK = 16  # of the prompt


def lowered(monkeypatch, method, family, drafter=None, **overrides) -> str:
    overrides = dict(num_layers=1, sliding_windows=(None,)) | overrides
    target = testing.tiny_target(dtype="bfloat16", **TARGET_HEADS | overrides)
    taps = dict(target_layer_ids=(0,)) if family == "eagle3" else {}
    drafter = FAMILIES[family](target, **taps | DRAFTER_HEADS | (drafter or {}))
    config = dt.DecodeConfig(method=method, max_new_tokens=16, temperature=1.0, **METHODS[method][0])
    return lower_loop(monkeypatch, target, drafter, config)


def attention_queries(text: str) -> set[tuple[int, int, int]]:
    """(rows, heads, head_dim) of each tree attention that is a kernel: queries, or a projection with keys and values,
    then caches, lengths, and more."""
    return {call[0][1:] for call in kernel_operands(text) if len(call) >= 8 and len(call[0]) == len(call[1]) == 4}


def expected_queries(method: str, heads: int = 10) -> set[tuple[int, int, int]]:
    """The drafter's steps, and of the target a chunk of the prompt and the tree: projections of 6 queries, 2 keys and 2
    values."""
    _, steps, nodes = METHODS[method]
    return {(rows, 4, 128) for rows in steps} | {(CHUNK, heads, 64), (nodes, heads, 64)}


QUICK = (("eagle3", "eagle2"),)


@pytest.mark.parametrize(
    "family,method",
    [
        pytest.param(family, method, marks=() if (family, method) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for method in METHODS
    ],
)
def test_every_step_attends_with_the_gpu_kernel(monkeypatch, family, method):
    assert attention_queries(lowered(monkeypatch, method, family)) == expected_queries(method)


@pytest.mark.slow
def test_the_layer_of_a_hybrid_target(monkeypatch):
    delta = DeltaConfig(num_key_heads=1, num_value_heads=2, key_head_dim=128, value_head_dim=128)
    text = lowered(
        monkeypatch, "eagle2", "mtp", hybrid=True, num_layers=2, sliding_windows=(None,) * 2, delta_layers=(0,),
        delta=delta,
    )  # fmt: skip
    assert attention_queries(text) == expected_queries("eagle2", heads=6)  # it rotates too little of a head for more
    # Beside them the delta rule of prompt chunk and tree, and the commit of the accepted path,
    # each of which reads the states of two value heads.
    states = [call for call in kernel_operands(text) if any(shape[-3:] == (2, 128, 128) for shape in call)]
    assert len(states) >= 3


@pytest.mark.slow
def test_experts_of_target_and_drafter(monkeypatch):
    moe = testing.tiny_moe(1, sparse=(True,), intermediate_size=128, shared_intermediate_size=0)
    wide = dataclasses.replace(moe, intermediate_size=256, shared_intermediate_size=20)
    text = lowered(monkeypatch, "eagle2", "mtp", dict(moe=wide), moe=moe, hidden_size=128)
    assert attention_queries(text) == expected_queries("eagle2")
    weights = {call[-1] for call in kernel_operands(text) if len(call[-1]) == 3 and call[-1][0] == moe.num_experts}
    # Gate and up, then down: of the target's 16 experts and of the drafter's, which are twice as wide.
    assert weights == {(16, 256, 128), (16, 128, 128), (16, 512, 128), (16, 128, 256)}
