"""Rotary settings of a config.json, in both spellings: rope_theta + rope_scaling, or rope_parameters."""

from convert.fields import Fields
from ddtree_jax.config import RopeConfig

_COMMON = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
# Of models with vision: which angles follow height and width of an image. All three positions of text are the same.
_IMAGE_KEYS = {"mrope_section", "mrope_interleaved"}
_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
        "mscale_all_dim", "truncate",
    },
}  # fmt: skip
_DEFAULT_THETA = 10000.0  # of every Hugging Face class converted here


def rope_config(config: Fields, *, partial: bool = False) -> RopeConfig:
    """Reads the rotary settings.

    Args:
      config: of the model.
      partial: a share of each head may rotate, which the caller reads, and settings for images may be there.

    Raises:
      ConversionError: an unknown kind or key, two bases that differ.
    """
    places = [p for p in ("rope_parameters", "rope_scaling") if p in config]
    if len(places) == 2 and config.data["rope_parameters"] != config.data["rope_scaling"]:
        raise config.error("rope_scaling", expected="only one of rope_parameters and rope_scaling", found="both")
    scaling = config.nested(places[0] if places else "rope_parameters")
    theta = scaling.number("rope_theta", config.number("rope_theta", _DEFAULT_THETA))
    if config.number("rope_theta", theta) != theta:
        found = f"{config.data['rope_theta']} here and {theta} in {places[0]}"
        raise config.error("rope_theta", expected="one value", found=found)
    for fields in (config, scaling):
        if not partial and fields.number("partial_rotary_factor", 1.0) != 1.0:
            found = fields.data["partial_rotary_factor"]
            raise fields.error("partial_rotary_factor", expected="1 (the whole head rotates)", found=found)

    kind_key = "rope_type" if "rope_type" in scaling else "type"
    kind = scaling.only(kind_key, tuple(_KEYS), "default")
    # An ignored key could change the angles without a trace, so each must be understood.
    known = _COMMON | _KEYS[kind] | (_IMAGE_KEYS if partial else set())
    unknown = sorted(k for k in scaling.data if k in scaling and k not in known)
    if unknown:
        key = unknown[0]
        raise scaling.error(key, expected=f"a setting of rope kind {kind!r}", found=repr(scaling.data[key]))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=scaling.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta, kind=kind, factor=scaling.number("factor"),
            original_max_position=scaling.integer("original_max_position_embeddings"),
            low_freq_factor=scaling.number("low_freq_factor"), high_freq_factor=scaling.number("high_freq_factor"),
        )  # fmt: skip
    if "original_max_position_embeddings" in scaling:
        original = scaling.integer("original_max_position_embeddings")
    else:
        original = config.integer("max_position_embeddings")
    return RopeConfig(
        theta=theta, kind=kind, factor=scaling.number("factor"), original_max_position=original,
        beta_fast=scaling.number("beta_fast", 32.0), beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=scaling.number("attention_factor", None), mscale=scaling.number("mscale", None),
        mscale_all_dim=scaling.number("mscale_all_dim", None), truncate=scaling.flag("truncate", True),
    )  # fmt: skip
