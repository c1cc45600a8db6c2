"""The default kernel on a Hopper GPU, over a wide grid of shapes: JAX_PLATFORMS=cuda pytest ...; skipped elsewhere."""

import jax
import numpy as np
import pytest
from suite import Case, TreeAttentionSuite, in_layers, make_operands, to_pages

from pallas_kernels.choice import on_hopper
from pallas_kernels.tree_attention import paged_tree_attention, tree_attention


@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")
class TestGpu(TreeAttentionSuite):
    cases = (
        # Qwen3 shapes, widths and lengths of every kind, several slots.
        *(
            Case(
                nodes=n, heads=8, kv_heads=2, head_dim=128, capacity=1104, lengths=(0, 1, 640, 1023, 1104), dead=n // 5
            )
            for n in (1, 3, 16, 33, 64, 100, 128, 256)
        ),
        Case(nodes=512, heads=8, kv_heads=2, head_dim=128, capacity=1024, lengths=(1000,), mask="causal"),
        Case(nodes=16, heads=32, kv_heads=8, head_dim=128, capacity=8192, lengths=(8192,), mask="full"),
        Case(nodes=64, heads=32, kv_heads=8, head_dim=128, capacity=8192, lengths=(8101,), dtype="float16"),
        # Groups that fill no tile, and the other head dimensions.
        *(
            Case(nodes=20, heads=2 * g, kv_heads=2, head_dim=128, capacity=504, lengths=(450, 77))
            for g in (1, 2, 3, 5, 6, 7, 8, 12, 16)
        ),
        *(
            Case(nodes=n, heads=12, kv_heads=2, head_dim=d, capacity=704, lengths=(704, 311), dtype=dtype)
            for n, d, dtype in ((64, 64, "bfloat16"), (40, 96, "float16"), (16, 256, "bfloat16"), (130, 256, "float16"))
        ),
        # Options.
        Case(nodes=70, heads=8, kv_heads=2, head_dim=128, capacity=2000, lengths=(1999, 300), sliding_window=256),
        Case(
            nodes=70,
            heads=8,
            kv_heads=2,
            head_dim=256,
            capacity=2000,
            lengths=(1999, 300),
            sliding_window=5,
            softcap=20.0,
        ),
        Case(
            nodes=9, heads=8, kv_heads=2, head_dim=64, capacity=904, lengths=(850,), sliding_window=100, positions=True
        ),
        *(
            Case(nodes=30, heads=8, kv_heads=2, head_dim=128, capacity=1000, lengths=(0, 513, 999), page_rows=rows)
            for rows in (16, 32, 64, 128)
        ),
        *(
            Case(nodes=30, heads=8, kv_heads=2, head_dim=128, capacity=1000, lengths=(0, 513, 999), layer=layer)
            for layer in range(3)
        ),
        Case(nodes=64, heads=32, kv_heads=8, head_dim=128, capacity=3000, lengths=(2900,), layer=2),
    )

    def attend(self, case, operands, options):
        function = tree_attention
        if case.page_rows:
            function, operands = paged_tree_attention, to_pages(case, operands)
        operands, options = in_layers(case, operands, options)
        return jax.jit(lambda *a: function(*a, **options, implementation="mosaic_gpu"))(*operands)

    @pytest.mark.parametrize("nodes, length", [(1, 3000), (64, 1000), (256, 700)])
    def test_the_same_bits_every_time(self, nodes, length):
        """Chains of calls, each fed with the last one's output: a race between kernels or warpgroups would show."""
        case = Case(nodes=nodes, heads=32, kv_heads=8, head_dim=128, capacity=3000, lengths=(length,))
        (q, *rest), options = make_operands(case)

        @jax.jit
        def chain(q):
            return jax.lax.fori_loop(
                0, 50, lambda _, q: tree_attention(q, *rest, **options, implementation="mosaic_gpu"), q
            )

        first = np.asarray(chain(q)).view(np.uint16)
        for _ in range(20):
            np.testing.assert_array_equal(np.asarray(chain(q)).view(np.uint16), first)
