"""config.json of an EAGLE-3 drafter (SafeAILab, SpecForge and SGLang's layout) -> Eagle3Config, checked against its
target."""

import warnings
from collections.abc import Iterable

from convert.errors import ConversionError, ConversionWarning
from convert.fields import Fields
from convert.hf_config import head_counts, head_dim, refuse_variants
from convert.rope_config import rope_config
from ddtree_jax.config import Eagle3Config, TargetConfig, eagle3_taps
from ddtree_jax.models.abstract import check_fits

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
EMBEDDING = "embed_tokens.weight"
_TAPS = "eagle_aux_hidden_state_layer_ids"


def is_eagle3(config: Fields) -> bool:
    """By its class, or, in the first checkpoints, by a vocabulary of its own beside the name of the Llama class."""
    classes = config.data.get("architectures") or []
    return any(name in classes for name in ARCHITECTURES) or (
        classes == ["LlamaForCausalLM"] and "draft_vocab_size" in config
    )


def eagle3_config(
    config: Fields,
    tensor_names: Iterable[str],
    target: TargetConfig,
    *,
    taps: tuple[int, ...] | None = None,
    dtype: str | None = None,
) -> Eagle3Config:
    """Reads the config of an EAGLE-3 drafter.

    Args:
      config: of the drafter.
      tensor_names: of the checkpoint, without a leading "model.".
      target: what the drafter will draft for.
      taps: zero-based blocks of the target whose output it reads; None takes what the config says.
      dtype: of the converted parameters; None takes the target's.

    Raises:
      ConversionError: a variant that is not supported, taps that can be read in two ways, a misfit to the target.
    """
    classes = config.data.get("architectures")
    if len(classes) != 1:
        raise config.error("architectures", expected=f"['{ARCHITECTURES[0]}']", found=classes)
    _refuse_variants(config)
    if "rope_theta" not in config and not any(p in config for p in ("rope_parameters", "rope_scaling")):
        message = f"{config.file}: rope_theta: missing, 10000 is assumed"
        warnings.warn(message, ConversionWarning, stacklevel=3)
    heads, kv_heads = head_counts(config, default_to_heads=True)
    result = Eagle3Config(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim(config, heads, None),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope_config(config),
        target_layer_ids=taps or _taps(config, target.num_layers),
        target_hidden_size=config.integer("target_hidden_size", target.hidden_size),
        target_num_layers=config.integer("num_target_layers", target.num_layers),
        target_vocab_size=config.integer("vocab_size"),
        draft_vocab_size=config.integer("draft_vocab_size"),
        own_embedding=EMBEDDING in tensor_names,
        dtype=dtype or target.dtype,
    )
    if len(result.target_layer_ids) != 3:
        raise config.error(_TAPS, expected="three blocks", found=list(result.target_layer_ids))
    try:
        check_fits(result, target)
    except ValueError as error:
        raise ConversionError(f"{config.file}: {error}") from None
    return result


def _refuse_variants(config: Fields) -> None:
    """Settings that change the mathematics."""
    refuse_variants(config)
    config.only("num_hidden_layers", (1,), 1)
    config.only("tie_word_embeddings", (False,), False)
    if config.flag("use_sliding_window", True):
        config.only("sliding_window", (None,), None)
    for key in ("attention_bias", "bias", "norm_before_residual", "norm_before_fc", "fc_norm"):
        config.only(key, (False,), False)
    config.nested("eagle_config").only("use_aux_hidden_state", (True,), True)


def _taps(config: Fields, layers: int) -> tuple[int, ...]:
    """The default, or what is listed if it is the default. Engines count differently: to SGLang an id is the block
    whose output is read, to vLLM the block that it enters. Other lists are never guessed."""
    default = eagle3_taps(layers)
    inner = config.nested("eagle_config")
    place = inner if _TAPS in inner else config
    listed = place.integers(_TAPS, default)
    if listed not in (default, tuple(i + 1 for i in default)):
        expected = f"{list(default)} (whose output is read) or {[i + 1 for i in default]} (which it enters)"
        raise place.error(_TAPS, expected=f"blocks {expected}, or --taps to say which", found=list(listed))
    return default
