"""Tiny Hugging Face folders with random weights, written without the code under test."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 16, 24, 4, 2, 8, 40
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
CLASSES |= {"qwen3_moe": "Qwen3MoeForCausalLM"}
EXPERTS, EXPERT_SIZE = 4, 12
MOE = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_SIZE, "norm_topk_prob": True}


def target_json(architecture: str, **changes) -> dict:
    config = {
        "architectures": [CLASSES[architecture]],
        "model_type": architecture,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "eos_token_id": 3,
        "torch_dtype": "bfloat16",
    }
    return {**config, **(MOE if architecture == "qwen3_moe" else {}), **changes}


def drafter_json(**changes) -> dict:
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "num_target_layers": LAYERS,
        "block_size": 4,
        "dtype": "bfloat16",
        "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 1]},
    }
    return {**config, **changes}


def _layer(prefix: str, *, norms: bool, qkv_bias: bool, o_bias: bool) -> dict[str, tuple[int, ...]]:
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (query, HIDDEN),
        "self_attn.k_proj.weight": (key, HIDDEN),
        "self_attn.v_proj.weight": (key, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, query),
        "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }
    if norms:
        shapes |= {"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)}
    if qkv_bias:
        shapes |= {
            "self_attn.q_proj.bias": (query,), "self_attn.k_proj.bias": (key,), "self_attn.v_proj.bias": (key,),
        }  # fmt: skip
    if o_bias:
        shapes |= {"self_attn.o_proj.bias": (HIDDEN,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def _with_experts(prefix: str, layer: dict[str, tuple[int, ...]], fused: bool) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer with a router and experts for its MLP, each expert apart or all in one tensor."""
    mlp = f"{prefix}mlp."
    shapes = {name: shape for name, shape in layer.items() if not name.startswith(mlp)}
    shapes[f"{mlp}gate.weight"] = (EXPERTS, HIDDEN)
    if fused:
        shapes[f"{mlp}experts.gate_up_proj"] = (EXPERTS, 2 * EXPERT_SIZE, HIDDEN)
        shapes[f"{mlp}experts.down_proj"] = (EXPERTS, HIDDEN, EXPERT_SIZE)
        return shapes
    for j in range(EXPERTS):
        for name in ("gate_proj", "up_proj"):
            shapes[f"{mlp}experts.{j}.{name}.weight"] = (EXPERT_SIZE, HIDDEN)
        shapes[f"{mlp}experts.{j}.down_proj.weight"] = (HIDDEN, EXPERT_SIZE)
    return shapes


def _random(shapes: dict[str, tuple[int, ...]], seed: int, dtype) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}


def target_tensors(
    config: dict, seed: int = 0, dtype=ml_dtypes.bfloat16, *, fused_experts: bool = False
) -> dict[str, np.ndarray]:
    kind, bias = config["model_type"], config.get("attention_bias", False)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        qkv_bias, o_bias = bias or kind == "qwen2", bias and kind != "qwen2"
        prefix = f"model.layers.{i}."
        layer = _layer(prefix, norms=kind.startswith("qwen3"), qkv_bias=qkv_bias, o_bias=o_bias)
        sparse = kind == "qwen3_moe" and i not in config.get("mlp_only_layers", ())
        shapes |= _with_experts(prefix, layer, fused_experts) if sparse else layer
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return _random(shapes, seed, dtype)


def drafter_tensors(config: dict, seed: int = 1, dtype=ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    bias = config.get("attention_bias", False)
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= _layer(f"layers.{i}.", norms=True, qkv_bias=bias, o_bias=bias)
    return _random(shapes, seed, dtype)


def tokenizer_json(size: int = VOCAB) -> str:
    vocab = {chr(ord("a") + i) if i < 26 else f"<{i}>": i for i in range(size)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.add_special_tokens(["<0>" if size < 26 else f"<{size - 1}>"])
    return backend.to_str()


def write_folder(
    folder: Path, config: dict, tensors: dict[str, np.ndarray], *, shards: int = 1, tokenizer: bool = True
) -> Path:
    """config.json, safetensors in `shards` files (with an index from two on) and, for targets, a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        files = {name: f"model-{1 + i % shards:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(tensors)}
        for file in set(files.values()):
            save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    if tokenizer:
        (folder / "tokenizer.json").write_text(tokenizer_json())
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "d"}))
    return folder


# Hybrids: key heads, value heads, their dimensions and the taps of the convolution, all different.
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 2, 6, 4, 3, 4
HYBRID_CLASSES = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


def hybrid_json(architecture: str, **changes) -> dict:
    """Two layers: Gated DeltaNet, then attention. Changes apply to the text model's settings."""
    text = {k: v for k, v in target_json("qwen3").items() if k not in ("architectures", "model_type", "rope_theta")}
    text |= {
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": KEY_DIM,
        "linear_value_head_dim": VALUE_DIM,
        "linear_conv_kernel_dim": TAPS,
    }
    if architecture == "qwen3_next":
        text["num_experts"] = 0
    outer = {"architectures": [HYBRID_CLASSES[architecture]], "model_type": architecture}
    if architecture != "qwen3_5":
        return {**text, **outer, **changes}
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    text["model_type"] = "qwen3_5_text"
    return {**outer, "text_config": {**text, **changes}, "vision_config": {"depth": 1}, "tie_word_embeddings": False}


def hybrid_tensors(config: dict, seed: int = 0, dtype=ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    kind, text = config["model_type"], config.get("text_config", config)
    prefix = "model.language_model." if kind == "qwen3_5" else "model."
    keys, values = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
    shapes = {f"{prefix}embed_tokens.weight": (VOCAB, HIDDEN), f"{prefix}norm.weight": (HIDDEN,)}
    layer = _layer("", norms=True, qkv_bias=False, o_bias=False) | {
        "self_attn.q_proj.weight": (2 * HEADS * HEAD_DIM, HIDDEN)
    }
    shapes |= {f"{prefix}layers.1.{name}": shape for name, shape in layer.items()}
    delta = {name: shape for name, shape in layer.items() if not name.startswith("self_attn")}
    delta |= {
        "linear_attn.conv1d.weight": (2 * keys + values, 1, TAPS),
        "linear_attn.A_log": (VALUE_HEADS,),
        "linear_attn.dt_bias": (VALUE_HEADS,),
        "linear_attn.norm.weight": (VALUE_DIM,),
        "linear_attn.out_proj.weight": (HIDDEN, values),
    }
    packed = {"qkvz": 2 * keys + 2 * values, "ba": 2 * VALUE_HEADS}
    split = {"qkv": 2 * keys + values, "z": values, "b": VALUE_HEADS, "a": VALUE_HEADS}
    for name, rows in (packed if kind == "qwen3_next" else split).items():
        delta[f"linear_attn.in_proj_{name}.weight"] = (rows, HIDDEN)
    shapes |= {f"{prefix}layers.0.{name}": shape for name, shape in delta.items()}
    if not text["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    tensors = _random(shapes, seed, dtype)
    name = f"{prefix}layers.0.linear_attn.A_log"
    # Checkpoints keep this one in float32, in digits that bfloat16 has not.
    tensors[name] = np.log(np.random.default_rng(seed).uniform(0.01, 16, VALUE_HEADS)).astype(np.float32)
    return tensors
