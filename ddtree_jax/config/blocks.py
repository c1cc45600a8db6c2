"""Parts of a layer that a model may have: rotary embedding, mixture of experts, Gated DeltaNet."""

import dataclasses


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
    def heads(self) -> tuple[int, int]:
        """Of keys and of values."""
        return self.num_key_heads, self.num_value_heads

    @property
    def dims(self) -> tuple[int, int]:
        """Of a key head and of a value head."""
        return self.key_head_dim, self.value_head_dim

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

    @property
    def kept_channels(self) -> int:
        """What a commit needs of a token: those, write strengths and decays."""
        return self.conv_channels + 2 * self.num_value_heads

    @property
    def projected_channels(self) -> int:
        """All that is projected of a token: those, and output gates."""
        return self.kept_channels + self.value_size
