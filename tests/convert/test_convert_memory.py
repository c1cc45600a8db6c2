"""Host memory stays far below the size of the checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import synthetic_checkpoints as synthetic
from safetensors.numpy import save_file

import convert

LAYERS, HIDDEN, INTERMEDIATE = 12, 1024, 3584
EXPERTS = 8  # that share the intermediate size
SCRIPT = """
import sys
import convert
source, small, out = sys.argv[1:]
def peak():  # not ru_maxrss: that begins with the peak of the parent process
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
convert.convert_target(small, out + "-small")  # imports, thread pools and caches of Orbax
before = peak()
convert.convert_target(source, out)
print(peak() - before)
"""


def write_large(folder, architecture):
    config = synthetic.target_json(
        architecture, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS, head_dim=128,
        num_attention_heads=8, num_key_value_heads=2,
    )  # fmt: skip
    experts = architecture == "qwen3_moe"
    if experts:
        config |= {"num_experts": EXPERTS, "moe_intermediate_size": INTERMEDIATE // EXPERTS}
    shapes = {"model.embed_tokens.weight": (40, HIDDEN), "lm_head.weight": (40, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm.weight": (HIDDEN,), p + "post_attention_layernorm.weight": (HIDDEN,)}
        shapes |= {f"{p}self_attn.{n}_proj.weight": (rows, HIDDEN) for n, rows in zip("qkv", (1024, 256, 256))}
        shapes |= {p + "self_attn.o_proj.weight": (HIDDEN, 1024)}
        size = INTERMEDIATE
        if experts:
            shapes |= {f"{p}self_attn.{n}_norm.weight": (128,) for n in "qk"} | {
                p + "mlp.gate.weight": (EXPERTS, HIDDEN)
            }
            size = INTERMEDIATE // EXPERTS
        for mlp in [f"{p}mlp.experts.{j}." for j in range(EXPERTS)] if experts else [f"{p}mlp."]:
            shapes |= {mlp + "gate_proj.weight": (size, HIDDEN), mlp + "up_proj.weight": (size, HIDDEN)}
            shapes |= {mlp + "down_proj.weight": (HIDDEN, size)}
    rng = np.random.default_rng(0)
    tensors = {n: rng.standard_normal(s, np.float32).astype(ml_dtypes.bfloat16) for n, s in shapes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(synthetic.tokenizer_json())
    save_file(tensors, folder / "model.safetensors")
    return sum(t.nbytes for t in tensors.values())


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_peak_is_a_few_layers(tmp_path, architecture):
    payload = write_large(tmp_path / "large", architecture)
    assert payload > 300e6
    config = synthetic.target_json("llama")
    small = synthetic.write_folder(tmp_path / "small", config, synthetic.target_tensors(config))
    arguments = [str(tmp_path / "large"), str(small), str(tmp_path / "out")]
    root = Path(convert.__file__).parents[1]
    command = [sys.executable, "-c", SCRIPT, *arguments]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    growth = int(result.stdout)
    # One batch of groups (32 MiB and a layer), Orbax's copy of it, a mapped tensor: not the payload.
    assert growth < 0.6 * payload, f"{growth / 1e6:.0f} MB for a checkpoint of {payload / 1e6:.0f} MB"
    print(f"{growth / 1e6:.0f} MB for a checkpoint of {payload / 1e6:.0f} MB")
