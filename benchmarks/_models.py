"""Shapes of published models, and random weights at these shapes made on the device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ddtree_jax.config import DeltaConfig, DrafterConfig, MoEConfig, RopeConfig, TargetConfig, default_taps
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


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def normal(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype, scale: float) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)


def random_params(config: TargetConfig | DrafterConfig) -> Any:
    """Small normal weights in the dtype of `config`, leaf by leaf, so that no float32 copy of a model exists."""
    leaves, structure = jax.tree.flatten(abstract_params(config))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    values = [
        jnp.ones(x.shape, x.dtype) if len(x.shape) == 1 else normal(key, x.shape, x.dtype, 0.02)
        for key, x in zip(keys, leaves)
    ]
    return jax.tree.unflatten(structure, values)
