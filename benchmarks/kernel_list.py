"""Which kernels a decoding round is on an H200, by XLA's program for one, compiled where no GPU is.

  pip install jax-cuda12-plugin==JAX_VERSION nvidia-cuda-nvcc-cu12      beside a jax for the CPU
  JAX_PLATFORMS=cpu python -m benchmarks.kernel_list --shape qwen3-8b --method ddtree --nodes 64
  JAX_PLATFORMS=cpu python -m benchmarks.kernel_list --shape qwen3.6-27b --part accept+commit --hlo commit.txt

The rounds are those of `decode_step`. What is listed is the body of the loop: what every round launches, in order, with
the shape that each kernel writes. Products are not tuned (that needs the GPU): splits of theirs, and the reductions
after them, may differ from the real program. The other kernels are the same, and so are fusions, copies and layouts.
For times see `kernel_times`.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from benchmarks._parts import add_part_arguments, chosen_part
from benchmarks._rounds import loop_of
from ddtree_jax.models.abstract import abstract_params
from pallas_kernels import choice

_MULTIPROCESSORS = 132
# What XLA asks of a device: the properties that CUDA reports of an H200.
_TARGET = f"""
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: {_MULTIPROCESSORS} fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 143167619072
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "NVIDIA H200"
"""
_NO_KERNEL = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant")


def loop_kernels(program: str) -> list[tuple[str, str, str]]:
    """(name, kind, shape of the result) of what the body of the only loop of an optimised program launches, in order.

    Raises:
      ValueError: the program has no loop.
    """
    body = re.search(r"\bwhile\(.*\bbody=%?([\w.\-]+)", program)
    if body is None:
        raise ValueError("the program has no loop")
    found, inside = [], False
    for line in program.splitlines():
        if re.match(rf"%?{re.escape(body[1])} \(", line):
            inside = True
        elif line.startswith("}"):
            inside = False
        elif inside and (op := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(", line)):
            name, shape, kind = op.groups()
            if kind not in _NO_KERNEL:
                pallas = re.search(r'op_name="[^"]*/(\w+)/mpmd_map"', line) if kind == "custom-call" else None
                found.append((pallas[1] if pallas else name, kind, shape))
    return found


def compile_for_hopper(run, *args: Any) -> str:
    """The optimised program of a jitted function of abstract arrays."""
    topology = topologies.get_topology_desc("", "cuda", target_config=_TARGET, topology="1x1x1")
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    options = dict(xla_gpu_autotune_level=0)
    if nvcc := importlib.util.find_spec("nvidia.cuda_nvcc"):
        folder = str(next(iter(nvcc.submodule_search_locations)))
        options["xla_gpu_cuda_data_dir"] = folder
        os.environ["PATH"] = f"{Path(folder) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    with mock.patch.multiple(choice, on_hopper=lambda: True, multiprocessors=lambda: _MULTIPROCESSORS):
        return run.lower(*placed).compile(compiler_options=options).as_text()


def main(arguments: list[str] | None = None) -> list[tuple[str, str, str]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_part_arguments(parser)
    args = parser.parse_args(arguments)
    if importlib.util.find_spec("jax_cuda12_plugin") is None and importlib.util.find_spec("jax_cuda13_plugin") is None:
        parser.error("no compiler for CUDA here: pip install jax-cuda12-plugin nvidia-cuda-nvcc-cu12")
    target, drafter, part, title = chosen_part(parser, args)
    params = {"target": abstract_params(target), "drafter": abstract_params(drafter)}
    fixed, carry = jax.eval_shape(part.make)
    turns = jax.ShapeDtypeStruct((), jnp.int32)
    program = compile_for_hopper(loop_of(part), params, fixed, carry, turns)
    if args.hlo:
        Path(args.hlo).write_text(program, encoding="utf-8")
    kernels = loop_kernels(program)
    print(f"{title}: {len(kernels)} kernels")
    for name, kind, shape in kernels:
        print(f"{name:<44} {kind:<12} {shape[:90]}")
    counts = collections.Counter(re.sub(r"[._]\d+$", "", name) for name, _, _ in kernels)
    print("\n".join(f"{count:6d}  {name}" for name, count in counts.most_common()))
    return kernels


if __name__ == "__main__":
    main()
