"""The decoder that a text comes from."""

import dataclasses

from ddtree_jax.config.base import ModelConfig
from ddtree_jax.config.blocks import DeltaConfig, MoEConfig, RopeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig(ModelConfig):
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
