"""EAGLE-3 (arXiv 2503.01840 and its code) and the prediction layer of Qwen3.5 in numpy: every row and node computed
from scratch, one at a time, over the sequence that leads to it. Nothing of the package is used but the parameters."""

import numpy as np


def silu(x):
    return x / (1 + np.exp(-x))


def log_softmax(x):
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def swiglu(gate_up, down, x):
    gate, up = np.split(gate_up @ x, 2)
    return down @ (silu(gate) * up)


class Eagle3Oracle:
    """One text: tokens t_0 .. t_n with t_n the root, the target's taps [n, T * E] and its final hidden states [n, E] at
    t_0 .. t_{n-1}. `tables` are the target's embedding and head."""

    def __init__(self, config, params, tables, tokens, features, hidden):
        self.c = config
        self.w = lambda *path: np.asarray(_at(params, path), np.float64)
        self.tables = [np.asarray(table, np.float64) for table in tables]
        self.embedding = self.w("embed", "weight") if config.own_embedding else self.tables[0]
        self.rows = list(zip(tokens[1:], self.context(features, hidden), strict=True))

    def context(self, features, hidden):
        return features.astype(np.float64) @ self.w("fc", "weight").T

    def norm(self, x, *path):
        return x / np.sqrt((x * x).mean() + self.c.rms_norm_eps) * self.w(*path, "weight")

    def rotate(self, x, position):
        """[heads, D], rotate_half of the first dimensions."""
        size = self.c.rotary_dim or self.c.head_dim
        half = size // 2
        angle = position * self.c.rope.theta ** (-np.arange(half) / half)
        a, b, rest = np.split(x, (half, size), axis=-1)
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), rest], -1)

    def enter(self, token, context):
        """(what attention projects, the residual stream)."""
        both = self.norm(self.embedding[token], "input_layernorm"), self.norm(context, "hidden_norm")
        return np.concatenate(both), context

    def head_norm(self, x, name):
        """Of queries or keys [heads, D]; EAGLE-3 has none."""
        return x

    def gate(self, attention, x):
        return attention

    def logits(self, h):
        return self.w("lm_head", "weight") @ self.norm(h, "norm")

    def token(self, row):
        return int(self.w("lm_head", "target_ids")[row])

    def keys_values(self, rows):
        """Of a sequence of (token, context) from position 0 on: [R, K, D] each."""
        kv = self.w("self_attn", "kv_proj", "weight")
        split = [np.split((kv @ self.enter(*row)[0]).reshape(-1, self.c.head_dim), 2) for row in rows]
        keys = [self.rotate(self.head_norm(k, "k_norm"), i) for i, (k, _) in enumerate(split)]
        return np.stack(keys), np.stack([v for _, v in split])

    def last(self, rows):
        """(log probabilities over the head's rows [U], the children's context [E]) of the last of a sequence."""
        keys, values = self.keys_values(rows)
        x, residual = self.enter(*rows[-1])
        q = (self.w("self_attn", "q_proj", "weight") @ x).reshape(-1, self.c.head_dim)[: self.c.num_heads]
        q = self.rotate(self.head_norm(q, "q_norm"), len(rows) - 1)
        out = []
        for head in range(self.c.num_heads):
            group = head // (self.c.num_heads // self.c.num_kv_heads)
            p = np.exp(log_softmax(keys[:, group] @ q[head] / np.sqrt(self.c.head_dim)))
            out.append(p @ values[:, group])
        h = residual + self.w("self_attn", "o_proj", "weight") @ self.gate(np.concatenate(out), x)
        h = h + self.feed_forward(self.norm(h, "post_attention_layernorm"))
        return log_softmax(self.logits(h)), self.pass_on(h)

    def feed_forward(self, x):
        if self.c.moe is None:
            return swiglu(self.w("mlp", "gate_up_proj", "weight"), self.w("mlp", "down_proj", "weight"), x)
        moe, block = self.c.moe, lambda *path: self.w("mlp", *path, "weight")
        share = np.exp(log_softmax(block("gate") @ x))
        chosen = np.argsort(-share, kind="stable")[: moe.experts_per_token]
        total = share[chosen].sum() if moe.renormalise else 1.0
        gate_up, down = block("gate_up_proj"), block("down_proj")
        out = sum(share[e] / total * swiglu(gate_up[e], down[e], x) for e in chosen)
        if moe.shared_intermediate_size:
            shared = swiglu(block("shared_expert", "gate_up_proj"), block("shared_expert", "down_proj"), x)
            out = out + shared / (1 + np.exp(-block("shared_expert_gate") @ x))
        return out

    def pass_on(self, h):
        return h

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
        return [(self.token(u), log_probs[u]) for u in np.argsort(-log_probs, kind="stable")[:count]]


class MTPOracle(Eagle3Oracle):
    """All norms multiply by 1 + weight; embedding first, then the hidden state, through one projection."""

    def context(self, features, hidden):
        return hidden.astype(np.float64)

    def norm(self, x, *path):
        return x / np.sqrt((x * x).mean() + self.c.rms_norm_eps) * (1 + self.w(*path, "weight"))

    def enter(self, token, context):
        both = self.norm(self.embedding[token], "pre_fc_norm_embedding"), self.norm(context, "pre_fc_norm_hidden")
        x = self.w("fc", "weight") @ np.concatenate(both)
        return self.norm(x, "input_layernorm"), x

    def head_norm(self, x, name):
        return np.stack([self.norm(head, "self_attn", name) for head in x])

    def gate(self, attention, x):
        gates = np.split(self.w("self_attn", "q_proj", "weight") @ x, 2)[1]
        return attention / (1 + np.exp(-gates))

    def pass_on(self, h):
        return self.norm(h, "norm")

    def logits(self, h):
        return self.tables[1] @ self.norm(h, "norm")

    def token(self, row):
        return int(row)


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
