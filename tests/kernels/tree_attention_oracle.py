"""Tree attention in float64 numpy, one head at a time: plain enough to be believed."""

from __future__ import annotations

import numpy as np


def oracle(
    q, k_cache, v_cache, lengths, k_tree, v_tree, ancestors, *, scale, sliding_window=None, softcap=None, positions=None
):
    """Same arguments as `tree_attention`, as arrays of any kind; returns float64 [B, N, H, D]."""
    q, k_cache, v_cache, k_tree, v_tree = (
        np.asarray(x).astype(np.float64) for x in (q, k_cache, v_cache, k_tree, v_tree)
    )
    lengths, ancestors = np.asarray(lengths), np.asarray(ancestors)
    batch, nodes, heads, _ = q.shape
    group = heads // k_cache.shape[1]
    out = np.zeros(q.shape)
    for b in range(batch):
        n = int(lengths[b])
        bits = (ancestors[b][:, :, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
        sees = bits.reshape(nodes, -1)[:, :nodes].astype(bool)
        place = np.asarray(positions[b]) if positions is not None else n + sees.sum(1) - 1
        visible = np.concatenate([np.ones((nodes, n), bool), sees], axis=1)
        if sliding_window is not None:
            visible &= place[:, None] - np.concatenate([np.arange(n), place])[None, :] < sliding_window
        for h in range(heads):
            keys = np.concatenate([k_cache[b, h // group, :n], k_tree[b, h // group]])
            values = np.concatenate([v_cache[b, h // group, :n], v_tree[b, h // group]])
            scores = q[b, :, h] @ keys.T * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            scores = np.where(visible, scores, -np.inf)
            weights = np.where(visible, np.exp(scores - scores.max(axis=1, keepdims=True)), 0.0)
            # A value nobody sees may be NaN, and 0 * NaN is NaN: drop it from the sum, do not weigh it with 0.
            for i in range(nodes):
                out[b, i, h] = weights[i, visible[i]] @ values[visible[i]] / weights[i].sum()
    return out
