"""Math shared by targets and drafters, as free functions on arrays, and the two parameter-holding modules.

Shape letters: B slots, N tokens of the pass, H query heads, K key/value heads, D head_dim, E hidden size.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import choice, linear_chain
from pallas_kernels.fused_norm import add_rms_norm, rms_norm
from pallas_kernels.linear_chain import ChainWeights, Turns
from pallas_kernels.streaming_matmul import (
    PartialSums,
    partial_sums,
    runs_kernel,
    streaming_argmax,
    streaming_matmul,
    streaming_swiglu,
)

# How products with a weight matrix are computed: "xla"; "mosaic_gpu" (all by `pallas_kernels.streaming_matmul`);
# "chain" (all that `pallas_kernels.linear_chain` can take); None to choose by what was measured. Read while tracing:
# set it before anything is compiled.
MATMUL: str | None = None


_ONLY_XLA = contextvars.ContextVar("only_xla", default=False)


@contextlib.contextmanager
def differentiable() -> Iterator[None]:
    """While this thread traces inside, XLA computes all products: the kernels have no gradient."""
    token = _ONLY_XLA.set(True)
    try:
        yield
    finally:
        _ONLY_XLA.reset(token)


def _streams(x: jax.Array, weight: jax.Array, **options) -> bool:
    """Whether a product is for the streaming kernel."""
    if MATMUL == "xla" or _ONLY_XLA.get():
        return False
    return runs_kernel(x, weight, implementation=None if MATMUL == "chain" else MATMUL, **options)


def precision_of(dtype: jnp.dtype) -> lax.Precision | None:
    """Float32 means float32: no TF32 on the tensor cores, so that the exactness tests mean what they say."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def linear(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """x [..., I] times weight [O, I] (the layout of Hugging Face) plus bias [O] -> [..., O] in `out_dtype` (x's)."""
    if _streams(x, weight, out_dtype=out_dtype):
        y = streaming_matmul(x, weight, out_dtype=out_dtype, implementation="mosaic_gpu", early_weights=True)
    else:
        y = jnp.einsum("...i,oi->...o", x, weight, precision=precision_of(x.dtype), preferred_element_type=out_dtype)
    if bias is not None:
        y = y + jnp.broadcast_to(bias, y.shape)
    return y


def largest(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Which of x [..., I] times weight [O, I], in float32, is the largest, [...] int32; of equal ones the first."""
    if _streams(x, weight, argmax=True):
        return streaming_argmax(x, weight, implementation="mosaic_gpu", early_weights=True)
    return jnp.argmax(linear(x, weight, out_dtype=jnp.float32), axis=-1).astype(jnp.int32)


def swiglu(gate_up: jax.Array) -> jax.Array:
    """silu(gate) * up for a fused projection [..., 2F] (gate first) -> [..., F]."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def gated_linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`swiglu` of x [..., I] times a fused weight [2F, I] -> [..., F]."""
    if _streams(x, weight, panels=2):
        return streaming_swiglu(x, weight, implementation="mosaic_gpu", early_weights=True)
    return swiglu(linear(x, weight))


def total(product: jax.Array | PartialSums) -> jax.Array:
    """A product whose splits may be left to add."""
    return product.total() if isinstance(product, PartialSums) else product


def for_kernels(x: jax.Array) -> jax.Array | PartialSums:
    """A product [B, N, O] by XLA as norms and attention of `pallas_kernels` take it for kernels, where those run."""
    if MATMUL == "xla" or _ONLY_XLA.get() or x.dtype.itemsize != 2 or not choice.on_hopper():
        return x
    return PartialSums(x.reshape(1, -1, x.shape[-1]), x.shape[:-1], x.dtype.name)


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

    def partial(self, x: jax.Array) -> jax.Array | PartialSums:
        """The same for norms and attention of `pallas_kernels`, which add up what the kernel leaves."""
        if self.bias is not None or not _streams(x, self.weight):
            return for_kernels(self(x))
        return partial_sums(x, self.weight, early_weights=True)


class RMSNorm(nn.Module):
    """Holds `weight` [size]."""

    size: int
    eps: float
    dtype: jnp.dtype = jnp.bfloat16
    zero_centred: bool = False

    def setup(self):
        init = nn.initializers.zeros if self.zero_centred else nn.initializers.ones
        self.weight = self.param("weight", init, (self.size,), self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight, self.eps, zero_centred=self.zero_centred)

    def add(self, x: jax.Array, update: jax.Array | PartialSums | None) -> tuple[jax.Array, jax.Array]:
        """(x + update, its norm); no update adds nothing."""
        if update is None:
            return x, self(x)
        return add_rms_norm(x, update, self.weight, eps=self.eps, zero_centred=self.zero_centred)


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

    def partial(self, x: jax.Array) -> jax.Array | PartialSums:
        """See `Linear.partial`."""
        return self.down_proj.partial(gated_linear(x, self.gate_up_proj.weight))


def between_mixers(
    mixed: jax.Array, stream: jax.Array, out: Linear, norm: RMSNorm, mlp: nn.Module, next_norm: RMSNorm,
    entry: Linear | None, turns: Turns,
) -> tuple[jax.Array, jax.Array | PartialSums]:  # fmt: skip
    """What a decoder block does after its mixer, and the next one before its own.

    Args:
      mixed: [B, N, A], of the mixer.
      stream: [B, N, E], the residual stream before the block.
      out: projection of `mixed` to E.
      norm: before the feed-forward block.
      mlp: an `MLP`, or a mixture of experts.
      next_norm: after the block: the next one's first, or the final one.
      entry: first projection of the next mixer, or None.
      turns: of this pass.

    Returns:
      The residual stream after the block, and `entry` (or nothing) of its norm.
    """
    if isinstance(mlp, MLP) and out.bias is None and (entry is None or entry.bias is None):
        weights = ChainWeights(
            out.weight, norm.weight, mlp.gate_up_proj.weight, mlp.down_proj.weight, next_norm.weight,
            None if entry is None else entry.weight,
        )  # fmt: skip
        options = dict(eps=norm.eps, zero_centred=norm.zero_centred)
        if (next_norm.eps, next_norm.zero_centred) == (norm.eps, norm.zero_centred) and _chains(
            mixed, stream, weights, options
        ):
            return linear_chain.linear_chain(mixed, stream, weights, turns, implementation="mosaic_gpu", **options)
    stream, normed = norm.add(stream, out.partial(mixed))
    update = mlp.partial(normed) if isinstance(mlp, MLP) else for_kernels(mlp(normed))
    stream, normed = next_norm.add(stream, update)
    return stream, normed if entry is None else entry.partial(normed)


def _chains(mixed: jax.Array, stream: jax.Array, weights: ChainWeights, options: dict) -> bool:
    """Whether a chain is for the kernel that runs it as one."""
    if MATMUL in ("xla", "mosaic_gpu") or _ONLY_XLA.get():
        return False
    if MATMUL == "chain":
        return linear_chain.supported(mixed, stream, weights, **options)
    return linear_chain.runs_kernel(mixed, stream, weights, **options)
