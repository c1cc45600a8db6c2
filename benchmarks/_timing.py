"""Timing on the device: calls chained inside one jitted loop, over operands that do not fit in the cache together."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax

# Measured on an H200: the sum over 2 GiB, and an 8192^3 bfloat16 matrix product.
BYTES_PER_US = 4.39e6
FLOP_PER_US = 790e6


def floor_us(bytes_moved: float, flop: float) -> float:
    """The time below which no kernel can go: memory or arithmetic, whichever takes longer."""
    return max(bytes_moved / BYTES_PER_US, flop / FLOP_PER_US)


def compile_loop(call: Callable, carry: Any, operand_sets: Sequence[tuple], iterations: int):
    """Compiles `iterations` rounds of carry = call(carry, *operands) over all the sets; the carry keeps its type."""
    one = jax.jit(call)  # traced and lowered once, however many sets there are

    @jax.jit
    def loop(carry, operand_sets):
        def body(_, carry):
            for operands in operand_sets:
                carry = one(carry, *operands)
            return carry

        return lax.fori_loop(0, iterations, body, carry)

    return loop.lower(carry, operand_sets).compile()


def time_loop_us(loop, carry: Any, operand_sets: Sequence[tuple], iterations: int, repeats: int = 5) -> float:
    """Microseconds of one call, the least of `repeats` measurements."""
    jax.block_until_ready(loop(carry, operand_sets))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(loop(carry, operand_sets))
        best = min(best, time.perf_counter() - start)
    return best * 1e6 / (iterations * len(operand_sets))


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Holds the lock file named by BENCHMARK_LOCK, if any: several processes may compile while one measures."""
    path = os.environ.get("BENCHMARK_LOCK")
    if not path:
        yield
        return
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
