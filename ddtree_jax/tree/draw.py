"""Drawings of one slot's tree, as text and as a figure. Host-side only: arrays are copied from the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ddtree_jax.tree.accept import Acceptance
from ddtree_jax.tree.draft_tree import DraftTree

ACCEPTED_MARK = "●"


def format_tree(
    tree: DraftTree,
    slot: int = 0,
    decode: Callable[[int], str] | None = None,
    accepted: Acceptance | Sequence[int] | None = None,
) -> str:
    """A text drawing of one slot's tree: one line per node, children in order of probability.

    Each line shows the token, the probability of the whole text from the root to it under the drafter, and a dot if
    the node was accepted. Padding is left out.

    Args:
      tree: a concrete (not traced) `DraftTree`.
      slot: which slot to draw.
      decode: token id -> text; ids are shown if left out.
      accepted: the `Acceptance` of the whole batch, or the node indices accepted in this slot.

    Returns:
      Lines joined by newlines, without a trailing one.

    Raises:
      IndexError: no such slot.
    """
    nodes = _Nodes(tree, slot, decode, accepted)
    lines: list[str] = []
    # Depth first, with a stack, so that long chains do not meet Python's recursion limit.
    stack = [(0, "", "")]
    while stack:
        node, branch, indent = stack.pop()
        mark = f" {ACCEPTED_MARK}" if node in nodes.accepted else ""
        lines.append(f"{branch}{nodes.labels[node]} {nodes.probability[node]:.3g}{mark}")
        children = nodes.children[node]
        for child in reversed(children):
            is_last = child == children[-1]
            stack.append((child, indent + ("└─ " if is_last else "├─ "), indent + ("   " if is_last else "│  ")))
    return "\n".join(lines)


def plot_tree(
    tree: DraftTree,
    slot: int = 0,
    decode: Callable[[int], str] | None = None,
    accepted: Acceptance | Sequence[int] | None = None,
    ax: Any = None,
) -> Any:
    """Draws one slot's tree with matplotlib: depth to the right, accepted path highlighted, area ~ probability.

    Args:
      tree, slot, decode, accepted: as in `format_tree`.
      ax: the axes to draw on; a new figure if left out.

    Returns:
      The matplotlib axes.

    Raises:
      ImportError: matplotlib is not installed.
      IndexError: no such slot.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plot_tree needs matplotlib: pip install 'ddtree_jax[demo]'") from error
    nodes = _Nodes(tree, slot, decode, accepted)
    height = nodes.heights()
    if ax is None:
        _, ax = plt.subplots(figsize=(2 + 0.9 * max(nodes.depth), 1 + 0.3 * (1 + max(height))), layout="constrained")
    plain, strong = "0.6", "tab:green"
    for node in range(1, len(nodes.labels)):
        above = nodes.parent[node]
        on_path = node in nodes.accepted
        ax.plot(
            [nodes.depth[above], nodes.depth[node]],
            [height[above], height[node]],
            color=strong if on_path else plain,
            linewidth=2.5 if on_path else 1.0,
            zorder=2 if on_path else 1,
        )
    colors = [strong if node in nodes.accepted else plain for node in range(len(nodes.labels))]
    ax.scatter(nodes.depth, height, s=[20 + 180 * p for p in nodes.probability], c=colors, zorder=3)
    for node, label in enumerate(nodes.labels):
        ax.annotate(label, (nodes.depth[node], height[node]), xytext=(0, 6), textcoords="offset points", ha="center")
    ax.set_xlabel("depth")
    ax.set_xticks(range(max(nodes.depth) + 1))
    ax.invert_yaxis()  # the most probable branch on top
    ax.yaxis.set_visible(False)
    for side in ("left", "right", "top"):
        ax.spines[side].set_visible(False)
    return ax


class _Nodes:
    """The live nodes of one slot as plain Python values."""

    def __init__(
        self,
        tree: DraftTree,
        slot: int,
        decode: Callable[[int], str] | None,
        accepted: Acceptance | Sequence[int] | None,
    ):
        slots = tree.tokens.shape[0]
        if not 0 <= slot < slots:
            raise IndexError(f"slot {slot} of a batch of {slots}")
        tree, accepted = jax.device_get((tree, accepted))
        size = int(tree.size[slot])
        tokens = tree.tokens[slot, :size].tolist()
        self.labels = [str(token) if decode is None else repr(decode(token)) for token in tokens]
        self.parent = tree.parent[slot, :size].tolist()
        self.depth = tree.depth[slot, :size].tolist()
        self.probability = np.exp(tree.log_prob[slot, :size].astype(np.float64)).tolist()
        self.children: list[list[int]] = [[] for _ in range(size)]
        for node in range(1, size):
            self.children[self.parent[node]].append(node)
        if isinstance(accepted, Acceptance):
            accepted = accepted.path[slot, : accepted.length[slot]].tolist()
        self.accepted = set() if accepted is None else {int(node) for node in accepted}

    def heights(self) -> list[float]:
        """Vertical places: leaves get one line each, in drawing order; a parent sits level with its first child."""
        height = [0.0] * len(self.labels)
        stack, line = [0], -1
        first_child = {children[0] for children in self.children if children}
        while stack:
            node = stack.pop()
            # A first child shares its parent's line, so only other nodes open a new one.
            line += node not in first_child
            height[node] = float(line)
            stack.extend(reversed(self.children[node]))
        return height
