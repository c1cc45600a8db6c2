"""Writes tiny random DFlash drafters and an independent float32 evaluation of them (arXiv 2602.06036), in numpy only.

One of them is a DFlash 2 (inco.ai, August 2026): dynamic convolutions in every layer and a candidate selector.

Nothing here knows of a cache: every layer projects the whole context and the whole block again, and the attention mask
is built from absolute positions. Nothing is imported from the package under test. Each drafter becomes a folder

    drafters/<name>/config.json, model.safetensors    in the names of the published checkpoints
    drafters/<name>/golden.npz                        see `golden_arrays`

All of them belong to the golden target "qwen3" (run make_model_goldens.py first), whose embedding and head they use.
"""

import itertools
import json
import pathlib

import numpy as np
from safetensors.numpy import load_file, save_file

HERE = pathlib.Path(__file__).parent
TARGET = HERE / "models" / "qwen3"
MASK_TOKEN = 95
CONTEXT, MORE = 21, 9  # tokens before the first and the second block
F32 = np.float32


def config_json(target: dict, *, layers: int, taps: list[int], dflash: dict, top: dict) -> dict:
    """A drafter's config.json: `dflash` goes into "dflash_config", `top` beside it."""
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "dtype": "float32",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "vocab_size": target["vocab_size"],
        "max_position_embeddings": 128,
        "num_target_layers": target["num_hidden_layers"],
        "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": taps, **dflash},
        **top,
    }


def drafters(target: dict) -> dict[str, dict]:
    """Configs by folder name. Both places of block_size and both spellings of the rotary base occur in the wild."""
    full = ["full_attention"]
    old_rope = {"rope_theta": 1000000.0, "rope_scaling": None}
    new_rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return {
        "full": config_json(
            target, layers=3, taps=[0, 2], dflash={},
            top={
                "block_size": 8, "layer_types": 3 * full,
                "sliding_window": None, "use_sliding_window": False, **old_rope,
            },
        ),
        # Window 8 on a context of 21: the last slots of the block lose sight of everything but the block's end.
        "sliding": config_json(
            target, layers=2, taps=[0, 1, 3], dflash={"block_size": 6},
            top={
                "layer_types": ["sliding_attention", *full],
                "sliding_window": 8, "use_sliding_window": True, **new_rope,
            },
        ),
        "bias": config_json(
            target, layers=2, taps=[1, 2], dflash={"block_size": 5},
            top={"attention_bias": True, "layer_types": 2 * full, **new_rope},
        ),
        "scaled": config_json(
            target, layers=1, taps=[0, 1, 2],
            dflash={
                "block_size": 5, "output_multiplier": 0.6, "final_logit_softcapping": 4.0, "input_embedding_scale": 1.7,
            },
            top={"layer_types": full, **new_rope},
        ),
        # "is_causal" overrides the layers' own rule: a window, yet the block sees itself in both directions.
        "from_anchor": config_json(
            target, layers=2, taps=[0, 2], dflash={"block_size": 5},
            top={
                "sample_from_anchor": True, "is_causal": False, "layer_types": ["sliding_attention", *full],
                "sliding_window": 8, "use_sliding_window": True, **new_rope,
            },
        ),
        "second": config_json(
            target, layers=2, taps=[0, 2],
            dflash={
                "block_size": 6, "projector_type": "dflash2", "conv_kernel_size": 2, "conv_group_size": 4,
                "selector_rank": 5, "selector_top_k": 7, "output_multiplier": 0.5, "final_logit_softcapping": 3.0,
            },
            top={
                "architectures": ["DFlash2DraftModel"], "is_causal": False, "layer_types": 2 * ["sliding_attention"],
                "sliding_window": 8, "use_sliding_window": True, **new_rope,
            },
        ),
    }  # fmt: skip


def random_weights(config: dict, target: dict, rng: np.random.Generator) -> dict[str, np.ndarray]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    width = len(config["dflash_config"]["target_layer_ids"]) * target["hidden_size"]

    def matrix(rows, columns, gain=1.0):
        return (gain * rng.standard_normal((rows, columns)) / columns**0.5).astype(F32)

    def norm(size):
        return (1 + 0.2 * rng.standard_normal(size)).astype(F32)

    weights = {"fc.weight": matrix(hidden, width), "hidden_norm.weight": norm(hidden), "norm.weight": norm(hidden)}
    for i in range(config["num_hidden_layers"]):
        layer, attention = f"layers.{i}.", f"layers.{i}.self_attn."
        weights[layer + "input_layernorm.weight"] = norm(hidden)
        weights[layer + "post_attention_layernorm.weight"] = norm(hidden)
        weights[layer + "mlp.gate_proj.weight"] = matrix(inner, hidden)
        weights[layer + "mlp.up_proj.weight"] = matrix(inner, hidden)
        weights[layer + "mlp.down_proj.weight"] = matrix(hidden, inner)
        weights[attention + "q_norm.weight"] = 1.5 * norm(head_dim)  # peaked attention
        weights[attention + "k_norm.weight"] = norm(head_dim)
        shapes = {"q_proj": (q_rows, hidden), "k_proj": (kv_rows, hidden), "v_proj": (kv_rows, hidden)}
        for name, shape in {**shapes, "o_proj": (hidden, q_rows)}.items():
            weights[f"{attention}{name}.weight"] = matrix(*shape)
            if config["attention_bias"]:
                weights[f"{attention}{name}.bias"] = (0.3 * rng.standard_normal(shape[0])).astype(F32)
    dflash = config["dflash_config"]
    if dflash.get("conv_kernel_size"):
        taps, groups = dflash["conv_kernel_size"], hidden // dflash["conv_group_size"]
        for i, name in itertools.product(range(config["num_hidden_layers"]), ("attention_conv", "mlp_conv")):
            base = np.zeros((2, taps, hidden))
            base[:, 0] = 1
            base += 0.3 * rng.standard_normal(base.shape)
            weights[f"layers.{i}.{name}.base_kernel"] = base.astype(F32)
            weights[f"layers.{i}.{name}.kernel_projection.weight"] = matrix(2 * taps * groups, hidden, 0.5)
        rank = dflash["selector_rank"]
        for name in ("predecessor_codebook", "successor_codebook"):
            weights[f"candidate_selector.{name}"] = (0.6 * rng.standard_normal((config["vocab_size"], rank))).astype(
                F32
            )
        weights["candidate_selector.hidden_projection.weight"] = matrix(rank, hidden)
    return weights


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + F32(eps)))


def rotate(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Rotary embedding of x [heads, rows, D] as complex numbers: dimension j is real, j + D/2 imaginary."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1).astype(F32)


def visible(config: dict, layer: int, start: int, slots: int) -> np.ndarray:
    """[slots, start + slots] bool: which keys of [context, block] each slot of the block attends."""
    sliding = config["layer_types"][layer] == "sliding_attention"
    causal = config.get("is_causal", sliding)
    query, key = np.arange(start, start + slots)[:, None], np.arange(start + slots)[None, :]
    seen = np.ones((slots, start + slots), bool)
    if causal:
        seen &= key <= query
    if sliding:
        seen &= np.abs(query - key) < config["sliding_window"]
    return seen


def convolutions(config: dict, w: dict, name: str, n: np.ndarray):
    """The two convolutions around a sublayer, as functions of [S, E], their coefficients predicted from its input n."""
    dflash = config["dflash_config"]
    taps = dflash.get("conv_kernel_size", 0)
    if not taps:
        return (lambda x: x,) * 2
    slots, size = n.shape
    base = w[f"{name}.base_kernel"]
    predicted = (n @ w[f"{name}.kernel_projection.weight"].T).reshape(slots, 2, taps, -1)

    def of(side):
        def apply(x):
            y = np.zeros_like(x)
            for i, t, c in itertools.product(range(slots), range(taps), range(size)):
                if i >= t:  # nothing stands before the block
                    y[i, c] += (base[side, t, c] + predicted[i, side, t, c // dflash["conv_group_size"]]) * x[i - t, c]
            return y

        return apply

    return of(0), of(1)


def draft(config: dict, w: dict, features: np.ndarray, block: np.ndarray) -> np.ndarray:
    """One pass for one slot: features [start, T * E] before the anchor, embeddings [S, E] -> hidden [S, E]."""
    start, slots = len(features), len(block)
    eps, head_dim = config["rms_norm_eps"], config["head_dim"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    context = rms_norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    everywhere = np.arange(start + slots)

    x = block
    for i in range(config["num_hidden_layers"]):
        prefix = f"layers.{i}."

        def project(name, rows, prefix=prefix):
            y = rows @ w[f"{prefix}self_attn.{name}.weight"].T
            return y + w.get(f"{prefix}self_attn.{name}.bias", F32(0))

        def heads(y):
            return y.reshape(len(y), -1, head_dim).swapaxes(0, 1)

        h = rms_norm(x, w[prefix + "input_layernorm.weight"], eps)
        before, after = convolutions(config, w, prefix + "attention_conv", h)
        h = before(h)
        # The context enters as it is; only the block goes through the layer's input norm.
        rows = np.concatenate([context, h])
        q = rms_norm(heads(project("q_proj", h)), w[prefix + "self_attn.q_norm.weight"], eps)
        k = rms_norm(heads(project("k_proj", rows)), w[prefix + "self_attn.k_norm.weight"], eps)
        v = heads(project("v_proj", rows))
        q, k = rotate(q, everywhere[start:], theta), rotate(k, everywhere, theta)
        scores = q @ np.repeat(k, group, axis=0).swapaxes(1, 2) * F32(head_dim**-0.5)
        scores = np.where(visible(config, i, start, slots), scores, F32(-np.inf))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = (weights @ np.repeat(v, group, axis=0)).swapaxes(0, 1).reshape(slots, -1)
        x = x + after(project("o_proj", attended))

        n = rms_norm(x, w[prefix + "post_attention_layernorm.weight"], eps)
        before, after = convolutions(config, w, prefix + "mlp_conv", n)
        n = before(n)
        gate, up = n @ w[prefix + "mlp.gate_proj.weight"].T, n @ w[prefix + "mlp.up_proj.weight"].T
        x = x + after((gate / (1 + np.exp(-gate)) * up) @ w[prefix + "mlp.down_proj.weight"].T)
    return rms_norm(x, w["norm.weight"], eps)


def golden_arrays(config: dict, weights: dict, target: dict, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Two slots, two blocks each: one after 21 (slot 0) or 12 (slot 1) context tokens, one after 9 tokens more.

    features [2, 30, T * E]; lengths [2 slots, 2 blocks]: context tokens before each block; anchors [2, 2];
    hidden [2, 2, S, E] after the final norm; logits [2, 2, S, V];
    log_probs [2, 2, L, V]: of the tokens at depths 1..L after the anchor. With a selector also
    candidates, scores, walk: see `selected`.
    """
    dflash = config["dflash_config"]
    size = dflash.get("block_size") or config["block_size"]
    embedding, head = target["model.embed_tokens.weight"], target["lm_head.weight"]
    width = weights["fc.weight"].shape[1]
    features = rng.standard_normal((2, CONTEXT + MORE, width)).astype(F32)
    lengths = np.array([[CONTEXT, CONTEXT + MORE], [12, 12 + MORE]])
    anchors = rng.integers(3, MASK_TOKEN, (2, 2))
    hidden = np.empty((2, 2, size, config["hidden_size"]), F32)
    for slot, j in np.ndindex(2, 2):
        tokens = np.array([anchors[slot, j]] + [MASK_TOKEN] * (size - 1))
        block = embedding[tokens] * F32(dflash.get("input_embedding_scale", 1.0))
        hidden[slot, j] = draft(config, weights, features[slot, : lengths[slot, j]], block)
    logits = hidden @ head.T * F32(dflash.get("output_multiplier", 1.0))
    if cap := dflash.get("final_logit_softcapping"):
        logits = np.tanh(logits / F32(cap)) * F32(cap)
    # Slot k predicts its own position, and slot 0 nothing; sampling from the anchor, slot k predicts the next position.
    drafted = logits if config.get("sample_from_anchor") else logits[:, :, 1:]
    wide = drafted.astype(np.float64)
    log_probs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    arrays = dict(
        features=features, lengths=lengths, anchors=anchors, hidden=hidden, logits=logits,
        log_probs=log_probs.astype(F32),
    )  # fmt: skip
    if dflash.get("selector_rank"):
        arrays |= selected(config, weights, hidden[:, :, 1:], drafted, anchors)
    return arrays


def selected(config: dict, w: dict, hidden: np.ndarray, logits: np.ndarray, anchors: np.ndarray) -> dict:
    """What the candidate selector makes of two slots' two blocks.

    candidates [2, 2, L, K], best first; scores [2, 2, L, K, K] of a candidate (last axis) after a candidate of the
    depth before, at the first depth after the anchor; walk [2, 2, L]: the token of the highest score after the token
    just picked.
    """
    before, after = w["candidate_selector.predecessor_codebook"], w["candidate_selector.successor_codebook"]
    projection = w["candidate_selector.hidden_projection.weight"]
    count = config["dflash_config"]["selector_top_k"]
    candidates = np.argsort(-logits, axis=-1)[..., :count]
    scores = np.empty((*candidates.shape, count), F32)
    walk = np.empty(candidates.shape[:-1], int)
    for slot, j in np.ndindex(2, 2):
        picked = anchors[slot, j]
        for depth, (own, h, z) in enumerate(zip(candidates[slot, j], hidden[slot, j], logits[slot, j], strict=True)):
            h = projection @ h

            def score(p, h=h, own=own, z=z):
                return np.array([z[c] + np.sum(before[p] * h * after[c]) for c in own], F32)

            above = candidates[slot, j, depth - 1] if depth else [anchors[slot, j]] * count
            scores[slot, j, depth] = [score(p) for p in above]
            picked = own[np.argmax(score(picked))]
            walk[slot, j, depth] = picked
    return dict(candidates=candidates, scores=scores, walk=walk)


def main() -> None:
    target = json.loads((TARGET / "config.json").read_text())
    target_weights = load_file(TARGET / "model.safetensors")
    for seed, (name, config) in enumerate(drafters(target).items()):
        rng = np.random.default_rng(100 + seed)
        weights = random_weights(config, target, rng)
        arrays = golden_arrays(config, weights, target_weights, rng)
        folder = HERE / "drafters" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        np.savez_compressed(folder / "golden.npz", **arrays)
        print(f"{name}: |logits| max {np.abs(arrays['logits']).max():.1f}, std {arrays['logits'].std():.2f}")


if __name__ == "__main__":
    main()
