"""Rotary position embeddings: default, linear, Llama 3 and YaRN frequencies.

Angles are computed on the fly in float32 from absolute positions, so no table bounds the context.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.config import RopeConfig

KINDS = ("default", "linear", "llama3", "yarn")


def _yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def inverse_frequencies(config: RopeConfig, rotary_dim: int) -> tuple[np.ndarray, float]:
    """Angular frequencies and the factor on cos and sin.

    Args:
      config: see `RopeConfig`.
      rotary_dim: how many dimensions of a head rotate; even.

    Returns:
      (inv_freq [rotary_dim / 2] float32 in radians a token, attention factor).

    Source: Llama 3.1 (piecewise scaling of low frequencies); YaRN, arXiv 2309.00071, section 3.2-3.3.
    """
    if config.kind not in KINDS:
        raise ValueError(f"rope kind {config.kind!r} is unknown; known: {', '.join(KINDS)}")
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    inv_freq = (1.0 / np.float32(config.theta) ** exponent).astype(np.float32)
    if config.kind == "default":
        return inv_freq, 1.0
    if config.kind == "linear":
        return inv_freq / np.float32(config.factor), 1.0
    if config.kind == "llama3":
        return _llama3(config, inv_freq), 1.0
    return _yarn(config, inv_freq, rotary_dim)


def _llama3(config: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    wavelength = 2 * np.pi / inv_freq
    rotations = config.original_max_position / wavelength
    # 0 below the low band (fully stretched), 1 above the high band (untouched), linear between.
    blend = (rotations - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * inv_freq / config.factor + blend * inv_freq).astype(np.float32)


def _yarn(config: RopeConfig, inv_freq: np.ndarray, rotary_dim: int) -> tuple[np.ndarray, float]:
    def dimension_of(rotations: float) -> float:
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return rotary_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step, without dividing by zero
    ramp = np.clip((np.arange(rotary_dim // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0)
    mixed = inv_freq / config.factor * ramp + inv_freq * (1 - ramp)
    factor = config.attention_factor
    if factor is None:
        if config.mscale and config.mscale_all_dim:
            factor = _yarn_mscale(config.factor, config.mscale) / _yarn_mscale(config.factor, config.mscale_all_dim)
        else:
            factor = _yarn_mscale(config.factor)
    return mixed.astype(np.float32), float(factor)


def rope_tables(config: RopeConfig, positions: jax.Array, rotary_dim: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, N, rotary_dim / 2] float32 at positions [B, N] int32."""
    inv_freq, factor = inverse_frequencies(config, rotary_dim)
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(inv_freq)[None, None, :]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor
