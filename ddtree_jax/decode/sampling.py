"""The target's draws: Gumbel-max in float32 keyed by (request seed, absolute position).

The noise of a position does not depend on the node, the tree or the batch, so the same seed draws the same text with
every method (Gumbel-max: argmax(logits / temperature + G), G ~ Gumbel(0, 1), follows softmax(logits / temperature)).
At temperature 0 there is none: `Decoder.greedy` draws.

Shape letters: B slots, N nodes, P depths of a tree (root included), V vocabulary.
"""

import jax
import jax.numpy as jnp


def position_noise(seeds: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """Gumbel noise [B, P, V] float32 for seeds [B] uint32 at absolute positions [B, P] int32."""

    def one(seed, position):
        # Named, since other generators (rbg) give other bits under vmap of another shape.
        key = jax.random.key(seed, impl="threefry2x32")
        key = jax.random.fold_in(key, position.astype(jnp.uint32))
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(jax.vmap(one, (None, 0)))(seeds, positions)


def draw(
    logits: jax.Array,
    depth: jax.Array,
    *,
    first_position: jax.Array,
    num_depths: int,
    seeds: jax.Array,
    temperature: jax.Array,
) -> jax.Array:
    """The target's own token at every node.

    Args:
      logits: [B, N, V] float32.
      depth: [B, N] int32 in 0..num_depths-1, the node's depth below the root.
      first_position: [B] int32, absolute position of the token drawn at the root.
      num_depths: P, how many positions the nodes span.
      seeds: [B] uint32.
      temperature: [] float32, positive.

    Returns:
      [B, N] int32. Of equal logits the smallest token id is taken. (Equal rows of the head need not give equal logits:
      the last bits of a matrix product may depend on its shape.)
    """
    positions = first_position[:, None] + jnp.arange(num_depths, dtype=jnp.int32)[None, :]
    noise = position_noise(seeds, positions, logits.shape[-1])
    noise = noise if num_depths == 1 else jnp.take_along_axis(noise, depth[:, :, None], axis=1)
    return jnp.argmax(logits / temperature + noise, axis=-1).astype(jnp.int32)
