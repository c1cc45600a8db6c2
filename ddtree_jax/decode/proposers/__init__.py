"""Proposers: how a round gets its draft tree. The loop knows nothing else of a method."""

from ddtree_jax.decode.proposers.autoregressive import NoDraft
from ddtree_jax.decode.proposers.dflash import DFlashProposer
from ddtree_jax.decode.proposers.growth import DynamicGrowth, Growth, StaticGrowth, chain
from ddtree_jax.decode.proposers.lookup import LookupProposer
from ddtree_jax.decode.proposers.protocol import Proposer, TextRows
from ddtree_jax.decode.proposers.shapes import Chain, MostProbable, Shape, Static
from ddtree_jax.decode.proposers.step import StepProposer

__all__ = [
    "Chain",
    "DFlashProposer",
    "DynamicGrowth",
    "Growth",
    "LookupProposer",
    "MostProbable",
    "NoDraft",
    "Proposer",
    "Shape",
    "Static",
    "StaticGrowth",
    "StepProposer",
    "TextRows",
    "chain",
]
