"""The whole loop, Mosaic kernel included, lowers for a Hopper GPU on a machine without one."""

import numpy as np
import pytest
from loop_lowering import kernel_operands, lower_loop

import ddtree_jax as dt
from ddtree_jax import testing
from ddtree_jax.config import DeltaConfig
from ddtree_jax.decode.width import RoundCosts

# Heads of the real size: the kernel takes no other.
DELTA = DeltaConfig(num_key_heads=1, num_value_heads=2, key_head_dim=128, value_head_dim=128)


def lowered(monkeypatch, method, num_nodes, num_layers, drafter=(), **overrides) -> str:
    shape = dict(num_heads=6, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    target = testing.tiny_target(num_layers=num_layers, sliding_windows=(None,) * num_layers, **shape | overrides)
    drafter = testing.tiny_drafter(
        target, num_heads=6, num_kv_heads=2, head_dim=64, num_layers=1, causal=(False,), sliding_windows=(None,),
        target_layer_ids=(0,), block_size=4, **dict(drafter),
    )  # fmt: skip
    config = dt.DecodeConfig(
        method=method, num_nodes=num_nodes, widths=(8, 32), max_new_tokens=16, temperature=1.0
    )  # fmt: skip
    return lower_loop(monkeypatch, target, drafter, config)


@pytest.mark.parametrize(
    "method,num_nodes",
    [
        ("ddtree", 16),
        pytest.param("ddtree", 64, marks=pytest.mark.slow),
        pytest.param("static_tree", 2, marks=pytest.mark.slow),
        pytest.param("lookup_tree", 64, marks=pytest.mark.slow),
    ],
)
def test_lowers_with_the_gpu_kernel(monkeypatch, method, num_nodes):
    one = lowered(monkeypatch, method, num_nodes, num_layers=1).count("mosaic_gpu")
    # Prefill chunk, drafter's block (if there is a drafter) and tree: streaming and merging kernels of each.
    assert one >= (2 if method.startswith("lookup") else 3)
    # Layers share a lowering: that of one kernel takes seconds, and models have dozens of layers.
    assert lowered(monkeypatch, method, num_nodes, num_layers=3).count("mosaic_gpu") == one


def test_every_width_to_choose_from_lowers_with_the_gpu_kernel(monkeypatch):
    costs = RoundCosts(np.zeros(1, np.float32), np.ones((1, 2), np.float32))
    monkeypatch.setattr("ddtree_jax.prepare.round_costs", lambda *_: costs)
    text = lowered(monkeypatch, "ddtree", "auto", num_layers=1)
    # Prompt chunk and both widths, each with a branch of its own, and the drafter's block: all with their keys and
    # values.
    queries = {call[0] for call in kernel_operands(text) if len(call) >= 8 and len(call[0]) == len(call[1]) == 4}
    assert queries == {(1, rows, 10, 64) for rows in (16, 8, 32, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [1, 2])
def test_lowers_with_the_kernels_of_the_experts(monkeypatch, num_layers):
    moe = testing.tiny_moe(num_layers, sparse=(True,) * num_layers, intermediate_size=128)
    text = lowered(monkeypatch, "ddtree", 16, num_layers, hidden_size=128, moe=moe)
    # Both products, each lowered once for all layers, and for the prefill chunk and the tree alike (16 tokens each).
    assert sum("grouped_matmul" in line and "mosaic_gpu" in line for line in text.splitlines()) == 2


def test_lowers_with_the_kernels_of_recurrent_layers(monkeypatch):
    texts = [
        lowered(monkeypatch, "ddtree", 16, n + 1, hybrid=True, delta_layers=tuple(range(n)), delta=DELTA)
        for n in (1, 2)
    ]
    # Beside the attention: the delta rule of prefill chunk and tree, and the commit of the accepted path.
    assert texts[0].count("mosaic_gpu") >= 6
    assert texts[0].count("mosaic_gpu") == texts[1].count("mosaic_gpu")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dflash", "ddtree", "static_tree"])
def test_lowers_with_dflash_2(monkeypatch, method):
    second = dict(conv_taps=2, conv_group_size=4, selector_rank=8)
    assert lowered(monkeypatch, method, 16, 1, second).count("mosaic_gpu") >= 3
