"""Static descriptions of targets and drafters, with a JSON form for checkpoints.

Everything here is frozen and hashable: a config is a static argument of every jitted function.
"""

import dataclasses
import itertools
from typing import Any, ClassVar, Self

import jax.numpy as jnp

from ddtree_jax.fields import from_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
      theta: base of the geometric sequence of wavelengths.
      kind: "default", "linear", "llama3" or "yarn".
      factor: context extension factor of every kind but "default".
      original_max_position: context length before the extension, in tokens ("llama3", "yarn").
      low_freq_factor, high_freq_factor: band edges of "llama3".
      beta_fast, beta_slow: band edges of "yarn", in rotations over the original context.
      attention_factor: multiplies cos and sin ("yarn"); None derives it from `factor` and the two mscales.
      mscale, mscale_all_dim: numerator and denominator of that derivation, where a checkpoint gives them.
      truncate: whether "yarn" rounds its band edges outwards to whole dimensions.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts in place of the feed-forward block: softmax over all experts, then the top k.

    Attributes:
      sparse: one entry a layer, whether it has experts; the others keep the dense block.
      num_experts, experts_per_token: X and k.
      intermediate_size: of one expert.
      renormalise: the k weights of a token are divided by their sum.
      shared_intermediate_size: of the expert that every token passes, scaled by a sigmoid gate; 0 for none.
    """

    sparse: tuple[bool, ...]
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    renormalise: bool
    shared_intermediate_size: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Gated DeltaNet layers of a hybrid target (arXiv 2412.06464).

    Attributes:
      num_key_heads, key_head_dim: of queries and keys; value head h reads key head h // (value heads / key heads).
      num_value_heads, value_head_dim: of values, decays, write strengths, output gates and states.
      conv_kernel: taps of the causal depthwise convolution over queries, keys and values, the token's own included.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int = 4

    @property
    def key_size(self) -> int:
        """Channels of all keys; those of all queries are as many."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Channels of all values."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values, in this order."""
        return 2 * self.key_size + self.value_size


# Parameters whose dtype is not the model's, by the last part of their path. The decays of Gated DeltaNet are
# exp(-exp(A_log) ...): these few numbers stay float32. Token ids are no weights.
FIXED_DTYPES = {"A_log": "float32", "dt_bias": "float32", "target_ids": "int32"}


def parameter_dtype(name: str, model: str) -> str:
    """The dtype of a parameter by the last part of its path: that of the model, but for a few by name."""
    return FIXED_DTYPES.get(name, model)


DTYPES = ("bfloat16", "float16", "float32")


class _ModelConfig:
    """What the configs of checkpoints share: the dtype as jax's, and a JSON round trip."""

    dtype: str

    @property
    def jax_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Rebuilds a config. Raises ValueError on a field that is missing, unknown or of another type, naming it."""
        config = from_json(cls, data)
        config.check()
        return config

    def check(self) -> None:
        """Raises ValueError where fields contradict each other."""
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, found {self.dtype!r}")
        for name in ("sliding_windows", "causal"):
            entries = getattr(self, name, None)
            if entries is not None and len(entries) != self.num_layers:
                raise ValueError(f"{name}: expected {self.num_layers} entries, one a layer, found {len(entries)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig(_ModelConfig):
    """A decoder: Llama 3, Qwen2.5, Qwen3 (dense or with a mixture of experts), or a hybrid of attention and Gated
    DeltaNet (Qwen3.5, Qwen3.6, Qwen3-Next).

    Attributes:
      qk_norm: per-head RMSNorm on queries and keys before the rotary embedding (Qwen3).
      qkv_bias, o_bias: biases on the attention projections (Qwen2.5 has qkv only).
      tie_embeddings: the head is the embedding table.
      sliding_windows: one entry a layer, None for full attention, else the window in tokens
        (a key is visible iff query position - key position < window).
      max_position: longest context the checkpoint declares, in tokens.
      stop_token_ids: tokens that end a text.
      moe: the mixture of experts; None where every layer is dense.
      dtype: name of the parameter and activation dtype.
      rotary_dim: dimensions of a head that rotate, the first ones; None for all.
      zero_centred_norms: RMSNorms multiply by 1 + weight (the gated norm of Gated DeltaNet by its plain weight).
      attention_gate: attention multiplies each head's output by the sigmoid of a gate of its own.
      delta_layers: zero-based blocks whose mixer is Gated DeltaNet, ascending; the others have attention.
      delta: their shape; None where there are none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    tie_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    max_position: int
    stop_token_ids: tuple[int, ...]
    moe: MoEConfig | None = None
    dtype: str = "bfloat16"
    rotary_dim: int | None = None
    zero_centred_norms: bool = False
    attention_gate: bool = False
    delta_layers: tuple[int, ...] = ()
    delta: DeltaConfig | None = None

    @property
    def qkv_heads(self) -> int:
        """Heads of the fused attention projection: queries, keys, values and, if there are any, output gates."""
        return self.num_heads * (2 if self.attention_gate else 1) + 2 * self.num_kv_heads

    def check(self) -> None:
        super().check()
        if self.delta_layers and self.delta is None:
            raise ValueError("delta: expected the shape of the layers that delta_layers lists, found none")
        if self.delta_layers and not 0 <= min(self.delta_layers) <= max(self.delta_layers) < self.num_layers:
            raise ValueError(
                f"delta_layers: expected blocks in 0..{self.num_layers - 1}, found {list(self.delta_layers)}"
            )
        if self.moe is not None and len(self.moe.sparse) != self.num_layers:
            raise ValueError(f"moe.sparse: expected {self.num_layers} entries, found {len(self.moe.sparse)}")
        for token in self.stop_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"stop_token_ids: expected ids in 0..{self.vocab_size - 1}, found {token}")

    def moe_of(self, layer: int) -> MoEConfig | None:
        """The mixture of experts of a layer; None where its feed-forward block is dense."""
        return self.moe if self.moe is not None and self.moe.sparse[layer] else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig(_ModelConfig):
    """A DFlash block-diffusion drafter (arXiv 2602.06036).

    Embedding and head are the target's, unless the drafter has its own.

    Attributes:
      block_size: slots of a block, the anchor included.
      mask_token_id: row of the embedding that stands for "to be predicted".
      target_layer_ids: taps; l means the residual stream after the target's zero-based block l.
      target_hidden_size, target_num_layers, target_vocab_size: what the drafter was trained on.
      causal: per layer, whether a slot sees only earlier slots of its block.
      sliding_windows: per layer, None or a window in tokens (visible iff |distance| < window).
      sample_from_anchor: False (z-lab): slot i predicts its own position, slot 0 nothing.
        True (DSpark, DeepSpec): slot i predicts the position after it, slot 0 included.
      output_multiplier, logit_softcap, embedding_scale: scale and tanh cap of the logits, scale of the block input.
      own_embedding: the drafter holds the embedding of its block, one row a token of the target.
      own_head: the drafter holds its head.
      draft_vocab_size: rows of a head over a part of the target's tokens, which a table names; None for all of them.
      conv_taps, conv_group_size: T and G of the dynamic convolutions of DFlash 2 around attention and MLP; no taps for
        none.
      selector_rank, selector_top_k: R and K of DFlash 2's candidate selector; rank 0 for none.
    """

    family: ClassVar[str] = "dflash"

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    target_num_layers: int
    target_vocab_size: int
    causal: tuple[bool, ...]
    sliding_windows: tuple[int | None, ...]
    sample_from_anchor: bool = False
    output_multiplier: float = 1.0
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    own_embedding: bool = False
    own_head: bool = False
    draft_vocab_size: int | None = None
    conv_taps: int = 0
    conv_group_size: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16
    dtype: str = "bfloat16"

    @property
    def depth(self) -> int:
        """L: how many future tokens one block predicts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def vocab_size(self) -> int:
        """V of the drafter's distributions."""
        return self.draft_vocab_size or self.target_vocab_size

    @property
    def max_candidates(self) -> int:
        """Tokens that a tree may choose from at one depth."""
        return min(self.selector_top_k, self.vocab_size) if self.selector_rank else self.vocab_size

    @property
    def max_depth(self) -> int:
        """The deepest draft there can be."""
        return self.depth


MAX_STEPS = 32  # of a drafter that runs once a depth; each is compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDrafterConfig(_ModelConfig):
    """What drafters of one decoder layer share that run once for every depth, each time on the tokens drafted last.

    Attributes:
      target_hidden_size, target_num_layers, target_vocab_size: what the drafter was trained on.
      depth: L, tokens drafted a round unless the caller says otherwise; any depth up to `max_depth` is possible.
    """

    num_layers: ClassVar[int] = 1

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    target_hidden_size: int
    target_num_layers: int
    target_vocab_size: int
    depth: int
    dtype: str = "bfloat16"

    @property
    def max_depth(self) -> int:
        """The deepest draft there can be."""
        return MAX_STEPS

    def to_json(self) -> dict[str, Any]:
        return {"family": self.family, **super().to_json()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config(StepDrafterConfig):
    """An EAGLE-3 drafter (arXiv 2503.01840): one layer over the embedding of a token and three taps of the target.

    Attributes:
      target_layer_ids: three taps; l means the residual stream after the target's zero-based block l.
      draft_vocab_size: rows of the drafter's own head, a selection of the target's tokens.
      own_embedding: the drafter has an embedding table of its own; else it shares the target's.
    """

    family: ClassVar[str] = "eagle3"
    rotary_dim: ClassVar[int | None] = None
    qk_norm: ClassVar[bool] = False
    attention_gate: ClassVar[bool] = False
    zero_centred_norms: ClassVar[bool] = False
    moe: ClassVar[MoEConfig | None] = None
    own_head: ClassVar[bool] = True

    target_layer_ids: tuple[int, ...]
    draft_vocab_size: int
    own_embedding: bool = False
    depth: int = 7  # steps unrolled in training

    @property
    def max_candidates(self) -> int:
        """Tokens that a tree may choose from at one depth."""
        return self.draft_vocab_size


def eagle3_taps(num_layers: int) -> tuple[int, int, int]:
    """Blocks whose output EAGLE-3 reads where its config names none: what enters blocks 2, n / 2 and n - 3."""
    return 1, num_layers // 2 - 1, num_layers - 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig(StepDrafterConfig):
    """The multi-token prediction layer of Qwen3.5, Qwen3.6 and Qwen3-Next checkpoints.

    Attributes:
      rotary_dim: dimensions of a head that rotate, the first ones; None for all.
      moe: the layer's mixture of experts; None where its feed-forward block is dense.
    """

    family: ClassVar[str] = "mtp"
    qk_norm: ClassVar[bool] = True
    attention_gate: ClassVar[bool] = True
    zero_centred_norms: ClassVar[bool] = True
    own_embedding: ClassVar[bool] = False
    own_head: ClassVar[bool] = False
    target_layer_ids: ClassVar[tuple[int, ...]] = ()

    rotary_dim: int | None
    moe: MoEConfig | None = None
    depth: int = 3  # as the engines run it

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that can be drafted: the head is the target's."""
        return self.target_vocab_size


DraftConfig = DrafterConfig | Eagle3Config | MTPConfig
_DRAFTERS = {cls.family: cls for cls in (DrafterConfig, Eagle3Config, MTPConfig)}


def drafter_from_json(data: dict[str, Any]) -> DraftConfig:
    """The config of any drafter; without a "family" it is DFlash's. Raises ValueError naming what is wrong."""
    family = data.get("family", DrafterConfig.family) if isinstance(data, dict) else data
    if not isinstance(family, str) or family not in _DRAFTERS:
        raise ValueError(f"family: expected one of {sorted(_DRAFTERS)}, found {family!r}")
    return _DRAFTERS[family].from_json({k: v for k, v in data.items() if k != "family"})


def default_taps(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Taps spread evenly from block 1 to the third block from the end, as the z-lab reference spreads them.

    (36, 5) gives (1, 9, 17, 25, 33); one tap sits in the middle. `round` is Python's, to even at halves. The last
    blocks serve the target's own next token and help a drafter less.

    Raises:
      ValueError: the target has too few layers for so many taps.
    """
    if num_taps == 1:
        return (num_layers // 2,)
    taps = tuple(round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    if taps[0] < 0 or any(a >= b for a, b in itertools.pairwise(taps)):
        raise ValueError(f"{num_taps} taps do not fit a target of {num_layers} layers; name the taps instead")
    return taps


@dataclasses.dataclass(frozen=True)
class Method:
    """What a decoding method takes.

    Attributes:
      needs_drafter: whether it needs a drafter's checkpoint.
      has_width: whether `num_nodes` sets the width of its tree.
      same_as: the method that it is another name of, for drafters that have both.
      families: drafters that can do it, if it needs one.
    """

    needs_drafter: bool
    has_width: bool = False
    same_as: str | None = None
    families: tuple[str, ...] = tuple(_DRAFTERS)

    def possible(self, drafter: DraftConfig | None) -> bool:
        """Whether it can be done with this drafter, or without one."""
        return not self.needs_drafter or (drafter is not None and drafter.family in self.families)


METHODS = {
    "autoregressive": Method(needs_drafter=False),
    "lookup": Method(needs_drafter=False),
    "lookup_tree": Method(needs_drafter=False, has_width=True),
    "dflash": Method(needs_drafter=True, families=("dflash",)),
    "best_path": Method(needs_drafter=True, same_as="dflash"),
    "static_tree": Method(needs_drafter=True),
    "ddtree": Method(needs_drafter=True, has_width=True, families=("dflash",)),
    "eagle2": Method(needs_drafter=True, has_width=True, families=("eagle3", "mtp")),
}
MAX_NODES = 512


def possible_methods(drafter: DraftConfig | None) -> list[str]:
    """The methods that a target can be decoded with, given its drafter; no method under two names."""
    possible = [name for name, method in METHODS.items() if method.possible(drafter)]
    return [name for name in possible if METHODS[name].same_as not in possible]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How to decode. The text never depends on `method` and how it drafts, `batch_size`, `prefill_chunk` or
    `prompt_bucket`.

    Attributes:
      method: "autoregressive"; "lookup" and "lookup_tree" (what followed the last tokens where they occurred before:
        the first such continuation, or several merged in a tree); of a drafter "best_path" (its most probable chain,
        for DFlash also "dflash"), "static_tree" (its tokens by rank, in a tree fixed in advance), "ddtree" (DFlash: its
        N most probable prefixes) or "eagle2" (drafters that run once a depth: the tree grown from the best nodes).
      num_nodes: N, width of the tree, root included (ddtree, eagle2 and lookup_tree). Widths that fill tiles: 16, 32,
        64, 128, 256.
      draft_depth: L, tokens drafted a round; None takes all that the drafter was trained for, 15 for a look-up.
      branching: children drafted of a node, and nodes drafted further at each depth (eagle2).
      tree_choices: the static tree: a list of tuples of child ranks such as ((0,), (1,), (0, 0)), its text, or the
        name of a published tree ("eagle-1", "medusa-vicuna-7b"); None takes "eagle-1" down to the drafter's depth.
      ngram: longest run of last tokens that a look-up looks for.
      max_new_tokens: new tokens a prompt, the stop token included.
      temperature: 0 for the most probable token, else draws from softmax(logits / temperature).
      seed: of the draws; one for all prompts, or one each. A draw depends on (seed, absolute position) alone.
      stop_token_ids: what ends a text; None takes the checkpoint's, () nothing.
      capacity: longest text in tokens, prompt included; None takes what the prompts and `max_new_tokens` need, up to
        the longest context that the target declares.
      batch_size: prompts decoded at a time; None takes all of them, at most 8.
      prefill_chunk: prompt tokens a pass.
      prompt_bucket: pad prompts to at least this many tokens, so that several calls share one executable.
    """

    method: str = "ddtree"
    num_nodes: int = 64
    draft_depth: int | None = None
    branching: int = 10
    tree_choices: str | tuple[tuple[int, ...], ...] | None = None
    ngram: int = 3
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int | tuple[int, ...] = 0
    stop_token_ids: tuple[int, ...] | None = None
    capacity: int | None = None
    batch_size: int | None = None
    prefill_chunk: int = 256
    prompt_bucket: int = 0
