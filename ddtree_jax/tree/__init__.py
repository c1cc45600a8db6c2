"""Draft trees: the type, the builders, acceptance of the target's draws, and the commit of what was accepted."""

from ddtree_jax.tree.accept import Acceptance, accept
from ddtree_jax.tree.best_static import best_static_tree, rank_hits, replayed_length
from ddtree_jax.tree.build import build_from_top, build_tree
from ddtree_jax.tree.chain import chain_tree, root_tree
from ddtree_jax.tree.choices import PRESETS, Choices, default_choices, parse_choices
from ddtree_jax.tree.compact import gather_path, gather_path_rows, write_rows
from ddtree_jax.tree.conditional import conditional_chain, conditional_static_tree, conditional_tree
from ddtree_jax.tree.draft_tree import (
    DraftTree,
    ancestor_bits,
    num_words,
    only_first,
    static_bits,
    unpack_ancestors,
)
from ddtree_jax.tree.draw import format_tree, plot_tree
from ddtree_jax.tree.pool import tree_from_pool
from ddtree_jax.tree.select import sorted_largest, top_log_probs, top_tokens
from ddtree_jax.tree.static import fill_layout, static_layout, static_tree
from ddtree_jax.tree.trie import trie_tree

__all__ = [
    "PRESETS",
    "Acceptance",
    "Choices",
    "DraftTree",
    "accept",
    "ancestor_bits",
    "best_static_tree",
    "build_from_top",
    "build_tree",
    "chain_tree",
    "conditional_chain",
    "conditional_static_tree",
    "conditional_tree",
    "default_choices",
    "fill_layout",
    "format_tree",
    "gather_path",
    "gather_path_rows",
    "num_words",
    "only_first",
    "parse_choices",
    "plot_tree",
    "rank_hits",
    "replayed_length",
    "root_tree",
    "sorted_largest",
    "static_bits",
    "static_layout",
    "static_tree",
    "top_log_probs",
    "top_tokens",
    "tree_from_pool",
    "trie_tree",
    "unpack_ancestors",
    "write_rows",
]
