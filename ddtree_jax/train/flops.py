"""Floating-point operations of a training step, for the share of peak that a run reports."""

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
    layer = t.hidden_size * (2 * width + 2 * t.num_kv_heads * t.head_dim + 3 * t.intermediate_size)
    target = (max(d.target_layer_ids) + 1) * tokens * (2 * layer + 4 * width * c.sequence_length / 2)

    heads, kv = d.num_heads * d.head_dim, 2 * d.num_kv_heads * d.head_dim
    block = d.hidden_size * (2 * heads + kv + 3 * d.intermediate_size)
    attention = 2 * heads * (c.sequence_length / 2 + d.block_size)
    drafter = 6 * d.num_layers * (slots * (block + attention) + tokens * d.hidden_size * kv)
    fusion = 4 * tokens * d.hidden_size * len(d.target_layer_ids) * t.hidden_size
    head = 4 * slots * (d.block_size - 1) / d.block_size * t.vocab_size * t.hidden_size
    return target + drafter + fusion + head
