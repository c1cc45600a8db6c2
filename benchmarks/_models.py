"""Shapes of published models, and random weights at these shapes made on the device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ddtree_jax.config import (
    DeltaConfig,
    DraftConfig,
    DrafterConfig,
    Eagle3Config,
    MoEConfig,
    MTPConfig,
    RopeConfig,
    TargetConfig,
    default_taps,
    eagle3_taps,
)
from ddtree_jax.models.abstract import abstract_params


def _target(architecture: str, layers: int, heads: int, kv_heads: int, head_dim: int, **fields) -> TargetConfig:
    common = dict(rms_norm_eps=1e-6, qkv_bias=False, o_bias=False, max_position=40960, stop_token_ids=(0,))
    return TargetConfig(
        architecture=architecture, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        qk_norm=architecture.startswith("qwen3"), sliding_windows=(None,) * layers, **common | fields,
    )  # fmt: skip


def _hybrid(layers: int, heads: int, kv_heads: int, value_heads: int, **fields) -> TargetConfig:
    """Qwen3.5 and Qwen3.6: three layers of Gated DeltaNet, then one of gated attention."""
    return _target(
        "qwen3_5", layers, heads, kv_heads, 256, vocab_size=248320, rope=RopeConfig(theta=1e7), rotary_dim=64,
        zero_centred_norms=True, attention_gate=True, delta_layers=tuple(i for i in range(layers) if i % 4 != 3),
        delta=DeltaConfig(num_key_heads=16, num_value_heads=value_heads, key_head_dim=128, value_head_dim=128),
        **fields,
    )  # fmt: skip


_QWEN3 = dict(vocab_size=151936, rope=RopeConfig(theta=1e6))
_LLAMA31_ROPE = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position=8192)
TARGETS = {
    "qwen3-0.6b": _target(
        "qwen3", 28, 16, 8, 128, hidden_size=1024, intermediate_size=3072, tie_embeddings=True, **_QWEN3
    ),
    "qwen3-4b": _target(
        "qwen3", 36, 32, 8, 128, hidden_size=2560, intermediate_size=9728, tie_embeddings=True, **_QWEN3
    ),
    "qwen3-8b": _target(
        "qwen3", 36, 32, 8, 128, hidden_size=4096, intermediate_size=12288, tie_embeddings=False, **_QWEN3
    ),
    "qwen3-32b": _target(
        "qwen3", 64, 64, 8, 128, hidden_size=5120, intermediate_size=25600, tie_embeddings=False, **_QWEN3
    ),
    "qwen3-30b-a3b": _target(
        "qwen3_moe", 48, 32, 4, 128, hidden_size=2048, intermediate_size=6144, tie_embeddings=False, moe=MoEConfig(
            sparse=(True,) * 48, num_experts=128, experts_per_token=8, intermediate_size=768, renormalise=True
        ), **_QWEN3,
    ),
    "qwen3.5-4b": _hybrid(32, 16, 4, 32, hidden_size=2560, intermediate_size=9216, tie_embeddings=True),
    "qwen3.5-9b": _hybrid(32, 16, 4, 32, hidden_size=4096, intermediate_size=12288, tie_embeddings=False),
    "qwen3.6-27b": _hybrid(64, 24, 4, 48, hidden_size=5120, intermediate_size=17408, tie_embeddings=False),
    "llama-3.1-8b": _target(
        "llama", 32, 32, 8, 128, hidden_size=4096, intermediate_size=14336, tie_embeddings=False, vocab_size=128256,
        rope=_LLAMA31_ROPE,
    ),
    "smollm2-135m": _target(
        "llama", 30, 9, 3, 64, hidden_size=576, intermediate_size=1536, tie_embeddings=True, vocab_size=49152,
        rope=RopeConfig(theta=1e5),
    ),
    "tiny-hybrid": _target(
        "qwen3_5", 2, 4, 2, 16, hidden_size=64, intermediate_size=128, tie_embeddings=True, vocab_size=512,
        rope=RopeConfig(), rotary_dim=4, zero_centred_norms=True, attention_gate=True, delta_layers=(0,),
        delta=DeltaConfig(num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16),
    ),
    "tiny": _target(
        "llama", 2, 4, 2, 16, hidden_size=64, intermediate_size=128, tie_embeddings=True, vocab_size=512,
        rope=RopeConfig(),
    ),
}  # fmt: skip


def dflash_config(name: str) -> DrafterConfig:
    """The DFlash drafter of a target: five layers of the target's own geometry and blocks of 16 slots.

    As published for Qwen3-4B and 8B (z-lab/Qwen3-8B-DFlash-b16); the one for Llama 3.1 8B has blocks of 10 and a
    narrower MLP. Those of hybrids have 32 heads of 128 whatever the target has; all their layers but the last slide
    (by 2048 tokens for Qwen3.6-27B, five layers; by 4096 for Qwen3.5, six layers). For the other shapes the same recipe
    stands in.
    """
    t = TARGETS[name]
    if t.delta_layers and not name.startswith("tiny"):
        layers, window = (5, 2048) if name.startswith("qwen3.6") else (6, 4096)
        taps = default_taps(t.num_layers, 5 if layers == 5 else 8)
        return DrafterConfig(
            hidden_size=t.hidden_size, intermediate_size=t.intermediate_size, num_layers=layers, num_heads=32,
            num_kv_heads=8, head_dim=128, rms_norm_eps=t.rms_norm_eps, rope=t.rope, attention_bias=False,
            block_size=16, mask_token_id=248077, target_layer_ids=taps, target_hidden_size=t.hidden_size,
            target_num_layers=t.num_layers, target_vocab_size=t.vocab_size, causal=(False,) * layers,
            sliding_windows=(window,) * (layers - 1) + (None,), dtype=t.dtype,
        )  # fmt: skip
    layers = 1 if name.startswith("tiny") else 5
    sizes = {"llama-3.1-8b": (10, 12288), "tiny": (4, 128), "tiny-hybrid": (4, 128)}
    block, intermediate = sizes.get(name, (16, t.intermediate_size))
    return DrafterConfig(
        hidden_size=t.hidden_size, intermediate_size=intermediate, num_layers=layers, num_heads=t.num_heads,
        num_kv_heads=t.num_kv_heads, head_dim=t.head_dim, rms_norm_eps=t.rms_norm_eps, rope=t.rope,
        attention_bias=False, block_size=block, mask_token_id=t.vocab_size - 1,
        target_layer_ids=default_taps(t.num_layers, layers), target_hidden_size=t.hidden_size,
        target_num_layers=t.num_layers, target_vocab_size=t.vocab_size, causal=(False,) * layers,
        sliding_windows=(None,) * layers, dtype=t.dtype,
    )  # fmt: skip


def dflash2_config(name: str) -> DrafterConfig:
    """The DFlash 2 drafter of a target: that of DFlash with the sizes that are published (Qwen3.8-27B-DFlash2).

    Blocks of 8 slots, layers that all slide by 2048 tokens, convolutions of 2 taps over groups of 16 channels, a
    selector of rank 256 among 16 candidates.
    """
    dflash = dflash_config(name)
    return dataclasses.replace(
        dflash, block_size=min(8, dflash.block_size), sliding_windows=(2048,) * dflash.num_layers, conv_taps=2,
        conv_group_size=16, selector_rank=256, selector_top_k=16,
    )  # fmt: skip


def eagle3_config(t: TargetConfig) -> Eagle3Config:
    """The EAGLE-3 drafter of a target: one layer of the target's own geometry, a head over 32000 tokens.

    As published for Qwen3-8B and Llama-3.1-8B; for the other shapes the same recipe stands in. Small vocabularies are
    cut to a quarter, and short targets tapped at their first blocks.
    """
    return Eagle3Config(
        hidden_size=t.hidden_size, intermediate_size=t.intermediate_size, num_heads=t.num_heads,
        num_kv_heads=t.num_kv_heads, head_dim=t.head_dim, rms_norm_eps=t.rms_norm_eps, rope=t.rope,
        target_layer_ids=eagle3_taps(t.num_layers) if t.num_layers > 6 else tuple(range(min(3, t.num_layers))),
        target_hidden_size=t.hidden_size, target_num_layers=t.num_layers, target_vocab_size=t.vocab_size,
        draft_vocab_size=32000 if t.vocab_size > 32000 else t.vocab_size // 4, dtype=t.dtype,
    )  # fmt: skip


def mtp_config(t: TargetConfig) -> MTPConfig:
    """The prediction layer that a hybrid target's checkpoint brings along. Raises ValueError for other targets."""
    if not t.delta_layers:
        raise ValueError("multi-token-prediction layers come with Qwen3.5 and Qwen3.6 only")
    return MTPConfig(
        hidden_size=t.hidden_size, intermediate_size=t.intermediate_size, num_heads=t.num_heads,
        num_kv_heads=t.num_kv_heads, head_dim=t.head_dim, rms_norm_eps=t.rms_norm_eps, rope=t.rope,
        rotary_dim=t.rotary_dim, moe=t.moe and dataclasses.replace(t.moe, sparse=(True,)),
        target_hidden_size=t.hidden_size, target_num_layers=t.num_layers, target_vocab_size=t.vocab_size, dtype=t.dtype,
    )  # fmt: skip


BLOCK_DRAFTERS = {"dflash": dflash_config, "dflash2": dflash2_config}
STEP_DRAFTERS = {"eagle3": eagle3_config, "mtp": mtp_config}
DRAFTER_KINDS = (*BLOCK_DRAFTERS, *STEP_DRAFTERS)


def models(shape: str, kind: str = "dflash", num_layers: int | None = None) -> tuple[TargetConfig, DraftConfig]:
    """Configs of a target and of a drafter for it.

    Args:
      shape: one of TARGETS.
      kind: of the drafter, one of DRAFTER_KINDS.
      num_layers: cuts the target to so many layers for a quick look; the drafter keeps its size.

    Raises:
      ValueError: there is no such drafter for this shape, or not so many layers.
    """
    target = TARGETS[shape]
    if num_layers is not None:
        if not 1 <= num_layers <= target.num_layers:
            raise ValueError(f"{shape} can be cut to 1..{target.num_layers} layers, not to {num_layers}")
        moe = target.moe and dataclasses.replace(target.moe, sparse=target.moe.sparse[:num_layers])
        target = dataclasses.replace(
            target, num_layers=num_layers, sliding_windows=(None,) * num_layers, moe=moe,
            delta_layers=tuple(i for i in target.delta_layers if i < num_layers),
        )  # fmt: skip
    if kind in STEP_DRAFTERS:
        return target, STEP_DRAFTERS[kind](target)
    drafter = BLOCK_DRAFTERS[kind](shape)
    if num_layers is not None:
        taps = default_taps(num_layers, min(len(drafter.target_layer_ids), max(1, num_layers - 3)))
        drafter = dataclasses.replace(drafter, target_num_layers=num_layers, target_layer_ids=taps)
    return target, drafter


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def normal(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype, scale: float) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)


def random_params(config: TargetConfig | DraftConfig) -> Any:
    """Small normal weights in the dtype of `config`, leaf by leaf, so that no float32 copy of a model exists.

    Norms are one, and a table of token ids names the first ones.
    """

    def value(key: jax.Array, x: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.arange(x.size, dtype=x.dtype)
        return jnp.ones(x.shape, x.dtype) if len(x.shape) == 1 else normal(key, x.shape, x.dtype, 0.02)

    leaves, structure = jax.tree.flatten(abstract_params(config))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(structure, [value(key, x) for key, x in zip(keys, leaves)])
