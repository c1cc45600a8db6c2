"""The decoder against transformers: one model, fed in every way that decoding feeds it.

Whatever the passes, the logits at a token and the residual streams behind it must be those of the plain sequence that
leads to the token.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import TARGETS, golden, target

from ddtree_jax.models import cache as cache_lib
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.decoder import Decoder

# Of two models alike one is fed in pieces in the first stage.
IN_PIECES = [pytest.param(n, marks=pytest.mark.slow) if n == "qwen3_moe_plain" else n for n in TARGETS]
TOLERANCE = 1e-4
CAPACITY = 64
NODES = 11  # most passes have this width, so that each model compiles three programs only


@functools.cache
def compiled(name: str, taps: tuple[int, ...]):
    """(tokens [B, N], depth [N], ancestors [B, N, W], cache) -> logits, features, tree_kv."""
    model = target(name)
    decoder = Decoder(model.config)

    @jax.jit
    def run(params, tokens, depth, ancestors, cache):
        positions = cache.length[:, None] + depth[None, :]
        out = decoder.apply({"params": params}, tokens, positions, ancestors, cache, taps)
        return decoder.apply({"params": params}, out.hidden, method=Decoder.logits), out.features, out.tree_kv

    return functools.partial(run, model.params)


append_rows = jax.jit(cache_lib.append_rows)


@jax.jit
def commit_path(cache, tree_kv, path, count, weights):
    return cache_lib.commit_rows(cache, cache_lib.path_rows(tree_kv, path), count, weights)


class Runner:
    """Feeds trees of tokens to a decoder and compares what comes out; keeps the cache between passes."""

    def __init__(self, name: str, taps: tuple[int, ...] | None = None, batch: int = 2, capacity: int = CAPACITY):
        config = target(name).config
        self.taps = tuple(range(config.num_layers)) if taps is None else taps
        self._run = compiled(name, self.taps)
        params = {"params": target(name).params}
        self._weights = Decoder(config).apply(params, method=Decoder.commit_weights)
        # Rows that nobody wrote are NaN: reading one of them cannot go unnoticed.
        empty = KVCache.empty(config, batch=batch, rows=capacity)
        keys, values = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), (empty.keys, empty.values))
        self.cache = empty.replace(keys=keys, values=values)

    def append(self, count):
        """Commits the first `count` tokens of the last pass, a chain."""
        self.cache = append_rows(self.cache, self.tree_kv, jnp.asarray(count, jnp.int32), self._weights)

    def commit(self, path, count):
        """Commits the first `count` nodes of a path of the last pass."""
        path, count = jnp.asarray(path), jnp.asarray(count, jnp.int32)
        self.cache = commit_path(self.cache, self.tree_kv, path, count, self._weights)

    def tree(self, tokens, parent):
        """One pass over nodes with the given parents (-1: the root, below the cache) -> logits, taps [layers, ...]."""
        count = len(parent)
        seen, depth = np.zeros((count, count), bool), np.zeros(count, np.int32)
        for i, p in enumerate(parent):
            if p >= 0:
                seen[i], depth[i] = seen[p], depth[p] + 1
            seen[i, i] = True
        words = np.zeros((count, -(-count // 32)), np.uint32)
        for i, j in np.argwhere(seen):
            words[i, j // 32] |= np.uint32(1) << np.uint32(j % 32)
        ancestors = jnp.asarray(np.broadcast_to(words, (len(tokens), *words.shape)))
        logits, features, self.tree_kv = self._run(
            jnp.asarray(tokens, jnp.int32), jnp.asarray(depth), ancestors, self.cache
        )
        return np.asarray(logits), np.stack(np.split(np.asarray(features), len(self.taps), axis=-1))

    def chain(self, tokens):
        return self.tree(tokens, range(-1, tokens.shape[1] - 1))


def close(actual, expected):
    assert actual.shape == expected.shape
    difference = np.abs(actual - expected).max()
    assert difference <= TOLERANCE, f"max abs difference {difference:.2e}"


@pytest.mark.parametrize("name", TARGETS)
def test_whole_prompt_in_one_pass(name):
    gold = golden("models", name)
    logits, taps = Runner(name).chain(gold["tokens"])
    close(logits, gold["logits"])
    close(taps, gold["blocks"])


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_taps_are_kept_in_the_order_asked_for(name):
    """Tap l is the output of zero-based block l; the last one is the residual before the final norm."""
    gold = golden("models", name)
    last = len(gold["blocks"]) - 1
    _, taps = Runner(name, taps=(last, 0)).chain(gold["tokens"])
    close(taps, gold["blocks"][[last, 0]])


@pytest.mark.parametrize("name", IN_PIECES)
@pytest.mark.parametrize("commit", ["append_rows", "commit_path"])
def test_prompt_in_chunks(name, commit):
    """Slots commit different counts of a chunk; the rest is forgotten, as the rejected nodes of a tree are."""
    gold = golden("models", name)
    runner, rng = Runner(name), np.random.default_rng(1)
    start = np.zeros(2, np.int32)
    end = gold["tokens"].shape[1] - NODES
    while start.min() < end:
        chunk = np.stack([gold["tokens"][b, s : s + NODES] for b, s in enumerate(start)])
        logits, taps = runner.chain(chunk)
        for b, s in enumerate(start):
            close(logits[b], gold["logits"][b, s : s + NODES])
            close(taps[:, b], gold["blocks"][:, b, s : s + NODES])
        count = np.minimum(rng.integers(1, NODES + 1, 2), end - start).astype(np.int32)
        if commit == "append_rows":
            runner.append(count)
        else:
            path = jnp.broadcast_to(jnp.arange(NODES, dtype=jnp.int32)[None], (2, NODES))
            runner.commit(path, count)
        start += count
        np.testing.assert_array_equal(runner.cache.length, start)


@pytest.mark.parametrize("name", IN_PIECES)
def test_one_token_at_a_time(name):
    gold = golden("models", name)
    runner = Runner(name)
    for i in range(gold["tokens"].shape[1]):
        logits, taps = runner.chain(gold["tokens"][:, i : i + 1])
        close(logits[:, 0], gold["logits"][:, i])
        close(taps[:, :, 0], gold["blocks"][:, :, i])
        runner.append(np.ones(2, np.int32))


# The fork as a tree: node 0 is the branches' common first token, then the branches take turns.
PARENT = [-1, 0, 0, *range(1, NODES - 2)]
BRANCH_NODES = ([0, *range(1, NODES, 2)], [0, *range(2, NODES, 2)])


def fork(name):
    """A runner with each slot's prefix committed, and the fork's tokens in node order."""
    gold = golden("models", name)
    prefix = gold["fork_prefix"].astype(np.int32)
    runner = Runner(name)
    runner.chain(gold["tokens"])
    runner.append(prefix)
    tokens = np.zeros((2, len(PARENT)), np.int64)
    for branch, nodes in enumerate(BRANCH_NODES):
        tokens[:, nodes] = gold["fork_tokens"][:, branch]
    return gold, runner, tokens


@pytest.mark.parametrize("name", TARGETS)
def test_tree_of_two_branches(name):
    gold, runner, tokens = fork(name)
    logits, taps = runner.tree(tokens, PARENT)
    for branch, nodes in enumerate(BRANCH_NODES):
        close(logits[:, nodes], gold["fork_logits"][:, branch])
        close(taps[:, :, nodes], gold["fork_blocks"][:, :, branch])


@pytest.mark.parametrize("name", IN_PIECES)
def test_commit_of_a_branch_continues_that_branch(name):
    """Slot 0 keeps three nodes of the second branch, slot 1 two of the first; the next pass sees just those."""
    gold, runner, tokens = fork(name)
    runner.tree(tokens, PARENT)
    path, count = np.array([BRANCH_NODES[1][:4], BRANCH_NODES[0][:4]], np.int32), np.array([3, 2], np.int32)
    runner.commit(path, count)
    branches = gold["fork_tokens"][[0, 1], [1, 0]]
    rest = np.zeros((2, NODES), np.int64)
    for b, n in enumerate(count):
        rest[b, :3] = branches[b, n : n + 3]
    logits, taps = runner.chain(rest)
    for b, n in enumerate(count):
        close(logits[b, :3], gold["fork_logits"][b, 1 - b, n : n + 3])
        close(taps[:, b, :3], gold["fork_blocks"][:, b, 1 - b, n : n + 3])


def test_goldens_tell_models_apart():
    """The tolerance means something: forgetting the branch point or the order of tokens moves logits by far more."""
    gold = golden("models", "qwen3")
    assert np.abs(gold["fork_logits"][:, 0, 1:] - gold["fork_logits"][:, 1, 1:]).max() > 1
    _, runner, tokens = fork("qwen3")
    logits, _ = runner.chain(tokens)
    assert np.abs(logits[:, BRANCH_NODES[1]] - gold["fork_logits"][:, 1]).max() > 0.1
