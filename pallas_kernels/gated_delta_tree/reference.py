"""The gated delta rule in plain XLA: any device, float32 throughout; the oracle and the fallback of the kernels.

The masked WY form. Write j <= i for "node j is node i or an ancestor of it", G_ij for the sum of the logarithms of the
decays after j up to and with i, G_i for that of the whole path to i, S for the state before the tree. Unrolling the
recurrence along the path to i gives its state as

    S_i = e^{G_i} S + sum_{j <= i} e^{G_ij} k_j u_j^T

and inserting the parent's into u_i = beta_i (v_i - e^{g_i} S_parent^T k_i) gives a unit lower triangular system:

    (I + A) U = R,   A_ij = [j < i] beta_i e^{G_ij} (k_i . k_j),   R_i = beta_i (v_i - e^{G_i} S^T k_i)
    output_i = e^{G_i} S^T q_i + sum_{j <= i} e^{G_ij} (q_i . k_j) u_j

The state enters only through S^T k and S^T q. A chain is the case of a causal mask (UT transform of DeltaNet,
arXiv:2406.06484; gated, arXiv:2412.06464).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tree_attention import masks

LOWEST = -120.0  # log_decay is raised to it: its exponential is zero, and sums of it can be told from sums without it
_CHUNK = 64  # rows that `fold` takes at a time
_BLOCK = 16  # rows of the triangular solve eliminated at once


def tree(
    q: jax.Array,  # [B, N, Hk, Dk]
    k: jax.Array,  # [B, N, Hk, Dk]
    v: jax.Array,  # [B, N, Hv, Dv]
    log_decay: jax.Array,  # [B, N, Hv]
    beta: jax.Array,  # [B, N, Hv]
    states: jax.Array,  # [M, B, Hv, Dk, Dv]
    ancestors: jax.Array,  # [B, N, W] uint32
    *,
    layer: int,
) -> jax.Array:  # [B, N, Hv, Dv]
    """See `pallas_kernels.gated_delta_tree.gated_delta_tree`; the arguments are taken as checked."""
    batch, nodes, value_heads, value_dim = v.shape
    key_heads = k.shape[2]
    sees = masks.unpack_bits(ancestors, nodes)
    strict = sees & ~jnp.eye(nodes, dtype=bool)[None]
    state = _grouped(states[layer], key_heads)
    queries, keys = _heads_first(q), _heads_first(k)
    wy = _solve(keys, _values_first(v, key_heads), *_gates_first(log_decay, beta, key_heads), state, strict)

    # A node's own write is added apart: among the others, what no node sees may be NaN, and 0 * NaN is NaN.
    scores = wy.masked(_product("bknd,bkmd->bknm", queries, keys)[:, :, None])
    out = _product("bknd,bkrde->bkrne", queries, state) * jnp.exp(wy.total)[..., None]
    out += _product("bkrnm,bkrme->bkrne", scores, wy.seen_updates)
    out += jnp.sum(queries * keys, axis=-1)[:, :, None, :, None] * wy.updates
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, nodes, value_heads, value_dim).astype(v.dtype)


def replay(
    k: jax.Array,  # [M, B, P, Hk, Dk]
    v: jax.Array,  # [M, B, P, Hv, Dv]
    log_decay: jax.Array,  # [M, B, P, Hv]
    beta: jax.Array,  # [M, B, P, Hv]
    states: jax.Array,  # [M, B, Hv, Dk, Dv]
    count: jax.Array,  # [B] int32
) -> jax.Array:  # [M, B, Hv, Dk, Dv]
    """See `pallas_kernels.gated_delta_tree.gated_delta_replay`."""
    rows, key_heads = k.shape[2:4]
    group = v.shape[3] // key_heads

    def row(array, i):  # [M, B, P, ...] -> [M, B, ...] float32
        return lax.dynamic_index_in_dim(array, i, axis=2, keepdims=False).astype(jnp.float32)

    def step(i, states):
        key = jnp.repeat(row(k, i), group, axis=2)
        decayed = states * jnp.exp(row(log_decay, i))[..., None, None]
        update = row(beta, i)[..., None] * (row(v, i) - _product("mbhd,mbhde->mbhe", key, decayed))
        after = decayed + key[..., None] * update[..., None, :]
        return jnp.where((i < count)[None, :, None, None, None], after, states)

    return lax.fori_loop(0, jnp.clip(jnp.max(count), 0, rows), step, states)


def fold(
    k: jax.Array,  # [M, B, P, Hk, Dk]
    v: jax.Array,  # [M, B, P, Hv, Dv]
    log_decay: jax.Array,  # [M, B, P, Hv]
    beta: jax.Array,  # [M, B, P, Hv]
    states: jax.Array,  # [M, B, Hv, Dk, Dv]
    count: jax.Array,  # [B] int32
) -> jax.Array:  # [M, B, Hv, Dk, Dv]
    """See `pallas_kernels.gated_delta_tree.gated_delta_fold`."""
    layers, batch, rows, key_heads = k.shape[:4]
    chunk = min(_CHUNK, rows)
    shape = states.shape
    count = jnp.clip(jnp.broadcast_to(count[None], (layers, batch)).reshape(layers * batch), 0, rows)
    # Every layer of every slot on its own: [M, B, P, ...] -> [M * B, P + spare, ...].
    k, v, log_decay, beta = (
        jnp.pad(x.reshape(layers * batch, *x.shape[2:]), ((0, 0), (0, -rows % chunk), *[(0, 0)] * (x.ndim - 3)))
        for x in (k, v, log_decay, beta)
    )
    causal = jnp.tril(jnp.ones((1, chunk, chunk), bool), -1)

    def step(i, state):
        live = i * chunk + jnp.arange(chunk, dtype=jnp.int32)[None, :] < count[:, None]  # [M * B, chunk]

        def cut(x):  # dead rows neither decay nor write
            part = lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis=1)
            return jnp.where(live.reshape(*live.shape, *[1] * (x.ndim - 2)), part, jnp.zeros((), x.dtype))

        keys, values = _heads_first(cut(k)), _values_first(cut(v), key_heads)
        wy = _solve(keys, values, *_gates_first(cut(log_decay), cut(beta), key_heads), state, causal)
        kept = jnp.exp(wy.since[..., -1, :])[..., None] * wy.updates  # decayed to the end of the chunk
        after = state * jnp.exp(wy.total[..., -1])[..., None, None] + _product("bknd,bkrne->bkrde", keys, kept)
        return jnp.where(live[:, 0, None, None, None, None], after, state)

    grouped = _grouped(states.reshape(layers * batch, *shape[2:]), key_heads)
    return lax.fori_loop(0, lax.div(jnp.max(count) + chunk - 1, chunk), step, grouped).reshape(shape)


@dataclasses.dataclass(frozen=True)
class _WY:
    """What the triangular system yields, per slot, key head and value head of its group."""

    strict: jax.Array  # [B or 1, 1, 1, N, N] bool: node j is an ancestor of i
    total: jax.Array  # [B, Hk, R, N]: G_i
    since: jax.Array  # [B, Hk, R, N, N]: G_ij where j <= i; elsewhere of no meaning
    updates: jax.Array  # [B, Hk, R, N, Dv]: U
    seen_updates: jax.Array  # the same, zero where no other node sees it

    def masked(self, scores: jax.Array) -> jax.Array:
        """[j < i] e^{G_ij} scores_ij; masked before the exponential, which could overflow."""
        return jnp.where(self.strict, jnp.exp(jnp.where(self.strict, self.since, 0.0)) * scores, 0.0)


def _solve(keys, values, log_decay, beta, state, strict) -> _WY:
    """Solves (I + A) U = R.

    Args:
      keys: [B, Hk, N, Dk] float32.
      values: [B, Hk, R, N, Dv] float32.
      log_decay, beta: [B, Hk, R, N] float32.
      state: [B, Hk, R, Dk, Dv] float32.
      strict: [B or 1, N, N] bool, each node's ancestors, itself excluded.
    """
    nodes = strict.shape[-1]
    seen = jnp.any(strict, axis=1)[:, None, None, :, None]  # by another node
    eye = jnp.eye(nodes, dtype=bool)[None]
    beyond = jnp.broadcast_to(~(strict | eye), (len(keys), nodes, nodes)).astype(jnp.float32)
    strict, eye = strict[:, None, None], eye[:, None, None]

    # G_ij is summed over the path between, not taken as G_i - G_j: that would lose a slow decay after a fast one.
    above = jnp.where(strict, log_decay[..., None, :], 0.0)  # [..., i, l]: of the ancestors of i
    between = _product("bkrnl,bml->bkrnm", above, beyond) + log_decay[..., None]
    since = jnp.where(eye, 0.0, between)
    total = jnp.sum(above, axis=-1) + log_decay
    wy = _WY(strict, total, since, values, values)

    right = beta[..., None] * (values - jnp.exp(total)[..., None] * _product("bknd,bkrde->bkrne", keys, state))
    system = wy.masked(beta[..., None] * _product("bknd,bkmd->bknm", keys, keys)[:, :, None])
    updates = _substitute(system, right, seen)
    return dataclasses.replace(wy, updates=updates, seen_updates=jnp.where(seen, updates, 0.0))


def _substitute(system: jax.Array, right: jax.Array, seen: jax.Array) -> jax.Array:
    """Forward substitution in blocks: U [..., N, Dv] with (I + A) U = R, for A strictly lower triangular [..., N, N].

    Rows of R that are not `seen` [..., N, 1] have a zero column in A, and never enter another row.
    """
    nodes = system.shape[-1]
    block = min(_BLOCK, nodes)
    count = -(-nodes // block)
    spare = count * block - nodes
    padding = [(0, 0)] * (system.ndim - 2)
    system = jnp.pad(system, [*padding, (0, spare), (0, spare)])
    right = jnp.pad(right, [*padding, (0, spare), (0, 0)])
    seen = jnp.pad(seen, [*padding, (0, spare), (0, 0)])

    # (I + A_bb)^-1 - I of the blocks on the diagonal, all at once.
    eye = jnp.eye(block, dtype=system.dtype)
    corners = jnp.stack([system[..., b : b + block, b : b + block] for b in range(0, nodes, block)], axis=-3)
    eyes = jnp.broadcast_to(eye, corners.shape)
    inverses = lax.linalg.triangular_solve(corners + eyes, eyes, left_side=True, lower=True, unit_diagonal=True) - eyes

    def clear(x, rows):
        return jnp.where(seen[..., rows, :], x, 0.0)

    done: list[jax.Array] = []  # blocks of U
    for b in range(count):
        rows, before = slice(b * block, (b + 1) * block), slice(0, b * block)
        rest = right[..., rows, :]
        if done:
            known = clear(jnp.concatenate(done, axis=-2), before)
            rest -= _product("...nm,...me->...ne", system[..., rows, before], known)
        done.append(rest + _product("...nm,...me->...ne", inverses[..., b, :, :], clear(rest, rows)))
    return jnp.concatenate(done, axis=-2)[..., :nodes, :]


def _heads_first(x: jax.Array) -> jax.Array:
    """[B, N, Hk, Dk] -> [B, Hk, N, Dk] float32."""
    return x.astype(jnp.float32).transpose(0, 2, 1, 3)


def _values_first(v: jax.Array, key_heads: int) -> jax.Array:
    """[B, N, Hv, Dv] -> [B, Hk, R, N, Dv] float32."""
    batch, nodes, value_heads, value_dim = v.shape
    grouped = v.astype(jnp.float32).reshape(batch, nodes, key_heads, value_heads // key_heads, value_dim)
    return grouped.transpose(0, 2, 3, 1, 4)


def _gates_first(log_decay: jax.Array, beta: jax.Array, key_heads: int) -> tuple[jax.Array, jax.Array]:
    """[B, N, Hv] -> [B, Hk, R, N], both."""
    batch, nodes, value_heads = beta.shape
    shape = batch, nodes, key_heads, value_heads // key_heads
    return tuple(x.reshape(shape).transpose(0, 2, 3, 1) for x in (jnp.maximum(log_decay, LOWEST), beta))


def _grouped(state: jax.Array, key_heads: int) -> jax.Array:
    """[B, Hv, Dk, Dv] -> [B, Hk, R, Dk, Dv]."""
    batch, value_heads, *dims = state.shape
    return state.reshape(batch, key_heads, value_heads // key_heads, *dims)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Contraction of float32 operands as such (no TF32)."""
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST)
