"""Exact speculative decoding with draft trees in JAX and Pallas."""

from ddtree_jax.api import (
    Drafter,
    Generation,
    Target,
    compile_ahead,
    generate,
    load_drafter,
    load_target,
    stream,
    stream_tokens,
)
from ddtree_jax.config import DecodeConfig, DrafterConfig, RopeConfig, TargetConfig
from ddtree_jax.tree import DraftTree, accept, build_tree, chain_tree

__version__ = "0.1.0"

__all__ = [
    "DecodeConfig",
    "DraftTree",
    "Drafter",
    "DrafterConfig",
    "Generation",
    "RopeConfig",
    "Target",
    "TargetConfig",
    "accept",
    "build_tree",
    "chain_tree",
    "compile_ahead",
    "generate",
    "load_drafter",
    "load_target",
    "stream",
    "stream_tokens",
]
