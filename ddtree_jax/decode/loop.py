"""One round, and the loop of rounds on the device.

    state -> propose -> verify -> draw and accept -> commit -> state

Prefill is the same target pass over chunks of the prompt, each chunk a chain. Everything here is pure and static in
shape; the jitted entry points are in `ddtree_jax.decode.run`.

Shape letters: B slots, N nodes, P rows committed a round at most, S prompt rows (padded), V vocabulary.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ddtree_jax.decode.proposers import Proposer, TextRows
from ddtree_jax.decode.sampling import draw
from ddtree_jax.decode.state import DecodeState, Request, clip_commit, write_rows
from ddtree_jax.models.cache import KVCache, append_rows, commit_path
from ddtree_jax.models.decoder import Decoder, TargetPass
from ddtree_jax.tree import Acceptance, DraftTree, accept, gather_path, static_bits


@flax.struct.dataclass
class Verified:
    """A round before its commit.

    Attributes:
      tree: what was drafted.
      out: the target's pass over it.
      draws: [B, N] int32, the target's own token at every node.
      walk: the path that the draws follow.
    """

    tree: DraftTree
    out: TargetPass
    draws: jax.Array
    walk: Acceptance


@dataclasses.dataclass(frozen=True)
class DecodeLoop:
    """Static part of a decode: models, shapes, whether draws are random. Hashable, so a static jit argument.

    Attributes:
      target: the decoder module (no parameters).
      proposer: how a round gets its tree.
      sample: False decodes at temperature 0.
      chunk: prompt tokens a prefill pass.
    """

    target: Decoder
    proposer: Proposer
    sample: bool
    chunk: int

    def init_state(self, batch: int, cache_rows: int, output_rows: int) -> DecodeState:
        """An empty state. `cache_rows` and `output_rows` must leave P rows free past the last live one."""
        zeros = lambda *shape: jnp.zeros(shape, jnp.int32)  # noqa: E731
        return DecodeState(
            target_cache=KVCache.empty(self.target.config, batch=batch, rows=cache_rows),
            drafter_cache=self.proposer.init_cache(batch, cache_rows),
            root=zeros(batch),
            tokens=zeros(batch, output_rows),
            num_tokens=zeros(batch),
            accepted=zeros(batch, output_rows),
            rounds=zeros(batch),
            done=jnp.zeros((batch,), bool),
        )

    def prefill(self, params: Any, request: Request, prompt: jax.Array, prompt_length: jax.Array, state: DecodeState):
        """Runs the prompts [B, S] (right-padded, live up to `prompt_length` [B]) and draws each first token.

        S is a multiple of `chunk`; passes that hold no live token are skipped.
        """
        chunk, taps = self.chunk, self.proposer.taps
        causal = jnp.asarray(static_bits(np.tri(chunk, dtype=bool)))
        causal = jnp.broadcast_to(causal[None], (prompt.shape[0], *causal.shape))

        def one_chunk(carry):
            start, cache, drafter_cache, last_hidden = carry
            tokens = lax.dynamic_slice_in_dim(prompt, start, chunk, axis=1)
            rows = jnp.arange(chunk, dtype=jnp.int32)
            positions = jnp.broadcast_to((start + rows)[None, :], tokens.shape)
            # A slot whose prompt ended in an earlier chunk runs along; its rows land past its live length.
            out = self._target(params, tokens, positions, causal, cache, taps)
            count = jnp.clip(prompt_length - start, 0, chunk)
            last = prompt_length - 1 - start
            here = (last >= 0) & (last < chunk)
            picked = gather_path(out.hidden, jnp.clip(last, 0, chunk - 1)[:, None])[:, 0]
            last_hidden = jnp.where(here[:, None], picked, last_hidden)
            cache = append_rows(cache, out.tree_kv, count)
            drafter_cache = self._absorb(params, drafter_cache, TextRows(tokens, out.hidden, out.features, count))
            return start + chunk, cache, drafter_cache, last_hidden

        hidden_size = self.target.config.hidden_size
        first = jnp.zeros((prompt.shape[0], hidden_size), self.target.config.jax_dtype)
        longest = jnp.max(prompt_length)
        _, cache, drafter_cache, hidden = lax.while_loop(
            lambda carry: carry[0] < longest,
            one_chunk,
            (jnp.int32(0), state.target_cache, state.drafter_cache, first),
        )
        depth = jnp.zeros_like(prompt_length)[:, None]
        root = self._draw(params, request, hidden[:, None], depth, cache.length, 1)[:, 0]
        live = request.limit > 0
        _, stopped = clip_commit(root[:, None], jnp.ones_like(root), request.limit, request.stop_tokens)
        return state.replace(
            target_cache=cache,
            drafter_cache=drafter_cache,
            root=root,
            tokens=write_rows(state.tokens, root[:, None], state.num_tokens),
            num_tokens=live.astype(jnp.int32),
            done=~live | stopped,
        )

    def verify(self, params: Any, request: Request, state: DecodeState) -> Verified:
        """Drafts a tree and takes the target's own draw at each of its nodes, in one pass of the target."""
        tree = self.proposer.propose(params["drafter"], params["target"], state.drafter_cache, state.root)
        return self.verify_tree(params, request, state, tree)

    def verify_tree(self, params: Any, request: Request, state: DecodeState, tree: DraftTree) -> Verified:
        """`verify` of a given tree."""
        proposer = self.proposer
        start = state.target_cache.length
        positions = start[:, None] + tree.depth
        out = self._target(params, tree.tokens, positions, tree.ancestors, state.target_cache, proposer.taps)
        draws = self._draw(params, request, out.hidden, tree.depth, start + 1, proposer.max_path)
        return Verified(tree, out, draws, accept(tree, draws, max_path=proposer.max_path))

    def commit(self, params: Any, request: Request, state: DecodeState, verified: Verified) -> DecodeState:
        """Appends the accepted path to the text and to both caches, cut at a stop token and at the limit."""
        walk, out = verified.walk, verified.out
        count, ended = clip_commit(walk.tokens, walk.length, request.limit - state.num_tokens, request.stop_tokens)
        count = jnp.where(state.done, 0, count)
        rows = TextRows(
            tokens=gather_path(verified.tree.tokens, walk.path),
            hidden=gather_path(out.hidden, walk.path),
            features=None if out.features is None else gather_path(out.features, walk.path),
            count=count,
        )
        last = jnp.take_along_axis(walk.tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        active = (~state.done).astype(jnp.int32)
        return DecodeState(
            target_cache=commit_path(state.target_cache, out.tree_kv, walk.path, count),
            drafter_cache=self._absorb(params, state.drafter_cache, rows),
            root=jnp.where(state.done, state.root, last),
            tokens=write_rows(state.tokens, walk.tokens, state.num_tokens),
            num_tokens=state.num_tokens + count,
            accepted=write_rows(state.accepted, count[:, None], state.rounds),
            rounds=state.rounds + active,
            done=state.done | ended,
        )

    def decode_round(self, params: Any, request: Request, state: DecodeState) -> DecodeState:
        """One round: pure, static in shape."""
        return self.commit(params, request, state, self.verify(params, request, state))

    def advance(self, params: Any, request: Request, state: DecodeState, max_rounds: jax.Array) -> DecodeState:
        """Rounds until every slot is done, `max_rounds` [] int32 at most."""

        def unfinished(carry):
            rounds, state = carry
            return (rounds < max_rounds) & ~jnp.all(state.done)

        def body(carry):
            rounds, state = carry
            return rounds + 1, self.decode_round(params, request, state)

        return lax.while_loop(unfinished, body, (jnp.int32(0), state))[1]

    def _absorb(self, params, drafter_cache, rows):
        return self.proposer.absorb(params["drafter"], params["target"], drafter_cache, rows)

    def _target(self, params, tokens, positions, ancestors, cache, taps):
        return self.target.apply({"params": params["target"]}, tokens, positions, ancestors, cache, taps)

    def _draw(self, params, request, hidden, depth, first_position, num_depths):
        logits = self.target.apply({"params": params["target"]}, hidden, method=Decoder.logits)
        return draw(
            logits, depth, first_position=first_position, num_depths=num_depths, seeds=request.seeds,
            temperature=request.temperature, sample=self.sample,
        )  # fmt: skip


ALL_ROUNDS = np.int32(2**31 - 1)
