"""Math shared by targets and drafters, as free functions on arrays, and the two parameter-holding modules.

Shape letters: B slots, N tokens of the pass, H query heads, K key/value heads, D head_dim, E hidden size.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.streaming_matmul import streaming_matmul, streaming_swiglu

# How products with a weight matrix are computed: "xla", or an implementation of `pallas_kernels.streaming_matmul`, None
# to let it choose by the number of rows. Read while tracing: set it before anything is compiled. Its kernel has no
# gradient and reads weights early, so it is for decoding only.
MATMUL: str | None = "xla"


def precision_of(dtype: jnp.dtype) -> lax.Precision | None:
    """Float32 means float32: no TF32 on the tensor cores, so that the exactness tests mean what they say."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def linear(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """x [..., I] times weight [O, I] (the layout of Hugging Face) plus bias [O] -> [..., O] in `out_dtype` (x's)."""
    if MATMUL == "xla":
        y = jnp.einsum("...i,oi->...o", x, weight, precision=precision_of(x.dtype), preferred_element_type=out_dtype)
    else:
        y = streaming_matmul(x, weight, out_dtype=out_dtype, implementation=MATMUL, early_weights=True)
    if bias is not None:
        y = y + jnp.broadcast_to(bias, y.shape)
    return y


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, zero_centred: bool = False) -> jax.Array:
    """RMSNorm over the last axis, in the order of Llama and Qwen: normalise in float32, cast to x's dtype, weigh.

    Zero-centred (Qwen3.5, Qwen3-Next): multiply by 1 + weight, in float32, and cast last.
    """
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    weight = jnp.broadcast_to(weight, x.shape)
    if zero_centred:
        return (x32 * scale * (1 + weight.astype(jnp.float32))).astype(x.dtype)
    return (x32 * scale).astype(x.dtype) * weight


def swiglu(gate_up: jax.Array) -> jax.Array:
    """silu(gate) * up for a fused projection [..., 2F] (gate first) -> [..., F]."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def gated_linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`swiglu` of x [..., I] times a fused weight [2F, I] -> [..., F]."""
    if MATMUL == "xla":
        return swiglu(linear(x, weight))
    return streaming_swiglu(x, weight, implementation=MATMUL, early_weights=True)


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """[B, N, heads * D] -> [B, N, heads, D]."""
    return x.reshape(*x.shape[:-1], num_heads, -1)


_FAN_IN = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=0)


class Linear(nn.Module):
    """Holds `weight` [features, in_features] and, if asked, `bias` [features]."""

    features: int
    in_features: int
    use_bias: bool = False
    dtype: jnp.dtype = jnp.bfloat16
    init: nn.initializers.Initializer = _FAN_IN

    def setup(self):
        self.weight = self.param("weight", self.init, (self.features, self.in_features), self.dtype)
        self.bias = self.param("bias", nn.initializers.zeros, (self.features,), self.dtype) if self.use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Holds `weight` [size]."""

    size: int
    eps: float
    dtype: jnp.dtype = jnp.bfloat16
    zero_centred: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.zeros if self.zero_centred else nn.initializers.ones
        weight = self.param("weight", init, (self.size,), self.dtype)
        return rms_norm(x, weight, self.eps, zero_centred=self.zero_centred)


class MLP(nn.Module):
    """SwiGLU feed-forward block with gate and up fused into one projection."""

    hidden_size: int
    intermediate_size: int
    dtype: jnp.dtype = jnp.bfloat16

    def setup(self):
        self.gate_up_proj = Linear(2 * self.intermediate_size, self.hidden_size, dtype=self.dtype)
        self.down_proj = Linear(self.hidden_size, self.intermediate_size, dtype=self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(gated_linear(x, self.gate_up_proj.weight))
