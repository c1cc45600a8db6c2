"""The count of operations of a training step."""

from ddtree_jax import testing
from ddtree_jax.train.config import TrainConfig
from ddtree_jax.train.flops import step_flops
from ddtree_jax.train.step import Models


def flops(moe=None):
    target = testing.tiny_target_config(moe=moe)
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
