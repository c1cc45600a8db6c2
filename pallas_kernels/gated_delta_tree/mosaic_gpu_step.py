"""One token of a Gated DeltaNet mixer on Hopper, all of it: one thread block a slot and value head.

A tree of one node needs no triangular system. Each of 128 threads holds one column of the state, as in
`mosaic_gpu_replay`, and one channel of queries, keys and values. The state is read once and not written: with
S' = decay S, the output S'^T q + (k . q) u needs S only through S^T k and S^T q.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fused_norm.mosaic_gpu_add import normed
from pallas_kernels.gated_delta_tree.mosaic_gpu_conv import L2_EPS, fast_gates
from pallas_kernels.gated_delta_tree.mosaic_gpu_replay import COLUMNS, DIM, KEYS, PART, VALUES
from pallas_kernels.mosaic_gpu_layouts import across, load

_CHANNELS = plgpu.Layout.WG_STRIDED((DIM,), vec_size=1)  # one in each thread


@dataclasses.dataclass(frozen=True)
class Static:
    """Everything static about one call."""

    slots: int
    key_heads: int
    value_heads: int
    taps: int
    eps: float
    dtype: str

    @property
    def values(self) -> int:
        """The first channel of the values."""
        return 2 * self.key_heads * DIM

    @property
    def strengths(self) -> int:
        """The first column of the write strengths; then come decays and output gates."""
        return self.values + self.value_heads * DIM


def call(static: Static, interpret):
    """The kernel, a function of layer [1], projected [B, 1, F], window, weight [C, W], A_log, dt_bias [Hv], norm weight
    [Dv] and states [M, B, Hv, Dk, Dv], to [B, 1, Hv Dv]."""
    s = static
    return plgpu.kernel(
        functools.partial(_body, s, interpret is not None),
        out_type=jax.ShapeDtypeStruct((s.slots, 1, s.value_heads * DIM), s.dtype),
        scratch_types=dict(vectors_s=plgpu.SMEM((4, DIM), jnp.float32)),
        grid=(s.slots, s.value_heads),
        grid_names=("slot", "head"),
        kernel_name="gated_delta_step",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
        interpret=interpret,
    )


def _body(
    s: Static, interpreted: bool, layer_g, projected_g, window_g, weight_g, rate_g, bias_g, norm_g, states_g, out_g, *,
    vectors_s,
):  # fmt: skip
    slot, head = lax.axis_index("slot"), lax.axis_index("head")
    if not interpreted:
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
    layer, key_head = layer_g[0], lax.div(head, s.value_heads // s.key_heads)
    parts = [pl.ds(d, PART) for d in range(0, DIM, PART)]
    state = [load(states_g.at[layer, slot, head, part], COLUMNS) for part in parts]

    def row(first) -> jax.Array:
        return load(projected_g.at[slot, 0, pl.ds(first, DIM)], _CHANNELS).astype(jnp.float32)

    def convolved(first) -> jax.Array:
        channels = pl.ds(first, DIM)
        taps = [load(window_g.at[layer, slot, t, channels], _CHANNELS).astype(jnp.float32) for t in range(s.taps - 1)]
        weights = [load(weight_g.at[channels, t], _CHANNELS).astype(jnp.float32) for t in range(s.taps)]
        total = functools.reduce(jnp.add, [x * w for x, w in zip([*taps, row(first)], weights)])
        return _silu(total).astype(s.dtype).astype(jnp.float32)

    def unit(x: jax.Array, scale: float) -> jax.Array:
        # Rounded as `tree_conv` rounds them, so that a token verified alone or in a tree sees the same ones.
        return (x * (lax.rsqrt(jnp.sum(x * x) + L2_EPS) * scale)).astype(s.dtype).astype(jnp.float32)

    q = unit(convolved(key_head * DIM), DIM**-0.5)
    k = unit(convolved((s.key_heads + key_head) * DIM), 1.0)
    for i, vector in enumerate((q, k, convolved(s.values + head * DIM))):
        vectors_s[i] = vector
    overlap = jnp.sum(q * k)
    gate = _silu(row(s.strengths + 2 * s.value_heads + head * DIM))

    def number(ref) -> jax.Array:
        return jnp.full((DIM,), ref.astype(jnp.float32), jnp.float32)

    strength, raw_decay = (number(projected_g[slot, 0, s.strengths + i * s.value_heads + head]) for i in range(2))
    log_decay, beta = fast_gates(strength, raw_decay, rate_g[head], bias_g[head])
    decay = jnp.exp(log_decay)

    def times_state(i: int) -> jax.Array:
        spread = [across(load(vectors_s.at[i, part], KEYS), (PART, DIM)) for part in parts]
        return functools.reduce(jnp.add, [(rows * x).sum(axis=0) for rows, x in zip(state, spread)])

    update = beta * (load(vectors_s.at[2], VALUES) - decay * times_state(1))
    vectors_s[3] = decay * times_state(0) + overlap * update
    out = load(vectors_s.at[3], _CHANNELS).astype(s.dtype)
    weighed = normed(out, load(norm_g, _CHANNELS), eps=s.eps, zero_centred=False)
    out_g[slot, 0, pl.ds(head * DIM, DIM)] = (weighed.astype(jnp.float32) * gate).astype(s.dtype)


def _silu(x: jax.Array) -> jax.Array:
    return x / (1.0 + jnp.exp(-x))
