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
    state = loop.prefill(params, request, prompt, prompt_length, state)
    return loop.advance(params, request, state, ALL_ROUNDS)


# Newest last. Bounded: a process that keeps hundreds of programs runs out of memory maps, on a CPU at least.
_MOST_EXECUTABLES = 24
_executables: collections.OrderedDict[Any, Callable] = collections.OrderedDict()


def executable(function: Callable, loop: DecodeLoop, *args: Any) -> tuple[Callable, float]:
    """The compiled form of a jitted entry point, and the seconds that compiling took (0.0 if it was at hand).

    Compiling ahead of the call keeps compile time out of every reported speed.
    """
    leaves, structure = jax.tree.flatten(args)
    shapes = tuple((x.shape, x.dtype.name, getattr(x, "sharding", None)) for x in leaves)
    key = (function.__name__, loop, structure, shapes)
    if (found := _executables.get(key)) is not None:
        return found, 0.0
    began = time.perf_counter()
    _executables[key] = compiled = function.lower(loop, *args).compile()
    while len(_executables) > _MOST_EXECUTABLES:
        _executables.popitem(last=False)
    return compiled, time.perf_counter() - began
