"""Attention of training: every query sees an interval of the context, and a draft block also itself.

A block at anchor a reads context rows [first, a), where `first` is the start of its document or of its window. So the
mask is two integers a query, and keys of the context are shared by all blocks of a row: one matrix product, no gather.
The block's own keys are a batched [B, B] product; both parts share one softmax. Anchors go in chunks, so that the
float32 scores of a chunk, and nothing else, are in memory; the backward pass computes them again from the log-sum-exp
(as FlashAttention does, arXiv 2205.14135, section 3.1).

Shape letters: b rows of the batch, n blocks a row, B slots a block, S tokens a row, H query heads, K key/value heads,
G = H/K, D head_dim, M = G * B queries of a block that share a key/value head.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from ddtree_jax.models.dflash import block_visibility
from ddtree_jax.models.layers import precision_of

_MASKED = -1e30  # finite: a row without any visible key must not become NaN


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Static part of a call.

    Attributes:
      scale: factor on the scores.
      causal: whether a slot sees only earlier slots of its block.
      window: None or sliding window in tokens, within the block; the context's is part of `first`.
      chunk_bytes: most bytes of float32 scores at a time.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    chunk_bytes: int = 2**31


def block_attention(spec: AttentionSpec, q, k_context, v_context, first, last, k_block=None, v_block=None) -> jax.Array:
    """Softmax attention over an interval of the context and, if given, the queries' own block.

    Args:
      q: [b, n, B, H, D]; query head h reads key/value head h // G.
      k_context, v_context: [b, K, S, D].
      first, last: [b, n, B] int32; context row j is visible where first <= j < last.
      k_block, v_block: [b, n, B, K, D], or None for no block part.

    Returns:
      [b, n, B, H, D] in q's dtype. A query that sees nothing yields zeros; gradients are finite everywhere.
    """
    b, n, slots, heads, dim = q.shape
    kv_heads, length = k_context.shape[1:3]
    group = heads // kv_heads
    per_block = 4 * b * heads * slots * (length + (slots if k_block is not None else 0))
    chunk = max(1, min(n, spec.chunk_bytes // per_block))
    chunks = -(-n // chunk)
    chunk = -(-n // chunks)
    padding = chunks * chunk - n

    def chunked(x):  # [b, n, ...] -> [chunks, b, chunk, ...]
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(b, chunks, chunk, *x.shape[2:]).swapaxes(0, 1)

    grouped = q.reshape(b, n, slots, kv_heads, group, dim).transpose(0, 1, 3, 4, 2, 5)  # [b, n, K, G, B, D]
    grouped = grouped.reshape(b, n, kv_heads, group * slots, dim)
    blocks = None
    if k_block is not None:
        blocks = tuple(chunked(x).transpose(0, 1, 4, 2, 3, 5) for x in (k_block, v_block))  # [chunks, b, K, c, B, D]
    # Key/value heads before blocks: then a product over a head's keys has one long axis of queries, and no transpose.
    queries = chunked(grouped).swapaxes(2, 3)  # [chunks, b, K, c, M, D]
    out = _attend(spec, slots, queries, k_context, v_context, chunked(first), chunked(last), blocks).swapaxes(2, 3)
    out = out.swapaxes(0, 1).reshape(b, chunks * chunk, kv_heads, group, slots, dim)[:, :n]
    return out.transpose(0, 1, 4, 2, 3, 5).reshape(b, n, slots, heads, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(spec, slots, q, k_context, v_context, first, last, blocks):
    return _forward(spec, slots, q, k_context, v_context, first, last, blocks)[0]


def _forward(spec, slots, q, k_context, v_context, first, last, blocks):
    def one(args):
        q, first, last, blocks = args
        s_context, s_block = _scores(spec, slots, q, k_context, first, last, blocks)
        top = jnp.max(s_context, axis=-1)
        if blocks is not None:
            top = jnp.maximum(top, jnp.max(s_block, axis=-1))
        p_context = jnp.where(s_context > _MASKED, jnp.exp(s_context - top[..., None]), jnp.float32(0))
        total = jnp.sum(p_context, axis=-1)
        out = _dot("bkcms,bksd->bkcmd", p_context.astype(q.dtype), v_context)
        if blocks is not None:
            p_block = jnp.where(s_block > _MASKED, jnp.exp(s_block - top[..., None]), jnp.float32(0))
            total = total + jnp.sum(p_block, axis=-1)
            out = out + _dot("bkcmj,bkcjd->bkcmd", p_block.astype(q.dtype), blocks[1])
        safe = jnp.where(total > 0, total, jnp.float32(1))
        return (out / safe[..., None]).astype(q.dtype), top + jnp.log(safe)

    out, log_total = _each_chunk(one, (q, first, last, blocks))
    return out, (q, k_context, v_context, first, last, blocks, out, log_total)


def _backward(spec, slots, residuals, d_out):
    q, k_context, v_context, first, last, blocks, out, log_total = residuals
    # Cotangents of the shared context keys and values add up over chunks in float32.
    zero = jnp.zeros(k_context.shape, jnp.float32)

    def one(carry, args):
        q, first, last, blocks, out, log_total, d_out = args
        d_k, d_v = carry
        s_context, s_block = _scores(spec, slots, q, k_context, first, last, blocks)
        delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)[..., None]

        def d_scores(scores, d_p):
            p = jnp.where(scores > _MASKED, jnp.exp(scores - log_total[..., None]), jnp.float32(0))
            return p.astype(q.dtype), (p * (d_p - delta) * jnp.float32(spec.scale)).astype(q.dtype)

        p, d_s = d_scores(s_context, _dot("bkcmd,bksd->bkcms", d_out, v_context))
        d_v = d_v + _dot("bkcms,bkcmd->bksd", p, d_out)
        d_k = d_k + _dot("bkcms,bkcmd->bksd", d_s, q)
        d_q = _dot("bkcms,bksd->bkcmd", d_s, k_context)
        d_blocks = None
        if blocks is not None:
            p, d_s = d_scores(s_block, _dot("bkcmd,bkcjd->bkcmj", d_out, blocks[1]))
            d_q = d_q + _dot("bkcmj,bkcjd->bkcmd", d_s, blocks[0])
            d_keys, d_values = _dot("bkcmj,bkcmd->bkcjd", d_s, q), _dot("bkcmj,bkcmd->bkcjd", p, d_out)
            d_blocks = (d_keys.astype(q.dtype), d_values.astype(q.dtype))
        return (d_k, d_v), (d_q.astype(q.dtype), d_blocks)

    chunks = (q, first, last, blocks, out, log_total, d_out)
    if q.shape[0] == 1:
        (d_k, d_v), (d_q, d_blocks) = one((zero, zero), jax.tree.map(lambda x: x[0], chunks))
        d_q, d_blocks = jax.tree.map(lambda x: x[None], (d_q, d_blocks))
    else:
        (d_k, d_v), (d_q, d_blocks) = lax.scan(one, (zero, zero), chunks)
    return d_q, d_k.astype(k_context.dtype), d_v.astype(v_context.dtype), None, None, d_blocks


_attend.defvjp(_forward, _backward)


def _each_chunk(one, args):
    if args[0].shape[0] == 1:
        return jax.tree.map(lambda x: x[None], one(jax.tree.map(lambda x: x[0], args)))
    return lax.map(one, args)


def _scores(spec, slots, q, k_context, first, last, blocks):
    """Masked float32 scores of one chunk: over the context [b, K, c, M, S], over the block [b, K, c, M, B] or None."""
    group = q.shape[3] // slots
    row = jnp.arange(k_context.shape[2], dtype=jnp.int32)[None, None, None]
    visible = (row >= first[..., None]) & (row < last[..., None])  # [b, c, B, S]
    visible = jnp.tile(visible, (1, 1, group, 1))[:, None]  # M = (G, B): the mask of a slot serves every head
    s_context = _dot("bkcmd,bksd->bkcms", q, k_context) * jnp.float32(spec.scale)
    s_context = jnp.where(visible, s_context, jnp.float32(_MASKED))
    if blocks is None:
        return s_context, None
    seen = jnp.asarray(block_visibility(slots, spec.causal, spec.window))
    s_block = _dot("bkcmd,bkcjd->bkcmj", q, blocks[0]) * jnp.float32(spec.scale)
    return s_context, jnp.where(jnp.tile(seen, (group, 1))[None, None, None], s_block, jnp.float32(_MASKED))


def _dot(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Product of two arrays of one dtype, accumulated and returned in float32."""
    if x.dtype == jnp.float32:
        return jnp.einsum(spec, x, y, precision=precision_of(x.dtype))

    def wide(x, y):  # the CPU backend lacks bfloat16 x bfloat16 = float32 for some layouts
        return jnp.einsum(spec, x.astype(jnp.float32), y.astype(jnp.float32))

    def narrow(x, y):
        return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)

    return lax.platform_dependent(x, y, cpu=wide, default=narrow)
