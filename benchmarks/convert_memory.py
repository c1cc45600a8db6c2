"""Host memory that converting a large checkpoint takes, beside the payload of its largest shard.

  python -m benchmarks.convert_memory --shape qwen3.6-27b --folder SCRATCH [--shard-gb 5]

Writes a Hugging Face folder with the tensor names and shapes of the published model, all zeros, as sparse files that
take no disk, and converts it in a process of its own. The checkpoint written is compressed: zeros take little, too. So
this measures memory, not speed.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import tokenizers

from benchmarks._models import TARGETS
from convert.names import Parameter, parameters
from ddtree_jax.config import TargetConfig

# VmHWM and not ru_maxrss, which begins with the peak of the parent.
SCRIPT = """
import sys, convert
convert.convert_target(sys.argv[1], sys.argv[2], dtype="bfloat16")
with open("/proc/self/status") as file:
    print(next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM")))
"""


def hf_config(c: TargetConfig) -> dict:
    """config.json of a Qwen3.5 or Qwen3.6."""
    d = c.delta
    text = dict(
        model_type="qwen3_5_text", vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.num_layers,
        intermediate_size=c.intermediate_size, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, full_attention_interval=4, linear_num_key_heads=d.num_key_heads,
        linear_num_value_heads=d.num_value_heads, linear_key_head_dim=d.key_head_dim,
        linear_value_head_dim=d.value_head_dim, rms_norm_eps=c.rms_norm_eps, max_position_embeddings=c.max_position,
        eos_token_id=0, dtype="bfloat16", tie_word_embeddings=c.tie_embeddings,
        rope_parameters=dict(
            rope_type="default", rope_theta=c.rope.theta, partial_rotary_factor=c.rotary_dim / c.head_dim
        ),
    )  # fmt: skip
    outer = dict(architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5")
    return outer | dict(text_config=text, tie_word_embeddings=c.tie_embeddings)


def write_sparse(folder: Path, table: tuple[Parameter, ...], shard_bytes: float) -> tuple[int, int]:
    """Shards of zeros in bfloat16; returns (number of tensors, payload of the largest shard)."""
    tensors = [source for parameter in table for source in parameter.sources]
    shards: list[dict] = [{}]
    sizes = [0]
    for name, shape in tensors:
        size = 2 * math.prod(shape)
        if sizes[-1] and sizes[-1] + size > shard_bytes:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [sizes[-1], sizes[-1] + size]}
        sizes[-1] += size
    index = {}
    for number, (header, size) in enumerate(zip(shards, sizes), start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as out:
            out.write(np.uint64(len(text)).tobytes() + text)
            out.truncate(8 + len(text) + size)
        index |= dict.fromkeys(header, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return len(tensors), max(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=[n for n, c in TARGETS.items() if c.delta], default="qwen3.6-27b")
    parser.add_argument("--folder", required=True, type=Path, help="a folder to make and to remove again")
    parser.add_argument("--shard-gb", type=float, default=5.0, help="payload of a shard")
    args = parser.parse_args()

    config, source, out = TARGETS[args.shape], args.folder / "source", args.folder / "out"
    source.mkdir(parents=True)
    try:
        (source / "config.json").write_text(json.dumps(hf_config(config)))
        tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(source / "tokenizer.json"))
        count, largest = write_sparse(source, parameters(config), 1e9 * args.shard_gb)
        began = time.perf_counter()
        command = [sys.executable, "-c", SCRIPT, str(source), str(out)]
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        seconds = time.perf_counter() - began
    finally:
        shutil.rmtree(args.folder)
    total = 2 * sum(p.size for p in parameters(config)) / 1e9
    limit = largest / 1e9 + 3 * 2**30 / 1e9
    print(f"{args.shape}: {count} tensors, {total:.1f} GB, largest shard {largest / 1e9:.2f} GB; converted in "
          f"{seconds:.0f} s, peak host memory {peak / 1e9:.2f} GB (largest shard and 3 GiB: {limit:.2f})")  # fmt: skip


if __name__ == "__main__":
    main()
