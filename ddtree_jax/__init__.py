"""Exact speculative decoding with draft trees in JAX and Pallas."""

from ddtree_jax.api import Generation, compile_ahead, generate
from ddtree_jax.config import DecodeConfig, DrafterConfig, MoEConfig, RopeConfig, TargetConfig
from ddtree_jax.loading import Drafter, Target, load_drafter, load_target
from ddtree_jax.stepwise import RoundTrace, stream, stream_tokens, trace
from ddtree_jax.tree import DraftTree, accept, build_tree, chain_tree

__version__ = "0.1.0"

__all__ = [
    "DecodeConfig",
    "DraftTree",
    "Drafter",
    "DrafterConfig",
    "Generation",
    "MoEConfig",
    "RopeConfig",
    "RoundTrace",
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
    "trace",
]
