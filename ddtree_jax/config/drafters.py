"""Drafters: DFlash, and those that run once a depth (EAGLE-3, MTP)."""

import dataclasses
from typing import Any, ClassVar

from ddtree_jax.config.base import ModelConfig
from ddtree_jax.config.blocks import MoEConfig, RopeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig(ModelConfig):
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
class StepDrafterConfig(ModelConfig):
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

    @property
    def max_candidates(self) -> int:
        """Tokens that a tree may choose from at one depth."""
        return self.draft_vocab_size

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
DRAFTERS = {cls.family: cls for cls in (DrafterConfig, Eagle3Config, MTPConfig)}


def drafter_from_json(data: dict[str, Any]) -> DraftConfig:
    """The config of any drafter; without a "family" it is DFlash's. Raises ValueError naming what is wrong."""
    family = data.get("family", DrafterConfig.family) if isinstance(data, dict) else data
    if not isinstance(family, str) or family not in DRAFTERS:
        raise ValueError(f"family: expected one of {sorted(DRAFTERS)}, found {family!r}")
    return DRAFTERS[family].from_json({k: v for k, v in data.items() if k != "family"})
