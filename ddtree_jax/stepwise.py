"""Decoding a few rounds at a time: streams of text, and traces of every round's tree."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.config import DecodeConfig
from ddtree_jax.decode import run as device
from ddtree_jax.decode.plan import Plan
from ddtree_jax.loading import Drafter, Target
from ddtree_jax.prepare import inputs, prepare
from ddtree_jax.prompts import Prompt
from ddtree_jax.tokenizer import IncrementalDecoder
from ddtree_jax.tree import Acceptance, DraftTree


def stream_tokens(
    target: Target,
    drafter: Drafter | None,
    prompt: Prompt,
    config: DecodeConfig | None = None,
    *,
    rounds_per_step: int = 1,
) -> Iterator[list[int]]:
    """Yields the tokens of one prompt as they are committed, after every `rounds_per_step` rounds.

    The tokens are those of `generate`. Settings are checked at once, not at the first item.
    """
    if rounds_per_step < 1:
        raise ValueError(f"rounds_per_step must be 1 or more; found {rounds_per_step!r}")
    config = config or DecodeConfig()
    encoded, plan = prepare(target, drafter, [prompt], config)
    return _stream(target, drafter, plan, encoded, config.temperature, rounds_per_step)


def stream(
    target: Target,
    drafter: Drafter | None,
    prompt: Prompt,
    config: DecodeConfig | None = None,
    *,
    rounds_per_step: int = 1,
) -> Iterator[str]:
    """Yields the text of one prompt as it is committed; a character is never split. See `stream_tokens`."""
    if target.tokenizer is None:
        raise ValueError("this target has no tokenizer; use stream_tokens")
    chunks = stream_tokens(target, drafter, prompt, config, rounds_per_step=rounds_per_step)
    return _decode_stream(IncrementalDecoder(target.tokenizer), chunks)


def _decode_stream(decoder: IncrementalDecoder, chunks: Iterator[list[int]]) -> Iterator[str]:
    for tokens in chunks:
        if text := decoder.push(tokens):
            yield text
    if text := decoder.flush():
        yield text


def _start(target, drafter, plan: Plan, encoded, temperature):
    """Parameters, request, and the state after the prompt."""
    params, *args = inputs(target, drafter, plan, encoded, 0, temperature)
    # Once for all calls, and of a tree of its own: the caller may change his while the text goes on.
    params = plan.loop.prepare(jax.tree.map(lambda x: x, params))
    request, *_ = args
    return params, request, device.executable(device.start, plan.loop, params, *args)[0](params, *args)


def _stream(target, drafter, plan: Plan, encoded, temperature, rounds_per_step) -> Iterator[list[int]]:
    params, request, state = _start(target, drafter, plan, encoded, temperature)
    steps = jnp.int32(rounds_per_step)
    step = device.executable(device.advance, plan.loop, params, request, state, steps)[0]
    sent = 0
    while True:
        count, finished = int(state.num_tokens[0]), bool(state.done[0])
        if count > sent:
            yield np.asarray(state.tokens[0, sent:count]).tolist()
        if finished:
            return
        sent = count
        state = step(params, request, state, steps)


@dataclasses.dataclass(frozen=True)
class RoundTrace:
    """One round of a single prompt, as numpy arrays (slot 0 is the prompt).

    Attributes:
      tree: what was verified of what the drafter proposed; of several widths ("auto") nodes past the round's own are
        padding.
      draws: [1, N] int32, the target's own token at every node.
      walk: the accepted path; `walk.tokens[0, : walk.length[0]]` is what the round commits.
      text_tokens: prompt and all tokens committed before the round.
    """

    tree: DraftTree
    draws: np.ndarray
    walk: Acceptance
    text_tokens: list[int]


def trace(
    target: Target, drafter: Drafter | None, prompt: Prompt, config: DecodeConfig | None = None
) -> Iterator[RoundTrace]:
    """Decodes one prompt round by round and yields each round's tree and accepted path, to look at or to measure."""
    config = config or DecodeConfig()
    encoded, plan = prepare(target, drafter, [prompt], config)
    return _trace(target, drafter, plan, encoded, config.temperature)


def _trace(target, drafter, plan: Plan, encoded, temperature) -> Iterator[RoundTrace]:
    params, request, state = _start(target, drafter, plan, encoded, temperature)
    look = device.executable(device.verify, plan.loop, params, request, state)[0]
    one = jnp.int32(1)
    step = device.executable(device.advance, plan.loop, params, request, state, one)[0]
    while not bool(state.done[0]):
        verified = look(params, request, state)
        committed = np.asarray(state.tokens[0, : int(state.num_tokens[0])]).tolist()
        yield RoundTrace(*jax.device_get((verified.tree, verified.draws, verified.walk)), encoded[0] + committed)
        state = step(params, request, state, one)
