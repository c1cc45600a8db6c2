"""What the config.json of a hybrid target (Qwen3.5, Qwen3.6, Qwen3-Next) says beyond that of a dense one."""

from typing import Any

from convert.fields import Fields
from ddtree_jax.config import DeltaConfig

LAYER_KINDS = ("linear_attention", "full_attention")
# What the Hugging Face classes assume where a config is silent.
_FULL_ATTENTION_INTERVAL = 4
_PARTIAL_ROTARY_FACTOR = 0.25


def hybrid_settings(config: Fields, layers: int, head_dim: int) -> dict[str, Any]:
    """Fields of a `TargetConfig`: rotary_dim, zero_centred_norms, attention_gate, delta_layers, delta.

    Raises:
      ConversionError: a bad value, or a variant that is not supported (experts, other gates).
    """
    config.only("attn_output_gate", (True,), True)
    config.only("output_gate_type", ("swish", "silu"), "silu")
    delta_layers = _delta_layers(config, layers)
    key_heads, value_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    if value_heads % key_heads:
        expected = f"a multiple of {key_heads} key heads"
        raise config.error("linear_num_value_heads", expected=expected, found=value_heads)
    delta = DeltaConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=config.integer("linear_key_head_dim"),
        value_head_dim=config.integer("linear_value_head_dim"),
        conv_kernel=config.integer("linear_conv_kernel_dim", 4, least=2),
    )
    return dict(
        rotary_dim=_rotary_dim(config, head_dim), zero_centred_norms=True, attention_gate=True,
        delta_layers=delta_layers, delta=delta if delta_layers else None,
    )  # fmt: skip


def _delta_layers(config: Fields, layers: int) -> tuple[int, ...]:
    """Blocks with Gated DeltaNet: by `layer_types`, else all but every `full_attention_interval`-th."""
    kinds = config.strings("layer_types", layers)
    if kinds is None:
        interval = config.integer("full_attention_interval", _FULL_ATTENTION_INTERVAL)
        return tuple(i for i in range(layers) if (i + 1) % interval)
    for i, kind in enumerate(kinds):
        if kind not in LAYER_KINDS:
            raise config.error(f"layer_types[{i}]", expected=" or ".join(LAYER_KINDS), found=repr(kind))
    return tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")


def _rotary_dim(config: Fields, head_dim: int) -> int:
    """How many dimensions of a head rotate; the factor stands among the rotary settings or beside them."""
    places = [config.nested("rope_parameters"), config.nested("rope_scaling"), config]
    place = next((p for p in places if "partial_rotary_factor" in p), config)
    factor = place.number("partial_rotary_factor", _PARTIAL_ROTARY_FACTOR)
    size = int(head_dim * factor)
    if not 0 < size <= head_dim or size % 2:
        expected = f"a share of the {head_dim} dimensions of a head that is an even number of them"
        raise place.error("partial_rotary_factor", expected=expected, found=factor)
    return size
