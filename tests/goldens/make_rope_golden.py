"""Writes rope.json: inverse frequencies and attention factors as transformers computes them (see README.md)."""

import json
import pathlib

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

POSITIONS = (0, 4095, 40961, 200000)

# (head_dim, rope_parameters): published settings, and settings that reach every branch.
CASES = {
    "default_llama2": (64, dict(rope_type="default", rope_theta=10000.0)),
    "default_qwen3": (128, dict(rope_type="default", rope_theta=1000000.0)),
    "linear_4": (64, dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
    "llama3_8b": (
        128,
        dict(
            rope_type="llama3",
            rope_theta=500000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "llama3_1b": (
        64,
        dict(
            rope_type="llama3",
            rope_theta=500000.0,
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "yarn_qwen3": (
        128,
        dict(rope_type="yarn", rope_theta=1000000.0, factor=4.0, original_max_position_embeddings=32768),
    ),
    "yarn_gpt_oss": (
        64,
        dict(
            rope_type="yarn",
            rope_theta=150000.0,
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=4096,
        ),
    ),
    "yarn_equal_mscales": (
        128,
        dict(
            rope_type="yarn",
            rope_theta=50000.0,
            factor=64.0,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=4096,
        ),
    ),
    "yarn_mscale_pair": (
        64,
        dict(
            rope_type="yarn",
            rope_theta=10000.0,
            factor=40.0,
            mscale=0.707,
            mscale_all_dim=1.2,
            original_max_position_embeddings=4096,
        ),
    ),
    "yarn_given_attention_factor": (
        64,
        dict(
            rope_type="yarn",
            rope_theta=10000.0,
            factor=8.0,
            attention_factor=0.75,
            original_max_position_embeddings=2048,
        ),
    ),
    # Both band edges beyond the last dimension, or before the first: the ramp has no room.
    "yarn_all_low": (32, dict(rope_type="yarn", rope_theta=10000.0, factor=2.0, original_max_position_embeddings=4)),
}


def main() -> None:
    golden = {}
    for name, (head_dim, parameters) in CASES.items():
        extended = int(parameters.get("original_max_position_embeddings", 4096) * parameters.get("factor", 1.0))
        config = transformers.Qwen3Config(
            head_dim=head_dim, hidden_size=4 * head_dim, num_attention_heads=4,
            max_position_embeddings=extended, rope_parameters=dict(parameters),
        )  # fmt: skip
        if parameters["rope_type"] == "default":
            inv_freq, factor = Qwen3RotaryEmbedding.compute_default_rope_parameters(config)
        else:
            inv_freq, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
        cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), torch.tensor([POSITIONS]))
        golden[name] = dict(
            head_dim=head_dim, rope_parameters=parameters, inv_freq=inv_freq.tolist(), attention_factor=factor,
            positions=POSITIONS, cos=cos[0, :, : head_dim // 2].tolist(), sin=sin[0, :, : head_dim // 2].tolist(),
        )  # fmt: skip
    text = json.dumps(json.loads(json.dumps(golden), parse_float=lambda x: float(f"{float(x):.9g}")))
    (pathlib.Path(__file__).parent / "rope.json").write_text(text.replace('}, "', '},\n"') + "\n")


if __name__ == "__main__":
    main()
