"""Tree attention from a raw projection where there is no kernel, and arguments that contradict each other."""

import jax.numpy as jnp
import pytest
from projected_suite import Case, ProjectedSuite, make_call

from pallas_kernels.tree_attention import projected_tree_attention


def attend(case, call, **others):
    arguments = dict(
        projected=call.parts[:, : len(case.lengths) * case.nodes].reshape(len(case.lengths), case.nodes, -1),
        q_weight=call.weights[0], k_weight=call.weights[1], cos=call.rope[0], sin=call.rope[1], heads=case.described(),
        k_cache=call.cache[0], v_cache=call.cache[1], lengths=call.lengths, ancestors=call.ancestors,
    )  # fmt: skip
    return projected_tree_attention(**arguments | call.options | others)


class TestXla(ProjectedSuite):
    cases = (
        Case(nodes=1, capacity=20, lengths=(0, 13)),
        Case(nodes=5, heads=(4, 2, 0), capacity=30, lengths=(23,), norm=False, sliding_window=4, layer=1),
        Case(
            nodes=12, heads=(2, 1, 2), head_dim=256, rotary=64, zero_centred=True, capacity=72, lengths=(65,), dead=3,
            dtype="float16",
        ),
        Case(nodes=16, heads=(3, 1, 0), head_dim=96, capacity=104, lengths=(77, 5), mask="full"),
    )  # fmt: skip

    def attend(self, case, call):
        return attend(case, call, implementation="xla")


CASE = Case(nodes=5, heads=(4, 2, 0), capacity=32, lengths=(23,), layer=1)


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu", None])
@pytest.mark.parametrize(
    "name,value,message",
    [
        ("projected", jnp.ones((1, 5, 448), jnp.bfloat16), "^projected must be"),
        ("q_weight", jnp.ones(32, jnp.bfloat16), "^q_weight must be"),
        ("k_weight", None, "^k_weight must be"),
        ("cos", jnp.ones((1, 4, 32), jnp.float32), "^cos must be"),
        ("sin", jnp.ones((1, 5, 16), jnp.float32), "^sin must be"),
        ("k_cache", jnp.ones((3, 1, 1, 32, 64), jnp.bfloat16), "^k_cache must have 2 heads"),
        ("k_cache", jnp.ones((3, 1, 2, 32, 32), jnp.bfloat16), "^k_cache must have shape"),
        ("v_cache", jnp.ones((3, 1, 2, 32, 64), jnp.float16), "^v_cache must be"),
        ("lengths", jnp.ones(2, jnp.int32), "^lengths must have"),
        ("ancestors", jnp.ones((1, 5, 2), jnp.uint32), "^ancestors must have"),
        ("positions", jnp.ones((1, 4), jnp.int32), "^positions must have"),
        ("sliding_window", 0, "^sliding_window must be"),
        ("layer", 3, "^layer 3 needs"),
        ("implementation", "cuda", "^implementation must be"),
    ],
)
def test_contradictions(name, value, message, implementation):
    with pytest.raises(ValueError, match=message):
        attend(CASE, make_call(CASE), **{"implementation": implementation, name: value})


def test_what_no_kernel_can_do_is_named():
    case = Case(nodes=5, capacity=30, lengths=(23,))
    with pytest.raises(NotImplementedError, match="a cache of 30 rows"):
        attend(case, make_call(case), implementation="mosaic_gpu")
