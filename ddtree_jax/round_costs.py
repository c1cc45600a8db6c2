"""What a round takes at each width: measured once a setting, kept on disk.

The loop that will decode is timed itself: with a table that prices out all widths but one, every look takes that one.
Caches are filled with noise up to the context asked for, so that no prompt has to be read.
"""

import dataclasses
import hashlib
import json
import os
import platform
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ddtree_jax
from ddtree_jax.decode import run as device
from ddtree_jax.decode.noise import at_context, noisy_state
from ddtree_jax.decode.plan import Plan
from ddtree_jax.decode.state import Request
from ddtree_jax.decode.width import RoundCosts
from ddtree_jax.files import write_whole
from ddtree_jax.models import layers

CACHE_VARIABLE = "DDTREE_JAX_CACHE"
_REPEATS = 4
_MOST_ROUNDS = 17
_FORMAT = 3

_known: dict[str, RoundCosts] = {}


def round_costs(plan: Plan, params: Any) -> RoundCosts:
    """Seconds of a round at each of the loop's widths, as host arrays; measured if no table of them is on disk.

    A table holds for one loop (models, method, widths, temperature 0 or not), batch, cache size, device, version of
    JAX and of this package, and kernel of the linear layers. Tables are JSON files in `round_costs` of
    `$DDTREE_JAX_CACHE`, else `$XDG_CACHE_HOME/ddtree_jax`, else `~/.cache/ddtree_jax`: delete them to measure anew. A
    file that cannot be read counts as missing.
    """
    setting = {
        "format": _FORMAT,
        "loop": repr(dataclasses.replace(plan.loop, chunk=0)),  # of the prompt: no part of a round
        "batch": plan.batch,
        "cache_rows": plan.cache_rows,
        "device": _device(),
        "versions": [jax.__version__, ddtree_jax.__version__],
        "matmul": layers.MATMUL,
    }
    key = hashlib.sha256(json.dumps(setting).encode()).hexdigest()[:24]
    if key not in _known:
        path = _folder() / "round_costs" / f"{key}.json"
        costs = _read(path, len(plan.loop.widths))
        if costs is None:
            costs = measure(plan, params)
            _write(path, setting, costs)
        _known[key] = costs
    return _known[key]


def measure(plan: Plan, params: Any) -> RoundCosts:
    """Times rounds of each width at a short and at a long context of the plan's cache; see `round_costs`.

    A call has costs of its own, which widths share (a small model's are those of a round or two): what counts is what
    more rounds add to a call of one.
    """
    loop, path, widths = plan.loop, plan.loop.proposer.max_path, range(len(plan.loop.widths))
    params = loop.prepare(params)  # as a stream has them, so that it finds the same program compiled
    rounds = max(2, min(_MOST_ROUNDS, plan.cache_rows // path))
    longest = max(0, plan.cache_rows - rounds * path)
    contexts = sorted({longest // 8, longest})
    request = Request(
        limit=np.full(plan.batch, np.iinfo(np.int32).max, np.int32),
        seeds=np.zeros(plan.batch, np.uint32),
        stop_tokens=np.full(1, -1, np.int32),
        temperature=np.float32(1),
    )

    def seconds(width: int, context: int, rounds: int) -> float:
        """Of a call."""
        priced = jax.device_put(request.replace(costs=RoundCosts.all_but(width, len(widths), contexts)))
        state = at_context(_noisy_state(loop, plan.batch, plan.cache_rows, plan.output_rows), context)
        args = (params, priced, state.replace(choice=state.choice.due()), jnp.int32(rounds))
        call, _ = device.executable(device.advance, loop, *args)
        jax.block_until_ready(args)
        began = time.perf_counter()
        jax.block_until_ready(call(*args))
        return time.perf_counter() - began

    # In turn, so that what disturbs the machine for a while disturbs no width alone. The first runs warm up.
    runs = [
        [[[seconds(width, context, n) for n in (1, rounds)] for width in widths] for context in contexts]
        for _ in range(1 + _REPEATS)
    ]
    one, all_rounds = np.moveaxis(np.min(runs[1:], axis=0), -1, 0)
    more = all_rounds - one
    # Where a machine was disturbed for all but the short calls.
    costs = np.where(more > 0, more / (rounds - 1), all_rounds / rounds)
    return RoundCosts(np.array(contexts, np.float32), costs.astype(np.float32))


_noisy_state = jax.jit(noisy_state, static_argnums=(0, 1, 2, 3))


def _device() -> str:
    kind = jax.devices()[0].device_kind
    return f"{kind} of {platform.node()}, {os.cpu_count()} cores" if kind == "cpu" else kind


def _folder() -> Path:
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "ddtree_jax"


def _read(path: Path, widths: int) -> RoundCosts | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        costs = RoundCosts(np.array(data["contexts"], np.float32), np.array(data["seconds"], np.float32))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    contexts, seconds = costs.contexts, costs.seconds
    whole = contexts.ndim == 1 and contexts.size and seconds.shape == (contexts.size, widths)
    sane = whole and np.all(np.isfinite(seconds) & (seconds > 0)) and np.all(np.isfinite(contexts))
    return costs if sane and np.all(np.diff(contexts) > 0) else None


def _write(path: Path, setting: dict, costs: RoundCosts) -> None:
    table = {"setting": setting, "contexts": costs.contexts.tolist(), "seconds": costs.seconds.tolist()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(table, indent=1).encode())
    except OSError as error:
        warnings.warn(f"{path}: round costs cannot be kept, so they will be measured again: {error}", stacklevel=2)
