"""Settings of a training run, from a TOML or JSON file, and the drafter that they describe."""

import dataclasses
import itertools
import json
import tomllib
from pathlib import Path
from typing import Any, Self

from ddtree_jax.config import DrafterConfig, TargetConfig, default_taps

LOSSES = ("decay", "dpace", "decay+dpace")
INITS = ("random", "norm", "layers")
OVERFLOWS = ("error", "skip")
# Settings that say when things happen, not what is computed: they may differ between a run and its continuation.
FREE = (
    "log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "max_minutes", "answer_minutes", "eval_answers",
    "answer_slots", "answer_refill", "answers_per_shard", "steps", "epochs", "devices",
)  # fmt: skip
# Block size -> gamma as published (arXiv 2602.06036, section 4).
_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides what a run computes; 0 means "no limit" or "as the target" where it says so.

    Attributes:
      mask_token_id: row of the target's embedding that stands for "to be predicted". No text may use it, and it is
        not the padding or stop token. Has no default: it depends on the target.
      num_layers: layers of the drafter.
      num_heads, num_kv_heads, head_dim, intermediate_size: of the drafter; 0 takes the target's.
      num_taps: target blocks whose output the drafter reads, spread by `default_taps` if `taps` is empty.
      taps: zero-based target blocks, ascending.
      block_size: slots of a block, the anchor included.
      causal_head: whether a slot sees only earlier slots of its block, in every layer.
      sliding_windows: one entry a layer in tokens, 0 for full attention; empty for full attention everywhere.
      init: "random"; "norm" starts the last norm at the target's last norm, which sets the scale that the target's head
        expects; "layers" also starts the drafter's layers at the target's last ones, where all shapes agree.

      max_new_tokens: longest answer in tokens.
      temperatures: the target answers every prompt at each of them.
      samples: answers a prompt at each temperature above 0.
      answer_slots: answers decoded at a time. answer_refill: prompts prefilled at a time into slots that came free.
      answer_minutes: time limit of answering, all temperatures together; what is done by then is trained on. 0: none.
      answers_per_shard: answers a file; a killed run loses at most one file of work.
      max_prompt_tokens: longest prompt; 0 takes what leaves room for an answer in a row of `sequence_length`. Caches
        are made for the longest prompt, so one long prompt slows all of them down.
      prompt_overflow: what to do with a longer prompt, "error" or "skip".
      thinking: passed to the chat template as `enable_thinking`.

      sequence_length: S, tokens a row; several short documents share a row, longer ones are cut.
      batch_size: rows a step.
      anchors: blocks a row, drawn anew every step.
      partial_blocks: whether an anchor may stand so near the end of its text that some slots have no label (their
        weight is 0). Without them a drafter never learns how texts end.
      loss: weights of the slots, "decay" (exp(-(k-1)/gamma)), "dpace" or the product of both.
      gamma: None takes the published value for the block size (7 for 16, 5 for 10, 4 for 8).
      dpace_alpha: floor of the smoothed confidence.

      learning_rate, warmup_ratio, min_lr_ratio, beta1, beta2, weight_decay, clip: AdamW with linear warm-up over a
        share of the steps, then cosine to `min_lr_ratio * learning_rate`; global gradient norm clipped to `clip`.
      steps: optimiser steps; 0 takes `epochs` passes over the answers.
      max_minutes: time limit of training. The schedule is fitted to the speed measured, so that the learning rate
        has decayed when time is up. 0: none.
      dtype: of activations and matrix products; master weights and optimiser are float32.
      attention_mib: largest block of attention scores in MiB; bounds memory, not results.
      head_rows: predictions whose logits exist at a time; bounds memory, not results.
      remat: recompute the drafter's layers in the backward pass instead of keeping their activations.

      devices: GPUs of this host that share the work; 0 takes all that are there (and divide `batch_size`).
      log_every, eval_every, checkpoint_every: in steps; 0: only at the end.
      keep_checkpoints: newest checkpoints kept.
      eval_answers: held-out answers scored.
      seed: of weights, order of the data and anchors.
    """

    mask_token_id: int
    num_layers: int = 5
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    num_taps: int = 5
    taps: tuple[int, ...] = ()
    block_size: int = 16
    causal_head: bool = False
    sliding_windows: tuple[int, ...] = ()
    init: str = "norm"

    max_new_tokens: int = 320
    temperatures: tuple[float, ...] = (0.0,)
    samples: int = 1
    answer_slots: int = 256
    answer_refill: int = 64
    answer_minutes: float = 0.0
    answers_per_shard: int = 2048
    max_prompt_tokens: int = 0
    prompt_overflow: str = "error"
    thinking: bool = False

    sequence_length: int = 512
    batch_size: int = 32
    anchors: int = 128
    partial_blocks: bool = True
    loss: str = "decay"
    gamma: float | None = None
    dpace_alpha: float = 0.5

    learning_rate: float = 6e-4
    warmup_ratio: float = 0.04
    min_lr_ratio: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip: float = 1.0
    steps: int = 0
    epochs: int = 6
    max_minutes: float = 0.0
    dtype: str = "bfloat16"
    attention_mib: int = 2048
    head_rows: int = 4096
    remat: bool = False

    devices: int = 0
    log_every: int = 50
    eval_every: int = 500
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    eval_answers: int = 256
    seed: int = 0

    def __post_init__(self):
        """Raises ValueError on a setting out of range, naming it, what is allowed and what was found."""
        for name in ("num_layers", "num_taps", "max_new_tokens", "samples", "answer_slots", "answer_refill", "anchors",
                     "answers_per_shard", "batch_size", "attention_mib", "head_rows", "log_every", "keep_checkpoints",
                     "eval_answers"):  # fmt: skip
            self._at_least(name, 1)
        for name in ("num_heads", "num_kv_heads", "head_dim", "intermediate_size", "mask_token_id", "steps",
                     "eval_every", "checkpoint_every", "seed", "max_prompt_tokens", "devices"):  # fmt: skip
            self._at_least(name, 0)
        self._at_least("block_size", 2)
        self._at_least("sequence_length", 2)
        if self.steps == 0:
            self._at_least("epochs", 1)
        for name, allowed in (("loss", LOSSES), ("init", INITS), ("prompt_overflow", OVERFLOWS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; found {getattr(self, name)!r}")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype must be bfloat16 or float32; found {self.dtype!r}")
        for name in ("learning_rate", "clip"):
            self._number(name, lambda x: x > 0, "positive")
        for name in ("answer_minutes", "max_minutes", "weight_decay"):
            self._number(name, lambda x: x >= 0, "0 or more")
        for name in ("warmup_ratio", "min_lr_ratio", "beta1", "beta2", "dpace_alpha"):
            self._number(name, lambda x: 0 <= x < 1, "in [0, 1)")
        if self.gamma is not None:
            self._number("gamma", lambda x: x > 0, "positive")
        if not self.temperatures or not all(t == 0 or 1e-3 <= t <= 1e3 for t in self.temperatures):
            raise ValueError(f"temperatures must be 0 or 0.001..1000, one or more; found {list(self.temperatures)}")
        if len(set(self.temperatures)) != len(self.temperatures):
            raise ValueError(f"temperatures must differ; found {list(self.temperatures)}")
        if len(self.sliding_windows) not in (0, self.num_layers) or any(w < 0 for w in self.sliding_windows):
            found = list(self.sliding_windows)
            raise ValueError(f"sliding_windows must be {self.num_layers} entries of 0 or more, or none; found {found}")

    def _at_least(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"{name} must be an integer of {low} or more; found {value!r}")

    def _number(self, name: str, ok, what: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not ok(value):
            raise ValueError(f"{name} must be {what}; found {value!r}")

    @property
    def slot_gamma(self) -> float:
        """gamma, or the published value for the block size."""
        return self.gamma if self.gamma is not None else _GAMMA.get(self.block_size, 7.0 * self.block_size / 16)

    def computing(self) -> Self:
        """These settings with the defaults of all that decides when and not what."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return dataclasses.replace(self, **{name: defaults[name] for name in FREE})

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Rebuilds a config. Raises ValueError on an unknown or missing key, a wrong type or a value out of range."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - set(fields)):
            raise ValueError(f"unknown settings: {', '.join(unknown)}; known: {', '.join(fields)}")
        if "mask_token_id" not in data:
            raise ValueError("mask_token_id is missing: name a row of the target's embedding that no text uses")
        return cls(**{name: _converted(name, fields[name].type, value) for name, value in data.items()})


def _converted(name: str, kind: Any, value: Any) -> Any:
    """A value of a settings file as the field's type; lists become tuples, whole numbers floats where one is due."""
    if isinstance(value, list):
        element = float if kind == tuple[float, ...] else int
        if kind not in (tuple[float, ...], tuple[int, ...]):
            raise ValueError(f"{name} must be a single value; found a list")
        return tuple(_converted(name, element, v) for v in value)
    wanted = {int: int, bool: bool, str: str, float: (int, float), float | None: (int, float, type(None))}.get(kind)
    wrong = wanted is None or not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool)
    if wrong:
        raise ValueError(f"{name} must be of type {getattr(kind, '__name__', kind)}; found {value!r}")
    return float(value) if kind is float else value


def load_config(path: str | Path, overrides: dict[str, Any] | None = None) -> TrainConfig:
    """Reads settings from a .toml or .json file. `overrides` replace settings of the file.

    Raises ValueError naming the file: unreadable, not TOML or JSON, or what `TrainConfig.from_json` refuses.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected an object of settings, found {type(data).__name__}")
    try:
        return TrainConfig.from_json(data | (overrides or {}))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _ascending(taps: tuple[int, ...]) -> bool:
    return all(a < b for a, b in itertools.pairwise(taps))


def drafter_config(config: TrainConfig, target: TargetConfig, dtype: str | None = None) -> DrafterConfig:
    """The drafter that `config` describes for `target`, in `dtype` (default: `config.dtype`).

    Raises ValueError where they do not fit.
    """
    if config.mask_token_id >= target.vocab_size:
        raise ValueError(f"mask_token_id must be in 0..{target.vocab_size - 1}; found {config.mask_token_id}")
    if config.mask_token_id in target.stop_token_ids:
        raise ValueError(f"mask_token_id {config.mask_token_id} is a stop token of the target")
    taps = config.taps or default_taps(target.num_layers, config.num_taps)
    if not _ascending(taps) or taps[0] < 0 or taps[-1] >= target.num_layers:
        raise ValueError(f"taps must be ascending block ids in 0..{target.num_layers - 1}; found {list(taps)}")
    heads = config.num_heads or target.num_heads
    kv_heads = config.num_kv_heads or target.num_kv_heads
    if heads % kv_heads:
        raise ValueError(f"num_heads ({heads}) must be a multiple of num_kv_heads ({kv_heads})")
    if config.head_dim % 2:
        raise ValueError(f"head_dim must be even (halves rotate against each other); found {config.head_dim}")
    windows = tuple(w or None for w in config.sliding_windows) or (None,) * config.num_layers
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size or target.intermediate_size,
        num_layers=config.num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=config.head_dim or target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        attention_bias=False,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=taps,
        target_hidden_size=target.hidden_size,
        target_num_layers=target.num_layers,
        target_vocab_size=target.vocab_size,
        causal=(config.causal_head,) * config.num_layers,
        sliding_windows=windows,
        dtype=dtype or config.dtype,
    )
