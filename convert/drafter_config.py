"""config.json of a DFlash drafter in the z-lab layout -> DrafterConfig, checked against its target.

Settings lie inside `dflash_config` or, in other revisions, at the top level; the inner one wins.
"""

import warnings
from collections.abc import Iterable
from pathlib import Path

from convert.errors import ConversionError, ConversionWarning, mismatch
from convert.fields import Fields
from convert.hf_config import LAYER_KINDS, head_counts, head_dim, refuse_variants, sliding_windows
from convert.rope_config import rope_config
from ddtree_jax.config import DrafterConfig, TargetConfig, default_taps
from ddtree_jax.models.abstract import check_fits

ARCHITECTURE = "DFlashDraftModel"
# Architectures of the slot layout, whose configs do not always declare it.
ANCHOR_ARCHITECTURES = ("Qwen3DFlashModel", "Qwen3DSparkModel")
# Own copies of the target's embedding and head are the mark of the slot layout (DeepSpec).
ANCHOR_TENSORS = ("embed_tokens.weight", "lm_head.weight")
DEFAULT_BLOCK_SIZE = 16

# Settings of variants of DFlash that would be wrong to ignore: (key, values that mean "not that variant").
_VARIANTS = (
    ("projector_type", (None, "none", "dflash")),
    ("shift_label", (None, False)),
    ("attention_sink_bias", (None, False)),
    ("attention_value_scale", (None, 1.0)),
    ("conv_kernel_size", (None, 0)),
    ("selector_rank", (None, 0)),
    ("markov_head_type", (None, "none")),
    ("markov_rank", (None, 0)),
)
_INNER_KEYS = {
    "block_size", "mask_token_id", "mask_token", "target_layer_ids", "num_target_layers", "output_multiplier",
    "final_logit_softcapping", "input_embedding_scale", "causal", "use_swa", "swa_window_size", "sample_from_anchor",
    *(key for key, _ in _VARIANTS),
}  # fmt: skip


def drafter_config(
    folder: Path,
    tensor_names: Iterable[str],
    target: TargetConfig,
    *,
    sample_from_anchor: bool = False,
    dtype: str | None = None,
) -> DrafterConfig:
    """Reads the config of a drafter.

    Args:
      folder: holds config.json.
      tensor_names: of the checkpoint, without a leading "model.".
      target: what the drafter will draft for.
      sample_from_anchor: the caller says that the checkpoint has the slot layout (slot i predicts the next position).
      dtype: of the converted parameters; None takes the target's, since drafter and target work on one hidden state.

    Raises:
      ConversionError: another format or variant, the slot layout without `sample_from_anchor`, a misfit to the target.
    """
    config = Fields.read(folder / "config.json")
    inner = config.nested("dflash_config")
    _refuse_formats(config)
    _check_layout(config, inner, set(tensor_names), sample_from_anchor)
    _refuse_variants(folder, config, inner)
    refuse_variants(config)

    layers = config.integer("num_hidden_layers")
    heads, kv_heads = head_counts(config, default_to_heads=False)
    causal, windows = attention_kinds(config, layers)
    target_layers = _place(config, inner, "num_target_layers").integer("num_target_layers", target.num_layers)
    softcap = _place(config, inner, "final_logit_softcapping").number("final_logit_softcapping", 0.0)
    result = DrafterConfig(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim(config, heads, 128),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope_config(config),
        attention_bias=config.flag("attention_bias", False),
        block_size=_block_size(config, inner),
        mask_token_id=_mask_token_id(config, inner),
        target_layer_ids=_taps(config, inner, target_layers, layers),
        target_hidden_size=config.integer("target_hidden_size", target.hidden_size),
        target_num_layers=target_layers,
        target_vocab_size=config.integer("vocab_size", target.vocab_size),
        causal=causal,
        sliding_windows=windows,
        sample_from_anchor=sample_from_anchor,
        output_multiplier=_place(config, inner, "output_multiplier").number("output_multiplier", 1.0),
        logit_softcap=softcap or None,
        embedding_scale=_place(config, inner, "input_embedding_scale").number("input_embedding_scale", 1.0),
        dtype=dtype or target.dtype,
    )
    try:
        check_fits(result, target)
    except ValueError as error:
        raise ConversionError(f"{config.file}: {error}") from None
    return result


def _taps(config: Fields, inner: Fields, target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """Taps as listed, else the default: one a draft layer."""
    place = _place(config, inner, "target_layer_ids")
    if "target_layer_ids" in place:
        return place.integers("target_layer_ids")
    return default_taps(target_layers, draft_layers)


def attention_kinds(config: Fields, layers: int) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    """Causality inside the block and sliding window of each layer.

    Causality: `is_causal`, else `dflash_config.causal`, for all layers; else sliding layers are causal and full ones
    are not. `dflash_config.use_swa` makes every layer slide, not causal unless one of the two keys says so; it goes
    with absent layer_types, or with all of them full (ModelOpt writes them so).
    """
    inner = config.nested("dflash_config")
    kinds = config.strings("layer_types", layers)
    forced = config.flag("is_causal", inner.flag("causal", None))
    if inner.flag("use_swa", False):
        if kinds is not None and set(kinds) != {"full_attention"}:
            expected = f"no sliding layers beside dflash_config.use_swa, or {LAYER_KINDS[0]} for all"
            raise config.error("layer_types", expected=expected, found=list(kinds))
        window = inner.integer("swa_window_size", None) or config.integer("sliding_window")
        return (bool(forced),) * layers, (window,) * layers
    windows = sliding_windows(config, layers)
    if forced is not None:
        return (forced,) * layers, windows
    return tuple(window is not None for window in windows), windows


def _place(config: Fields, inner: Fields, key: str) -> Fields:
    """Where `key` is to be read: inside `dflash_config` if it is there, else at the top level."""
    return inner if key in inner else config


def _block_size(config: Fields, inner: Fields) -> int:
    place = _place(config, inner, "block_size")
    if "block_size" not in place:
        message = f"{config.file}: block_size: missing, {DEFAULT_BLOCK_SIZE} is assumed"
        warnings.warn(message, ConversionWarning, stacklevel=3)
    return place.integer("block_size", DEFAULT_BLOCK_SIZE, least=2)


def _mask_token_id(config: Fields, inner: Fields) -> int:
    place = _place(config, inner, "mask_token_id")
    if "mask_token_id" not in place and "mask_token" in _place(config, inner, "mask_token"):
        raise config.error("mask_token_id", expected="an integer", found="only the text mask_token")
    # No upper bound here: check_fits names the target's.
    return place.integer("mask_token_id", least=0)


def _refuse_formats(config: Fields) -> None:
    for key in ("speculators_model_type", "speculators_config", "transformer_layer_config", "open_spec_config_version"):
        if key in config:
            found = f"the speculators format ({key})"
            raise mismatch(config.file, "format", expected="the z-lab layout of a DFlash drafter", found=found)


def _check_layout(config: Fields, inner: Fields, names: set[str], sample_from_anchor: bool) -> None:
    """The slot layout shifts every proposal by one position, so it is never guessed."""
    classes = config.data.get("architectures") or []
    declared = _place(config, inner, "sample_from_anchor").flag("sample_from_anchor", None)
    if declared is False and sample_from_anchor:
        raise config.error("sample_from_anchor", expected="true, as asked for", found="false")
    known = (ARCHITECTURE, *(ANCHOR_ARCHITECTURES if sample_from_anchor else ()))
    signs = []
    if declared:
        signs.append("sample_from_anchor: true")
    signs.extend(f"architecture {name}" for name in classes if name in ANCHOR_ARCHITECTURES)
    signs.extend(f"its own {name}" for name in ANCHOR_TENSORS if name in names)
    if signs and not sample_from_anchor:
        raise mismatch(
            config.file, "slot layout", expected="slot 0 to hold the anchor and predict nothing (z-lab)",
            found=f"{', '.join(signs)}: the DSpark/DeepSpec layout, where slot i predicts the position after it; "
            "convert with --sample-from-anchor if that is what it is",
        )  # fmt: skip
    if len(classes) != 1 or classes[0] not in known:
        raise config.error("architectures", expected=" or ".join(f"['{name}']" for name in known), found=classes)


def _refuse_variants(folder: Path, config: Fields, inner: Fields) -> None:
    for key, absent in _VARIANTS:
        place = _place(config, inner, key)
        if place.data.get(key) not in absent:
            found = f"{place.data[key]!r} (a variant of DFlash that is not supported)"
            raise place.error(key, expected="nothing", found=found)
    for key in sorted(set(inner.data) - _INNER_KEYS):
        message = f"{config.file}: dflash_config.{key}: not known here, ignored"
        warnings.warn(message, ConversionWarning, stacklevel=3)
    if (folder / "mask_embedding.pt").exists():
        found = "an own mask embedding (not supported)"
        raise mismatch(folder / "mask_embedding.pt", "file", expected="none", found=found)
