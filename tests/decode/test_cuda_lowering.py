"""The whole loop, Mosaic kernel included, lowers for a Hopper GPU on a machine without one."""

import jax
import jax.numpy as jnp
import pytest

import ddtree_jax as dt
from ddtree_jax import testing
from ddtree_jax.config import DeltaConfig
from ddtree_jax.decode import run as device
from ddtree_jax.decode.plan import make_plan
from ddtree_jax.prepare import inputs
from pallas_kernels import choice

DENSE = dict(num_layers=1, sliding_windows=(None,))
# Heads of the real size: the kernel takes no other.
HYBRID = dict(
    hybrid=True, num_layers=2, sliding_windows=(None,) * 2, delta_layers=(0,),
    delta=DeltaConfig(num_key_heads=1, num_value_heads=2, key_head_dim=128, value_head_dim=128),
)  # fmt: skip


@pytest.mark.parametrize(
    "layers,num_nodes,kernels",
    [
        (DENSE, 16, 3),  # prefill chunk, drafter's block and tree: streaming and merging kernels of each
        pytest.param(DENSE, 64, 3, marks=pytest.mark.slow),
        (HYBRID, 16, 6),  # and the delta rule of prefill chunk and tree, and the commit of the accepted path
    ],
)
def test_lowers_with_the_gpu_kernel(monkeypatch, layers, num_nodes, kernels):
    shape = dict(num_heads=6, num_kv_heads=2, head_dim=64, dtype="bfloat16")
    target = testing.tiny_target(**layers, **shape)
    drafter = testing.tiny_drafter(
        target, num_heads=6, num_kv_heads=2, head_dim=64, num_layers=1, causal=(False,), sliding_windows=(None,),
        target_layer_ids=(0,), block_size=4,
    )  # fmt: skip
    config = dt.DecodeConfig(method="ddtree", num_nodes=num_nodes, max_new_tokens=16, temperature=1.0)
    plan = make_plan(config, target.config, drafter.config, [3])
    args = inputs(target, drafter, plan, [[1, 2, 3]], 0, 1.0)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), args)
    monkeypatch.setattr(choice, "on_hopper", lambda: True)
    text = device.run.trace(plan.loop, *args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= kernels
