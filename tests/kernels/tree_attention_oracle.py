"""Tree attention in float64 numpy, one query at a time: slow, and plain enough to be believed."""

from __future__ import annotations

import numpy as np


def oracle(
    q, k_cache, v_cache, lengths, k_tree, v_tree, ancestors, *, scale, sliding_window=None, softcap=None, positions=None
):
    """Same arguments as `tree_attention`, as arrays of any kind; returns float64 [B, N, H, D]."""
    q, k_cache, v_cache, k_tree, v_tree = (np.asarray(x).astype(np.float64) for x in (q, k_cache, v_cache, k_tree, v_tree))
    lengths, ancestors = np.asarray(lengths), np.asarray(ancestors)
    batch, nodes, heads, _ = q.shape
    group = heads // k_cache.shape[1]
    out = np.zeros(q.shape)
    for b in range(batch):
        n = int(lengths[b])
        bits = (ancestors[b][:, :, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
        sees = bits.reshape(nodes, -1)[:, :nodes].astype(bool)
        place = np.asarray(positions[b]) if positions is not None else n + sees.sum(1) - 1
        key_place = np.concatenate([np.arange(n), place])
        for i in range(nodes):
            visible = np.concatenate([np.ones(n, bool), sees[i]])
            if sliding_window is not None:
                visible &= place[i] - key_place < sliding_window
            if not visible.any():
                continue
            for h in range(heads):
                keys = np.concatenate([k_cache[b, h // group, :n], k_tree[b, h // group]])[visible]
                values = np.concatenate([v_cache[b, h // group, :n], v_tree[b, h // group]])[visible]
                score = keys @ q[b, i, h] * scale
                if softcap is not None:
                    score = softcap * np.tanh(score / softcap)
                weight = np.exp(score - score.max())
                out[b, i, h] = weight @ values / weight.sum()
    return out
