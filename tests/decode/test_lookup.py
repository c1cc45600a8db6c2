"""Prompt look-up against plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_oracle import check_tree, node_prefixes

from ddtree_jax.decode.proposers import LookupProposer, TextRows
from ddtree_jax.decode.proposers.lookup import continuations, find_matches

ROWS = 24


@functools.partial(jax.jit, static_argnums=(2, 3))
def matches(text, last, ngram, width):
    places, lengths = find_matches(text, last, ngram=ngram, width=width)
    return places, lengths, continuations(text, last, places, depth=5)


def oracle(text, ngram):
    """(place, match length, continuation) of every earlier occurrence, longest and then latest first."""
    last, found = len(text) - 1, []
    for place in range(last):
        length = 0
        while length < min(ngram, place + 1) and text[place - length] == text[last - length]:
            length += 1
        if length:
            grown = list(text)
            for i in range(1, 6):  # what comes next is what came then, new tokens included
                grown.append(grown[place + i])
            found.append((place, length, grown[last + 1 :]))
    return sorted(found, key=lambda match: (-match[1], -match[0]))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_matches(data):
    ngram, width = data.draw(st.sampled_from([(1, 1), (3, 1), (3, 4), (5, 12)]))
    texts = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=ROWS), min_size=2, max_size=2))
    padded = np.full((2, ROWS), 1, np.int32)  # undefined rows hold tokens that would match
    for slot, text in enumerate(texts):
        padded[slot, : len(text)] = text
    last = np.array([len(text) - 1 for text in texts], np.int32)
    places, lengths, tokens = jax.device_get(matches(jnp.asarray(padded), jnp.asarray(last), ngram, width))
    for slot, text in enumerate(texts):
        expected = oracle(text, ngram)[:width]
        assert lengths[slot].tolist() == [m[1] for m in expected] + [0] * (width - len(expected))
        for i, (place, _, continuation) in enumerate(expected):
            assert places[slot, i] == place and tokens[slot, i].tolist() == continuation


@functools.lru_cache
def propose_after(proposer):
    def run(tokens, counts, root):
        cache = proposer.init_cache(tokens.shape[0], ROWS)
        half = tokens.shape[1] // 2
        for rows, count in (
            (tokens[:, :half], jnp.minimum(counts, half)),
            (tokens[:, half:], jnp.maximum(counts - half, 0)),
        ):
            cache = proposer.absorb(None, None, cache, TextRows(rows, None, None, count))
        return cache, proposer.propose(None, None, cache, root)

    return jax.jit(run)


TEXTS = np.array([[5, 6, 7, 8, 5, 6, 9, 9, 1, 6], [1, 2, 3, 4, 0, 0, 0, 0, 0, 0]], np.int32)


def test_the_chain_follows_the_longest_match():
    chain = LookupProposer(depth=4, num_nodes=None, ngram=3)
    assert chain.max_path == 5
    cache, tree = propose_after(chain)(TEXTS[:, :10], jnp.array([9, 4], jnp.int32), jnp.array([6, 7], jnp.int32))
    assert cache.length.tolist() == [9, 4] and cache.tokens[0, :9].tolist() == TEXTS[0, :9].tolist()
    # 6 came at places 1 and 5, neither time after 1: the later one is followed. 7 never came in slot 1.
    assert tree.tokens[0].tolist() == [6, 9, 9, 1, 6]
    assert tree.size.tolist() == [5, 1] and tree.tokens[1].tolist() == [7, 0, 0, 0, 0]
    longer = propose_after(chain)(
        jnp.array([[5, 6, 7, 8, 1, 6, 9, 9, 5, 6]], jnp.int32), jnp.array([9], jnp.int32), jnp.array([6], jnp.int32)
    )[1]
    assert longer.tokens[0].tolist() == [6, 7, 8, 1, 6]  # 5 6 beats the later 6


def test_the_tree_holds_several_continuations():
    proposer = LookupProposer(depth=3, num_nodes=8, ngram=3)
    tree = propose_after(proposer)(TEXTS[:, :10], jnp.array([9, 4], jnp.int32), jnp.array([6, 7], jnp.int32))[1]
    check_tree(tree, 0)
    assert set(node_prefixes(tree, 0)[1:]) == {(9,), (9, 9), (9, 9, 1), (7,), (7, 8), (7, 8, 5)}
    assert tree.size.tolist() == [7, 1]


@pytest.mark.parametrize("proposer", [LookupProposer(6, None, 2), LookupProposer(6, 9, 2)])
def test_a_loop_is_drafted_to_the_end(proposer):
    tokens = jnp.array([[4, 1, 2, 3, 1, 2, 3, 1]], jnp.int32)
    tree = propose_after(proposer)(tokens, jnp.array([8], jnp.int32), jnp.array([2], jnp.int32))[1]
    assert (3, 1, 2, 3, 1, 2) in node_prefixes(tree, 0)
