"""The public interface: load a target and a drafter, generate, stream."""

import concurrent.futures
import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.checkpoint import load_config, load_params
from ddtree_jax.config import DecodeConfig, DrafterConfig, TargetConfig
from ddtree_jax.decode import run as device
from ddtree_jax.decode.plan import Plan, bucket, make_plan
from ddtree_jax.decode.state import DecodeState, Request
from ddtree_jax.models.abstract import abstract_params, check_fits
from ddtree_jax.prompts import Prompt, encode_prompt
from ddtree_jax.tokenizer import IncrementalDecoder, Tokenizer


@dataclasses.dataclass(frozen=True)
class Target:
    """A target ready to decode: static config, parameters on the device, tokenizer (None where there is none)."""

    config: TargetConfig
    params: Any
    tokenizer: Tokenizer | None = None


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A drafter ready to decode; it shares the embedding and the head of the target that it was loaded for."""

    config: DrafterConfig
    params: Any


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns; every list has one entry a prompt.

    Attributes:
      tokens: new token ids, the stop token included.
      text: the same without special tokens; None without a tokenizer.
      accepted_lengths: tokens that each round committed, the target's own (bonus) token included: 1 means that no
        drafted token was accepted. The first token comes from the prefill and from no round, and tokens past a stop
        or a limit are not counted, so len(tokens) == 1 + sum(accepted_lengths).
      rounds: passes of the target after the prefill.
      finish_reasons: "stop" (a stop token) or "length" (`max_new_tokens` or capacity).
      prompt_lengths: in tokens.
      seconds: wall time on the device, prefill included, compiling not.
      compile_seconds: 0.0 where the executable was at hand.
    """

    tokens: list[list[int]]
    text: list[str] | None
    accepted_lengths: list[list[int]]
    rounds: list[int]
    finish_reasons: list[str]
    prompt_lengths: list[int]
    seconds: float
    compile_seconds: float

    @property
    def mean_accepted_length(self) -> float:
        """Mean over prompts of each prompt's mean accepted length (the tau of the literature); nan without rounds."""
        means = [statistics.fmean(lengths) for lengths in self.accepted_lengths if lengths]
        return statistics.fmean(means) if means else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all prompts over `seconds`."""
        return sum(map(len, self.tokens)) / self.seconds


def load_target(path: str | Path) -> Target:
    """Loads a target that `python -m convert target` wrote. Raises ValueError naming the file and what is wrong."""
    config = load_config(path, kind="target")
    return Target(config, load_params(path, abstract_params(config)), Tokenizer.from_folder(path))


def load_drafter(path: str | Path, target: Target) -> Drafter:
    """Loads a drafter and checks that it fits `target`. Raises ValueError naming what does not."""
    config = load_config(path, kind="drafter")
    check_fits(config, target.config)
    return Drafter(config, load_params(path, abstract_params(config)))


def generate(
    target: Target, drafter: Drafter | None, prompts: Prompt | Sequence[Prompt], config: DecodeConfig | None = None
) -> Generation:
    """Decodes prompts, `batch_size` at a time, each batch in one call on the device.

    Args:
      target, drafter: see `load_target`, `load_drafter`; the drafter may be None for "autoregressive".
      prompts: strings, token lists or lists of chat messages ({"role": ..., "content": ...}), or a single string.
      config: see `DecodeConfig`.

    Raises:
      ValueError: on a setting or a prompt that cannot be decoded, before anything compiles.
    """
    config = config or DecodeConfig()
    encoded, plan = _prepare(target, drafter, prompts, config)
    done: list[DecodeState] = []
    seconds = compile_seconds = 0.0
    for first in range(0, len(encoded), plan.batch):
        args = _inputs(target, drafter, plan, encoded, first, config.temperature)
        call, compiling = device.executable(device.run, plan.loop, *args)
        jax.block_until_ready(args)
        began = time.perf_counter()
        state = call(*args)
        # Caches go back to the device at once; only tokens and counts come to the host.
        state = jax.device_get(state.replace(target_cache=None, drafter_cache=None))
        seconds += time.perf_counter() - began
        compile_seconds += compiling
        done.append(state)

    tokens, accepted, rounds, reasons = [], [], [], []
    for i in range(len(encoded)):
        state, slot = done[i // plan.batch], i % plan.batch
        new = state.tokens[slot, : state.num_tokens[slot]].tolist()
        tokens.append(new)
        rounds.append(int(state.rounds[slot]))
        accepted.append(state.accepted[slot, : rounds[-1]].tolist())
        reasons.append("stop" if new[-1] in plan.stop_token_ids else "length")
    text = None if target.tokenizer is None else [target.tokenizer.decode(t) for t in tokens]
    lengths = [len(e) for e in encoded]
    return Generation(tokens, text, accepted, rounds, reasons, lengths, seconds, compile_seconds)


def compile_ahead(
    target: Target,
    drafter: Drafter | None,
    configs: Sequence[DecodeConfig],
    *,
    prompt_length: int,
    batch: int = 1,
    workers: int = 4,
) -> float:
    """Compiles what `generate` will need for each of `configs`, several at a time; returns the seconds it took.

    Args:
      prompt_length: longest prompt to come, in tokens; give the same `prompt_bucket` here and there, or equal buckets.
      batch: B of the calls to come.
    """

    def one(config: DecodeConfig) -> None:
        config = dataclasses.replace(config, seed=0, batch_size=batch)
        prompts = [[0] * prompt_length] * batch
        plan = make_plan(config, target.config, None if drafter is None else drafter.config, [prompt_length] * batch)
        device.executable(device.run, plan.loop, *_inputs(target, drafter, plan, prompts, 0, config.temperature))

    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, configs))
    return time.perf_counter() - began


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
    encoded, plan = _prepare(target, drafter, [prompt], config)
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


def _stream(target, drafter, plan: Plan, encoded, temperature, rounds_per_step) -> Iterator[list[int]]:
    params, request, *_, state = args = _inputs(target, drafter, plan, encoded, 0, temperature)
    state = device.executable(device.start, plan.loop, *args)[0](*args)
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


def _prepare(target: Target, drafter: Drafter | None, prompts, config: DecodeConfig) -> tuple[list[list[int]], Plan]:
    if isinstance(prompts, str):
        prompts = [prompts]
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


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _empty_state(loop, batch, cache_rows, output_rows) -> DecodeState:
    return loop.init_state(batch, cache_rows, output_rows)


def _inputs(target: Target, drafter: Drafter | None, plan: Plan, encoded, first: int, temperature: float):
    """Arguments of `device.run` for the batch that begins at prompt `first`; missing slots have a limit of 0."""
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
    )
    uses_drafter = bool(plan.loop.proposer.taps)
    params = {"target": target.params, "drafter": drafter.params if uses_drafter else None}
    state = _empty_state(plan.loop, plan.batch, plan.cache_rows, plan.output_rows)
    return params, *jax.device_put((request, prompt, lengths)), state

