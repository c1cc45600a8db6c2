"""A decoding round and its parts as loops on the device, with the context held at one length.

Every part is product code; what is added is the chain from one turn of a loop to the next, so that XLA can neither
drop, hoist nor overlap turns, and the reset of lengths and flags.

A round of a DFlash drafter has a pass of the drafter ("draft") and the tree's building ("build"). The drafters that run
once a depth grow their tree between their steps, and a look-up has no model: there "draft" is all until the tree
stands.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.tree_build import marginals
from ddtree_jax.decode.loop import DecodeLoop, Kept, Verified
from ddtree_jax.decode.noise import at_context, noise, noisy_state
from ddtree_jax.decode.plan import ROW_TILE
from ddtree_jax.decode.proposers import DFlashProposer, LookupProposer, NoDraft
from ddtree_jax.decode.proposers.lookup import MAX_MATCHES, History
from ddtree_jax.decode.state import DecodeState, Request
from ddtree_jax.models.abstract import abstract_params
from ddtree_jax.models.selector import log_conditionals
from ddtree_jax.tree import DraftTree, accept, top_log_probs

_OUTPUT_ROWS = 64


def _recurrence(context: int) -> int:
    """After how many tokens the token that is looked up comes back: often enough for MAX_MATCHES, and no draft of 15
    tokens reaches the next one."""
    return max(2, min(16, context // MAX_MATCHES))


def recurring_text(context: int, rows: int, vocab: int) -> jax.Array:
    """[1, rows] int32: random tokens, and every so often (`_recurrence`) one and the same.

    So the look-up of that one finds matches that go on in as many ways, which fill a tree with different tokens; where
    the context is short there are fewer.
    """
    text = jax.random.randint(jax.random.key(1), (1, rows), 1, vocab, jnp.int32)
    return jnp.where(jnp.arange(rows) % _recurrence(context) == 0, 0, text)


@dataclasses.dataclass(frozen=True)
class Part:
    """A loop: carry = step(params, fixed, carry).

    Attributes:
      name: "round", or the part of a round.
      step: one turn.
      make: makes (fixed, carry) on the device; the carry is donated to the loop.
      prepare: params of the loop -> params of its turns, before the first.
    """

    name: str
    step: Callable[[Any, Any, Any], Any]
    make: Callable[[], tuple[Any, Any]]
    prepare: Callable[[Any], Any] = lambda params: params


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The rounds of one decode loop over one sequence.

    Attributes:
      loop: what is decoded with, of one width.
      context: committed tokens, C of both caches just above it.
    """

    loop: DecodeLoop
    context: int

    @property
    def _vocab(self) -> int:
        return self.loop.target.config.vocab_size

    def parts(self) -> list[Part]:
        """The whole round first, then its parts in order."""
        prepare = self.loop.prepare
        whole = Part("round", self._round, lambda: (None, self._state()), prepare)
        verify = Part("verify", self._verify, lambda: ((self._state(), self._tree()), self._tree().tokens))
        operands = lambda: (self._verified(), (self._state(), self._draws()))  # noqa: E731
        commit = Part("accept+commit", self._commit, operands, prepare)
        if isinstance(self.loop.proposer, NoDraft):
            return [whole, verify, commit]
        start = lambda: (self._state(), jnp.zeros((1,), jnp.int32))  # noqa: E731
        if not isinstance(self.loop.proposer, DFlashProposer):
            return [whole, Part("draft", self._propose, start), verify, commit]
        draft, build = Part("draft", self._draft, start), Part("build", self._build, self._scores)
        return [whole, draft, build, verify, commit]

    def _request(self) -> Request:
        return Request(
            limit=jnp.full((1,), _OUTPUT_ROWS - self.loop.proposer.max_path, jnp.int32),
            seeds=jnp.zeros((1,), jnp.uint32),
            stop_tokens=jnp.full((1,), -1, jnp.int32),
            temperature=jnp.float32(1),
        )

    # One turn of each loop.

    def _round(self, params, _, state: DecodeState) -> DecodeState:
        return self._reset(self.loop.decode_round(params, self._request(), state))

    def _propose(self, params, state: DecodeState, root: jax.Array) -> jax.Array:
        proposer, cache = self.loop.proposer, state.drafter_cache
        tree = proposer.propose(params["drafter"], params["target"], cache, self._known(cache, root))
        return lax.optimization_barrier(tree).tokens[:, -1] % self._vocab

    def _draft(self, params, state: DecodeState, root: jax.Array) -> jax.Array:
        scores = self.loop.proposer.draft(params["drafter"], params["target"], state.drafter_cache, root)
        # All of them, as the tree build needs them.
        some = jax.tree.leaves(lax.optimization_barrier(scores))[0][:, 0, 0]
        return jnp.abs(some).astype(jnp.int32) % self._vocab

    def _build(self, params, candidates: jax.Array | None, scores: jax.Array) -> jax.Array:
        tree = lax.optimization_barrier(self._shape_tree(candidates, scores, jnp.zeros((1,), jnp.int32)))
        # One number changes in place, so that each tree waits for the one before.
        number = jnp.sum(tree.log_prob[:, :2]) + tree.tokens[0, -1].astype(jnp.float32) * 1e-9
        return scores.at[(0,) * scores.ndim].set(number)

    def _verify(self, params, fixed, tokens: jax.Array) -> jax.Array:
        state, tree = fixed
        tree = dataclasses.replace(tree, tokens=tokens)
        verified = self.loop.verify_tree(params, self._request(), state, tree)
        return lax.optimization_barrier((verified.draws, verified.out))[0]

    def _commit(self, params, verified: Verified, carry):
        state, draws = carry
        walk = accept(verified.tree, draws, max_path=self.loop.proposer.max_path)
        verified = verified.replace(draws=draws, walk=walk)
        state = self.loop.commit(params, self._request(), state, Kept.of(verified))
        return self._reset(state), (draws + state.root[:, None]) % self._vocab

    def _reset(self, state: DecodeState) -> DecodeState:
        return at_context(state, self.context).replace(
            root=self._known(state.drafter_cache, state.root),
            num_tokens=jnp.zeros((1,), jnp.int32), rounds=jnp.zeros((1,), jnp.int32), done=jnp.zeros((1,), bool),
        )  # fmt: skip

    def _known(self, drafter_cache: Any, root: jax.Array) -> jax.Array:
        """For a look-up a root [1] that its text holds, still a function of `root`: what a random target draws would
        not be found. For other proposers `root`."""
        if not isinstance(self.loop.proposer, LookupProposer):
            return root
        step = _recurrence(self.context)
        at = step * (root % max(1, self.context // step))
        return jnp.take_along_axis(drafter_cache.tokens, at[:, None], axis=1, mode="clip")[:, 0]

    # Operands.

    @property
    def _rows(self) -> int:
        """C of both caches."""
        return -(-(self.context + self.loop.proposer.max_path) // ROW_TILE) * ROW_TILE

    def _state(self) -> DecodeState:
        """A state with random keys and values, or text."""
        state = noisy_state(self.loop, 1, self._rows, _OUTPUT_ROWS)
        if isinstance(self.loop.proposer, LookupProposer):
            state = state.replace(drafter_cache=self._history())
        return self._reset(state)

    def _history(self) -> History:
        text = recurring_text(self.context, self._rows, self._vocab)
        return History(tokens=text, length=jnp.full((1,), self.context, jnp.int32))

    def _scores(self) -> tuple[jax.Array | None, jax.Array]:
        """What a DFlash tree is built from: (None, log probabilities [1, L, V] that flatten with depth, as a drafter's
        do), or of DFlash 2 (candidates [1, L, K], conditionals [1, L, K, K])."""
        proposer = self.loop.proposer
        log_probs = jax.jit(marginals, static_argnums=(0, 1))(proposer.max_path - 1, self._vocab)
        if not proposer.config.selector_rank:
            return None, log_probs
        log_prob, candidates = top_log_probs(log_probs, proposer.config.max_candidates)
        pairs = jax.random.normal(jax.random.key(3), (*log_prob.shape, log_prob.shape[-1]), jnp.float32)
        return candidates, log_conditionals(log_prob, pairs)

    def _shape_tree(self, candidates: jax.Array | None, scores: jax.Array, root: jax.Array) -> DraftTree:
        shape = self.loop.proposer.shape
        if candidates is not None:
            return shape.build_conditional(candidates, scores, root)
        return shape.build(*top_log_probs(scores, shape.ranks(scores.shape[-1])), root)

    def _tree(self) -> DraftTree:
        """A tree as the proposer builds it, without a model."""
        proposer, root = self.loop.proposer, jnp.zeros((1,), jnp.int32)
        if isinstance(proposer, NoDraft):
            return proposer.propose(None, None, None, root)
        if isinstance(proposer, LookupProposer):
            history = self._history()
            return jax.jit(proposer.propose)(None, None, history, self._known(history, root))
        if isinstance(proposer, DFlashProposer):
            return jax.jit(self._shape_tree)(*self._scores(), root)
        return jax.jit(lambda root: proposer.growth.grow(self._random_children, 0, root))(root)

    def _random_children(self, depth: int, tokens: jax.Array, parents: jax.Array, ranks: int):
        """Children of a tree that grows (`proposers.growth.Expand`): random tokens, each half as probable as the one
        before."""
        drafted = jax.random.randint(jax.random.key(depth), (*tokens.shape, ranks), 0, self._vocab, jnp.int32)
        log_prob = jnp.log(0.5) * jnp.arange(1, ranks + 1, dtype=jnp.float32)
        return jnp.broadcast_to(log_prob, drafted.shape), drafted, depth + 1

    def _draws(self) -> jax.Array:
        return jnp.zeros(self._tree().tokens.shape, jnp.int32)

    def _verified(self) -> Verified:
        tree, draws = self._tree(), self._draws()
        params = {"target": abstract_params(self.loop.target.config)}
        like = jax.eval_shape(self.loop.verify_tree, params, self._request(), self._state(), tree).out
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        walk = accept(tree, draws, max_path=self.loop.proposer.max_path)
        return Verified(tree=tree, out=noise(empty), draws=draws, walk=walk)


def loop_of(part: Part) -> Callable:
    """run(params, fixed, carry, turns) -> carry, jitted; the carry is donated."""

    @functools.partial(jax.jit, donate_argnums=2)
    def run(params, fixed, carry, turns):
        params = part.prepare(params)
        return lax.fori_loop(0, turns, lambda _, carry: part.step(params, fixed, carry), carry)

    return run


def compile_part(part: Part, params: Any) -> Callable:
    """`loop_of` a part, compiled."""
    fixed, carry = jax.eval_shape(part.make)
    return loop_of(part).lower(params, fixed, carry, jax.ShapeDtypeStruct((), jnp.int32)).compile()


def time_part(part: Part, run: Callable, params: Any, *, seconds: float = 0.15, repeats: int = 3) -> float:
    """Milliseconds of one turn: the least of some loops that take `seconds` or more."""
    fixed, carry = jax.block_until_ready(part.make())

    def clock(turns: int) -> float:
        nonlocal carry
        began = time.perf_counter()
        carry = jax.block_until_ready(run(params, fixed, carry, jnp.int32(turns)))
        return time.perf_counter() - began

    turns = 4
    while clock(turns) < seconds:
        turns *= 2
    return 1e3 * min(clock(turns) for _ in range(repeats)) / turns
