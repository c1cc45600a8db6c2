"""The benchmarks of kernels where no GPU is: what they compute, and how they tell it."""

import argparse
import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import kernel_list, kernel_times, layer_chain, linear_chain, streaming_matmul
from benchmarks._models import TARGETS
from benchmarks.streaming_matmul import table_entry
from ddtree_jax.models import layers
from pallas_kernels.linear_chain.config import Config as LinearChainConfig
from pallas_kernels.linear_chain.config import Cut, choose
from pallas_kernels.streaming_matmul.config import MEASURED, Config, Shape
from pallas_kernels.streaming_matmul.config import choose as choose_streaming


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


def test_a_draw_by_xla_is_timed(capsys):
    streaming_matmul.main(["--argmax", "--shape", "tiny", "--rows", "3"])  # too narrow for the kernel
    _, timed, record, *_, entry, _ = capsys.readouterr().out.splitlines()
    assert timed.split()[:3] == ["tiny-head", "3", "xla"] and "inf" not in timed
    assert 0 <= json.loads(record)["error"] < 1e-4
    assert entry.startswith("    (512, 64, 1, 3): None,")


def test_variants_of_a_draw_lower_for_a_gpu():
    shape = streaming_matmul.head_of("qwen3.6-27b", 16)
    xla, matmul, *kernels = streaming_matmul.draws(shape, 2)
    assert matmul.config == choose_streaming(matmul.shape) and kernels[0].config == choose_streaming(shape)
    x, weight = (jax.ShapeDtypeStruct(dims, jnp.bfloat16) for dims in ((16, 5120), (248320, 5120)))
    for variant, count in ((xla, 0), (matmul, 1), (kernels[0], 1)):
        step = jax.jit(lambda x, weight, variant=variant: streaming_matmul.step(variant, x, weight))
        text = step.trace(x, weight).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") == count


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


@pytest.mark.parametrize("mixer", ["attention", "delta"])
def test_the_loop_around_a_chain_lowers_for_a_gpu(mixer):
    chain = linear_chain.make_chain(TARGETS["qwen3.6-27b"], mixer, 64)
    assert chain.projected == {"attention": 14336, "delta": 16480}[mixer]
    operands = jax.eval_shape(lambda: linear_chain.make_operands(chain))
    stream = jax.ShapeDtypeStruct((64, chain.hidden), jnp.bfloat16)
    step = jax.jit(lambda stream, operands: linear_chain.chained(chain, choose(chain), stream, operands))
    text = step.trace(stream, operands).lower(lowering_platforms=("cuda",)).as_text()
    # All share one kernel; the last is lowered by itself, since nobody takes its counters.
    assert text.count("custom_call @mosaic_gpu") == 2


def test_phases_of_a_kernel_are_told_in_their_order():
    def event(kind, block, name, at):
        return dict(ph=kind, pid=block, tid=0, name=name, ts=at)

    events = [
        event("B", 0, "out", 10.0), event("E", 0, "out", 11.0), event("B", 1, "out", 10.5), event("E", 1, "out", 14.0),
        event("B", 0, "norm", 12.0), event("E", 0, "norm", 13.0), event("B", 0, "never ended", 13.0),
    ]  # fmt: skip
    first, second = linear_chain.phases(events)
    assert first.split() == ["out", "begins", "0.00", "0.25", "0.50", "ends", "1.00", "2.50", "4.00"]
    assert second.split()[:3] == ["norm", "begins", "2.00"]


def test_a_chain_that_no_sizes_fit_is_refused(capsys):
    with pytest.raises(SystemExit):
        linear_chain.main(["--shape", "tiny"])
    assert "no configuration fits" in capsys.readouterr().err


def test_sizes_of_a_chain_are_read():
    found = linear_chain.parse_sizes("96x3,96,80x2,48:7:3:128")
    config = LinearChainConfig(**found)
    assert (config.out, config.gate_up, config.down, config.next) == (Cut(96, 3), Cut(96, 1), Cut(80, 2), Cut(48, 1))
    assert (config.weight_stages, config.x_stages, config.block) == (7, 3, 128)
    for wrong in ("96,96:7:3:128", "96,96,96,96:7:3", "a,96,96,96:7:3:128", "1x2x3,96,96,96:7:3:128"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected like"):
            linear_chain.parse_sizes(wrong)


PROGRAM = """HloModule jit_run

%fused_add (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  ROOT %add.1 = s32[] add(%p, %p)
}

%region_0.5 (carry: (s32[], f32[4])) -> (s32[], f32[4]) {
  %carry = (s32[], f32[4]{0}) parameter(0)
  %get-tuple-element.1 = s32[] get-tuple-element(%carry), index=0
  %loop_add_fusion.1 = s32[] fusion(%get-tuple-element.1), kind=kLoop, calls=%fused_add
  %mpmd_map.7 = (bf16[4]{0}, f32[2]{0}) custom-call(%carry), metadata={op_name="jit(run)/while/body/tree_conv/mpmd_map"}
  ROOT %tuple.3 = (s32[], f32[4]{0}) tuple(%loop_add_fusion.1, %mpmd_map.7)
}

ENTRY %main.9 (a: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %copy.2 = s32[] copy(%a)
  ROOT %while.4 = (s32[], f32[4]{0}) while(%copy.2), condition=%region_1.6, body=%region_0.5
}
"""


def test_kernels_of_a_loop_are_read_from_its_program():
    assert kernel_list.loop_kernels(PROGRAM) == [
        ("loop_add_fusion.1", "fusion", "s32[]"), ("tree_conv", "custom-call", "(bf16[4]{0}, f32[2]{0})"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no loop"):
        kernel_list.loop_kernels(PROGRAM[: PROGRAM.index("ENTRY")])


def test_a_list_of_kernels_says_what_compiler_it_wants(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        kernel_list.main(["--shape", "tiny"])
    assert "pip install jax-cuda12-plugin" in capsys.readouterr().err


@pytest.mark.parametrize(
    "run,arguments,message",
    [
        (linear_chain.main, ["--rows", "0"], "rows of 1..128"),
        (linear_chain.main, ["--rows", "a"], "invalid"),
        (kernel_list.main, ["--shape", "tiny", "--context", "-5"], "--context"),
        (kernel_times.main, ["--shape", "tiny", "--part", "drafts"], "--part must be one of round, draft"),
        (kernel_list.main, ["--shape", "tiny", "--layers", "9"], "1..2 layers"),
        (kernel_list.main, ["--shape", "tiny", "--hlo", "/nowhere/x"], "no such folder"),
    ],
)
def test_wrong_arguments_are_said(capsys, monkeypatch, run, arguments, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(layers, "MATMUL", None)  # restored: the benchmark sets it
    with pytest.raises(SystemExit):
        run(arguments)
    assert message in capsys.readouterr().err


def test_a_trace_without_a_cpu_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(linear_chain, "_has_cpu", lambda: False)
    with pytest.raises(SystemExit):
        linear_chain.main(["--trace"])
    assert "JAX_PLATFORMS must name cpu too" in capsys.readouterr().err
