"""From prompts and settings to the arguments of the jitted loop."""

import numbers
from collections.abc import Iterable, Mapping

import jax
import numpy as np

from ddtree_jax.config import DecodeConfig
from ddtree_jax.decode.plan import Plan, bucket, make_plan
from ddtree_jax.decode.run import empty_state
from ddtree_jax.decode.state import Request
from ddtree_jax.decode.width import RoundCosts
from ddtree_jax.loading import Drafter, Target
from ddtree_jax.prompts import Prompt, encode_prompt
from ddtree_jax.round_costs import round_costs


def prepare(
    target: Target, drafter: Drafter | None, prompts: str | Iterable[Prompt], config: DecodeConfig
) -> tuple[list[list[int]], Plan]:
    """Token ids of every prompt, and the plan. Raises ValueError on anything that cannot be decoded."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping | bytes):
        raise ValueError(f"prompts must be a text or a list of prompts; found {type(prompts).__name__}")
    prompts = list(prompts)
    if prompts and all(isinstance(p, numbers.Integral) for p in prompts):
        raise ValueError("prompts must be a list of prompts; found one list of token ids: wrap it in a list")
    if prompts and all(isinstance(p, Mapping) for p in prompts):
        raise ValueError("prompts must be a list of prompts; found the messages of one chat: wrap them in a list")
    encoded = [_encode(target, prompt, i) for i, prompt in enumerate(prompts)]
    plan = make_plan(config, target.config, None if drafter is None else drafter.config, [len(e) for e in encoded])
    return encoded, plan


def _encode(target: Target, prompt: Prompt, index: int) -> list[int]:
    try:
        tokens = encode_prompt(target.tokenizer, prompt)
    except ValueError as error:
        raise ValueError(f"prompt {index}: {error}") from None
    for token in tokens:
        if not 0 <= token < target.config.vocab_size:
            raise ValueError(f"prompt {index}: token ids must be in 0..{target.config.vocab_size - 1}; found {token}")
    return tokens


def inputs(
    target: Target, drafter: Drafter | None, plan: Plan, encoded, first: int, temperature: float,
    costs: RoundCosts | None = None,
):  # fmt: skip
    """Arguments of `device.run` for the batch that begins at prompt `first`; missing slots have a limit of 0.

    Where the loop chooses among widths and no `costs` are given, the first call of a setting measures them.
    """
    params = {"target": target.params, "drafter": drafter.params if plan.loop.proposer.uses_drafter else None}
    if plan.loop.widths and costs is None:
        costs = _costs(plan, params)
    batch = slice(first, first + plan.batch)
    missing = plan.batch - len(encoded[batch])
    prompt = np.zeros((plan.batch, plan.prompt_rows), np.int32)
    for slot, tokens in enumerate(encoded[batch]):
        prompt[slot, : len(tokens)] = tokens
    lengths = np.array([len(e) for e in encoded[batch]] + [0] * missing, np.int32)
    stops = np.full(bucket(len(plan.stop_token_ids) or 1), -1, np.int32)
    stops[: len(plan.stop_token_ids)] = plan.stop_token_ids
    request = Request(
        limit=np.array((*plan.limits[batch], *[0] * missing), np.int32),
        seeds=np.array((*plan.seeds[batch], *[0] * missing), np.uint32),
        stop_tokens=stops,
        temperature=np.float32(temperature),
        costs=costs,
    )
    state = empty_state(plan.loop, plan.batch, plan.cache_rows, plan.output_rows)
    return params, *jax.device_put((request, prompt, lengths)), state


def _costs(plan: Plan, params) -> RoundCosts:
    # The first token is the prompt's: a text of one token has no rounds.
    return round_costs(plan, params) if max(plan.limits) > 1 else RoundCosts.flat(plan.loop.widths)
