"""Streaming matmul: the public functions, their argument checks, and the choice of implementation.

Shape letters: M rows (all leading axes of x together), E inner dimension, O output features, F features of a gate.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.streaming_matmul import config as configs
from pallas_kernels.streaming_matmul import mosaic_gpu, reference
from pallas_kernels.streaming_matmul.config import MAX_ROWS, Config, Shape


def streaming_matmul(
    x: jax.Array,  # [..., E]
    weight: jax.Array,  # [O, E]
    *,
    out_dtype: jnp.dtype | None = None,
    implementation: str | None = None,
    early_weights: bool = False,
    config: Config | None = None,
) -> jax.Array:  # [..., O]
    """x times the transposed weight, accumulated in float32; made for few rows, where reading the weight is all.

    The GPU kernel has no gradient (differentiate with implementation="xla") and runs on one device: over a mesh, call
    it inside `shard_map`. Its result is the same every time, but its last bits depend on M and on the configuration,
    as those of any matrix product do.

    Args:
      x: float32, float16 or bfloat16. M is the product of its leading axes.
      weight: in Hugging Face's layout, of x's dtype.
      out_dtype: of the result; default x's.
      implementation: "xla", "mosaic_gpu", or None to choose: "mosaic_gpu" on a Hopper GPU where it was measured to
        be faster, else "xla". The GPU kernel takes float16 and bfloat16, 1 <= M <= 256, O a multiple of 16
        and E of 64.
      early_weights: lets the kernel read the weight before the GPU has finished the operation before this one. Only
        for weights that no recent operation computes, such as the parameters of a model.
      config: sizes of the GPU kernel; default by table and model.

    Raises:
      ValueError: the arguments contradict each other.
      NotImplementedError: the implementation asked for cannot do this call; the message names what.
    """
    return _product(x, weight, 1, out_dtype, implementation, early_weights, config)


def streaming_swiglu(
    x: jax.Array,  # [..., E]
    weight: jax.Array,  # [2 * F, E]
    *,
    out_dtype: jnp.dtype | None = None,
    implementation: str | None = None,
    early_weights: bool = False,
    config: Config | None = None,
) -> jax.Array:  # [..., F]
    """silu(x @ gate.T) * (x @ up.T) for a weight that holds gate above up, in float32 up to the final rounding.

    Arguments and errors are those of `streaming_matmul`, with O = F.
    """
    return _product(x, weight, 2, out_dtype, implementation, early_weights, config)


def streaming_argmax(
    x: jax.Array,  # [..., E]
    weight: jax.Array,  # [O, E]
    *,
    implementation: str | None = None,
    early_weights: bool = False,
    config: Config | None = None,
) -> jax.Array:  # [...] int32
    """argmax over O of x times the transposed weight in float32, without the product ever being written.

    As `jnp.argmax` has it: of equal ones the first, and the first NaN if there is one. Of products that differ in their
    last bits only the choice depends on the implementation, on M and on the configuration. Arguments and errors are
    those of `streaming_matmul`; the GPU kernel takes configurations of one split.
    """
    _check(x, weight, 1, implementation)
    shape = _shape(x, weight, 1, None, argmax=True)
    rows = x.reshape(shape.rows, shape.inputs)
    if _choose(shape, implementation) == "xla":
        columns = reference.argmax(rows, weight)
    else:
        columns = argmax_from_kernel(rows, weight, shape, config or configs.choose(shape), early_weights=early_weights)
    return columns.reshape(x.shape[:-1])


@dataclasses.dataclass(frozen=True)
class PartialSums:
    """A product as the kernel leaves it, for a kernel that adds its splits while it reads them.

    Attributes:
      parts: [S, M or more, O], float32 sums of the S splits; of one split the product itself, in `dtype`.
      leading: the axes that M stands for.
      dtype: of the product, by name.
      interpret: how kernels that read it are interpreted, if at all.
    """

    parts: jax.Array
    leading: tuple[int, ...]
    dtype: str
    interpret: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the product."""
        return (*self.leading, self.parts.shape[-1])

    def __post_init__(self):
        if self.parts.ndim != 3 or self.parts.shape[1] < math.prod(self.leading):
            raise ValueError(f"parts must be [S, {math.prod(self.leading)} or more, O], got {self.parts.shape}")

    def total(self) -> jax.Array:
        """The product, [*leading, O]."""
        rows = math.prod(self.leading)
        sums = functools.reduce(jnp.add, [part[:rows] for part in self.parts])
        return sums.astype(self.dtype).reshape(*self.leading, -1)

    def by_slot(self) -> jax.Array:
        """[S, B, N or more, O] for leading axes (B, N)."""
        splits, rows, features = self.parts.shape
        batch, nodes = self.leading
        if batch == 1:
            return self.parts.reshape(splits, 1, rows, features)
        return self.parts[:, : batch * nodes].reshape(splits, batch, nodes, features)


def partial_sums(
    x: jax.Array,  # [..., E]
    weight: jax.Array,  # [O, E]
    *,
    early_weights: bool = False,
    config: Config | None = None,
    interpret: Any = None,
) -> PartialSums:
    """`streaming_matmul` by the GPU kernel, its splits not yet added.

    Raises:
      ValueError: the arguments contradict each other.
      NotImplementedError: the kernel cannot do this product; the message names what.
    """
    _check(x, weight, 1, None)
    shape = _shape(x, weight, 1, None)
    choice.choose("mosaic_gpu", unsupported(shape))
    rows = x.reshape(shape.rows, shape.inputs)
    options = dict(shape=shape, config=config or configs.choose(shape), early_weights=early_weights)
    parts = mosaic_gpu.matmul(rows, weight, interpret=interpret, **options)
    parts = parts[None] if parts.ndim == 2 else parts[:, 0]
    return PartialSums(parts, x.shape[:-1], shape.dtype, interpret)


def runs_kernel(
    x: jax.Array, weight: jax.Array, *, panels: int = 1, out_dtype: jnp.dtype | None = None,
    argmax: bool = False, implementation: str | None = None,
) -> bool:  # fmt: skip
    """Whether a product is for the GPU kernel; arguments and errors as those of `streaming_matmul`.

    Args:
      panels: 2 for `streaming_swiglu`.
      argmax: for `streaming_argmax`.
    """
    _check(x, weight, panels, implementation)
    return _choose(_shape(x, weight, panels, out_dtype, argmax), implementation) == "mosaic_gpu"


def _product(x, weight, panels, out_dtype, implementation, early_weights, config):
    _check(x, weight, panels, implementation)
    shape = _shape(x, weight, panels, out_dtype)
    rows = x.reshape(shape.rows, shape.inputs)
    if _choose(shape, implementation) == "xla":
        y = reference.matmul(rows, weight)
        y = reference.gate(y) if panels == 2 else y
    else:
        y = from_kernel(rows, weight, shape, config or configs.choose(shape), early_weights=early_weights)
    return y.astype(shape.out_dtype).reshape(*x.shape[:-1], shape.features)


def _shape(x, weight, panels, out_dtype, argmax=False) -> Shape:
    return Shape(
        rows=math.prod(x.shape[:-1]),
        features=weight.shape[0] // panels,
        inputs=x.shape[-1],
        panels=panels,
        dtype=x.dtype.name,
        out_dtype=jnp.dtype(x.dtype if out_dtype is None else out_dtype).name,
        argmax=argmax,
    )


def _choose(shape: Shape, implementation: str | None) -> str:
    obstacle = unsupported(shape)
    if implementation is None and obstacle is None and not configs.measured_faster(shape):
        return "xla"
    return choice.choose(implementation, obstacle)


def from_kernel(rows, weight, shape: Shape, config: Config, **options) -> jax.Array:
    """What the kernel computes, [M, F], its splits added in order."""
    out = mosaic_gpu.matmul(rows, weight, shape=shape, config=config, **options)[..., : shape.rows, :]
    if config.splits == 1:
        return out
    sums = functools.reduce(jnp.add, [out[i] for i in range(config.splits)])  # [panels, M, F]
    return (sums[0] if shape.panels == 1 else jax.nn.silu(sums[0]) * sums[1]).astype(shape.out_dtype)


def argmax_from_kernel(rows, weight, shape: Shape, config: Config, **options) -> jax.Array:
    """What the kernel finds, [M] int32, its thread blocks compared."""
    values, columns = mosaic_gpu.largest_of_blocks(rows, weight, shape=shape, config=config, **options)
    return reference.first_of_largest(values[:, : shape.rows], columns[:, : shape.rows])


def unsupported(shape: Shape) -> str | None:
    """Why the GPU kernel cannot take a product, or None."""
    if shape.dtype not in ("bfloat16", "float16"):
        return f"dtype {shape.dtype} (bfloat16 and float16 only)"
    if shape.out_dtype not in (shape.dtype, "float32"):
        return f"a result of {shape.out_dtype} ({shape.dtype} and float32 only)"
    if not 1 <= shape.rows <= MAX_ROWS:
        return f"{shape.rows} rows (1 to {MAX_ROWS})"
    if shape.features % 16 or shape.inputs % 64:
        return f"a weight of {shape.features} x {shape.inputs} (multiples of 16 and 64 only)"
    if configs.choose(shape) is None:
        return f"a weight of {shape.features} x {shape.inputs} (no configuration fits)"
    return None


def _check(x, weight, panels, implementation):
    """Raises ValueError where the arguments contradict each other."""
    choice.check(implementation)
    if x.ndim < 1 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight must be [O, E] with E = {x.shape[-1:]}, got {weight.shape}")
    if weight.shape[0] % panels:
        raise ValueError(f"gate above up needs an even number of rows, got {weight.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be floating point, got {x.dtype}")
    if weight.dtype != x.dtype:
        raise ValueError(f"weight must be {x.dtype} like x, got {weight.dtype}")
