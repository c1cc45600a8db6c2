"""Loss of the drafter: cross entropy per slot, weights of the slots, and what to report of a batch.

Shape letters: b rows, S tokens a row, n blocks a row, B slots, L = B - 1 labels a block, R predictions, E hidden size,
V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from ddtree_jax.models.layers import precision_of
from ddtree_jax.train.parallel import total


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """Static part of the head: how logits follow from `hidden @ weight.T`, and how many predictions go at a time."""

    multiplier: float = 1.0
    softcap: float | None = None
    rows: int = 4096


def block_labels(
    tokens: jax.Array, ends: jax.Array, labels: jax.Array, anchors: jax.Array, live: jax.Array, block_size: int
) -> tuple[jax.Array, jax.Array]:
    """What the slots 1..L of each block should predict.

    Slot k stands at anchor + k and predicts the token of its own position: no shift.

    Args:
      tokens, ends, labels: [b, S], see `data.Rows`.
      anchors, live: [b, n], see `anchors.draw_anchors`.

    Returns:
      (tokens [b, n, L] int32, valid [b, n, L] bool): `valid` where the label is in the answer of the anchor's document.
    """
    slot = jnp.arange(1, block_size, dtype=jnp.int32)[None, None, :]
    index = anchors[:, :, None] + slot
    inside = index < jnp.take_along_axis(ends, anchors, axis=1)[:, :, None]
    index = jnp.minimum(index, tokens.shape[1] - 1).reshape(tokens.shape[0], -1)
    pick = lambda x: jnp.take_along_axis(x, index, axis=1).reshape(inside.shape)  # noqa: E731
    return pick(tokens), inside & pick(labels) & live[:, :, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def cross_entropy(
    spec: HeadSpec, hidden: jax.Array, weight: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cross entropy of each prediction under the frozen head.

    Logits exist for `spec.rows` predictions at a time. The head has no gradient, so the gradient of a prediction's own
    loss to its hidden state is computed in the same pass as the loss, and the backward pass only weighs it: two matrix
    products with the head instead of the three that recomputing would take.

    Args:
      hidden: [R, E]; weight: [V, E], the target's head; labels: [R] int32.

    Returns:
      (cross entropy [R] float32 in nat, correct [R] bool: the label has the largest logit).
    """
    return _head_scan(spec, hidden, weight, labels, with_gradient=False)[:2]


def _cross_entropy_forward(spec, hidden, weight, labels):
    loss, correct, gradient = _head_scan(spec, hidden, weight, labels, with_gradient=True)
    return (loss, correct), gradient


def _cross_entropy_backward(spec, gradient, cotangents):
    d_loss = cotangents[0]
    return (d_loss[:, None] * gradient.astype(jnp.float32)).astype(gradient.dtype), None, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _head_scan(spec, hidden, weight, labels, *, with_gradient):
    count = hidden.shape[0]
    chunks = max(1, -(-count // spec.rows))
    rows = -(-count // chunks)
    padding = chunks * rows - count
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(chunks, rows, -1)
    labels = jnp.pad(labels, (0, padding)).reshape(chunks, rows)

    def one(args):
        hidden, labels = args
        raw = _head_product("re,ve->rv", hidden, weight)
        logits, slope = raw, None
        if spec.multiplier != 1.0:
            logits = logits * jnp.float32(spec.multiplier)
        if spec.softcap is not None:
            squashed = jnp.tanh(logits / jnp.float32(spec.softcap))
            logits, slope = squashed * jnp.float32(spec.softcap), 1 - jnp.square(squashed)
        top = jnp.max(logits, axis=-1)
        total = jnp.log(jnp.sum(jnp.exp(logits - top[:, None]), axis=-1)) + top
        at_label = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        gradient = None
        if with_gradient:
            hit = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :] == labels[:, None]
            d_logits = jnp.exp(logits - total[:, None]) - hit.astype(jnp.float32)
            if slope is not None:
                d_logits = d_logits * slope
            d_logits = (d_logits * jnp.float32(spec.multiplier)).astype(hidden.dtype)
            gradient = _head_product("rv,ve->re", d_logits, weight).astype(hidden.dtype)
        return total - at_label, at_label >= top, gradient

    out = lax.map(one, (hidden, labels))
    return jax.tree.map(lambda x: x.reshape(chunks * rows, *x.shape[2:])[:count], out)


def _head_product(spec, x, weight):
    if x.dtype == jnp.float32:
        return jnp.einsum(spec, x, weight.astype(jnp.float32), precision=precision_of(x.dtype))
    return jnp.einsum(spec, x, weight.astype(x.dtype), preferred_element_type=jnp.float32)


def slot_weights(loss: str, gamma: float, alpha: float, cross_entropies: jax.Array, valid: jax.Array) -> jax.Array:
    """Weights of the slots, without a gradient.

    "decay": w_k = exp(-(k - 1) / gamma), k = 1..L (arXiv 2602.06036, section 4): an early error costs all that follows.
    "dpace": w_k = sum over m >= k of C_m with C_m the product over i <= m of (1 - alpha) q_i + alpha, q the probability
    of the label: the derivative of the expected accepted length (arXiv 2605.18810). Slots without a label are left out
    of product and sum. "decay+dpace" is the product of both.

    Args:
      cross_entropies: [..., L] float32; valid: [..., L] bool.

    Returns:
      [..., L] float32, 0 where not valid.
    """
    weights = valid.astype(jnp.float32)
    if loss in ("decay", "decay+dpace"):
        slot = jnp.arange(valid.shape[-1], dtype=jnp.float32)
        weights = weights * jnp.broadcast_to(jnp.exp(-slot / jnp.float32(gamma)), weights.shape)
    if loss in ("dpace", "decay+dpace"):
        confidence = jnp.exp(-lax.stop_gradient(cross_entropies))
        smoothed = jnp.where(valid, (1 - alpha) * confidence + alpha, jnp.float32(1))
        survival = jnp.cumprod(smoothed, axis=-1) * valid.astype(jnp.float32)
        weights = weights * jnp.flip(jnp.cumsum(jnp.flip(survival, axis=-1), axis=-1), axis=-1)
    return lax.stop_gradient(weights)


def prefix_length(correct: jax.Array, valid: jax.Array) -> jax.Array:
    """Correct slots in a row from the first on, [..., L] bool -> [...] int32."""
    return jnp.sum(jnp.cumprod((correct & valid).astype(jnp.int32), axis=-1), axis=-1, dtype=jnp.int32)


def block_loss(
    loss: str, gamma: float, alpha: float, cross_entropies: jax.Array, correct: jax.Array, valid: jax.Array,
    mesh: Mesh | None = None,
):  # fmt: skip
    """The loss of a batch, normalised by the sum of its weights (0 without any label), and sums to report.

    Args:
      cross_entropies: [b, n, L] float32; correct, valid: [b, n, L] bool.
      mesh: the devices that share the batch. The sum of the weights is then that of all, and the sum of what each
        device returns is what one device would have returned for the whole batch.

    Returns:
      (loss [] float32, dict of float32 sums: "loss", "blocks", "accepted" (1 + correct prefix), "correct" [L] and
      "labels" [L]).
    """
    weights = slot_weights(loss, gamma, alpha, cross_entropies, valid)
    value = jnp.sum(weights * cross_entropies) / (total(mesh, jnp.sum(weights)) + jnp.float32(1e-6))
    live = jnp.any(valid, axis=-1)
    sums = {
        "loss": value,
        "blocks": jnp.sum(live.astype(jnp.float32)),
        "accepted": jnp.sum((1 + prefix_length(correct, valid)).astype(jnp.float32) * live.astype(jnp.float32)),
        "correct": jnp.sum((correct & valid).astype(jnp.float32), axis=(0, 1)),
        "labels": jnp.sum(valid.astype(jnp.float32), axis=(0, 1)),
    }
    return value, lax.stop_gradient(sums)


@dataclasses.dataclass(frozen=True)
class Report:
    """Means of one or more batches.

    Attributes:
      loss: weighted cross entropy in nat.
      accepted: estimated mean accepted length: 1 + expected length of the correct prefix of a block at a random anchor.
      accuracy: per slot 1..L.
    """

    loss: float
    accepted: float
    accuracy: tuple[float, ...]


def report(sums: list[dict]) -> Report:
    """Means of the sums that `block_loss` returned for several batches, on the host."""
    total = {k: sum(s[k] for s in sums) for k in sums[0]}
    ratio = lambda x, y: float(x) / float(y) if y else 0.0  # noqa: E731
    accuracy = tuple(ratio(c, n) for c, n in zip(total["correct"], total["labels"], strict=True))
    return Report(float(total["loss"]) / len(sums), ratio(total["accepted"], total["blocks"]), accuracy)
