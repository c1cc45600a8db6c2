"""A proposer that knows the text: long accepted paths through branching trees, which random drafters never give.

Its marginals put the true token of each depth at a rank drawn from (slot, position), so that paths leave the spine,
end early or run to the last depth. What it proposes depends on the text so far alone, as for any drafter.
"""

import dataclasses

import jax
import jax.numpy as jnp

import ddtree_jax as dt
from ddtree_jax.decode import run as device
from ddtree_jax.decode.plan import make_plan
from ddtree_jax.decode.proposers import MostProbable, Shape
from ddtree_jax.models.selector import log_conditionals
from ddtree_jax.prepare import inputs
from ddtree_jax.tree import top_tokens


@dataclasses.dataclass(frozen=True)
class Conditional:
    """`shape` over the best candidates of each depth, each more or less probable after each of the depth before."""

    shape: Shape
    candidates: int

    def depths(self, drafted):
        return self.shape.depths(drafted)

    def ranks(self, vocab_size):
        return self.candidates

    def build(self, values, tokens, root):
        pairs = 0.3 * jax.random.normal(jax.random.key(3), (*tokens.shape[1:], self.candidates), jnp.float32)
        pairs = jnp.broadcast_to(pairs[None], (tokens.shape[0], *pairs.shape))
        return self.shape.build_conditional(tokens, log_conditionals(values, pairs), root)


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Parameters: script [B, T] int32, the token at every absolute position. Cache: [B] int32, the root's position.

    Attributes:
      depth: L.
      shape: which tree is built from the marginals.
      vocab_size: V.
      rank_spread: the true token of a depth is moved down by 0..rank_spread ranks.
      taps: any, to exercise the features' way through the loop.
    """

    depth: int
    shape: Shape
    vocab_size: int
    rank_spread: int
    taps: tuple[int, ...] = (1,)
    uses_drafter: bool = True

    @property
    def max_path(self):
        return self.shape.depths(self.depth) + 1

    def prepare(self, params):
        return params

    def init_cache(self, batch, rows):
        return jnp.zeros((batch,), jnp.int32)

    def log_probs(self, script, position):
        def one(row, start):
            def at(i):
                where = start + 1 + i
                key = jax.random.fold_in(jax.random.key(7), where.astype(jnp.uint32))
                scores = jax.random.normal(key, (self.vocab_size,), jnp.float32)
                rank = jax.random.randint(key, (), 0, self.rank_spread + 1)
                score = jnp.sort(scores)[::-1][rank] + 1e-3
                token = row[jnp.minimum(where, row.shape[0] - 1)]
                return jax.nn.log_softmax(scores.at[token].set(score) * 2.0)

            return jax.vmap(at)(jnp.arange(self.shape.depths(self.depth), dtype=jnp.int32))

        return jax.vmap(one)(script, position)

    def propose(self, params, target_params, cache, root):
        return self.build(params, self.draft(params, target_params, cache, root), root)

    def of_width(self, num_nodes):
        return dataclasses.replace(self, shape=MostProbable(num_nodes))

    def draft(self, params, target_params, cache, root):
        return self.log_probs(params, cache)

    def empty_scores(self, batch):
        return jnp.zeros((batch, self.shape.depths(self.depth), self.vocab_size), jnp.float32)

    def build(self, params, scores, root):
        scores = scores[:, : self.shape.depths(self.depth)]
        return self.shape.build(*top_tokens(scores, self.shape.ranks(self.vocab_size)), root)

    def absorb(self, params, target_params, cache, rows):
        return cache + rows.count


def scripted_run(target, proposer, scripts, temperature, prompts, seeds, widths=(), costs=None, **settings):
    """`generate` with a proposer of the test's own: (tokens of each prompt, the last state)."""
    config = dt.DecodeConfig(method="autoregressive", temperature=temperature, seed=seeds[: len(prompts)], **settings)
    plan = make_plan(config, target.config, None, [len(p) for p in prompts])
    plan = dataclasses.replace(
        plan,
        loop=dataclasses.replace(plan.loop, proposer=proposer),
        cache_rows=plan.cache_rows + 128,
        output_rows=plan.output_rows + proposer.max_path,
        batch=len(prompts),
    )
    params, request, prompt, lengths, _ = inputs(target, dt.Drafter(None, None), plan, prompts, 0, temperature)
    loop = dataclasses.replace(plan.loop, widths=widths, look_every=2)
    state = device.empty_state(loop, plan.batch, plan.cache_rows, plan.output_rows)
    params = {"target": target.params, "drafter": jnp.asarray(scripts)}
    state = jax.device_get(device.run(loop, params, request.replace(costs=costs), prompt, lengths, state))
    tokens = [state.tokens[i, : state.num_tokens[i]].tolist() for i in range(len(prompts))]
    return tokens, state
