"""Tree attention from a raw projection on a Hopper GPU: JAX_PLATFORMS=cuda pytest ...; skipped elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from projected_suite import Case, ProjectedSuite, make_call

from pallas_kernels.choice import on_hopper
from pallas_kernels.streaming_matmul import PartialSums
from pallas_kernels.tree_attention import projected_tree_attention

QWEN3_8B = dict(heads=(32, 8, 0), head_dim=128)
QWEN36_27B = dict(heads=(24, 4, 24), head_dim=256, rotary=64, zero_centred=True)


def function(case, call):
    """Of the projection's parts."""

    def attend(parts):
        projected = PartialSums(parts, (len(case.lengths), case.nodes), case.dtype)
        return projected_tree_attention(
            projected, *call.weights, *call.rope, case.described(), *call.cache, call.lengths, call.ancestors,
            **call.options, implementation="mosaic_gpu",
        )  # fmt: skip

    return jax.jit(attend)


@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")
class TestGpu(ProjectedSuite):
    cases = (
        *(Case(nodes=n, **QWEN3_8B, capacity=1280, lengths=(1100,), dead=n // 5) for n in (1, 5, 16, 33, 60, 64)),
        *(Case(nodes=n, **QWEN3_8B, capacity=8192, lengths=(8100,)) for n in (1, 16, 64, 128)),
        Case(nodes=16, **QWEN3_8B, capacity=32768, lengths=(30000,)),
        *(Case(nodes=n, **QWEN36_27B, capacity=1280, lengths=(1200,), dead=n // 5) for n in (1, 5, 16, 64)),
        Case(nodes=64, **QWEN36_27B, capacity=8192, lengths=(8000,), layer=2),
        # Slots, the shortest contexts, layers, rows past the last.
        *(Case(nodes=n, **QWEN3_8B, capacity=1104, lengths=(0, 1, 63, 1023, 1104), layer=1) for n in (3, 16, 64)),
        Case(nodes=13, heads=(8, 2, 0), head_dim=128, capacity=640, lengths=(600, 64), norm=False, spare_rows=6),
        # Windows, other head dimensions and groups.
        Case(nodes=60, **QWEN3_8B, capacity=2000, lengths=(1999, 300), sliding_window=256),
        Case(nodes=30, **QWEN36_27B, capacity=2000, lengths=(1999, 300), sliding_window=5),
        Case(nodes=9, heads=(8, 2, 0), capacity=904, lengths=(850,), sliding_window=100, positions=True),
        Case(nodes=40, heads=(9, 3, 0), capacity=704, lengths=(704, 311), dtype="float16"),
        Case(nodes=40, heads=(12, 4, 0), head_dim=96, capacity=704, lengths=(704, 311), dtype="float16"),
    )

    def attend(self, case, call):
        call_kernels = function(case, call)
        assert call_kernels.lower(call.parts).as_text().count("custom_call @mosaic_gpu") <= 2  # no norms before
        return call_kernels(call.parts)

    @pytest.mark.parametrize(
        "nodes, length, shape",
        [(1, 3000, QWEN3_8B), (16, 1000, QWEN36_27B), (64, 1000, QWEN3_8B), (64, 10, QWEN36_27B)],
    )
    def test_the_same_bits_every_time(self, nodes, length, shape):
        """Chains of calls, each fed with the last one's results: a race between kernels or warpgroups would show."""
        case = Case(nodes=nodes, **shape, capacity=3072, lengths=(length,))
        call = make_call(case)
        attend = function(case, call)

        @jax.jit
        def chain(parts):
            def step(_, parts):
                out, keys, values, _ = attend(parts)
                rows = (out, keys.swapaxes(1, 2), values.swapaxes(1, 2))
                found = jnp.concatenate([x.reshape(1, nodes, -1) for x in rows], axis=-1)
                return parts.at[..., : found.shape[-1]].set(found)

            return jax.lax.fori_loop(0, 50, step, parts)

        first = np.asarray(chain(call.parts)).view(np.uint16)
        for _ in range(20):
            np.testing.assert_array_equal(np.asarray(chain(call.parts)).view(np.uint16), first)
