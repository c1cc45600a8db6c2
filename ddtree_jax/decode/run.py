"""Jitted entry points of the loop. The state is donated to each; a call compiles once per static loop and shapes."""

import collections
import functools
import time
from collections.abc import Callable
from typing import Any

import jax

from ddtree_jax.decode.loop import ALL_ROUNDS, DecodeLoop, Verified
from ddtree_jax.decode.state import DecodeState, Request


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def empty_state(loop: DecodeLoop, batch: int, cache_rows: int, output_rows: int) -> DecodeState:
    """`DecodeLoop.init_state`, made on the device."""
    return loop.init_state(batch, cache_rows, output_rows)


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def start(loop: DecodeLoop, params: Any, request: Request, prompt, prompt_length, state: DecodeState) -> DecodeState:
    """Prefill and first token."""
    return loop.prefill(params, request, prompt, prompt_length, state)


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def advance(loop: DecodeLoop, params: Any, request: Request, state: DecodeState, max_rounds) -> DecodeState:
    """At most `max_rounds` rounds, for streaming."""
    return loop.advance(params, request, state, max_rounds)


@functools.partial(jax.jit, static_argnums=0)
def verify(loop: DecodeLoop, params: Any, request: Request, state: DecodeState) -> Verified:
    """The next round before its commit; the state stays as it is. For looking at trees."""
    return loop.verify(params, request, state)


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def run(loop: DecodeLoop, params: Any, request: Request, prompt, prompt_length, state: DecodeState) -> DecodeState:
    """Prefill and all rounds in one call: the host sees nothing before the last token."""
    params = loop.prepare(params)
    state = loop.prefill(params, request, prompt, prompt_length, state)
    return loop.advance(params, request, state, ALL_ROUNDS)


# Newest last.
_executables: collections.OrderedDict[Any, tuple[Callable, Callable]] = collections.OrderedDict()
# A compiled program takes a memory map or more an operation on a CPU, and Linux gives a process 65,530 of them.
MOST_MEMORY_MAPS = 40_000


def executable(function: Callable, loop: DecodeLoop, *args: Any) -> tuple[Callable, float]:
    """The compiled form of a jitted entry point, and the seconds that compiling took (0.0 if it was at hand).

    Compiling ahead of the call keeps compile time out of every reported speed. Where memory maps run low, the programs
    compiled first are forgotten.
    """
    leaves, structure = jax.tree.flatten(args)
    shapes = tuple((x.shape, x.dtype.name, getattr(x, "sharding", None)) for x in leaves)
    key = (function.__name__, loop, structure, shapes)
    if (found := _executables.get(key)) is not None:
        return found[1], 0.0
    began = time.perf_counter()
    compiled = function.lower(loop, *args).compile()
    _executables[key] = function, compiled
    while len(_executables) > 1 and memory_maps() > MOST_MEMORY_MAPS:
        oldest, _ = _executables.popitem(last=False)[1]
        oldest.clear_cache()  # JAX keeps what it compiled as long as it knows the traced function
    return compiled, time.perf_counter() - began


def memory_maps() -> int:
    """Of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return 0
