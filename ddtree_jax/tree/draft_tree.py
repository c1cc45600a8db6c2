"""The draft tree: the type that flows from the drafter to the verifier, and its packed visibility bits.

Shape letters: B slots · N nodes, root included · Q = ceil(N / 32) words of 32 visibility bits.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention.masks import unpack_bits

WORD_BITS = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftTree:
    """A batch of token trees, one per slot, of one static width N.

    Node 0 is the root: the token committed last, whose keys and values are not in the cache yet. A node stands
    for the text from the root down to it. Parents come before children. Nodes `size[b]`, `size[b] + 1`, ... of
    slot b are padding: token 0, parent 0, depth 0, log_prob -inf, and they see nothing but themselves (so that a
    softmax over what a node sees is never empty).

    Attributes:
      tokens: [B, N] int32, the token at each node.
      parent: [B, N] int32, the parent's node index; the root's parent is 0.
      depth: [B, N] int32, edges from the root; a node's position in the text is the root's position + depth.
      log_prob: [B, N] float32, sum of the drafter's log probabilities (nats) from the root; 0 at the root.
      size: [B] int32, live nodes, root included, so 1 <= size <= N.
      ancestors: [B, N, Q] uint32, bit j % 32 of word j // 32 in row i says that node j is i or an ancestor of i.
    """

    tokens: jax.Array
    parent: jax.Array
    depth: jax.Array
    log_prob: jax.Array
    size: jax.Array
    ancestors: jax.Array

    @property
    def num_nodes(self) -> int:
        """N, the static width, root and padding included."""
        return self.tokens.shape[-1]


def num_words(num_nodes: int) -> int:
    """Q, the number of 32-bit words that hold one visibility bit per node."""
    return -(-num_nodes // WORD_BITS)


def static_bits(visible: np.ndarray) -> np.ndarray:
    """Packs a mask known in advance: visible [N, N] bool -> [N, Q] uint32, for chains, blocks and prompt chunks."""
    num_nodes = visible.shape[-1]
    padded = np.zeros((len(visible), num_words(num_nodes) * WORD_BITS), bool)
    padded[:, :num_nodes] = visible
    weights = np.left_shift(np.uint32(1), np.arange(WORD_BITS, dtype=np.uint32))
    return np.sum(padded.reshape(len(visible), -1, WORD_BITS) * weights, axis=-1, dtype=np.uint32)


def in_every_slot(array: np.ndarray, batch: int) -> jax.Array:
    """A constant for all slots: array [...] -> [B, ...]."""
    return jnp.broadcast_to(jnp.asarray(array)[None], (batch, *array.shape))


def unpack_ancestors(tree: DraftTree) -> jax.Array:
    """The dense visibility of a tree, for tests and drawing.

    Returns:
      [B, N, N] bool: element [b, i, j] says that node i sees node j (j is i or an ancestor of i).
    """
    return unpack_bits(tree.ancestors, tree.num_nodes)


def only_first(tree: DraftTree, count: jax.Array) -> DraftTree:
    """The tree of the first `count` nodes, [] int32 (parents come first, so none is lost); the others are padding."""
    num_nodes = tree.num_nodes
    live = jnp.arange(num_nodes, dtype=jnp.int32)[None] < count
    alone = jnp.asarray(static_bits(np.eye(num_nodes, dtype=bool)))[None]
    return DraftTree(
        tokens=jnp.where(live, tree.tokens, 0),
        parent=jnp.where(live, tree.parent, 0),
        depth=jnp.where(live, tree.depth, 0),
        log_prob=jnp.where(live, tree.log_prob, -jnp.inf),
        size=jnp.minimum(tree.size, count),
        ancestors=jnp.where(live[:, :, None], tree.ancestors, alone),
    )


def ancestor_bits(parent: jax.Array, size: jax.Array, max_depth: int) -> jax.Array:
    """Packed ancestor-or-self bits of every node, by pointer doubling.

    After t steps a node knows itself and its nearest 2^t - 1 ancestors and points at the next one, so
    ceil(log2(max_depth + 1)) gathers are enough, whatever the number of nodes.

    Args:
      parent: [B, N] int32; the root is node 0 and its parent is 0.
      size: [B] int32 live nodes; the others see only themselves.
      max_depth: an upper bound of the depth of any node (static).

    Returns:
      [B, N, Q] uint32, the field `ancestors` of `DraftTree`.

    Raises:
      ValueError: shapes that do not match, or a negative `max_depth`.
    """
    if parent.ndim != 2 or size.shape != parent.shape[:1]:
        raise ValueError(f"expected parent [B, N] and size [B], got {parent.shape} and {size.shape}")
    if max_depth < 0:
        raise ValueError(f"max_depth must not be negative, got {max_depth}")
    batch, num_nodes = parent.shape
    index = jnp.arange(num_nodes, dtype=jnp.int32)[None]  # [1, N]
    # A padding node is its own ancestor, so that it never reaches the root.
    jump = jnp.where(index < size[:, None], parent, index)
    bits = jnp.broadcast_to(static_bits(np.eye(num_nodes, dtype=bool))[None], (batch, num_nodes, num_words(num_nodes)))
    for step in range(max_depth.bit_length()):  # ceil(log2(max_depth + 1))
        if step:
            jump = jnp.take_along_axis(jump, jump, axis=1, mode="clip")
        bits = bits | jnp.take_along_axis(bits, jump[:, :, None], axis=1, mode="clip")
    return bits


def tree_below_root(
    root_tokens: jax.Array,
    tokens: jax.Array,
    parent: jax.Array,
    depth: jax.Array,
    log_prob: jax.Array,
    live: jax.Array,
    *,
    num_nodes: int,
    max_depth: int,
) -> DraftTree:
    """Completes a tree from its drafted nodes: root in front, padding behind, visibility from the parents.

    Args:
      root_tokens: [B] int32.
      tokens, parent, depth, log_prob: [B, M] of nodes 1..M, M <= N - 1, as in `DraftTree`.
      live: [B, M] bool, a run of True and then False: the others become padding.
      num_nodes: N (static).
      max_depth: an upper bound of the depths (static).
    """

    # Elementwise, so that XLA can make all fields in few kernels: a concatenation of each would be one of its own.
    node = jnp.arange(num_nodes, dtype=jnp.int32)[None]
    around = ((0, 0), (1, num_nodes - 1 - live.shape[1]))
    drafted = jnp.pad(live, around)
    size = jnp.max(jnp.where(drafted, node + 1, 1), axis=1)

    def with_root(root: jax.Array, below: jax.Array, padding: float) -> jax.Array:
        below = jnp.where(drafted, jnp.pad(below, around), jnp.asarray(padding, below.dtype))
        return jnp.where(node == 0, root[:, None], below)

    zero = jnp.zeros_like(root_tokens)
    parent = with_root(zero, parent, 0)
    return DraftTree(
        tokens=with_root(root_tokens, tokens, 0),
        parent=parent,
        depth=with_root(zero, depth, 0),
        log_prob=with_root(jnp.zeros_like(log_prob[:, 0]), log_prob, -jnp.inf),
        size=size,
        ancestors=ancestor_bits(parent, size, max_depth),
    )


def place_of(wanted: jax.Array, chosen: jax.Array) -> jax.Array:
    """Node numbers by comparing all with all, one fused kernel where an inverse permutation is a scatter.

    Args:
      wanted: [B, M] int32.
      chosen: [B, M] int32 distinct; entry i is what node i + 1 stands for.

    Returns:
      [B, M] int32, the node that stands for each wanted value; 0 (the root) where none does.
    """
    node = jnp.arange(1, chosen.shape[1] + 1, dtype=jnp.int32)[None, None]
    return jnp.sum(jnp.where(wanted[:, :, None] == chosen[:, None, :], node, 0), axis=-1, dtype=jnp.int32)
