"""Random models, so that the whole loop can be tried and tested without a checkpoint.

A random drafter almost never agrees with its target: texts stay exact, accepted lengths stay near 1.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers

from ddtree_jax.config import (
    FIXED_DTYPES,
    DeltaConfig,
    DraftConfig,
    DrafterConfig,
    Eagle3Config,
    MoEConfig,
    MTPConfig,
    RopeConfig,
    TargetConfig,
    default_taps,
)
from ddtree_jax.loading import Drafter, Target
from ddtree_jax.models.abstract import init_params

# Compiled, `init` draws the parameters and drops the pass that it traces.
_random_params = jax.jit(init_params, static_argnums=0)


def tiny_target_config(**overrides) -> TargetConfig:
    """A Qwen3-shaped target of 3 layers, vocabulary 61 and hidden size 32, in float32."""
    values = dict(
        architecture="qwen3", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4,
        num_kv_heads=2, head_dim=8, rms_norm_eps=1e-6, rope=RopeConfig(theta=10000.0), qk_norm=True, qkv_bias=False,
        o_bias=False, tie_embeddings=False, sliding_windows=(None,) * 3, max_position=512, stop_token_ids=(60,),
        dtype="float32",
    )  # fmt: skip
    return TargetConfig(**values | overrides)


def tiny_moe(layers: int = 3, **overrides) -> MoEConfig:
    """Top 2 of 16 experts in every layer but the first, and a shared expert; a pass of few tokens touches some only."""
    values = dict(
        sparse=(False, *(True,) * (layers - 1)), num_experts=16, experts_per_token=2, intermediate_size=12,
        renormalise=True, shared_intermediate_size=20,
    )  # fmt: skip
    return MoEConfig(**values | overrides)


def tiny_hybrid_config(**overrides) -> TargetConfig:
    """A Qwen3.5-shaped target of 4 layers, the third with attention, the others Gated DeltaNet, in float32."""
    values = dict(
        architecture="qwen3_5_text", num_layers=4, sliding_windows=(None,) * 4, rotary_dim=4, zero_centred_norms=True,
        attention_gate=True, delta_layers=(0, 1, 3),
        delta=DeltaConfig(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=6),
    )  # fmt: skip
    return tiny_target_config(**values | overrides)


def tiny_drafter_config(target: TargetConfig, **overrides) -> DrafterConfig:
    """A DFlash drafter of 2 layers and 8 slots for `target`: one causal sliding layer, one full bidirectional."""
    values = dict(
        hidden_size=target.hidden_size, intermediate_size=40, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        rms_norm_eps=1e-6, rope=RopeConfig(theta=10000.0), attention_bias=False, block_size=8,
        mask_token_id=target.vocab_size - 2, target_layer_ids=(0, target.num_layers - 1),
        target_hidden_size=target.hidden_size, target_num_layers=target.num_layers,
        target_vocab_size=target.vocab_size, causal=(True, False), sliding_windows=(16, None), dtype=target.dtype,
    )  # fmt: skip
    return DrafterConfig(**values | overrides)


@functools.partial(jax.jit, static_argnums=0)
def _init(config: TargetConfig | DraftConfig, seed: int):
    """`init_params` as one program, which leaves out the pass that the parameters do not need."""
    return init_params(config, jax.random.key(seed))


def tiny_target(seed: int = 0, *, scale: float = 4.0, hybrid: bool = False, **overrides) -> Target:
    """A random target. `scale` multiplies the head, so that draws are neither uniform nor certain."""
    config = (tiny_hybrid_config if hybrid else tiny_target_config)(**overrides)
    params = _init(config, seed)
    head = "embed" if config.tie_embeddings else "lm_head"
    params = {**params, head: {"weight": params[head]["weight"] * jnp.asarray(scale, config.jax_dtype)}}
    return Target(config, params)


def tiny_drafter(target: Target, seed: int = 1, **overrides) -> Drafter:
    """A random drafter for `target`; of a reduced vocabulary the tokens are any of the target's, and what DFlash 2 adds
    does something."""
    config = tiny_drafter_config(target.config, **overrides)
    params = _init(config, seed)
    if config.conv_taps or config.selector_rank:
        params = _disturb_dflash2(params, seed)
    if config.draft_vocab_size is not None:
        ids = np.random.default_rng(seed).permutation(config.target_vocab_size)[: config.draft_vocab_size]
        params = {**params, "d2t": {"target_ids": jnp.asarray(ids, jnp.int32)}}
    return Drafter(config, params)


def _disturb_dflash2(params, seed: int):
    """Noise where an untrained DFlash 2 has identities and zeros."""
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(params))))

    def disturb(path, x):
        names, key = {entry.key for entry in path}, next(keys)
        if not names & {"base_kernel", "kernel_projection", "successor_codebook"}:
            return x
        return x + jax.random.normal(key, x.shape, x.dtype) * jnp.asarray(0.3, x.dtype)

    return jax.tree_util.tree_map_with_path(disturb, params)


def tiny_eagle3_config(target: TargetConfig, **overrides) -> Eagle3Config:
    """An EAGLE-3 drafter for `target` that knows two of three of its tokens."""
    values = dict(
        hidden_size=target.hidden_size, intermediate_size=40, num_heads=4, num_kv_heads=2, head_dim=8,
        rms_norm_eps=1e-6, rope=RopeConfig(theta=10000.0), target_layer_ids=(0, target.num_layers - 1),
        target_hidden_size=target.hidden_size, target_num_layers=target.num_layers,
        target_vocab_size=target.vocab_size, draft_vocab_size=2 * target.vocab_size // 3, depth=4, dtype=target.dtype,
    )  # fmt: skip
    return Eagle3Config(**values | overrides)


def tiny_eagle3(target: Target, seed: int = 1, **overrides) -> Drafter:
    """A random EAGLE-3 drafter for `target`; of every three tokens it leaves out the last."""
    config = tiny_eagle3_config(target.config, **overrides)
    params = _init(config, seed)
    rows = jnp.arange(config.draft_vocab_size, dtype=jnp.int32)
    offsets = jnp.minimum(rows // 2, config.target_vocab_size - config.draft_vocab_size)
    return Drafter(config, params | {"lm_head": params["lm_head"] | {"target_ids": rows + offsets}})


def tiny_mtp_config(target: TargetConfig, **overrides) -> MTPConfig:
    """A multi-token prediction layer for `target`."""
    values = dict(
        hidden_size=target.hidden_size, intermediate_size=40, num_heads=4, num_kv_heads=2, head_dim=8,
        rms_norm_eps=1e-6, rope=RopeConfig(theta=10000.0), rotary_dim=4, target_hidden_size=target.hidden_size,
        target_num_layers=target.num_layers, target_vocab_size=target.vocab_size, dtype=target.dtype,
    )  # fmt: skip
    return MTPConfig(**values | overrides)


def tiny_mtp(target: Target, seed: int = 1, **overrides) -> Drafter:
    """A random multi-token prediction layer for `target`."""
    config = tiny_mtp_config(target.config, **overrides)
    return Drafter(config, _init(config, seed))


def random_dflash(
    target: Target, *, mask_token_id: int, num_layers: int = 3, block_size: int = 16, seed: int = 0
) -> Drafter:
    """A DFlash drafter of the target's own geometry with random weights: the right cost, no skill."""
    t = target.config
    taps = default_taps(t.num_layers, min(num_layers, t.num_layers))
    config = DrafterConfig(
        hidden_size=t.hidden_size, intermediate_size=t.intermediate_size, num_layers=num_layers,
        num_heads=t.num_heads, num_kv_heads=t.num_kv_heads, head_dim=t.head_dim, rms_norm_eps=t.rms_norm_eps,
        rope=t.rope, attention_bias=False, block_size=block_size, mask_token_id=mask_token_id,
        target_layer_ids=taps, target_hidden_size=t.hidden_size, target_num_layers=t.num_layers,
        target_vocab_size=t.vocab_size, causal=(False,) * num_layers, sliding_windows=(None,) * num_layers,
        dtype=t.dtype,
    )  # fmt: skip
    return Drafter(config, _init(config, seed))


def with_dtype(target: Target, dtype: str) -> Target:
    """The same target with parameters and activations in another dtype."""

    def cast(path, x):
        return x if path[-1].key in FIXED_DTYPES else x.astype(dtype)

    params = jax.tree_util.tree_map_with_path(cast, target.params)
    return dataclasses.replace(target, config=dataclasses.replace(target.config, dtype=dtype), params=params)


TINY_SPECIAL_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>", "<|mask|>")
TINY_VOCABULARY = 256 + len(TINY_SPECIAL_TOKENS)
_TINY_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer_files() -> dict[str, bytes]:
    """Files of a byte-level tokenizer with a chat template: special tokens first (0 ends a text), then 256 bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*TINY_SPECIAL_TOKENS, *alphabet))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(TINY_SPECIAL_TOKENS))
    config = {"eos_token": "<|end|>", "chat_template": _TINY_TEMPLATE}
    return {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def write_hf_target(target: Target, folder: str | Path) -> None:
    """Writes a dense Qwen3-shaped target as a Hugging Face folder with the tiny tokenizer: something to convert."""
    c, folder = target.config, Path(folder)
    if c.moe is not None:
        raise ValueError("expected a dense target, found a mixture of experts")
    folder.mkdir(parents=True, exist_ok=True)
    query, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    tensors = {"model.embed_tokens.weight": target.params["embed"]["weight"]}
    tensors["model.norm.weight"] = target.params["norm"]["weight"]
    tensors["lm_head.weight"] = target.params["lm_head"]["weight"]
    for i in range(c.num_layers):
        layer, prefix = target.params[f"layers_{i}"], f"model.layers.{i}."
        attention, mlp = layer["self_attn"], layer["mlp"]
        fused = attention["qkv_proj"]["weight"]
        for name, rows in (("q", fused[:query]), ("k", fused[query : query + kv]), ("v", fused[query + kv :])):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = rows
        gate, up = jnp.split(mlp["gate_up_proj"]["weight"], 2)
        tensors |= {
            f"{prefix}self_attn.o_proj.weight": attention["o_proj"]["weight"],
            f"{prefix}self_attn.q_norm.weight": attention["q_norm"]["weight"],
            f"{prefix}self_attn.k_norm.weight": attention["k_norm"]["weight"],
            f"{prefix}mlp.gate_proj.weight": gate,
            f"{prefix}mlp.up_proj.weight": up,
            f"{prefix}mlp.down_proj.weight": mlp["down_proj"]["weight"],
            f"{prefix}input_layernorm.weight": layer["input_layernorm"]["weight"],
            f"{prefix}post_attention_layernorm.weight": layer["post_attention_layernorm"]["weight"],
        }
    config = dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=c.vocab_size, hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps, hidden_act="silu",
        rope_theta=c.rope.theta, max_position_embeddings=c.max_position, attention_bias=False,
        tie_word_embeddings=False, eos_token_id=list(c.stop_token_ids), torch_dtype=c.dtype,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name, content in tiny_tokenizer_files().items():
        (folder / name).write_bytes(content)
    arrays = {name: np.ascontiguousarray(value) for name, value in jax.device_get(tensors).items()}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
