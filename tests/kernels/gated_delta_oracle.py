"""The gated delta rule in float64 numpy, one token after the other: plain enough to be believed."""

from __future__ import annotations

import numpy as np


def parents(ancestors: np.ndarray, nodes: int) -> list[int]:
    """Each node's parent, -1 for a root: the ancestor that has the most ancestors itself."""
    sees = np.unpackbits(ancestors.view(np.uint8), axis=-1, bitorder="little")[:, :nodes].astype(bool)
    depth = sees.sum(axis=1)

    def parent(i: int) -> int:
        return max((j for j in range(nodes) if j != i and sees[i, j]), key=lambda j: depth[j], default=-1)

    return [parent(i) for i in range(nodes)]


def step(state, k, v, log_decay, beta):
    """One token for all heads: state [Hv, Dk, Dv], k [Hk, Dk], v [Hv, Dv], log_decay and beta [Hv]."""
    k = np.repeat(k, len(v) // len(k), axis=0)
    state = state * np.exp(log_decay)[:, None, None]
    update = beta[:, None] * (v - np.einsum("hde,hd->he", state, k))
    return state + k[:, :, None] * update[:, None, :]


def tree(q, k, v, log_decay, beta, states, ancestors, *, layer):
    """Same arguments as `gated_delta_tree`, as arrays of any kind; returns float64 [B, N, Hv, Dv]."""
    q, k, v, log_decay, beta, state = (_wide(x) for x in (q, k, v, log_decay, beta, states[layer]))
    batch, nodes, heads = v.shape[:3]
    out = np.zeros(v.shape)
    for b in range(batch):
        after = {-1: state[b]}
        for i, parent in enumerate(parents(np.asarray(ancestors[b]), nodes)):
            after[i] = step(after[parent], k[b, i], v[b, i], log_decay[b, i], beta[b, i])
            out[b, i] = np.einsum("hde,hd->he", after[i], np.repeat(q[b, i], heads // q.shape[2], axis=0))
    return out


def commit(k, v, log_decay, beta, states, count):
    """Same arguments as `gated_delta_replay`; returns float64 [M, B, Hv, Dk, Dv]."""
    k, v, log_decay, beta, states = (_wide(x) for x in (k, v, log_decay, beta, states))
    states = states.copy()
    for m in range(states.shape[0]):
        for b in range(states.shape[1]):
            for p in range(min(int(count[b]), k.shape[2])):
                states[m, b] = step(states[m, b], k[m, b, p], v[m, b, p], log_decay[m, b, p], beta[m, b, p])
    return states


def _wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)
