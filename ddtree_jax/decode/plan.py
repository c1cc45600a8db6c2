"""Checks a decode before anything compiles, and turns it into static shapes.

Shapes are rounded up to buckets, so that prompts of one bucket share one executable.
"""

import dataclasses
import numbers
from collections.abc import Sequence

from ddtree_jax.config import (
    AUTO,
    MAX_NODES,
    METHODS,
    DecodeConfig,
    DraftConfig,
    DrafterConfig,
    TargetConfig,
    possible_methods,
)
from ddtree_jax.decode.loop import DecodeLoop
from ddtree_jax.decode.proposers import (
    Chain,
    DFlashProposer,
    DynamicGrowth,
    LookupProposer,
    MostProbable,
    NoDraft,
    Proposer,
    Shape,
    Static,
    StaticGrowth,
    StepProposer,
    chain,
)  # fmt: skip
from ddtree_jax.models.abstract import check_fits
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.tree import Choices, default_choices, parse_choices

MIN_BUCKET = 16
ROW_TILE = 128  # cache rows come in whole tiles of the attention kernel
MAX_DEFAULT_BATCH = 8
LOOKUP_DEPTH = 15  # with the root a chain of 16 rows, which fills a tile
MAX_NGRAM = 16
MAX_BRANCHING = 32


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static shapes of a decode.

    Attributes:
      loop: what is compiled.
      batch: B, slots decoded at a time.
      prompt_rows: S, prompts are padded to it.
      cache_rows: C of every cache.
      output_rows: O of the output buffer.
      limits: new tokens at most, one a prompt.
      seeds: one a prompt.
      stop_token_ids: what ends a text.
    """

    loop: DecodeLoop
    batch: int
    prompt_rows: int
    cache_rows: int
    output_rows: int
    limits: tuple[int, ...]
    seeds: tuple[int, ...]
    stop_token_ids: tuple[int, ...]


def bucket(size: int) -> int:
    """The smallest power of two that holds `size`, at least MIN_BUCKET."""
    return max(MIN_BUCKET, 1 << (int(size) - 1).bit_length())


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_int(value: object, low: int, high: int | None = None) -> bool:
    ok = isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= low
    return ok and (high is None or value <= high)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def check_config(config: DecodeConfig, target: TargetConfig, drafter: DraftConfig | None) -> None:
    """Raises ValueError on a setting out of range, naming it, what is allowed and what was found."""
    c = config
    _check(c.method in METHODS, f"method {c.method!r} is unknown; known: {', '.join(METHODS)}")
    method = METHODS[c.method]
    if method.needs_drafter:
        _check(drafter is not None, f"method {c.method!r} needs a drafter, and none was given")
        _check(
            method.possible(drafter),
            f"method {c.method!r} cannot be had of a drafter of the kind {drafter.family!r}; "
            f"possible: {', '.join(possible_methods(drafter))}",
        )
        check_fits(drafter, target)
    low = 2 if method.has_width else 1
    if c.num_nodes == AUTO:
        _check(
            method.best_first or not method.has_width,
            f"num_nodes {AUTO!r} needs a method whose nodes come in order of probability "
            f"({', '.join(name for name, m in METHODS.items() if m.best_first)}); found method {c.method!r}",
        )
    else:
        _check(
            _is_int(c.num_nodes, low, MAX_NODES),
            f"num_nodes must be {low}..{MAX_NODES}, root included, or {AUTO!r}; found {c.num_nodes!r}",
        )
    _check(
        _is_list(c.widths) and bool(c.widths) and all(_is_int(n, 2, MAX_NODES) for n in c.widths)
        and list(c.widths) == sorted(set(c.widths)),
        f"widths must rise, each 2..{MAX_NODES}, root included; found {c.widths!r}",
    )  # fmt: skip
    if c.draft_depth is not None:
        most = drafter.max_depth if method.needs_drafter else MAX_NODES - 1
        _check(_is_int(c.draft_depth, 1, most), f"draft_depth must be 1..{most}; found {c.draft_depth!r}")
    if c.method == "static_tree":
        static_choices(c, drafter)
    _check(_is_int(c.branching, 1, MAX_BRANCHING), f"branching must be 1..{MAX_BRANCHING}; found {c.branching!r}")
    _check(_is_int(c.ngram, 1, MAX_NGRAM), f"ngram must be 1..{MAX_NGRAM}; found {c.ngram!r}")
    _check(_is_int(c.max_new_tokens, 1), f"max_new_tokens must be 1 or more; found {c.max_new_tokens!r}")
    _check(
        isinstance(c.temperature, numbers.Real)
        and not isinstance(c.temperature, bool)
        and (c.temperature == 0 or 1e-3 <= c.temperature <= 1e3),
        f"temperature must be 0 (most probable token) or 0.001..1000; found {c.temperature!r}",
    )
    seeds = c.seed if _is_list(c.seed) else (c.seed,)
    _check(
        all(_is_int(s, 0, 2**32 - 1) for s in seeds),
        f"seed must be an integer in 0..2^32-1, or one a prompt; found {c.seed!r}",
    )
    _check(
        c.stop_token_ids is None or _is_list(c.stop_token_ids),
        f"stop_token_ids must be a list of token ids or None; found {c.stop_token_ids!r}",
    )
    for token in c.stop_token_ids or ():
        _check(
            _is_int(token, 0, target.vocab_size - 1),
            f"stop_token_ids must be in 0..{target.vocab_size - 1}; found {token!r}",
        )
    if c.capacity is not None:
        _check(
            _is_int(c.capacity, 2, target.max_position),
            f"capacity must be 2..{target.max_position} (the target's longest context); found {c.capacity!r}",
        )
    if c.batch_size is not None:
        _check(_is_int(c.batch_size, 1), f"batch_size must be 1 or more; found {c.batch_size!r}")
    _check(_is_int(c.prefill_chunk, 1, MAX_NODES), f"prefill_chunk must be 1..{MAX_NODES}; found {c.prefill_chunk!r}")
    _check(
        _is_int(c.prompt_bucket, 0, target.max_position),
        f"prompt_bucket must be 0..{target.max_position}; found {c.prompt_bucket!r}",
    )


def static_choices(config: DecodeConfig, drafter: DraftConfig) -> Choices:
    """The static tree of a config, checked and in level order."""
    if config.tree_choices is None:
        return default_choices(config.draft_depth or drafter.depth)
    return parse_choices(
        config.tree_choices, max_depth=config.draft_depth or drafter.max_depth, max_rank=drafter.max_candidates - 1,
        max_nodes=MAX_NODES,
    )  # fmt: skip


def make_proposer(config: DecodeConfig, target: Decoder, drafter: DraftConfig | None) -> Proposer:
    """The proposer of a method. Raises as `check_config` does."""
    check_config(config, target.config, drafter)
    method, num_nodes = METHODS[config.method].same_as or config.method, _widest(config)
    if method == "autoregressive":
        return NoDraft()
    if method in ("lookup", "lookup_tree"):
        return LookupProposer(
            depth=int(config.draft_depth or LOOKUP_DEPTH),
            num_nodes=num_nodes if method == "lookup_tree" else None,
            ngram=int(config.ngram),
        )
    depth = int(config.draft_depth or drafter.depth)
    if isinstance(drafter, DrafterConfig):
        return DFlashProposer(target=target, config=drafter, depth=depth, shape=_shape(method, config, drafter))
    if method == "eagle2":
        branching = min(int(config.branching), num_nodes - 1, drafter.draft_vocab_size)
        growth = DynamicGrowth(num_nodes, min(depth, num_nodes - 1), branching)
    else:
        growth = StaticGrowth(static_choices(config, drafter)) if method == "static_tree" else chain(depth)
    return StepProposer(target=target, config=drafter, growth=growth)


def _widest(config: DecodeConfig) -> int:
    return int(config.widths[-1] if config.num_nodes == AUTO else config.num_nodes)


def _shape(method: str, config: DecodeConfig, drafter: DrafterConfig) -> Shape:
    if method == "static_tree":
        return Static(static_choices(config, drafter))
    return MostProbable(_widest(config)) if method == "ddtree" else Chain()


def make_plan(
    config: DecodeConfig, target: TargetConfig, drafter: DraftConfig | None, prompt_lengths: Sequence[int]
) -> Plan:
    """Plans the decode of prompts of these lengths, in tokens. Raises ValueError on anything that cannot be done."""
    decoder = Decoder(target)
    proposer = make_proposer(config, decoder, drafter)
    count = len(prompt_lengths)
    _check(count > 0, "no prompts were given")
    for i, length in enumerate(prompt_lengths):
        _check(length > 0, f"prompt {i} is empty")
    prompt_rows = bucket(max(*prompt_lengths, config.prompt_bucket))
    capacity = config.capacity or min(target.max_position, prompt_rows + bucket(config.max_new_tokens))
    for i, length in enumerate(prompt_lengths):
        _check(length < capacity, f"prompt {i} has {length} tokens, which leaves no room in a capacity of {capacity}")
    seeds = tuple(config.seed) if _is_list(config.seed) else (config.seed,) * count
    _check(len(seeds) == count, f"{len(seeds)} seeds were given for {count} prompts")

    chunk = min(config.prefill_chunk, prompt_rows)
    prompt_rows = -(-prompt_rows // chunk) * chunk
    limits = tuple(min(config.max_new_tokens, capacity - length) for length in prompt_lengths)
    rows = max(capacity + proposer.max_path, prompt_rows)
    choose = config.num_nodes == AUTO and METHODS[config.method].best_first
    stops = target.stop_token_ids if config.stop_token_ids is None else config.stop_token_ids
    return Plan(
        loop=DecodeLoop(
            target=decoder,
            proposer=proposer,
            sample=config.temperature > 0,
            chunk=chunk,
            widths=tuple(map(int, config.widths)) if choose else (),
        ),
        batch=config.batch_size or min(MAX_DEFAULT_BATCH, count),
        prompt_rows=prompt_rows,
        cache_rows=-(-rows // ROW_TILE) * ROW_TILE,
        output_rows=bucket(min(config.max_new_tokens, capacity)) + proposer.max_path,
        limits=limits,
        seeds=seeds,
        stop_token_ids=tuple(stops),
    )
