"""Writes a drafter as a Hugging Face folder in the z-lab layout, which `python -m convert drafter` reads back."""

import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from convert.drafter_formats import ARCHITECTURE, ARCHITECTURE_2
from convert.errors import ConversionError, mismatch
from convert.names import parameters
from ddtree_jax.config import DrafterConfig, RopeConfig


def export_drafter(
    config: DrafterConfig,
    params: Mapping[str, Any],
    out_dir: str | Path,
    *,
    dtype: str = "bfloat16",
    max_position_embeddings: int = 40960,
) -> None:
    """Writes config.json and model.safetensors; the folder appears only when it is complete.

    Args:
      config, params: a drafter; `params` is the Flax "params" collection.
      out_dir: folder to create; it must not exist.
      dtype: of the tensors. Parameters in this dtype come back bit for bit, others are rounded to it.
      max_position_embeddings: for other readers; the layout wants it and nothing here depends on it.

    Raises:
      ConversionError: `out_dir` exists, a parameter is missing or mis-shaped, or the layout cannot express `config`.
    """
    out = Path(os.path.abspath(out_dir))
    if os.path.lexists(out):
        raise ConversionError(f"{out}: already exists")
    description = z_lab_config(config, dtype=dtype, max_position_embeddings=max_position_embeddings)
    tensors = z_lab_tensors(config, params, dtype)
    temporary = out.parent / f".{out.name}.writing-{secrets.token_hex(4)}"
    try:
        temporary.mkdir(parents=True)
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        os.rename(temporary, out)
    except OSError as error:
        raise ConversionError(f"{error.filename or out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def z_lab_tensors(config: DrafterConfig, params: Mapping[str, Any], dtype: str) -> dict[str, np.ndarray]:
    """The parameter tree under z-lab names, fused projections taken apart (views where the dtype is the same)."""
    tensors: dict[str, np.ndarray] = {}
    for parameter in parameters(config):
        leaf: Any = params
        for key in parameter.path.split("/"):
            if not isinstance(leaf, Mapping) or key not in leaf:
                raise mismatch("params", parameter.path, expected=f"an array of shape {parameter.shape}", found="none")
            leaf = leaf[key]
        if tuple(leaf.shape) != parameter.shape:
            raise mismatch("params", f"{parameter.path}: shape", expected=parameter.shape, found=tuple(leaf.shape))
        array = np.asarray(leaf).astype(dtype, copy=False)
        row = 0
        for name, shape in parameter.sources:
            tensors[name] = np.ascontiguousarray(array[row : row + shape[0]])
            row += shape[0]
    return tensors


def z_lab_config(config: DrafterConfig, *, dtype: str, max_position_embeddings: int) -> dict[str, Any]:
    """The config.json of a drafter."""
    sliding = [window is not None for window in config.sliding_windows]
    window_sizes = sorted({window for window in config.sliding_windows if window is not None})
    if len(window_sizes) > 1:
        raise mismatch("config", "sliding_windows", expected="one size for all layers", found=window_sizes)
    result: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": dtype,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "max_position_embeddings": max_position_embeddings,
        "vocab_size": config.target_vocab_size,
        "num_target_layers": config.target_num_layers,
        "block_size": config.block_size,
        "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
        "use_sliding_window": any(sliding),
        "sliding_window": window_sizes[0] if window_sizes else None,
        "tie_word_embeddings": False,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "output_multiplier": config.output_multiplier,
            "final_logit_softcapping": config.logit_softcap,
            "input_embedding_scale": config.embedding_scale,
        },
    }
    if list(config.causal) != sliding:
        # The layout's default is "sliding layers are causal"; otherwise it has one switch for all layers.
        if len(set(config.causal)) != 1:
            expected = "all equal, or true exactly where a layer slides"
            raise mismatch("config", "causal", expected=expected, found=list(config.causal))
        result["is_causal"] = config.causal[0]
    if config.target_hidden_size != config.hidden_size:
        result["target_hidden_size"] = config.target_hidden_size
    if config.conv_taps or config.selector_rank:
        result["architectures"] = [ARCHITECTURE_2]
        result["dflash_config"] |= {
            "conv_kernel_size": config.conv_taps,
            "conv_group_size": config.conv_group_size,
            "selector_rank": config.selector_rank,
            "selector_top_k": config.selector_top_k,
        }
    if config.draft_vocab_size is not None:
        expected = "none (a head has all tokens in this layout)"
        raise mismatch("config", "draft_vocab_size", expected=expected, found=config.draft_vocab_size)
    if config.sample_from_anchor or config.own_embedding or config.own_head:
        result["sample_from_anchor"] = config.sample_from_anchor  # own tables make a reader doubt where it is silent
    return result


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    names = {"factor": "factor"}
    if rope.kind == "llama3":
        names |= {"original_max_position": "original_max_position_embeddings"}
        names |= {"low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"}
    if rope.kind == "yarn":
        names |= {"original_max_position": "original_max_position_embeddings"}
        names |= {k: k for k in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")}
    values = dataclasses.asdict(rope)
    return {"rope_type": rope.kind} | {new: values[k] for k, new in names.items() if values[k] is not None}
