"""The golden checkpoints, converted and loaded through the public interface. See ../goldens/README.md."""

import functools
import pathlib
import shutil
import tempfile

import numpy as np
import tokenizers

import convert
import ddtree_jax as dt

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
TARGETS = sorted(p.name for p in (GOLDENS / "models").iterdir())
DRAFTERS = sorted(p.name for p in (GOLDENS / "drafters").iterdir())
DRAFTERS_TARGET = "qwen3"


@functools.cache
def target(name: str) -> dt.Target:
    with tempfile.TemporaryDirectory() as folder:
        source, out = pathlib.Path(folder, "source"), pathlib.Path(folder, "out")
        shutil.copytree(GOLDENS / "models" / name, source)
        # A checkpoint has a tokenizer; these models speak no language, so any will do.
        words = {f"w{i}": i for i in range(96)}
        tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(source / "tokenizer.json"))
        convert.convert_target(source, out, dtype="float32")
        return dt.load_target(out)


@functools.cache
def drafter(name: str) -> dt.Drafter:
    """Belongs to `target(DRAFTERS_TARGET)`."""
    fitted = target(DRAFTERS_TARGET)
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "out")
        convert.convert_drafter(
            GOLDENS / "drafters" / name, out, target=fitted.config, dtype="float32",
            sample_from_anchor=name == "from_anchor",
        )  # fmt: skip
        return dt.load_drafter(out, fitted)


@functools.cache
def golden(kind: str, name: str) -> dict[str, np.ndarray]:
    """The arrays beside a golden checkpoint; kind is "models" or "drafters"."""
    with np.load(GOLDENS / kind / name / "golden.npz") as data:
        return dict(data)
