"""The whole loop, Mosaic kernel included, lowers for a Hopper GPU on a machine without one."""

import jax
import jax.numpy as jnp
import pytest

import ddtree_jax as dt
from ddtree_jax import testing
from ddtree_jax.decode import run as device
from ddtree_jax.decode.plan import make_plan
from ddtree_jax.prepare import inputs
from pallas_kernels import choice


@pytest.mark.parametrize("method,num_nodes", [("ddtree", 16), pytest.param("ddtree", 64, marks=pytest.mark.slow)])
def test_lowers_with_the_gpu_kernel(monkeypatch, method, num_nodes):
    shape = dict(num_heads=6, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    target = testing.tiny_target(num_layers=1, sliding_windows=(None,), **shape)
    drafter = testing.tiny_drafter(
        target, num_heads=6, num_kv_heads=2, head_dim=64, num_layers=1, causal=(False,), sliding_windows=(None,),
        target_layer_ids=(0,), block_size=4,
    )  # fmt: skip
    config = dt.DecodeConfig(method=method, num_nodes=num_nodes, max_new_tokens=16, temperature=1.0)
    plan = make_plan(config, target.config, drafter.config, [3])
    args = inputs(target, drafter, plan, [[1, 2, 3]], 0, 1.0)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), args)
    monkeypatch.setattr(choice, "on_hopper", lambda: True)
    text = device.run.trace(plan.loop, *args).lower(lowering_platforms=("cuda",)).as_text()
    # Prefill chunk, drafter's block and tree: streaming and merging kernels of each.
    assert text.count("mosaic_gpu") >= 3
