"""The formats that DFlash drafters are published in, each read into the same `Drafting`.

- z-lab: flat, or with settings inside `dflash_config`; of the two places the inner one wins. DFlash 2 is another
  architecture of it. DeepSpec and DSpark write it too, with another layout of the slots.
- speculators (Red Hat, vLLM): the model is described in `transformer_layer_config`; the output of block l is tap l + 1.
  DFlash 2 is another model type of it, with its sizes beside those of DFlash.
- Open Spec 0.0.0: flat, with `speculative_config`; where counting of taps begins is written in it.

The last two may hold an embedding and a head of their own, the head over a part of the target's vocabulary.
"""

import dataclasses
import warnings

from convert.errors import ConversionWarning, mismatch
from convert.fields import Fields
from convert.hf_config import LAYER_KINDS, layer_count, sliding_windows

ARCHITECTURE, ARCHITECTURE_2 = "DFlashDraftModel", "DFlash2DraftModel"
# Architectures of the slot layout, whose configs do not always declare it.
ANCHOR_ARCHITECTURES = ("Qwen3DFlashModel", "Qwen3DSparkModel")
# Own copies of the target's embedding and head are the mark of the slot layout where the config is silent (DeepSpec).
OWN_TABLES = ("embed_tokens.weight", "lm_head.weight")
DEFAULT_BLOCK_SIZE = 16
SPECULATORS_BLOCK_SIZE, SPECULATORS_VOCABULARY = 8, 32000  # defaults of that format
SPECULATORS_CLASSES = {
    "dflash": ("DFlashSpeculator", ARCHITECTURE),
    "dflash2": ("DFlash2Speculator", ARCHITECTURE_2),
}
OPEN_SPEC_VERSION = "0.0.0"
_MARKS = {
    "speculators": ("speculators_model_type", "speculators_config", "transformer_layer_config"),
    "Open Spec": ("open_spec_config_version", "speculative_config"),
    "z-lab": ("dflash_config",),
}

# Settings of variants of DFlash that would be wrong to ignore -> values that mean "not that variant".
VARIANTS = {
    "projector_type": (None, "none", "dflash"),
    "shift_label": (None, False),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
    "markov_head_type": (None, "none"),
    "markov_rank": (None, 0),
    "conv_kernel_size": (None, 0),
    "selector_rank": (None, 0),
    "draft_ffn_type": (None, "dense"),
}
# What DFlash 2 sets of these, and how large what it adds is by default.
VARIANTS_2 = {"projector_type": (None, "none", "dflash2")}
SIZES_2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
_VARIANT_KEYS = VARIANTS.keys() | SIZES_2.keys()
_SCALES = {"output_multiplier", "final_logit_softcapping", "input_embedding_scale"}
_Z_LAB_KEYS = _VARIANT_KEYS | _SCALES | {
    "block_size", "mask_token_id", "mask_token", "target_layer_ids", "num_target_layers", "causal", "use_swa",
    "swa_window_size", "sample_from_anchor",
}  # fmt: skip
_LIBRARY_KEYS = {"architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version"}
_SPECULATORS_KEYS = _VARIANT_KEYS | _SCALES | _LIBRARY_KEYS | {
    "speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config",
    "draft_vocab_size", "block_size", "target_hidden_size", "aux_hidden_state_layer_ids", "mask_token_id",
    "sliding_window_non_causal", "sample_from_anchor", "tie_word_embeddings",
}  # fmt: skip
_OPEN_SPEC_KEYS = _VARIANT_KEYS | _SCALES | {
    "method", "speculative_tokens", "verifier", "target_layer_ids", "target_layer_start_idx", "draft_vocab_size",
    "sample_from_anchor", "mask_token_id", "sliding_window_non_causal", "training_framework",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Drafting:
    """What a config says of drafting, whatever the format.

    Attributes:
      model: the object that describes the layers as a Qwen3 model.
      settings: where scales and variants are looked for, first place first.
      block_size, mask_token_id, causal, windows, sample_from_anchor: as in `DrafterConfig`.
      taps: zero-based blocks; None for the default spread.
      target_layers: depth of the target; None where the format does not say.
      second: whether it is DFlash 2.
      draft_vocabulary: rows of its own head; None where the head is the target's or of its size.
    """

    model: Fields
    settings: tuple[Fields, ...]
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...] | None
    target_layers: int | None
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    sample_from_anchor: bool
    second: bool = False
    draft_vocabulary: int | None = None

    def place(self, key: str) -> Fields:
        """Where a setting is: the first place that has it."""
        return next((fields for fields in self.settings if key in fields), self.settings[-1])


def read_drafting(config: Fields, tensor_names: set[str], *, sample_from_anchor: bool) -> Drafting:
    """Recognises the format and reads it.

    Args:
      config: the whole config.json.
      tensor_names: of the checkpoint, without prefixes.
      sample_from_anchor: the caller says that the slots are laid out as in DSpark and DeepSpec.

    Raises:
      ConversionError: marks of two formats, an unknown version, a slot layout that the caller contradicts or, where
        only he can know it, has not confirmed.
    """
    marks = {name: [key for key in keys if key in config] for name, keys in _MARKS.items()}
    formats = [name for name, found in marks.items() if found]
    if len(formats) > 1:
        found = " and ".join(f"{marks[name][0]} ({name})" for name in formats)
        raise mismatch(config.file, "format", expected="the marks of one format", found=found)
    if formats == ["speculators"]:
        return _speculators(config, sample_from_anchor)
    if formats == ["Open Spec"]:
        return _open_spec(config, sample_from_anchor)
    return _z_lab(config, tensor_names, sample_from_anchor)


def attention_kinds(config: Fields, layers: int) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    """Causality inside the block and sliding window of each layer, by the rules of z-lab.

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
    return _causality(config, layers, forced)


def _causality(model: Fields, layers: int, forced: bool | None) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    windows = sliding_windows(model, layers)
    if forced is not None:
        return (forced,) * layers, windows
    return tuple(window is not None for window in windows), windows


def _z_lab(config: Fields, names: set[str], asked: bool) -> Drafting:
    inner = config.nested("dflash_config")

    def place(key: str) -> Fields:
        return inner if key in inner else config

    _check_slot_layout(config, place("sample_from_anchor").flag("sample_from_anchor", None), names, asked)
    _warn_of_unknown(inner, _Z_LAB_KEYS)
    if "block_size" not in place("block_size"):
        _warn(f"{config.file}: block_size: missing, {DEFAULT_BLOCK_SIZE} is assumed")
    if "mask_token_id" not in place("mask_token_id") and "mask_token" in place("mask_token"):
        raise config.error("mask_token_id", expected="an integer", found="only the text mask_token")
    causal, windows = attention_kinds(config, layer_count(config))
    return Drafting(
        model=config,
        settings=(inner, config),
        block_size=place("block_size").integer("block_size", DEFAULT_BLOCK_SIZE, least=2),
        # No upper bound here: check_fits names the target's.
        mask_token_id=place("mask_token_id").integer("mask_token_id", least=0),
        taps=place("target_layer_ids").integers("target_layer_ids", None),
        target_layers=place("num_target_layers").integer("num_target_layers", None),
        causal=causal,
        windows=windows,
        sample_from_anchor=asked,
        second=config.data["architectures"] == [ARCHITECTURE_2],
    )


def _check_slot_layout(config: Fields, declared: bool | None, names: set[str], asked: bool) -> None:
    """The slot layout shifts every proposal by one position, so it is never guessed."""
    classes = config.data.get("architectures") or []
    _check_declared(config, declared, asked)
    known = (ARCHITECTURE, ARCHITECTURE_2, *(ANCHOR_ARCHITECTURES if asked else ()))
    signs = []
    if declared:
        signs.append("sample_from_anchor: true")
    signs.extend(f"architecture {name}" for name in classes if name in ANCHOR_ARCHITECTURES)
    if declared is None:
        signs.extend(f"its own {name}" for name in OWN_TABLES if name in names)
    if signs and not asked:
        raise mismatch(
            config.file, "slot layout", expected="slot 0 to hold the anchor and predict nothing (z-lab)",
            found=f"{', '.join(signs)}: the DSpark/DeepSpec layout, where slot i predicts the position after it; "
            "convert with --sample-from-anchor if that is what it is",
        )  # fmt: skip
    _check_class(config, known)


def _speculators(config: Fields, asked: bool) -> Drafting:
    kind = config.only("speculators_model_type", tuple(SPECULATORS_CLASSES), None)
    _check_class(config, SPECULATORS_CLASSES[kind])
    _warn_of_unknown(config, _SPECULATORS_KEYS)
    if "transformer_layer_config" not in config:
        raise config.error("transformer_layer_config", expected="an object", found="nothing")
    model = config.nested("transformer_layer_config")
    from_anchor = _declared_layout(config, asked)
    # In sliding layers DFlash 2 sees its whole block unless the config says otherwise, DFlash only what came before.
    causal, windows = _trained_causality(config, model, bidirectional=kind == "dflash2")
    size = config.integer("block_size", SPECULATORS_BLOCK_SIZE, least=2)
    _check_proposals(config.nested("speculators_config"), kind, size if from_anchor else size - 1)
    return Drafting(
        model=model,
        settings=(config,),
        block_size=size,
        mask_token_id=config.integer("mask_token_id", least=0),
        taps=_shifted(config, "aux_hidden_state_layer_ids", 1),
        target_layers=None,
        causal=causal,
        windows=windows,
        sample_from_anchor=from_anchor,
        second=kind == "dflash2",
        draft_vocabulary=config.integer("draft_vocab_size", SPECULATORS_VOCABULARY),
    )


def _open_spec(config: Fields, asked: bool) -> Drafting:
    config.only("open_spec_config_version", (OPEN_SPEC_VERSION,), None)
    _check_class(config, ("DflashDraftModel",))  # with a small f in this format
    inner = config.nested("speculative_config")
    inner.only("method", ("dflash",), None)
    _warn_of_unknown(inner, _OPEN_SPEC_KEYS)
    first = inner.only("target_layer_start_idx", (0, 1), None)
    from_anchor = _declared_layout(inner, asked)
    causal, windows = _trained_causality(inner, config, bidirectional=False)
    return Drafting(
        model=config,
        settings=(inner, config),
        block_size=inner.integer("speculative_tokens") + (0 if from_anchor else 1),
        mask_token_id=inner.integer("mask_token_id", least=0),
        taps=_shifted(inner, "target_layer_ids", first),
        target_layers=None,
        causal=causal,
        windows=windows,
        sample_from_anchor=from_anchor,
        draft_vocabulary=inner.integer("draft_vocab_size", None),
    )


def _trained_causality(
    settings: Fields, model: Fields, *, bidirectional: bool
) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    """As speculators trains: sliding layers are causal or not, as the flag says; full ones never are."""
    bidirectional = settings.flag("sliding_window_non_causal", bidirectional)
    return _causality(model, layer_count(model), False if bidirectional else None)


def _shifted(fields: Fields, key: str, first: int) -> tuple[int, ...]:
    """Taps of a format that calls the output of block 0 `first`."""
    ids = fields.integers(key)
    if min(ids, default=first) < first:
        expected = f"{first} or more (the output of the first block is {first})"
        raise fields.error(key, expected=expected, found=list(ids))
    return tuple(i - first for i in ids)


def _declared_layout(fields: Fields, asked: bool) -> bool:
    """The slot layout where the format declares it, false by default."""
    declared = fields.flag("sample_from_anchor", False)
    _check_declared(fields, declared, asked)
    return declared


def _check_declared(fields: Fields, declared: bool | None, asked: bool) -> None:
    if declared is False and asked:
        found = "false" if "sample_from_anchor" in fields else "nothing, which means false in this format"
        raise fields.error("sample_from_anchor", expected="true, as asked for", found=found)


def _check_class(config: Fields, known: tuple[str, ...]) -> None:
    classes = config.data.get("architectures") or []
    if len(classes) != 1 or classes[0] not in known:
        raise config.error("architectures", expected=" or ".join(f"['{name}']" for name in known), found=classes)


def _check_proposals(fields: Fields, kind: str, depth: int) -> None:
    """A block must hold as many tokens as the config says are drafted."""
    fields.only("algorithm", (kind,), kind)
    proposals = fields.data.get("proposal_methods") or []
    if not isinstance(proposals, list) or not all(isinstance(p, dict) for p in proposals):
        raise fields.error("proposal_methods", expected="a list of objects", found=repr(proposals))
    for i, proposal in enumerate(proposals):
        place = Fields(fields.file, proposal, f"{fields.prefix}proposal_methods[{i}].")
        tokens = place.integer("speculative_tokens", depth)
        if tokens > depth:
            expected = f"at most the {depth} tokens that a block predicts"
            raise place.error("speculative_tokens", expected=expected, found=tokens)


def _warn_of_unknown(fields: Fields, known: set[str]) -> None:
    for key in sorted(set(fields.data) - known):
        _warn(f"{fields.file}: {fields.prefix}{key}: not known here, ignored")


def _warn(message: str) -> None:
    warnings.warn(message, ConversionWarning, stacklevel=2)
