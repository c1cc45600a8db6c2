"""Draft trees: the type, the builders, acceptance of the target's draws, and the commit of what was accepted."""

from ddtree_jax.tree.accept import Acceptance, accept
from ddtree_jax.tree.build import build_from_top, build_tree, top_suffices
from ddtree_jax.tree.chain import chain_tree, root_tree
from ddtree_jax.tree.compact import gather_path, move_path_rows, write_rows
from ddtree_jax.tree.draft_tree import DraftTree, ancestor_bits, num_words, static_bits, unpack_ancestors
from ddtree_jax.tree.draw import format_tree, plot_tree
from ddtree_jax.tree.select import top_tokens

__all__ = [
    "Acceptance",
    "DraftTree",
    "accept",
    "ancestor_bits",
    "build_from_top",
    "build_tree",
    "chain_tree",
    "format_tree",
    "gather_path",
    "move_path_rows",
    "num_words",
    "plot_tree",
    "root_tree",
    "static_bits",
    "top_suffices",
    "top_tokens",
    "unpack_ancestors",
    "write_rows",
]
