"""One suite for every implementation of a whole Gated DeltaNet mixer: subclasses name cases and compute them."""

from __future__ import annotations

import dataclasses
import zlib

import gated_delta_oracle
import jax
import jax.numpy as jnp
import numpy as np
import tree_conv_suite
from gated_delta_suite import relative_error
from suite import pack

from pallas_kernels.gated_delta_tree import MixerWeights

EPS, LAYER, LAYERS, TAPS = 1e-5, tree_conv_suite.LAYER, tree_conv_suite.LAYERS, tree_conv_suite.TAPS
# Of all heads, and of one: queries, keys, values and outputs are rounded, and some heads have outputs that cancel.
TOLERANCE = {"bfloat16": (1.2e-2, 4e-2), "float32": (2e-6, 4e-6)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call. The layers not read are NaN."""

    nodes: int
    slots: int = 1
    heads: tuple[int, int] = (1, 2)
    dim: int = 128
    mask: str = "tree"  # or "chain"
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        heads = "x".join(map(str, self.heads))
        return f"n{self.nodes}b{self.slots}h{heads}d{self.dim}-{self.mask}-{self.dtype}"

    @property
    def channels(self) -> int:
        return (2 * self.heads[0] + self.heads[1]) * self.dim

    @property
    def columns(self) -> int:
        """Of the projection, some of them spare."""
        needed = self.channels + 2 * self.heads[1] + self.heads[1] * self.dim
        return needed + -needed % 32


def make_operands(case: Case) -> tuple:
    """projected, window, states, rows, ancestors, weights."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    rows, sees = tree_conv_suite.draw_paths(rng, case)
    projected = rng.standard_normal((case.slots, case.nodes, case.columns))
    projected[..., case.channels + case.heads[1] : case.channels + 2 * case.heads[1]] *= 4  # decays of all sizes
    window = np.full((LAYERS, case.slots, TAPS - 1, case.channels), np.nan)
    window[LAYER] = rng.standard_normal(window.shape[1:])
    states = np.full((LAYERS, case.slots, case.heads[1], case.dim, case.dim), np.nan)
    states[LAYER] = 0.3 * rng.standard_normal(states.shape[1:])
    weights = MixerWeights(
        conv=jnp.asarray(rng.standard_normal((case.channels, TAPS)) * 0.5, case.dtype),
        decay_rate_log=jnp.asarray(np.log(rng.uniform(0.01, 16, case.heads[1])), jnp.float32),
        decay_bias=jnp.asarray(rng.standard_normal(case.heads[1]), jnp.float32),
        norm=jnp.asarray(rng.uniform(0.5, 1.5, case.dim), case.dtype),
    )
    projected, window = jnp.asarray(projected, case.dtype), jnp.asarray(window, case.dtype)
    ancestors = jnp.asarray(np.stack([pack(s) for s in sees]))
    return projected, window, jnp.asarray(states, jnp.float32), jnp.asarray(rows), ancestors, weights


def oracle(case: Case, projected, window, states, rows, ancestors, weights: MixerWeights) -> np.ndarray:
    """[B, N, Hv, Dv] in float64."""
    q, k, v = tree_conv_suite.oracle(case, projected, window, rows, weights.conv)
    x, rate_log, bias, norm = (np.asarray(a, np.float64) for a in (projected, *weights[1:]))
    values = case.heads[1]
    ends = (values, 2 * values, 2 * values + values * case.dim)
    strength, decay, gate, _ = np.split(x[..., case.channels :], ends, axis=-1)
    log_decay = -np.exp(rate_log) * np.logaddexp(0, decay + bias)
    beta = 1 / (1 + np.exp(-strength))
    out = gated_delta_oracle.tree(q, k, v, log_decay, beta, states, ancestors, layer=LAYER)
    out = out / np.sqrt(np.mean(out * out, axis=-1, keepdims=True) + EPS) * norm
    gate = gate.reshape(out.shape)
    return out * gate / (1 + np.exp(-gate))


class MixerSuite:
    """Subclasses set `cases` and define `mix`, which computes a case in its implementation."""

    cases: tuple[Case, ...] = ()

    def mix(self, case: Case, operands) -> jax.Array:
        raise NotImplementedError

    def test_matches_the_oracle(self, case: Case):
        operands = make_operands(case)
        got, wanted = self.mix(case, operands), oracle(case, *operands)
        assert got.shape == (case.slots, case.nodes, case.heads[1] * case.dim) and got.dtype == case.dtype
        got = np.asarray(got, np.float64).reshape(wanted.shape)
        error = relative_error(got, wanted)
        worst = max(relative_error(got[:, :, h], wanted[:, :, h]) for h in range(case.heads[1]))
        most, most_of_one = TOLERANCE[case.dtype]
        assert error <= most and worst <= most_of_one, f"relative errors {error:.2e}, of one head {worst:.2e}"
