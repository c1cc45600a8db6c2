"""config.json of a Qwen3.5, Qwen3.6 or Qwen3-Next checkpoint -> MTPConfig of the prediction layer that lies in it.

The layer's norms are zero-centred as all norms of these checkpoints. Repackaged layers may have the 1 added already;
nothing in a file tells, so that only original checkpoints should be given.
"""

import dataclasses
from pathlib import Path

from convert.errors import ConversionError
from convert.fields import Fields
from convert.hf_config import ARCHITECTURES, target_config, text_config
from ddtree_jax.config import MTPConfig, TargetConfig
from ddtree_jax.models.abstract import check_fits


def is_mtp(config: Fields) -> bool:
    """Whether a config is that of a target that has such a layer."""
    architecture = ARCHITECTURES.get(str(config.data.get("model_type")))
    return architecture is not None and architecture.hybrid


def mtp_config(folder: Path, config: Fields, target: TargetConfig, *, dtype: str | None = None) -> MTPConfig:
    """Reads the config of the layer.

    Args:
      folder: of the target that it lies in.
      config: its config.json.
      target: the same target, converted.
      dtype: of the converted parameters; None takes the target's.

    Raises:
      ConversionError: no such layer, several of them, own embeddings, another target.
    """
    own = target_config(folder, dtype or target.dtype)
    text = text_config(config) if ARCHITECTURES[own.architecture].nested else config
    text.only("mtp_num_hidden_layers", (1,), 1)
    text.only("mtp_use_dedicated_embeddings", (False,), False)
    result = MTPConfig(
        hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size,
        num_heads=own.num_heads,
        num_kv_heads=own.num_kv_heads,
        head_dim=own.head_dim,
        rms_norm_eps=own.rms_norm_eps,
        rope=own.rope,
        rotary_dim=own.rotary_dim,
        moe=None if own.moe is None else dataclasses.replace(own.moe, sparse=(True,)),
        target_hidden_size=own.hidden_size,
        target_num_layers=own.num_layers,
        target_vocab_size=own.vocab_size,
        dtype=own.dtype,
    )
    try:
        check_fits(result, target)
    except ValueError as error:
        raise ConversionError(f"{config.file}: {error}") from None
    return result
