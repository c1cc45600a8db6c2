"""config.json of a DFlash drafter, in any of its formats -> DrafterConfig, checked against its target."""

from collections.abc import Iterable
from pathlib import Path

from convert.drafter_formats import SIZES_2, VARIANTS, VARIANTS_2, Drafting, read_drafting
from convert.errors import ConversionError, mismatch
from convert.fields import Fields
from convert.hf_config import head_counts, head_dim, layer_count, refuse_variants
from convert.rope_config import rope_config
from ddtree_jax.config import DrafterConfig, TargetConfig, default_taps
from ddtree_jax.models.abstract import check_fits


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
      tensor_names: of the checkpoint, as `names.drafter_name` writes them.
      target: what the drafter will draft for.
      sample_from_anchor: the caller says that the checkpoint has the slot layout (slot i predicts the next position).
      dtype: of the converted parameters; None takes the target's, since drafter and target work on one hidden state.

    Raises:
      ConversionError: another format or variant, the slot layout without `sample_from_anchor`, a misfit to the target.
    """
    config, names = Fields.read(folder / "config.json"), set(tensor_names)
    drafting = read_drafting(config, names, sample_from_anchor=sample_from_anchor)
    if (folder / "mask_embedding.pt").exists():
        found = "an own mask embedding (not supported)"
        raise mismatch(folder / "mask_embedding.pt", "file", expected="none", found=found)
    _refuse_variants(drafting)
    model = drafting.model
    refuse_variants(model)

    layers = layer_count(model)
    heads, kv_heads = head_counts(model, default_to_heads=False)
    target_layers = drafting.target_layers or target.num_layers
    vocabulary = model.integer("vocab_size", target.vocab_size)
    draft_vocabulary = _draft_vocabulary(drafting, names, vocabulary)
    scale, sizes = _scales(drafting), _sizes(drafting)
    result = DrafterConfig(
        hidden_size=model.integer("hidden_size"),
        intermediate_size=model.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim(model, heads, 128),
        rms_norm_eps=model.number("rms_norm_eps", 1e-6),
        rope=rope_config(model),
        attention_bias=model.flag("attention_bias", False),
        block_size=drafting.block_size,
        mask_token_id=drafting.mask_token_id,
        target_layer_ids=default_taps(target_layers, layers) if drafting.taps is None else drafting.taps,
        target_hidden_size=config.integer("target_hidden_size", target.hidden_size),
        target_num_layers=target_layers,
        target_vocab_size=vocabulary,
        causal=drafting.causal,
        sliding_windows=drafting.windows,
        sample_from_anchor=drafting.sample_from_anchor,
        output_multiplier=scale["output_multiplier"],
        logit_softcap=scale["final_logit_softcapping"] or None,
        embedding_scale=scale["input_embedding_scale"],
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names or draft_vocabulary is not None,
        draft_vocab_size=draft_vocabulary,
        conv_taps=sizes["conv_kernel_size"],
        conv_group_size=sizes["conv_group_size"],
        selector_rank=sizes["selector_rank"],
        selector_top_k=sizes["selector_top_k"],
        dtype=dtype or target.dtype,
    )
    try:
        check_fits(result, target)
    except ValueError as error:
        raise ConversionError(f"{config.file}: {error}") from None
    return result


def _refuse_variants(drafting: Drafting) -> None:
    variants = VARIANTS | (VARIANTS_2 if drafting.second else {})
    for key, absent in variants.items():
        place = drafting.place(key)
        if not (drafting.second and key in SIZES_2) and place.data.get(key) not in absent:
            found = f"{place.data[key]!r} (a variant of DFlash that is not supported)"
            raise place.error(key, expected="nothing", found=found)


def _sizes(drafting: Drafting) -> dict[str, int]:
    """Sizes of what DFlash 2 adds; convolutions and selector may each be left out of it (0)."""
    if not drafting.second:
        return SIZES_2 | {"conv_kernel_size": 0, "selector_rank": 0}
    least = {"conv_kernel_size": 0, "selector_rank": 0}
    return {key: drafting.place(key).integer(key, size, least=least.get(key, 1)) for key, size in SIZES_2.items()}


def _scales(drafting: Drafting) -> dict[str, float]:
    defaults = {"output_multiplier": 1.0, "final_logit_softcapping": 0.0, "input_embedding_scale": 1.0}
    return {key: drafting.place(key).number(key, default) for key, default in defaults.items()}


def _draft_vocabulary(drafting: Drafting, names: set[str], vocabulary: int) -> int | None:
    """Rows of a head whose tokens go through a table of target ids; a head of all tokens needs none."""
    size = drafting.draft_vocabulary
    if size is None or (size == vocabulary and "d2t" not in names):
        return None
    if size > vocabulary:
        expected = f"at most the {vocabulary} tokens of the target"
        raise drafting.place("draft_vocab_size").error("draft_vocab_size", expected=expected, found=size)
    return size
