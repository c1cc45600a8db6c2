"""Linear chain: the public functions, their argument checks, and the choice of implementation.

Shape letters: M rows (all leading axes together), A columns of the mixer's result, E hidden size, F features of the
feed-forward block, Q rows of the next projection.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.fused_norm import add_rms_norm
from pallas_kernels.linear_chain import config as configs
from pallas_kernels.linear_chain import mosaic_gpu
from pallas_kernels.linear_chain.config import MAX_ROWS, Chain, Config
from pallas_kernels.streaming_matmul import PartialSums, streaming_matmul, streaming_swiglu


@dataclasses.dataclass(frozen=True)
class ChainWeights:
    """Weights of a chain, in the order in which they are read; matrices in Hugging Face's layout.

    The GPU kernel begins to read them before the GPU has finished the operation before it: only for weights that no
    recent operation computes, such as the parameters of a model.

    Attributes:
      out: [E, A].
      norm: [E].
      gate_up: [2 * F, E], gate above up.
      down: [E, F].
      next_norm: [E].
      next: [Q, E], or None to end with the norm.
    """

    out: jax.Array
    norm: jax.Array
    gate_up: jax.Array
    down: jax.Array
    next_norm: jax.Array
    next: jax.Array | None = None


class Turns:
    """What the kernels of one pass hand on, one to the next, to wait for each other's thread blocks.

    Made anew for each pass, while it is traced; every chain of the pass takes the same one. They have the same number
    of rows, up to tiles of 64, and after one without a projection none has one.
    """

    def __init__(self):
        self._counters, self._turn = mosaic_gpu.new_counters(), 0
        self._waiting: tuple[int, int] | None = None  # workers and consumers of all chains
        self._ended = False

    def run(self, operands: dict[str, jax.Array], *, chain: Chain, config: Config) -> dict[str, jax.Array]:
        """`mosaic_gpu.run` as the next of the pass.

        Raises:
          ValueError: another chain of these turns makes that impossible.
        """
        waiting = config.workers, config.consumers
        if self._ended and chain.projected:
            raise ValueError("after a chain without a projection no other of the pass may have one, got one")
        if self._waiting not in (None, waiting):
            expected = "workers and consumers as before, {} and {}".format(*self._waiting)
            raise ValueError(f"chains of one pass must have {expected}, got {waiting[0]} and {waiting[1]}")
        turn = jnp.full((1,), self._turn, jnp.int32)
        results, self._counters = mosaic_gpu.run(operands, self._counters, turn, chain=chain, config=config)
        self._turn, self._waiting, self._ended = self._turn + 1, waiting, not chain.projected
        return results


def linear_chain(
    mixed: jax.Array,  # [..., A]
    stream: jax.Array,  # [..., E]
    weights: ChainWeights,
    turns: Turns,
    *,
    eps: float,
    zero_centred: bool = False,
    implementation: str | None = None,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array | PartialSums]:
    """From what a mixer leaves to what the next one starts from.

        middle = stream + mixed @ out.T
        total = middle + swiglu(rms_norm(middle) @ gate_up.T) @ down.T
        projected = rms_norm(total) @ next.T

    The GPU kernel is one launch that reads every weight once and never stops reading between the products. All its
    thread blocks, one a multiprocessor, wait for each other: no other kernel whose thread blocks do so may run beside
    it. It has no gradient and runs on one device: over a mesh, call it inside `shard_map`.

    Args:
      mixed: float32, float16 or bfloat16.
      stream: the residual stream, of the same dtype.
      weights: of the same dtype.
      turns: of this pass.
      implementation: "xla" (a product at a time), "mosaic_gpu", or None to choose: "mosaic_gpu" on a Hopper GPU where
        it was measured to be faster. The GPU kernel takes float16 and bfloat16, up to 128 rows, A, E and F multiples of
        128, Q of 8, and wants 132 multiprocessors.
      config: sizes of the GPU kernel; default by a rule (`config.choose`).

    Returns:
      (total [..., E], projected [..., Q] or, without `next`, the norm [..., E]). The kernel leaves `projected` as
      partial sums.

    Raises:
      ValueError: the arguments contradict each other.
      NotImplementedError: the implementation asked for cannot do this call; the message names what.
    """
    _check(mixed, stream, weights, implementation)
    chain = make_chain(mixed, weights, eps, zero_centred)
    config = config or configs.choose(chain)
    if _choose(chain, config, implementation) == "xla":
        return _by_products(mixed, stream, weights, eps, zero_centred)
    found = turns.run(operands(chain, mixed, stream, weights), chain=chain, config=config)
    return results(chain, found, stream)


def operands(chain: Chain, mixed: jax.Array, stream: jax.Array, weights: ChainWeights) -> dict[str, jax.Array]:
    """What the kernel takes."""
    spare = chain.padded_rows - chain.rows
    rows = mixed.reshape(chain.rows, chain.mixed)
    found = dict(
        mixed=jnp.pad(rows, ((0, spare), (0, 0))) if spare else rows,
        stream=stream.reshape(chain.rows, chain.hidden),
        out_weight=weights.out,
        norm_weight=weights.norm,
        gate_up_weight=weights.gate_up,
        down_weight=weights.down,
        next_norm_weight=weights.next_norm,
    )
    return found | ({} if weights.next is None else dict(next_weight=weights.next))


def results(chain: Chain, found: dict[str, jax.Array], stream: jax.Array) -> tuple[jax.Array, jax.Array | PartialSums]:
    """What `linear_chain` returns of what the kernel leaves."""
    total = found["total"].reshape(stream.shape)
    if chain.projected:
        return total, PartialSums(found["projected"], stream.shape[:-1], chain.dtype)
    return total, found["next_normed"][: chain.rows].reshape(stream.shape)


def runs_kernel(
    mixed: jax.Array, stream: jax.Array, weights: ChainWeights, *, eps: float, zero_centred: bool = False,
    implementation: str | None = None,
) -> bool:  # fmt: skip
    """Whether a chain is for the GPU kernel; arguments and errors as those of `linear_chain`."""
    _check(mixed, stream, weights, implementation)
    chain = make_chain(mixed, weights, eps, zero_centred)
    return _choose(chain, configs.choose(chain), implementation) == "mosaic_gpu"


def _choose(chain: Chain, config: Config | None, implementation: str | None) -> str:
    obstacle = unsupported(chain, config)
    if implementation is None and obstacle is None and not configs.measured_faster(chain):
        return "xla"
    return choice.choose(implementation, obstacle)


def supported(
    mixed: jax.Array, stream: jax.Array, weights: ChainWeights, *, eps: float, zero_centred: bool = False
) -> bool:
    """Whether the GPU kernel can take a chain; arguments and ValueError as those of `linear_chain`."""
    _check(mixed, stream, weights, None)
    chain = make_chain(mixed, weights, eps, zero_centred)
    return unsupported(chain, configs.choose(chain)) is None


def unsupported(chain: Chain, config: Config | None) -> str | None:
    """Why the GPU kernel cannot take a chain with these sizes, or None."""
    if chain.dtype not in ("bfloat16", "float16"):
        return f"dtype {chain.dtype} (bfloat16 and float16 only)"
    if not 1 <= chain.rows <= MAX_ROWS:
        return f"{chain.rows} rows (1 to {MAX_ROWS})"
    if config is None:
        return f"{chain} (no configuration fits)"
    if choice.on_hopper() and choice.multiprocessors() < config.workers:
        return f"a GPU of fewer than {config.workers} multiprocessors"
    return None


def make_chain(mixed: jax.Array, weights: ChainWeights, eps: float, zero_centred: bool) -> Chain:
    """The sizes of a call."""
    return Chain(
        rows=math.prod(mixed.shape[:-1]),
        mixed=mixed.shape[-1],
        hidden=weights.norm.shape[0],
        intermediate=weights.down.shape[1],
        projected=0 if weights.next is None else weights.next.shape[0],
        dtype=mixed.dtype.name,
        eps=eps,
        zero_centred=zero_centred,
    )


def _by_products(mixed, stream, weights: ChainWeights, eps: float, zero_centred: bool):
    """The same by XLA, a product at a time."""
    norms = dict(eps=eps, zero_centred=zero_centred)
    update = streaming_matmul(mixed, weights.out, implementation="xla")
    middle, normed = add_rms_norm(stream, update, weights.norm, **norms)
    update = streaming_matmul(
        streaming_swiglu(normed, weights.gate_up, implementation="xla"), weights.down, implementation="xla"
    )
    total, normed = add_rms_norm(middle, update, weights.next_norm, **norms)
    return total, normed if weights.next is None else streaming_matmul(normed, weights.next, implementation="xla")


def _check(mixed, stream, weights: ChainWeights, implementation) -> None:
    """Raises ValueError where the arguments contradict each other."""
    choice.check(implementation)
    if not mixed.ndim or not stream.ndim or weights.down.ndim != 2:
        shapes = f"{mixed.shape}, {stream.shape} and {weights.down.shape}"
        raise ValueError(f"mixed, stream and down must be [..., A], [..., E] and [E, F], got {shapes}")
    hidden, features = stream.shape[-1], weights.down.shape[-1]
    expected = dict(
        out=(hidden, mixed.shape[-1]), norm=(hidden,), gate_up=(2 * features, hidden), down=(hidden, features),
        next_norm=(hidden,),
    )  # fmt: skip
    if weights.next is not None:
        expected["next"] = (weights.next.shape[0], hidden)
    if mixed.shape[:-1] != stream.shape[:-1] or mixed.dtype != stream.dtype:
        expectation = f"{(*stream.shape[:-1], 'A')} of {stream.dtype} like stream"
        raise ValueError(f"mixed must be {expectation}, got {mixed.shape} of {mixed.dtype}")
    for name, shape in expected.items():
        weight = getattr(weights, name)
        if weight.shape != shape or weight.dtype != mixed.dtype:
            raise ValueError(f"{name} must be {shape} of {mixed.dtype}, got {weight.shape} of {weight.dtype}")
