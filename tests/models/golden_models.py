"""The golden checkpoints, loaded for the tests of this folder. See ../goldens/README.md."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from ddtree_jax.config import DrafterConfig, RopeConfig, TargetConfig

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
TARGETS = sorted(p.name for p in (GOLDENS / "models").iterdir())
DRAFTERS = sorted(p.name for p in (GOLDENS / "drafters").iterdir()) if (GOLDENS / "drafters").exists() else []


def _rope(hf):
    p = hf.get("rope_parameters") or dict(rope_theta=hf["rope_theta"], **(hf.get("rope_scaling") or {}))
    names = {"rope_type": "kind", "rope_theta": "theta", "original_max_position_embeddings": "original_max_position"}
    return RopeConfig(**{names.get(k, k): v for k, v in p.items()})


def _layers(t, n, prefix, drafter):
    out = {}
    for i in range(n):
        def get(name, kind="weight"):
            return t.get(f"{prefix}layers.{i}.{name}.{kind}")
        def lin(*names):
            d = {"weight": np.concatenate([get(x) for x in names])}
            if get(names[0], "bias") is not None:
                d["bias"] = np.concatenate([get(x, "bias") for x in names])
            return d
        a = "self_attn."
        attn = {"o_proj": lin(a + "o_proj")}
        if drafter:
            attn["q_proj"] = lin(a + "q_proj")
            attn["kv_proj"] = lin(a + "k_proj", a + "v_proj")
        else:
            attn["qkv_proj"] = lin(a + "q_proj", a + "k_proj", a + "v_proj")
        for x in ("q_norm", "k_norm"):
            if get(a + x) is not None:
                attn[x] = {"weight": get(a + x)}
        out[f"layers_{i}"] = {
            "self_attn": attn,
            "input_layernorm": {"weight": get("input_layernorm")},
            "post_attention_layernorm": {"weight": get("post_attention_layernorm")},
            "mlp": {"gate_up_proj": lin("mlp.gate_proj", "mlp.up_proj"), "down_proj": lin("mlp.down_proj")},
        }
    return out


@functools.cache
def target(name):
    f = GOLDENS / "models" / name
    hf = json.loads((f / "config.json").read_text())
    t = load_file(f / "model.safetensors")
    n = hf["num_hidden_layers"]
    fam = hf["model_type"]
    types = hf.get("layer_types") or ["full_attention"] * n
    c = TargetConfig(
        architecture=fam, vocab_size=hf["vocab_size"], hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"], num_layers=n, num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"], head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        rms_norm_eps=hf["rms_norm_eps"], rope=_rope(hf), qk_norm=fam == "qwen3",
        qkv_bias=fam == "qwen2" or hf.get("attention_bias", False), o_bias=hf.get("attention_bias", False),
        tie_embeddings=hf["tie_word_embeddings"],
        sliding_windows=tuple(hf["sliding_window"] if x == "sliding_attention" else None for x in types),
        max_position=hf["max_position_embeddings"], stop_token_ids=(2,), dtype="float32",
    )
    p = _layers(t, n, "model.", False)
    p["embed"] = {"weight": t["model.embed_tokens.weight"]}
    p["norm"] = {"weight": t["model.norm.weight"]}
    if not c.tie_embeddings:
        p["lm_head"] = {"weight": t["lm_head.weight"]}
    return c, jax.tree.map(jnp.asarray, p)


@functools.cache
def golden(kind, name):
    with np.load(GOLDENS / kind / name / "golden.npz") as data:
        return dict(data)
