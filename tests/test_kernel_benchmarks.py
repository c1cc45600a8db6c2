"""The benchmarks of kernels where no GPU is: what they compute, and how they tell it."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import kernel_times, layer_chain
from benchmarks._models import TARGETS
from benchmarks.streaming_matmul import table_entry
from pallas_kernels.streaming_matmul.config import MEASURED, Config, Shape


@pytest.mark.parametrize("shape,mixer", [("tiny", "attention"), ("tiny-hybrid", "attention"), ("tiny-hybrid", "delta")])
def test_a_layer_of_xla_products_is_timed(capsys, shape, mixer):
    layer_chain.main(["--shape", shape, "--mixer", mixer, "--rows", "3", "--variants", "xla"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(shape) and "us a layer" in line and "inf" not in line


def test_what_does_not_compile_is_told_and_is_never_the_best(capsys, monkeypatch):
    target = TARGETS["tiny"]
    products = layer_chain.shapes(target, "attention", 3)
    weights = layer_chain.make_weights(target, "attention")
    wrong = Config(tile=64, splits=1, cluster=1, consumers=1, block=128, stages=3)
    monkeypatch.setattr(layer_chain, "variety", lambda shape, limit: [wrong])
    best = layer_chain.sweep(target, 3, weights, {"o": products["o"]}, dict.fromkeys(products), 1)
    assert best["o"] is None
    assert "# failed" in capsys.readouterr().out


def test_lines_of_the_table_read_back():
    for (features, inputs, panels, rows), config in MEASURED.items():
        shape = Shape(rows=rows, features=features, inputs=inputs, panels=panels)
        ((key, value),) = eval("{" + table_entry(shape, config) + "}", {"Config": Config}).items()
        assert key == (features, inputs, panels, rows) and value == config


def test_kernels_of_a_round_are_summed_by_name():
    events = [("fusion_1", 0, 2000), ("fusion_2", 2000, 4000), ("matmul", 7000, 3000)]
    lines = kernel_times.table(events, turns=2)
    assert [line.split() for line in lines[1:3]] == [["3.0", "1.0", "3.00", "fusion"], ["1.5", "0.5", "3.00", "matmul"]]
    assert lines[-2].split() == ["0.5", "(between)"]  # of 10 us, the kernels take 9
    assert lines[-1].split() == ["5.0", "1.5", "(all)"]


def test_a_trace_without_a_gpu_is_refused(tmp_path):
    with jax.profiler.trace(str(tmp_path)):
        jnp.ones(3).block_until_ready()
    with pytest.raises(ValueError, match="holds no event of a GPU"):
        kernel_times.kernel_events(str(tmp_path))
