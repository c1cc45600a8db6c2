"""A decoding round and its parts as loops on the device, with the context held at one length.

Every part is product code; what is added is the chain from one turn of a loop to the next, so that XLA can neither
drop, hoist nor overlap turns, and the reset of lengths and flags.
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
from ddtree_jax.decode.proposers import NoDraft
from ddtree_jax.decode.state import DecodeState, Request
from ddtree_jax.models.abstract import abstract_params
from ddtree_jax.tree import DraftTree, accept

_OUTPUT_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Part:
    """A loop: carry = step(params, fixed, carry).

    Attributes:
      name: "round", or the part of a round.
      step: one turn.
      make: makes (fixed, carry) on the device; the carry is donated to the loop.
    """

    name: str
    step: Callable[[Any, Any, Any], Any]
    make: Callable[[], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The rounds of one decode loop over one sequence.

    Attributes:
      loop: what is decoded with.
      context: committed tokens, C of both caches just above it.
    """

    loop: DecodeLoop
    context: int

    @property
    def _vocab(self) -> int:
        return self.loop.target.config.vocab_size

    def parts(self) -> list[Part]:
        """The whole round first, then its parts in order."""
        whole = Part("round", self._round, lambda: (None, self._state()))
        verify = Part("verify", self._verify, lambda: ((self._state(), self._tree()), self._tree().tokens))
        commit = Part("accept+commit", self._commit, lambda: (self._verified(), (self._state(), self._draws())))
        if isinstance(self.loop.proposer, NoDraft):
            return [whole, verify, commit]
        draft = Part("draft", self._draft, lambda: (self._state(), jnp.zeros((1,), jnp.int32)))
        build = Part("build", self._build, lambda: (None, self._log_probs()))
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

    def _draft(self, params, state: DecodeState, root: jax.Array) -> jax.Array:
        log_probs = self.loop.proposer.log_probs(params["drafter"], params["target"], state.drafter_cache, root)
        log_probs = lax.optimization_barrier(log_probs)  # all of them, as the tree build needs them
        return jnp.abs(log_probs[:, 0, 0]).astype(jnp.int32) % self._vocab

    def _build(self, params, _, log_probs: jax.Array) -> jax.Array:
        tree = lax.optimization_barrier(self.loop.proposer.shape.build(log_probs, jnp.zeros((1,), jnp.int32)))
        # One number changes in place, so that each tree waits for the one before.
        return log_probs.at[0, 0, 0].set(jnp.sum(tree.log_prob[:, :2]) + tree.tokens[0, -1].astype(jnp.float32) * 1e-9)

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
            num_tokens=jnp.zeros((1,), jnp.int32), rounds=jnp.zeros((1,), jnp.int32), done=jnp.zeros((1,), bool)
        )

    # Operands.

    def _state(self) -> DecodeState:
        """A state with random keys and values."""
        rows = -(-(self.context + self.loop.proposer.max_path) // ROW_TILE) * ROW_TILE
        return self._reset(noisy_state(self.loop, 1, rows, _OUTPUT_ROWS))

    def _log_probs(self) -> jax.Array:
        """Marginals that flatten with depth, as a drafter's do."""
        return jax.jit(marginals, static_argnums=(0, 1))(self.loop.proposer.max_path - 1, self._vocab)

    def _tree(self) -> DraftTree:
        root = jnp.zeros((1,), jnp.int32)
        if isinstance(self.loop.proposer, NoDraft):
            return self.loop.proposer.propose(None, None, None, root)
        return jax.jit(self.loop.proposer.shape.build)(self._log_probs(), root)

    def _draws(self) -> jax.Array:
        return jnp.zeros(self._tree().tokens.shape, jnp.int32)

    def _verified(self) -> Verified:
        tree, draws = self._tree(), self._draws()
        params = {"target": abstract_params(self.loop.target.config)}
        like = jax.eval_shape(self.loop.verify_tree, params, self._request(), self._state(), tree).out
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        walk = accept(tree, draws, max_path=self.loop.proposer.max_path)
        return Verified(tree=tree, out=noise(empty), draws=draws, walk=walk)


def compile_part(part: Part, params: Any) -> Callable:
    """Compiles run(params, fixed, carry, turns) -> carry."""

    @functools.partial(jax.jit, donate_argnums=2)
    def run(params, fixed, carry, turns):
        return lax.fori_loop(0, turns, lambda _, carry: part.step(params, fixed, carry), carry)

    fixed, carry = jax.eval_shape(part.make)
    return run.lower(params, fixed, carry, jax.ShapeDtypeStruct((), jnp.int32)).compile()


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
