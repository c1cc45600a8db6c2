"""A conversion that dies in the middle leaves no checkpoint, no temporary folder, and the old checkpoint."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import synthetic_checkpoints as synthetic

import convert
from convert.pipeline import write_checkpoint
from convert.safetensors_source import SafetensorsSource
from ddtree_jax.checkpoint import load_params
from ddtree_jax.models.abstract import abstract_params


class Dying(SafetensorsSource):
    def read(self, name):
        if name == "model.norm.weight":
            raise KeyboardInterrupt
        return super().read(name)


@pytest.fixture
def source(tmp_path):
    config = synthetic.target_json("llama")
    return synthetic.write_folder(tmp_path / "source", config, synthetic.target_tensors(config))


def die(source, out, config, overwrite):
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(out, config, Dying(source), origin="x", overwrite=overwrite, progress=False)


def test_nothing_is_left(source, monkeypatch):
    monkeypatch.setattr("ddtree_jax.checkpoint._BATCH_BYTES", 1)  # so that something is on disk already
    from convert.hf_config import target_config

    out = source.parent / "out"
    die(source, out, target_config(source), overwrite=False)
    assert os.listdir(source.parent) == ["source"]


def test_the_old_checkpoint_survives(source):
    out = source.parent / "out"
    config = convert.convert_target(source, out)
    die(source, out, config, overwrite=True)
    assert sorted(os.listdir(source.parent)) == ["out", "source"]
    params = load_params(out, abstract_params(config))
    assert np.asarray(params["norm"]["weight"]).shape == (synthetic.HIDDEN,)


def test_overwrite_replaces(source):
    out = source.parent / "out"
    convert.convert_target(source, out, dtype="float32")
    config = convert.convert_target(source, out, overwrite=True)
    assert config.dtype == "bfloat16"
    load_params(out, abstract_params(config))
    assert sorted(os.listdir(source.parent)) == ["out", "source"]


@pytest.mark.slow
def test_terminated_process_cleans_up(source):
    """SIGTERM while tensors are written."""
    out = source.parent / "out"
    code = (
        "import sys, time; import convert.pipeline as p; read = p.read_parameter\n"
        "def slow(*a): time.sleep(0.5); return read(*a)\n"
        "p.read_parameter = slow; sys.argv[0] = 'convert'\n"
        "import runpy; runpy.run_module('convert.__main__', run_name='__main__')"
    )
    root = Path(convert.__file__).parents[1]
    process = subprocess.Popen([sys.executable, "-c", code, "target", source, out], cwd=root)
    deadline = time.monotonic() + 120
    while not any(".writing-" in p.name for p in source.parent.iterdir()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert sorted(os.listdir(source.parent)) == ["source"]
