"""The floor of a decoding round: what its parts must read and compute, whatever the program.

Of a part count the bytes of every weight that it must read and of the keys and values of the context, and the
arithmetic of its products and of attention. What is looked up row by row (embeddings, the codebooks of a selector, the
text of a look-up) is left out.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from benchmarks import _timing
from benchmarks._variants import decode_config
from ddtree_jax.config import DraftConfig, DrafterConfig, Eagle3Config, MTPConfig, StepDrafterConfig, TargetConfig
from ddtree_jax.decode.plan import make_proposer
from ddtree_jax.decode.proposers import DynamicGrowth, Growth
from ddtree_jax.models.abstract import abstract_params
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.tree import static_layout


@dataclasses.dataclass(frozen=True)
class Work:
    """What one pass of a model has to read and to compute."""

    bytes: float
    flop: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flop + other.flop)

    @property
    def floor_ms(self) -> float:
        return _timing.floor_us(self.bytes, self.flop) / 1e3


def pass_work(config: TargetConfig | DraftConfig, rows: int, context: int, drafted: int | None = None) -> Work:
    """Matrices and attention of one pass of `rows` tokens; a head of its own included, an embedding not.

    The `fc` over a target's features belongs to the commit and is left out. Of experts, those count that so many tokens
    are expected to choose if all are as likely. Recurrent layers read one state each.

    Args:
      drafted: rows beyond the context that a row may see; None for those of the pass.
    """
    c, itemsize = config, config.jax_dtype.itemsize
    leaves = jax.tree.leaves(abstract_params(c))
    dense = sum(x.size for x in leaves if len(x.shape) == 2) - _outside(c)
    experts, share, touched = 0, 0.0, 0.0
    if getattr(c, "moe", None):
        experts = sum(x.size for x in leaves if len(x.shape) == 3)
        share = c.moe.experts_per_token / c.moe.num_experts
        touched = 1 - (1 - share) ** rows
    all_windows = (None,) if isinstance(c, StepDrafterConfig) else c.sliding_windows
    windows = [w for i, w in enumerate(all_windows) if i not in getattr(c, "delta_layers", ())]
    seen = sum(context if w is None else min(context, w) for w in windows)
    keys_values = 2 * seen * c.num_kv_heads * c.head_dim * itemsize + state_bytes(c)
    beside = rows if drafted is None else drafted
    attention = 4 * rows * (seen + beside * len(windows)) * c.num_heads * c.head_dim
    size_read, size_used = dense + experts * touched, dense + experts * share
    return Work(size_read * itemsize + keys_values, 2 * rows * size_used + attention)


def _outside(config: TargetConfig | DraftConfig) -> int:
    """Elements of matrices that a pass does not multiply with."""
    c = config
    if isinstance(c, TargetConfig):
        return 0 if c.tie_embeddings else c.vocab_size * c.hidden_size
    if isinstance(c, MTPConfig):
        return 0
    codebooks = 2 * c.vocab_size * c.selector_rank if isinstance(c, DrafterConfig) else 0
    return _features(c) * c.hidden_size + codebooks


def state_bytes(config: TargetConfig | DraftConfig) -> int:
    """Float32 states of all recurrent layers of a sequence."""
    if not isinstance(config, TargetConfig) or not config.delta_layers:
        return 0
    d = config.delta
    return 4 * len(config.delta_layers) * d.num_value_heads * d.key_head_dim * d.value_head_dim


def _features(drafter: DrafterConfig | Eagle3Config) -> int:
    """Width of the target's features that the drafter takes in."""
    return len(drafter.target_layer_ids) * drafter.target_hidden_size


def matrix_work(config: TargetConfig | DraftConfig, outputs: int, inputs: int, rows: int) -> Work:
    return Work(outputs * inputs * config.jax_dtype.itemsize, 2 * rows * outputs * inputs)


def step_rows(growth: Growth) -> list[int]:
    """Nodes that each step of a drafter runs over, the root first."""
    if isinstance(growth, DynamicGrowth):
        return [1] + [growth.branching] * (growth.depth - 1)
    layout = static_layout(growth.choices)
    return np.bincount(layout.depth[np.unique(layout.parent[1:])]).tolist()


def _draft(target: TargetConfig, drafter: DraftConfig, proposer, context: int) -> Work:
    """The passes of the drafter, and as often the head."""
    if isinstance(drafter, DrafterConfig):
        head = matrix_work(target, target.vocab_size, target.hidden_size, proposer.max_path - 1)
        return pass_work(drafter, drafter.block_size, context) + head
    work, nodes = Work(0, 0), 0
    for rows in step_rows(proposer.growth):
        nodes += rows
        work += pass_work(drafter, rows, context, nodes)
        if not drafter.own_head:
            work += matrix_work(target, target.vocab_size, target.hidden_size, rows)
    return work


def _absorb(drafter: DraftConfig, rows: int) -> Work:
    """What makes `rows` committed tokens rows of the drafter's cache: `fc`, then keys and values of all layers."""
    d = drafter
    inputs = 2 * d.hidden_size if isinstance(d, MTPConfig) else _features(d)
    attention_inputs = 2 * d.hidden_size if isinstance(d, Eagle3Config) else d.hidden_size
    keys_values = matrix_work(d, 2 * d.num_kv_heads * d.head_dim * d.num_layers, attention_inputs, rows)
    return matrix_work(d, d.hidden_size, inputs, rows) + keys_values


def round_work(target: TargetConfig, drafter: DraftConfig, method: str, nodes: int, context: int) -> dict[str, Work]:
    """Work of the parts that read weights, `nodes` rows verified."""
    proposer = make_proposer(decode_config(method, nodes, drafter), Decoder(target), drafter)
    verify = pass_work(target, nodes, context)
    replay = Work(2 * state_bytes(target), 0)  # read and written once
    if not proposer.uses_drafter:
        return {"verify": verify} | ({"accept+commit": replay} if target.delta_layers else {})
    commit = _absorb(drafter, proposer.max_path) + replay
    return {"draft": _draft(target, drafter, proposer, context), "verify": verify, "accept+commit": commit}
