"""The whole loop as the text of a module for CUDA, made on a machine without a GPU."""

import re

import jax
import jax.numpy as jnp

from ddtree_jax.decode import run as device
from ddtree_jax.decode.plan import make_plan
from ddtree_jax.prepare import inputs
from pallas_kernels import choice


def lower_loop(monkeypatch, target, drafter, config) -> str:
    """StableHLO of a decode of one prompt of three tokens, with the kernels of a Hopper GPU."""
    plan = make_plan(config, target.config, drafter.config, [3])
    args = inputs(target, drafter, plan, [[1, 2, 3]], 0, config.temperature)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), args)
    with monkeypatch.context() as patch:
        patch.setattr(choice, "on_hopper", lambda: True)
        return device.run.trace(plan.loop, *args).lower(lowering_platforms=("cuda",)).as_text()


def kernel_operands(text: str) -> list[tuple[tuple[int, ...], ...]]:
    """Of each call of a Mosaic GPU kernel in a module, the shapes of its operands."""
    calls = re.findall(r"custom_call @mosaic_gpu\w*\(.* : \((tensor<.*)\) -> ", text)
    return [
        tuple(tuple(int(size) for size in shape.split("x") if size) for shape in re.findall(r"<((?:\d+x)*)\w+>", call))
        for call in calls
    ]
