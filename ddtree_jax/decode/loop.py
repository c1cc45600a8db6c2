"""One round, and the loop of rounds on the device.

    state -> propose -> verify -> draw and accept -> commit -> state

Prefill is the same target pass over chunks of the prompt, each chunk a chain. Everything here is pure and static in
shape; the jitted entry points are in `ddtree_jax.decode.run`.

Shape letters: B slots, N nodes, P rows committed a round at most, S prompt rows (padded), V vocabulary.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ddtree_jax.decode.proposers import Proposer, TextRows
from ddtree_jax.decode.sampling import draw
from ddtree_jax.decode.state import DecodeState, Request, clip_commit, write_rows
from ddtree_jax.decode.width import WidthChoice, promises
from ddtree_jax.models.cache import KVCache, PathRows, append_rows, commit_rows, path_rows
from ddtree_jax.models.decoder import Decoder, TargetPass
from ddtree_jax.tree import Acceptance, DraftTree, accept, gather_path, only_first, static_bits


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


@flax.struct.dataclass
class Kept:
    """What a commit needs of a round: the accepted path, and what the target computed along it.

    Attributes:
      walk: the path.
      tokens: [B, P] int32.
      hidden, features: of `TargetPass`, at the path's nodes.
      rows: of `TargetPass.tree_kv`, at the path's nodes.
    """

    walk: Acceptance
    tokens: jax.Array
    hidden: jax.Array
    features: jax.Array | None
    rows: PathRows

    @classmethod
    def of(cls, verified: Verified) -> "Kept":
        walk, out = verified.walk, verified.out
        return cls(
            walk=walk,
            tokens=gather_path(verified.tree.tokens, walk.path),
            hidden=gather_path(out.hidden, walk.path),
            features=None if out.features is None else gather_path(out.features, walk.path),
            rows=path_rows(out.tree_kv, walk.path),
        )


@dataclasses.dataclass(frozen=True)
class DecodeLoop:
    """Static part of a decode: models, shapes, whether draws are random. Hashable, so a static jit argument.

    Attributes:
      target: the decoder module (no parameters).
      proposer: how a round gets its tree.
      sample: False decodes at temperature 0.
      chunk: prompt tokens a prefill pass.
      widths: rising; rounds draft and verify as many nodes as pay best (`decode.width`). The last one is the proposer's
        own, whose trees have their nodes in order of probability. Empty: always the proposer's whole tree.
      look_every: rounds of a width before the next one is chosen.
    """

    target: Decoder
    proposer: Proposer
    sample: bool
    chunk: int
    widths: tuple[int, ...] = ()
    look_every: int = 16

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
            widths=zeros(batch, output_rows) if self.widths else None,
            choice=WidthChoice.empty(self.widths, self.look_every) if self.widths else None,
            scores=self.proposer.empty_scores(batch) if self.widths else None,
        )

    def prepare(self, params: Any) -> Any:
        """`params` with what is made of them once for all rounds: by the proposer (`Proposer.prepare`), and for commits
        (`Decoder.commit_weights`)."""
        drafter = self.proposer.prepare(params["drafter"])
        return {**params, "drafter": drafter, "commit": self._commit_weights(params)}

    def prefill(self, params: Any, request: Request, prompt: jax.Array, prompt_length: jax.Array, state: DecodeState):
        """Runs the prompts [B, S] (right-padded, live up to `prompt_length` [B]) and draws each first token.

        S is a multiple of `chunk`; passes that hold no live token are skipped.
        """
        params = self.prepare(params)
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
            cache = append_rows(cache, out.tree_kv, count, self._commit_weights(params))
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
        """Drafts a tree and takes the target's own draw at each of its nodes, in one pass of the target.

        Of several widths the round's own counts: the nodes past it are padding here, where a round leaves them out.
        """
        tree = self._propose(params, state)
        if self.widths:
            number = self._look(params, request, state).choice.number
            tree = only_first(tree, jnp.asarray(self.widths, jnp.int32)[number])
        return self.verify_tree(params, request, state, tree)

    def verify_tree(self, params: Any, request: Request, state: DecodeState, tree: DraftTree) -> Verified:
        """`verify` of a given tree."""
        proposer = self.proposer
        start = state.target_cache.length
        positions = start[:, None] + tree.depth
        out = self._target(params, tree.tokens, positions, tree.ancestors, state.target_cache, proposer.taps)
        draws = self._draw(params, request, out.hidden, tree.depth, start + 1, proposer.max_path)
        return Verified(tree, out, draws, accept(tree, draws, max_path=proposer.max_path))

    def commit(self, params: Any, request: Request, state: DecodeState, kept: Kept) -> DecodeState:
        """Appends the accepted path to the text and to both caches, cut at a stop token and at the limit."""
        walk = kept.walk
        count, ended = clip_commit(walk.tokens, walk.length, request.limit - state.num_tokens, request.stop_tokens)
        count = jnp.where(state.done, 0, count)
        rows = TextRows(tokens=kept.tokens, hidden=kept.hidden, features=kept.features, count=count)
        last = jnp.take_along_axis(walk.tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        active = (~state.done).astype(jnp.int32)
        return state.replace(
            target_cache=commit_rows(state.target_cache, kept.rows, count, self._commit_weights(params)),
            drafter_cache=self._absorb(params, state.drafter_cache, rows),
            root=jnp.where(state.done, state.root, last),
            tokens=write_rows(state.tokens, walk.tokens, state.num_tokens),
            num_tokens=state.num_tokens + count,
            accepted=write_rows(state.accepted, count[:, None], state.rounds),
            rounds=state.rounds + active,
            done=state.done | ended,
        )

    def decode_round(self, params: Any, request: Request, state: DecodeState) -> DecodeState:
        """One round of the proposer's whole tree: pure, static in shape."""
        verified = self.verify_tree(params, request, state, self._propose(params, state))
        return self.commit(params, request, state, Kept.of(verified))

    def advance(self, params: Any, request: Request, state: DecodeState, max_rounds: jax.Array) -> DecodeState:
        """Rounds until every slot is done, `max_rounds` [] int32 at most."""
        params = self.prepare(params)

        def unfinished(carry):
            rounds, state = carry
            return (rounds < max_rounds) & ~jnp.all(state.done)

        def rounds_while(more, one_round, carry):
            return lax.while_loop(more, lambda c: (c[0] + 1, one_round(params, request, c[1])), carry)

        if not self.widths:
            return rounds_while(unfinished, self.decode_round, (jnp.int32(0), state))[1]

        # A loop for each width, and no branch inside a round: on a GPU, branches make rounds slower by a tenth or more.
        def stretch(carry):
            rounds, state = carry
            state = self._look(params, request, state)
            of_widths = [functools.partial(of_width, number) for number in range(len(self.widths))]
            return lax.switch(state.choice.number, of_widths, rounds, state)

        def of_width(number, began, before):
            """Rounds of one width until the next look. What only stretches change is written at their end: a round is
            to be as short as one of a fixed width."""
            end = began + before.choice.left
            one_round = functools.partial(self._round_of_width, number)
            rounds, state = rounds_while(lambda c: unfinished(c) & (c[0] < end), one_round, (began, before))
            column = jnp.arange(state.widths.shape[1], dtype=jnp.int32)[None]
            new = (column >= before.rounds[:, None]) & (column < state.rounds[:, None])
            widths = jnp.where(new, self.widths[number], state.widths)
            return rounds, state.replace(widths=widths, choice=state.choice.replace(left=end - rounds))

        return lax.while_loop(unfinished, stretch, (jnp.int32(0), state))[1]

    def _round_of_width(self, number: int, params: Any, request: Request, state: DecodeState) -> DecodeState:
        """`decode_round` of the first `widths[number]` nodes."""
        narrow = dataclasses.replace(self, proposer=self.proposer.of_width(self.widths[number]), widths=())
        scores = self.proposer.draft(*self._given(params, state))
        tree = narrow.proposer.build(params["drafter"], scores, state.root)
        verified = narrow.verify_tree(params, request, state, tree)
        active = ~state.done
        choice = state.choice.observe(self.widths, promises(tree, self.widths, active), verified.walk, active)
        return narrow.commit(params, request, state.replace(choice=choice, scores=scores), Kept.of(verified))

    def _look(self, params: Any, request: Request, state: DecodeState) -> DecodeState:
        """With the width of the rounds to come, if one is to be chosen."""
        # Only probabilities count, so any root will do.
        tree, active = self.proposer.build(params["drafter"], state.scores, state.root), ~state.done
        length = state.target_cache.length
        choice = state.choice.look(promises(tree, self.widths, active), request.costs, length, active, self.look_every)
        return state.replace(choice=choice)

    def _propose(self, params, state):
        return self.proposer.propose(*self._given(params, state))

    def _given(self, params, state):
        return params["drafter"], params["target"], state.drafter_cache, state.root

    def _absorb(self, params, drafter_cache, rows):
        return self.proposer.absorb(params["drafter"], params["target"], drafter_cache, rows)

    def _commit_weights(self, params):
        if "commit" in params:
            return params["commit"]
        return self.target.apply({"params": params["target"]}, method=Decoder.commit_weights)

    def _target(self, params, tokens, positions, ancestors, cache, taps):
        return self.target.apply({"params": params["target"]}, tokens, positions, ancestors, cache, taps)

    def _draw(self, params, request, hidden, depth, first_position, num_depths):
        params = {"params": params["target"]}
        if not self.sample:
            return self.target.apply(params, hidden, method=Decoder.greedy)
        return draw(
            self.target.apply(params, hidden, method=Decoder.logits), depth, first_position=first_position,
            num_depths=num_depths, seeds=request.seeds, temperature=request.temperature,
        )  # fmt: skip


ALL_ROUNDS = np.int32(2**31 - 1)
