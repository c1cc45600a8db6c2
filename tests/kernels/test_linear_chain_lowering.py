"""Lowering of the chain's kernel for Hopper, with no GPU: layouts and shared memory of every choice."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks._models import TARGETS
from pallas_kernels.linear_chain import api, mosaic_gpu
from pallas_kernels.linear_chain.config import Chain, Config, candidates, choose


def chains(shape: str, rows: int) -> list[Chain]:
    """Between attention layers, into a recurrent one, and at the end."""
    c = TARGETS[shape]
    sizes = dict(rows=rows, hidden=c.hidden_size, intermediate=c.intermediate_size)
    attention = Chain(mixed=c.num_heads * c.head_dim, projected=c.qkv_heads * c.head_dim, **sizes)
    found = [attention, Chain(mixed=c.num_heads * c.head_dim, **sizes)]
    if c.delta:
        found.append(Chain(mixed=c.delta.value_size, projected=c.delta.projected_channels, **sizes))
    return found


def lower(chain: Chain, config: Config) -> str:
    shaped = lambda *shape: jax.ShapeDtypeStruct(shape, chain.dtype)  # noqa: E731
    weights = {f"{name}_weight": shaped(s.panels * s.features, s.inputs) for name, s in chain.shapes.items()}
    norms = dict(norm_weight=shaped(chain.hidden), next_norm_weight=shaped(chain.hidden))
    rows = dict(mixed=shaped(chain.padded_rows, chain.mixed), stream=shaped(chain.rows, chain.hidden))
    counters, turn = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (mosaic_gpu.COUNTERS, 1))

    def call(operands, counters, turn):
        return mosaic_gpu.run(operands, counters, turn, chain=chain, config=config)

    return jax.jit(call).trace(weights | norms | rows, counters, turn).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("rows", [1, 13, 64, 128])
@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-8b", "qwen3-32b", "qwen3.6-27b"])
def test_every_choice_of_configuration_lowers(shape, rows):
    for chain in chains(shape, rows):
        assert api.unsupported(chain, choose(chain)) is None
        text = lower(chain, choose(chain))
        assert "mosaic_gpu" in text
        # The counters are handed on in place.
        assert "output_operand_alias" in text


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 128])
def test_every_candidate_lowers(rows):
    for config in candidates(chains("qwen3-8b", rows)[0])[::4]:
        lower(chains("qwen3-8b", rows)[0], config)
