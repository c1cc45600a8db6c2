"""Static descriptions of targets and drafters, with a JSON form for checkpoints, and of how to decode.

Everything here is frozen and hashable: a config is a static argument of every jitted function.
"""

from ddtree_jax.config.base import DTYPES, FIXED_DTYPES, parameter_dtype
from ddtree_jax.config.blocks import DeltaConfig, MoEConfig, RopeConfig
from ddtree_jax.config.decode import AUTO, DecodeConfig
from ddtree_jax.config.drafters import (
    MAX_STEPS,
    DraftConfig,
    DrafterConfig,
    Eagle3Config,
    MTPConfig,
    StepDrafterConfig,
    drafter_from_json,
)
from ddtree_jax.config.methods import MAX_NODES, METHODS, Method, possible_methods
from ddtree_jax.config.taps import default_taps, eagle3_taps
from ddtree_jax.config.target import TargetConfig

__all__ = [
    "AUTO",
    "DTYPES",
    "FIXED_DTYPES",
    "MAX_NODES",
    "MAX_STEPS",
    "METHODS",
    "DecodeConfig",
    "DeltaConfig",
    "DraftConfig",
    "DrafterConfig",
    "Eagle3Config",
    "MTPConfig",
    "Method",
    "MoEConfig",
    "RopeConfig",
    "StepDrafterConfig",
    "TargetConfig",
    "default_taps",
    "drafter_from_json",
    "eagle3_taps",
    "parameter_dtype",
    "possible_methods",
]
