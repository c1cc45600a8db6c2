"""config.json of a Hugging Face model -> TargetConfig."""

import dataclasses
from pathlib import Path

from convert.errors import mismatch
from convert.fields import Fields
from convert.hybrid_config import hybrid_settings
from convert.rope_config import rope_config
from ddtree_jax.config import MoEConfig, TargetConfig

DTYPES = ("bfloat16", "float32", "float16")
LAYER_KINDS = ("full_attention", "sliding_attention")
# Far more than any published model has; what is listed one by one must end before memory does.
MAX_LAYERS, MAX_EXPERTS = 1024, 4096


@dataclasses.dataclass(frozen=True)
class _Architecture:
    """What the class of an architecture fixes and its config does not say.

    Attributes:
      class_name: the only entry accepted in `architectures`.
      qk_norm: per-head norms on queries and keys.
      qkv_bias, o_bias: fixed, or None where `attention_bias` decides.
      head_dim: default where the config has none; None means hidden_size / num_attention_heads.
      windows: whether layers may have sliding windows.
      experts: layers may have a mixture of experts.
      hybrid: most layers are Gated DeltaNet.
      nested: the text model's settings lie inside `text_config`.
    """

    class_name: str
    qk_norm: bool = False
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    head_dim: int | None = None
    windows: bool = True
    experts: bool = False
    hybrid: bool = False
    nested: bool = False


_HYBRID = dict(qk_norm=True, head_dim=256, windows=False, hybrid=True)
ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", windows=False),
    "qwen2": _Architecture("Qwen2ForCausalLM", qkv_bias=True, o_bias=False),
    "qwen3": _Architecture("Qwen3ForCausalLM", qk_norm=True, head_dim=128),
    # Its class takes hidden_size / num_attention_heads where the config names no head_dim.
    "qwen3_moe": _Architecture("Qwen3MoeForCausalLM", qk_norm=True, windows=False, experts=True),
    "qwen3_5": _Architecture("Qwen3_5ForConditionalGeneration", nested=True, **_HYBRID),
    "qwen3_5_text": _Architecture("Qwen3_5ForCausalLM", **_HYBRID),
    "qwen3_5_moe": _Architecture("Qwen3_5MoeForConditionalGeneration", nested=True, experts=True, **_HYBRID),
    "qwen3_5_moe_text": _Architecture("Qwen3_5MoeForCausalLM", experts=True, **_HYBRID),
    "qwen3_next": _Architecture("Qwen3NextForCausalLM", experts=True, **_HYBRID),
}


def target_config(folder: Path, dtype: str | None = None) -> TargetConfig:
    """Reads the config of a target.

    Args:
      folder: holds config.json and, usually, generation_config.json.
      dtype: of the converted parameters; None keeps the checkpoint's own.

    Raises:
      ConversionError: an architecture, activation, rope kind or quantisation that is not supported, or a bad value.
    """
    config = Fields.read(folder / "config.json")
    name = config.only("model_type", tuple(ARCHITECTURES), None)
    architecture = ARCHITECTURES[name]
    classes = config.data.get("architectures")
    if classes is not None and classes != [architecture.class_name]:
        hint = " (a drafter: python -m convert drafter)" if "DFlash" in str(classes) else ""
        raise config.error("architectures", expected=[architecture.class_name], found=f"{classes}{hint}")
    refuse_variants(config)
    if architecture.nested:
        config = text_config(config)
        refuse_variants(config)
    bias = config.flag("attention_bias", False)
    layers = layer_count(config)
    heads, kv_heads = head_counts(config, default_to_heads=name == "llama")
    windows = (None,) * layers
    if architecture.windows:
        windows = sliding_windows(config, layers)
    elif architecture.experts and not architecture.hybrid:
        # Its class would let every layer slide, whatever `max_window_layers` says; no published checkpoint does.
        config.only("use_sliding_window", (False,), False)
    else:
        config.only("sliding_window", (None,), None)
    size = head_dim(config, heads, architecture.head_dim)
    moe = mixture_of_experts(config, layers, hybrid=architecture.hybrid) if architecture.experts else None
    # A model whose layers all have experts need not say how wide a dense block would be.
    unused = moe.intermediate_size if moe and all(moe.sparse) else None
    return TargetConfig(
        architecture=name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size", unused),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope_config(config, partial=architecture.hybrid),
        qk_norm=architecture.qk_norm,
        qkv_bias=bias if architecture.qkv_bias is None else architecture.qkv_bias,
        o_bias=bias if architecture.o_bias is None else architecture.o_bias,
        tie_embeddings=config.flag("tie_word_embeddings", False),
        sliding_windows=windows,
        max_position=config.integer("max_position_embeddings"),
        stop_token_ids=stop_token_ids(folder, config),
        moe=moe,
        dtype=dtype or stored_dtype(config),
        **(hybrid_settings(config, layers, size) if architecture.hybrid else {}),
    )


def text_config(config: Fields) -> Fields:
    """The settings of the text model inside those of a model with vision; what it leaves open holds for both."""
    text = config.nested("text_config")
    key = "tie_word_embeddings"
    if key in config and key in text and config.flag(key) != text.flag(key):
        raise text.error(key, expected=f"{config.data[key]}, as outside of text_config", found=text.data[key])
    shared = ["tie_word_embeddings", "eos_token_id"]
    if "dtype" not in text and "torch_dtype" not in text:
        shared += ["dtype", "torch_dtype"]
    settings = text.data | {k: config.data[k] for k in shared if k not in text and k in config}
    return Fields(config.file, settings, text.prefix)


def refuse_variants(config: Fields) -> None:
    """Raises ConversionError on settings that change the mathematics and are not implemented."""
    config.only("hidden_act", ("silu",), "silu")
    config.only("mlp_bias", (False,), False)
    if "quantization_config" in config:
        method = config.nested("quantization_config").data.get("quant_method")
        raise config.error("quantization_config", expected="none (unquantised weights)", found=repr(method))


def layer_count(config: Fields) -> int:
    """How many layers there are."""
    return config.integer("num_hidden_layers", most=MAX_LAYERS)


def head_counts(config: Fields, *, default_to_heads: bool) -> tuple[int, int]:
    """(query heads, key/value heads); the second must divide the first."""
    heads = config.integer("num_attention_heads")
    if default_to_heads:
        kv_heads = config.integer("num_key_value_heads", heads)
    else:
        kv_heads = config.integer("num_key_value_heads")
    if heads % kv_heads:
        raise config.error("num_key_value_heads", expected=f"a divisor of {heads} heads", found=kv_heads)
    return heads, kv_heads


def head_dim(config: Fields, heads: int, default: int | None) -> int:
    """Size of a head, even (halves rotate against each other)."""
    hidden = config.integer("hidden_size")
    if "head_dim" not in config and default is None and hidden % heads:
        raise config.error("hidden_size", expected=f"a multiple of {heads} heads", found=hidden)
    size = config.integer("head_dim", default or hidden // heads)
    if size % 2:
        raise config.error("head_dim", expected="an even number", found=size)
    return size


def sliding_windows(config: Fields, layers: int) -> tuple[int | None, ...]:
    """Window of each layer, None for full attention.

    With `layer_types` they decide; without, `use_sliding_window` makes the layers from `max_window_layers` on slide.
    """
    kinds = config.strings("layer_types", layers)
    if kinds is not None:
        for i, kind in enumerate(kinds):
            if kind not in LAYER_KINDS:
                raise config.error(f"layer_types[{i}]", expected=" or ".join(LAYER_KINDS), found=repr(kind))
        if "sliding_attention" not in kinds:
            return (None,) * layers
        if not config.flag("use_sliding_window", True):
            raise config.error("use_sliding_window", expected="true (layer_types has sliding layers)", found="false")
        window = config.integer("sliding_window")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if not config.flag("use_sliding_window", False) or "sliding_window" not in config:
        return (None,) * layers
    window, first = config.integer("sliding_window"), config.integer("max_window_layers", 28, least=0)
    return tuple(window if i >= first else None for i in range(layers))


def mixture_of_experts(config: Fields, layers: int, *, hybrid: bool) -> MoEConfig | None:
    """The experts of Qwen3-MoE, or of a hybrid, which has a shared one beside them; None where no layer has any.

    A layer is sparse if `mlp_only_layers` does not list it and its one-based number is a multiple of
    `decoder_sparse_step`. Hybrids divide the weights of a token's experts by their sum unless they say otherwise.
    """
    step = config.integer("decoder_sparse_step", 1)
    dense = config.integers("mlp_only_layers", ())
    for layer in dense:
        if not 0 <= layer < layers:
            raise config.error("mlp_only_layers", expected=f"layers in 0..{layers - 1}", found=layer)
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    if not any(sparse):
        return None
    # Later writers of the format say num_local_experts.
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    experts = config.integer(key, least=0 if hybrid else 1, most=MAX_EXPERTS)
    if not experts:  # the dense models of a family whose others have experts
        return None
    _refuse_other_routers(config)
    chosen = config.integer("num_experts_per_tok")
    if chosen > experts:
        raise config.error("num_experts_per_tok", expected=f"at most the {experts} experts", found=chosen)
    return MoEConfig(
        sparse=sparse,
        num_experts=experts,
        experts_per_token=chosen,
        intermediate_size=config.integer("moe_intermediate_size"),
        renormalise=config.flag("norm_topk_prob", hybrid),
        shared_intermediate_size=config.integer("shared_expert_intermediate_size") if hybrid else 0,
    )


def _refuse_other_routers(config: Fields) -> None:
    """Raises ConversionError on the settings of routers that are not a softmax over all experts, as later families
    have them: sigmoid scores, experts chosen by group, scaled sums."""
    config.only("scoring_func", ("softmax",), "softmax")
    for key in ("n_group", "topk_group", "routed_scaling_factor"):
        config.only(key, (1,), 1)


def stop_token_ids(folder: Path, config: Fields) -> tuple[int, ...]:
    """End-of-text ids of generation_config.json, then those of config.json, each once."""
    ids: list[int] = []
    generation = folder / "generation_config.json"
    for fields in ([Fields.read(generation)] if generation.is_file() else []) + [config]:
        ids.extend(fields.integers("eos_token_id", ()))
    vocab = config.integer("vocab_size")
    for token in ids:
        if not 0 <= token < vocab:
            raise mismatch(folder / "config.json", "eos_token_id", expected=f"an id in 0..{vocab - 1}", found=token)
    return tuple(dict.fromkeys(ids))


def stored_dtype(config: Fields) -> str:
    """The dtype that the checkpoint was saved in; bfloat16 where it does not say."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    return config.only(key, DTYPES, "bfloat16")
