"""The count of operations of a training step."""

import dataclasses

from ddtree_jax import testing
from ddtree_jax.train.config import TrainConfig
from ddtree_jax.train.flops import step_flops
from ddtree_jax.train.step import Models


def flops(moe=None, target=None):
    target = target or testing.tiny_target_config(moe=moe)
    drafter = testing.tiny_drafter_config(target)
    return step_flops(Models(TrainConfig(mask_token_id=3, batch_size=2, sequence_length=16), target, drafter))


def test_a_mixture_counts_the_experts_of_a_token_the_router_and_the_shared_expert():
    dense = testing.tiny_target_config()
    half = dense.intermediate_size // 2
    moe = testing.tiny_moe(
        num_experts=16, experts_per_token=2, intermediate_size=half, shared_intermediate_size=0, sparse=(True,) * 3
    )
    token_products = 2 * 2 * 16 * dense.hidden_size  # of one row of weights, for all tokens of the step
    assert flops(moe) - flops() == 3 * 16 * token_products  # the routers of three layers; two halves are one whole
    shared = testing.tiny_moe(intermediate_size=half, shared_intermediate_size=5)
    assert flops(shared) - flops() == 2 * (16 + 3 * 5 + 1) * token_products


def test_a_recurrent_layer_counts_its_projections_and_no_attention():
    hybrid = testing.tiny_hybrid_config()
    d, tokens = hybrid.delta, 2 * 16
    attention = (hybrid.qkv_heads + hybrid.num_heads) * hybrid.head_dim
    recurrent = d.conv_channels + 2 * d.num_value_heads + 2 * d.value_size
    all_attention = dataclasses.replace(hybrid, delta=None, delta_layers=())
    taps = testing.tiny_drafter_config(hybrid).target_layer_ids
    changed = sum(i <= max(taps) for i in hybrid.delta_layers)
    scores = 4 * hybrid.num_heads * hybrid.head_dim * 16 / 2
    expected = changed * tokens * (2 * hybrid.hidden_size * (attention - recurrent) + scores)
    assert changed and flops(target=all_attention) - flops(target=hybrid) == expected
