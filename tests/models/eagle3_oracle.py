"""EAGLE-3 in numpy, as published (arXiv 2503.01840 and its code): every row and node computed from scratch, one at a
time, over the sequence that leads to it. Nothing of the package is used but the parameters."""

import numpy as np


def silu(x):
    return x / (1 + np.exp(-x))


def log_softmax(x):
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


class Oracle:
    """One text: tokens t_0 .. t_n with t_n the root, and the target's taps [n, T * E] at t_0 .. t_{n-1}."""

    def __init__(self, config, params, embedding, tokens, features):
        self.c = config
        self.p = params = {k: v for k, v in params.items()}
        self.w = lambda *path: np.asarray(_at(params, path), np.float64)
        self.embedding = np.asarray(params["embed"]["weight"] if config.own_embedding else embedding, np.float64)
        context = np.asarray(features, np.float64) @ self.w("fc", "weight").T
        self.rows = [(token, row) for token, row in zip(tokens[1:], context, strict=True)]

    def norm(self, x, *path):
        return x / np.sqrt((x * x).mean() + self.c.rms_norm_eps) * self.w(*path, "weight")

    def rotate(self, x, position):
        """[heads, D], rotate_half."""
        half = x.shape[-1] // 2
        angle = position * self.c.rope.theta ** (-np.arange(half) / half)
        a, b = x[:, :half], x[:, half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    def inputs(self, token, context):
        return np.concatenate([self.norm(self.embedding[token], "input_layernorm"), self.norm(context, "hidden_norm")])

    def keys_values(self, rows):
        """Of a sequence of (token, context) from position 0 on: [R, K, D] each."""
        kv = self.w("self_attn", "kv_proj", "weight")
        split = [np.split((kv @ self.inputs(*row)).reshape(-1, self.c.head_dim), 2) for row in rows]
        return np.stack([self.rotate(k, i) for i, (k, _) in enumerate(split)]), np.stack([v for _, v in split])

    def last(self, rows):
        """(log probabilities over the head's rows [U], the residual stream [E]) of the last of a sequence of rows."""
        keys, values = self.keys_values(rows)
        x = self.inputs(*rows[-1])
        q = (self.w("self_attn", "q_proj", "weight") @ x).reshape(self.c.num_heads, -1)
        q = self.rotate(q, len(rows) - 1)
        out = []
        for head in range(self.c.num_heads):
            group = head // (self.c.num_heads // self.c.num_kv_heads)
            p = np.exp(log_softmax(keys[:, group] @ q[head] / np.sqrt(self.c.head_dim)))
            out.append(p @ values[:, group])
        h = rows[-1][1] + self.w("self_attn", "o_proj", "weight") @ np.concatenate(out)
        gate, up = np.split(self.w("mlp", "gate_up_proj", "weight") @ self.norm(h, "post_attention_layernorm"), 2)
        h = h + self.w("mlp", "down_proj", "weight") @ (silu(gate) * up)
        return log_softmax(self.w("lm_head", "weight") @ self.norm(h, "norm")), h

    def after(self, path):
        """The distribution after the root and the drafted tokens `path`, over the head's rows [U]."""
        rows = list(self.rows)
        log_probs, h = self.last(rows)
        for token in path:
            rows.append((token, h))
            log_probs, h = self.last(rows)
        return log_probs

    def children(self, path, count):
        """The most probable tokens after `path`, best first: [(token of the target, log probability)]."""
        log_probs = self.after(path)
        best = np.argsort(-log_probs, kind="stable")[:count]
        return [(int(u + self.w("lm_head", "d2t")[u]), log_probs[u]) for u in best]


def _at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def eagle2(oracle, num_nodes, depth, branching):
    """{path: log probability} of the tree of EAGLE-2: expand the best, then rank all that was drafted."""
    drafted, frontier = {}, {(): 0.0}
    for _ in range(depth):
        new = {}
        for path, score in frontier.items():
            for token, log_prob in oracle.children(path, branching):
                new[*path, token] = score + log_prob
        drafted |= new
        frontier = dict(sorted(new.items(), key=lambda item: -item[1])[:branching])
    return dict(sorted(drafted.items(), key=lambda item: -item[1])[: num_nodes - 1])


def by_rank(oracle, choices):
    """{path: log probability} of a static tree."""
    paths, tree = {(): ((), 0.0)}, {}
    for ranks in sorted(choices, key=len):
        path, score = paths[ranks[:-1]]
        token, log_prob = oracle.children(path, ranks[-1] + 1)[-1]
        paths[ranks] = (*path, token), score + log_prob
        tree[*path, token] = score + log_prob
    return tree
