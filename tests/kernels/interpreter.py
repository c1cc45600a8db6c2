"""Running Mosaic GPU kernels in the interpreter, with its search for races."""

from collections.abc import Callable
from typing import Any

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

PARAMS = plgpu.InterpretGPUParams(detect_races=True)


def interpreted(function: Callable, *operands: Any, **options: Any) -> Any:
    """The results of a function that interprets kernels with `PARAMS`; fails where one has a race."""
    try:
        results = jax.block_until_ready(function(*operands, **options))
        assert not gpu_callbacks.get_races().races_found
    except BaseException:
        gpu_callbacks.reset_gpu_interpret_mode_state()  # or the next case cannot run
        raise
    return results
