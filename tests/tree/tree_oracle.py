"""Independent oracles for the tree tests: plain Python and float64, nothing shared with the package."""

import heapq
import itertools
import json
import math
from pathlib import Path

import numpy as np

_DATA = json.loads((Path(__file__).parent / "data" / "cases.json").read_text())
CASES = _DATA["cases"]
MARGINALS = {name: np.array(rows) for name, rows in _DATA["marginals"].items()}
HAND = MARGINALS["hand"]  # three depths, four tokens, no ties among the first nodes


def log(probs):
    """float64 log with log(0) = -inf, quietly."""
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probs, np.float64))


def heap_tree(log_probs, budget):
    """Algorithm 1 of arXiv 2604.12989 on log_probs [L, V]: up to `budget` (prefix, log probability), best first."""
    depths, vocab = log_probs.shape
    order = np.argsort(-log_probs, axis=1, kind="stable")
    ranked = np.take_along_axis(log_probs, order, axis=1)

    def entry(ranks):
        return (-math.fsum(ranked[d, r] for d, r in enumerate(ranks)), ranks)

    heap, popped = [entry((0,))], []
    while heap and len(popped) < budget:
        cost, ranks = heapq.heappop(heap)
        if cost == math.inf:
            break
        popped.append((tuple(int(order[d, r]) for d, r in enumerate(ranks)), -cost))
        if ranks[-1] + 1 < vocab:
            heapq.heappush(heap, entry((*ranks[:-1], ranks[-1] + 1)))
        if len(ranks) < depths:
            heapq.heappush(heap, entry((*ranks, 0)))
    return popped


def all_prefixes(log_probs):
    """Every possible prefix of log_probs [L, V] with its log probability, unordered."""
    depths, vocab = log_probs.shape
    for depth in range(1, depths + 1):
        for prefix in itertools.product(range(vocab), repeat=depth):
            weight = math.fsum(log_probs[d, token] for d, token in enumerate(prefix))
            if weight > -math.inf:
                yield prefix, weight


def ordered_prefixes(log_probs):
    """All rank tuples in the documented order of nodes, for log_probs [L, R] already sorted along R.

    Falling weight, then depth, then place among the nodes of that depth: the parent's place, then the rank.
    """
    everything, above = [], [((), 0.0)]
    for depth in range(log_probs.shape[0]):
        children = [((*ranks, r), w + lp) for ranks, w in above for r, lp in enumerate(log_probs[depth].tolist())]
        above = sorted(children, key=lambda child: -child[1])  # stable: parent's place, then rank
        everything += above
    everything = sorted(everything, key=lambda item: -item[1])  # stable: shallower first
    return [item for item in everything if item[1] > -math.inf]


def depth_by_depth(log_probs, num_nodes):
    """The tree of float32 log_probs [L, R], sorted along R, by stable sorts of all pairs of one depth after another.

    Returns (ranks, float32 weight) of up to num_nodes - 1 prefixes in the documented order.
    """
    everything, above = [], [((), np.float32(0))]
    for depth in range(1, min(len(log_probs), num_nodes - 1) + 1):
        sums = np.add.outer(np.array([w for _, w in above], np.float32), log_probs[depth - 1])
        order = np.argsort(-sums.ravel(), kind="stable")[: num_nodes - depth]
        places = [divmod(int(i), sums.shape[1]) for i in order]
        above = [((*above[i][0], r), sums[i, r]) for i, r in places if sums[i, r] > -np.inf]
        everything += above
        if not above:
            break
    return sorted(everything, key=lambda item: -item[1])[: num_nodes - 1]


def node_prefixes(tree, slot):
    """The token tuple below the root of every live node of one slot."""
    tokens, parent = np.asarray(tree.tokens[slot]), np.asarray(tree.parent[slot])
    prefixes = [()]
    for node in range(1, int(tree.size[slot])):
        prefixes.append((*prefixes[parent[node]], int(tokens[node])))
    return prefixes


def naive_visible(parent, size):
    """[N, N] bool by walking up from every node."""
    num_nodes = len(parent)
    visible = np.eye(num_nodes, dtype=bool)
    for node in range(1, size):
        above = node
        while above:
            above = parent[above]
            visible[node, above] = True
    return visible


def walk(tree, slot, draws):
    """The accepted node indices of one slot, step by step."""
    tokens, parent = np.asarray(tree.tokens[slot]), np.asarray(tree.parent[slot])
    path = [0]
    while True:
        here = path[-1]
        children = [n for n in range(1, int(tree.size[slot])) if parent[n] == here and tokens[n] == draws[here]]
        if not children:
            return path
        (child,) = children
        path.append(child)


def check_tree(tree, slot, log_probs=None):
    """Everything that must hold for any tree of one slot; with log_probs [L, V] also its weights."""
    size, width = int(tree.size[slot]), tree.num_nodes
    tokens, parent, depth, weight = (
        np.asarray(field[slot]) for field in (tree.tokens, tree.parent, tree.depth, tree.log_prob)
    )
    assert 1 <= size <= width
    assert parent[0] == 0 and depth[0] == 0 and weight[0] == 0
    assert not np.isnan(weight).any()
    index = np.arange(1, size)
    assert (parent[1:size] < index).all() and (parent >= 0).all()
    assert (depth[1:size] == depth[parent[1:size]] + 1).all()
    assert (np.diff(weight[:size]) <= 0).all()
    assert (tokens[size:] == 0).all() and (parent[size:] == 0).all() and (depth[size:] == 0).all()
    assert (weight[size:] == -np.inf).all()
    words = np.asarray(tree.ancestors[slot])
    assert words.dtype == np.uint32 and words.shape == (width, -(-width // 32))
    node = np.arange(width)
    visible = words[:, node // 32] >> (node % 32).astype(np.uint32) & 1 == 1
    np.testing.assert_array_equal(visible, naive_visible(parent, size))
    prefixes = node_prefixes(tree, slot)
    assert len(set(prefixes)) == size, "two nodes stand for the same text"
    if log_probs is not None:
        expected = [math.fsum(log_probs[d, token] for d, token in enumerate(prefix)) for prefix in prefixes]
        np.testing.assert_allclose(weight[:size], expected, rtol=2e-6, atol=2e-6)
    return prefixes
