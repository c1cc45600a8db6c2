"""Whole decodes: prompts in, texts and their statistics out."""

import concurrent.futures
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.config import AUTO, DecodeConfig
from ddtree_jax.decode import run as device
from ddtree_jax.decode.plan import Plan, make_plan
from ddtree_jax.decode.state import DecodeState
from ddtree_jax.decode.width import RoundCosts
from ddtree_jax.loading import Drafter, Target
from ddtree_jax.prepare import inputs, prepare
from ddtree_jax.prompts import Prompt

_FIRST_TOKENS = 8  # of a program's first runs, for a few rounds


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
      widths: nodes that each round verified; None where all trees have the same width (`num_nodes` other than "auto").
      finish_reasons: "stop" (a stop token) or "length" (`max_new_tokens` or capacity).
      prompt_lengths: in tokens.
      seconds: wall time on the device, prefill included, compiling not.
      compile_seconds: 0.0 where the executable was at hand. Includes measuring what widths cost (`num_nodes="auto"`).
    """

    tokens: list[list[int]]
    text: list[str] | None
    accepted_lengths: list[list[int]]
    rounds: list[int]
    widths: list[list[int]] | None
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


def generate(
    target: Target, drafter: Drafter | None, prompts: str | Iterable[Prompt], config: DecodeConfig | None = None
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
    encoded, plan = prepare(target, drafter, prompts, config)
    done: list[DecodeState] = []
    seconds = compile_seconds = 0.0
    for first in range(0, len(encoded), plan.batch):
        state, took, compiling = _decode_batch(target, drafter, plan, encoded, first, config.temperature)
        done.append(state)
        seconds += took
        compile_seconds += compiling

    tokens, accepted, rounds, widths, reasons = [], [], [], [], []
    for i in range(len(encoded)):
        state, slot = done[i // plan.batch], i % plan.batch
        new = state.tokens[slot, : state.num_tokens[slot]].tolist()
        tokens.append(new)
        rounds.append(int(state.rounds[slot]))
        accepted.append(state.accepted[slot, : rounds[-1]].tolist())
        if state.widths is not None:
            widths.append(state.widths[slot, : rounds[-1]].tolist())
        reasons.append("stop" if new[-1] in plan.stop_token_ids else "length")
    text = None if target.tokenizer is None else [target.tokenizer.decode(t) for t in tokens]
    lengths = [len(e) for e in encoded]
    return Generation(
        tokens, text, accepted, rounds, widths or None, reasons, lengths, seconds, compile_seconds
    )  # fmt: skip


def _decode_batch(
    target: Target, drafter: Drafter | None, plan: Plan, encoded: Sequence[Sequence[int]], first: int,
    temperature: float,
) -> tuple[DecodeState, float, float]:  # fmt: skip
    """Decodes the batch that begins at prompt `first`.

    All its arrays are gone when it returns, so those of the next batch lie where they lay: CUDA graphs hold addresses,
    and would have to be written anew for others.

    Returns:
      the last state without caches, on the host; seconds of the call; seconds of compiling and measuring before it.
    """
    make_args = functools.partial(inputs, target, drafter, plan, encoded, first, temperature)
    began = time.perf_counter()
    args = make_args()
    measuring = time.perf_counter() - began if plan.loop.widths and first == 0 else 0.0
    call, compiling = device.executable(device.run, plan.loop, *args)
    if compiling:
        del args
        compiling += measuring + _first_runs(call, plan, make_args)
        args = make_args()
    jax.block_until_ready(args)
    began = time.perf_counter()
    state = call(*args)
    # Caches go back to the device at once; only tokens and counts come to the host.
    state = jax.device_get(state.results())
    return state, time.perf_counter() - began, compiling


def _first_runs(call: Callable, plan: Plan, make_args: Callable[[], tuple]) -> float:
    """Runs a new program for a few tokens, once at each of its widths, so that what first rounds cost (CUDA graphs are
    written) is in no speed; returns the seconds."""
    began = time.perf_counter()
    count = len(plan.loop.widths)
    for number in range(count or 1):
        params, request, *rest, state = make_args()
        if count:
            held = RoundCosts.all_but(number, count, np.asarray(request.costs.contexts))
            request = request.replace(costs=jax.device_put(held))
            state = state.replace(choice=state.choice.due())
        few = request.replace(limit=jnp.minimum(request.limit, _FIRST_TOKENS))
        jax.block_until_ready(call(params, few, *rest, state))
    return time.perf_counter() - began


def compile_ahead(
    target: Target,
    drafter: Drafter | None,
    configs: Sequence[DecodeConfig],
    *,
    prompt_length: int,
    batch: int = 1,
    workers: int = 4,
) -> float:
    """Compiles what `generate` will need for each of `configs`, several at a time, and runs each program once; returns
    the seconds it took.

    Args:
      prompt_length: longest prompt to come, in tokens; give the same `prompt_bucket` here and there, or equal buckets.
      batch: B of the calls to come.
    """

    def one(config: DecodeConfig) -> None:
        config = dataclasses.replace(config, seed=0, batch_size=batch)
        prompts = [[0] * prompt_length] * batch
        plan = make_plan(config, target.config, None if drafter is None else drafter.config, [prompt_length] * batch)
        make_args = functools.partial(inputs, target, drafter, plan, prompts, 0, config.temperature)
        call, compiling = device.executable(device.run, plan.loop, *make_args())
        if compiling:
            _first_runs(call, plan, make_args)

    began = time.perf_counter()
    fixed = [c for c in configs if c.num_nodes != AUTO]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, fixed))
    for config in configs:
        if config.num_nodes == AUTO:  # measures the costs of its widths, so nothing may run beside it
            one(config)
    return time.perf_counter() - began
