"""Forward passes of training: the target's features of whole rows, and the drafter on many blocks a row.

Both run the modules of `ddtree_jax.models` on their own parameters; only the mixing of tokens differs
(`train.attention`, `train.recurrent`).

Shape letters: b rows, S tokens a row, n blocks a row, B slots, E hidden size, T taps, K key/value heads, D head_dim.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ddtree_jax.config import DrafterConfig, TargetConfig
from ddtree_jax.models.decoder import Block
from ddtree_jax.models.dflash import DFlash, DraftBlock
from ddtree_jax.models.layers import differentiable
from ddtree_jax.models.rope import rope_tables
from ddtree_jax.train.attention import AttentionSpec, block_attention
from ddtree_jax.train.recurrent import mix_rows


@differentiable()
def target_features(
    config: TargetConfig, params: Any, tokens: jax.Array, starts: jax.Array, taps: tuple[int, ...],
    chunk_bytes: int = 2**31,
) -> jax.Array:  # fmt: skip
    """The residual stream after the tapped blocks, for rows of documents.

    Args:
      params: of the target.
      tokens: [b, S] int32.
      starts: [b, S] int32, first index of each token's document: attention and positions begin there.
      taps: zero-based blocks, ascending. Blocks past the last tap, final norm and head are not run.
      chunk_bytes: see `AttentionSpec`.

    Returns:
      [b, S, T * E] in the target's dtype, without a gradient to `params`.
    """
    c, (b, length) = config, tokens.shape
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], tokens.shape)
    rope = rope_tables(c.rope, index - starts, c.rotary_dim or c.head_dim)
    x = jnp.take(params["embed"]["weight"], tokens, axis=0, mode="clip")
    # Queries in groups, as if each were a block: the chunking of the attention then bounds the scores.
    slots = next(s for s in (16, 8, 4, 2, 1) if length % s == 0)
    tapped = []
    for i in range(max(taps) + 1):
        block = Block(c, i).bind({"params": params[f"layers_{i}"]})
        h = block.input_layernorm(x)
        if i in c.delta_layers:
            x = x + mix_rows(block.linear_attn, h, starts)
        else:
            attention = block.self_attn
            q, k, v, gate = attention.heads(attention.qkv_proj(h), rope)
            first = _window_start(index, starts, c.sliding_windows[i])
            out = block_attention(
                AttentionSpec(scale=c.head_dim**-0.5, chunk_bytes=chunk_bytes),
                q.reshape(b, length // slots, slots, c.num_heads, c.head_dim), k, v,
                first.reshape(b, -1, slots), (index + 1).reshape(b, -1, slots),
            )  # fmt: skip
            x = x + attention.o_proj(attention.gated(out.reshape(b, length, c.num_heads, c.head_dim), gate))
        x = x + block.mlp(block.post_attention_layernorm(x))
        if i in taps:
            tapped.append(x)
    return jax.lax.stop_gradient(jnp.concatenate(tapped, axis=-1))


@differentiable()
def draft_blocks(
    config: DrafterConfig, params: Any, embedding: jax.Array, features: jax.Array, tokens: jax.Array,
    starts: jax.Array, anchors: jax.Array, *, chunk_bytes: int = 2**31, remat: bool = False,
) -> jax.Array:  # fmt: skip
    """The drafter on n blocks a row; what `DFlash.__call__` computes with a cache of the rows before each anchor.

    A block sees features strictly before its anchor and in its own document: the feature at the anchor does not exist
    yet in decoding, and those after it would give the labels away.

    Args:
      params: of the drafter, in `config.dtype`.
      embedding: [V, E], the target's.
      features: [b, S, T * E_target], see `target_features`.
      tokens, starts: [b, S] int32, see `target_features`.
      anchors: [b, n] int32, index of each block's first slot.
      chunk_bytes: see `AttentionSpec`.
      remat: recompute layers in the backward pass.

    Returns:
      [b, n, B, E] after the final norm, for the target's head.
    """
    c, (b, n), slots = config, anchors.shape, config.block_size
    if c.conv_taps or c.own_embedding:
        raise NotImplementedError(
            "training is of plain DFlash with the target's embedding: no convolutions, no own tables"
        )
    length = tokens.shape[1]
    anchor_tokens = jnp.take_along_axis(tokens, anchors, axis=1)
    ids = jnp.full((b, n, slots), c.mask_token_id, jnp.int32).at[:, :, 0].set(anchor_tokens)
    block = jnp.take(embedding, ids, axis=0, mode="clip").astype(c.jax_dtype)
    if c.embedding_scale != 1.0:
        block = block * jnp.asarray(c.embedding_scale, block.dtype)
    x = block.reshape(b, n * slots, -1)

    index = jnp.arange(length, dtype=jnp.int32)[None, :]
    context_rope = rope_tables(c.rope, index - starts, c.head_dim)
    block_starts = jnp.take_along_axis(starts, anchors, axis=1)[:, :, None]
    slot_index = anchors[:, :, None] + jnp.arange(slots, dtype=jnp.int32)[None, None, :]
    rope = rope_tables(c.rope, (slot_index - block_starts).reshape(b, n * slots), c.head_dim)
    last = jnp.broadcast_to(anchors[:, :, None], slot_index.shape)

    drafter = DFlash(c).bind({"params": params})
    context = drafter.hidden_norm(drafter.fc(features.astype(c.jax_dtype)))
    for i, (causal, window) in enumerate(zip(c.causal, c.sliding_windows, strict=True)):
        first = _window_start(slot_index, jnp.broadcast_to(block_starts, slot_index.shape), window)
        spec = AttentionSpec(scale=c.head_dim**-0.5, causal=causal, window=window, chunk_bytes=chunk_bytes)

        def layer(layer_params, x, context, causal=causal, window=window, first=first, spec=spec):
            block = DraftBlock(c, causal, window).bind({"params": layer_params})
            attention, h = block.self_attn, block.input_layernorm(x)
            q, k, v = attention.block_heads(attention.qkv_proj(h), rope)
            by_block = lambda y: y.reshape(b, n, slots, *y.shape[2:])  # noqa: E731
            out = block_attention(
                spec, by_block(q), *attention.keys_values(context, context_rope), first, last,
                by_block(k.swapaxes(1, 2)), by_block(v.swapaxes(1, 2)),
            )  # fmt: skip
            x = x + attention.o_proj(out.reshape(b, n * slots, -1))
            return x + block.mlp(block.post_attention_layernorm(x))

        x = (jax.checkpoint(layer) if remat else layer)(params[f"layers_{i}"], x, context)
    return drafter.norm(x).reshape(b, n, slots, -1)


def _window_start(position: jax.Array, starts: jax.Array, window: int | None) -> jax.Array:
    """First visible index of queries at `position` whose documents begin at `starts`."""
    return starts if window is None else jnp.maximum(starts, position - (window - 1))
