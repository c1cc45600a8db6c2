"""Floating-point operations of a training step, for the share of peak that a run reports."""

from ddtree_jax.config import TargetConfig
from ddtree_jax.train.step import Models

# Measured ceiling of dense bfloat16 matrix products on an H200, in FLOP/s.
PEAK_FLOPS = 790e12


def step_flops(models: Models) -> float:
    """Operations that one step needs (2 a multiply-add), recomputation not counted.

    Attention is counted over half of a row, as if every row were one document. The head counts twice (logits, gradient
    to the hidden state): it is frozen. So does `fc`, whose input has no gradient.
    """
    c, d, t = models.config, models.drafter, models.target
    tokens = c.batch_size * c.sequence_length
    slots = c.batch_size * min(c.anchors, c.sequence_length) * d.block_size
    width = t.num_heads * t.head_dim
    layers = range(max(d.target_layer_ids) + 1)
    products = t.hidden_size * sum(_mixer(t, i) + _feed_forward(t, i) for i in layers)
    attended = sum(i not in t.delta_layers for i in layers)
    target = tokens * (2 * products + attended * 4 * width * c.sequence_length / 2)

    heads, kv = d.num_heads * d.head_dim, 2 * d.num_kv_heads * d.head_dim
    block = d.hidden_size * (2 * heads + kv + 3 * d.intermediate_size)
    attention = 2 * heads * (c.sequence_length / 2 + d.block_size)
    drafter = 6 * d.num_layers * (slots * (block + attention) + tokens * d.hidden_size * kv)
    fusion = 4 * tokens * d.hidden_size * len(d.target_layer_ids) * t.hidden_size
    head = 4 * slots * (d.block_size - 1) / d.block_size * t.vocab_size * t.hidden_size
    return target + drafter + fusion + head


def _mixer(target: TargetConfig, layer: int) -> int:
    """The same of the projections around a layer's attention or recurrence (which itself is little beside them)."""
    if layer in target.delta_layers:
        d = target.delta
        return d.projected_channels + d.value_size
    return (target.qkv_heads + target.num_heads) * target.head_dim


def _feed_forward(target: TargetConfig, layer: int) -> int:
    """Multiply-adds of a layer's feed-forward block, for one token and one row of the hidden state."""
    moe = target.moe_of(layer)
    if moe is None:
        return 3 * target.intermediate_size
    shared = 3 * moe.shared_intermediate_size + bool(moe.shared_intermediate_size)
    return 3 * moe.experts_per_token * moe.intermediate_size + moe.num_experts + shared
