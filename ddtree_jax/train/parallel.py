"""Data parallelism: the rows of a batch spread over the devices of one host, everything else on each of them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "rows"
ROWS, SHARED = PartitionSpec(AXIS), PartitionSpec()


def row_mesh(batch_size: int, devices: int = 0) -> Mesh | None:
    """The devices that share a batch; None for one device, which then needs no mesh.

    Args:
      batch_size: rows a step, a multiple of the number of devices.
      devices: how many; 0 takes the most that are here and divide `batch_size`.

    Raises:
      ValueError: fewer devices are here, or `batch_size` cannot be divided evenly.
    """
    here = jax.local_devices()
    if devices > len(here):
        raise ValueError(f"devices: {devices} asked for, {len(here)} of platform {here[0].platform} are here")
    if devices and batch_size % devices:
        raise ValueError(f"batch_size must be a multiple of devices ({devices}); found {batch_size}")
    count = devices or max(n for n in range(1, len(here) + 1) if batch_size % n == 0)
    return Mesh(np.array(here[:count]), (AXIS,)) if count > 1 else None


def replicate(mesh: Mesh | None, tree: Any) -> Any:
    """`tree` on every device of the mesh."""
    return tree if mesh is None else jax.device_put(tree, NamedSharding(mesh, SHARED))


def one_copy(mesh: Mesh | None, tree: Any) -> Any:
    """What `replicate` put on every device, on the first of them alone: models decode on one."""
    return tree if mesh is None else jax.tree.map(lambda x: x.addressable_data(0), tree)


def spread(mesh: Mesh | None, tree: Any) -> Any:
    """Host arrays [b, ...] on the devices, each with its share of the rows; does not wait."""
    return jax.device_put(tree) if mesh is None else jax.device_put(tree, NamedSharding(mesh, ROWS))


def over_rows(mesh: Mesh | None, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`function` run by each device on its own rows; specs are ROWS or SHARED, as of `jax.shard_map`."""
    if mesh is None:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def total(mesh: Mesh | None, tree: Any) -> Any:
    """The sum over devices, inside `over_rows`."""
    return tree if mesh is None else jax.lax.psum(tree, AXIS)
