"""The benchmark of a decode step runs end to end on a CPU at a tiny shape, and its floors are sums done by hand."""

import json

import pytest

from benchmarks import decode_step
from benchmarks._models import TARGETS, dflash_config
from ddtree_jax.models import layers
from ddtree_jax.models.abstract import check_fits


@pytest.fixture(autouse=True)
def restore_switch(monkeypatch):
    monkeypatch.setattr(layers, "MATMUL", layers.MATMUL)  # the benchmark sets it


@pytest.mark.parametrize("shape", ["tiny", pytest.param("tiny-hybrid", marks=pytest.mark.slow)])
def test_runs_and_writes_records(tmp_path, capsys, shape):
    path = tmp_path / "records.jsonl"
    records = decode_step.main(
        ["--shape", shape, "--contexts", "20", "--methods", "autoregressive,ddtree", "--nodes", "4", "--seconds",
         "0.01", "--matmul", "auto", "--json", str(path)]
    )  # fmt: skip
    assert [json.loads(line) for line in path.read_text().splitlines()] == records
    autoregressive, tree = records
    assert set(tree["parts_ms"]) == {"draft", "build", "verify", "accept+commit"}
    assert set(autoregressive["parts_ms"]) == {"verify", "accept+commit"}
    for record in records:
        assert all(ms > 0 for ms in record["parts_ms"].values())
        assert record["round_ms"] > 0
    assert autoregressive["projected_tokens_per_s"] == pytest.approx(1e3 / autoregressive["round_ms"])
    assert tree["ratio_to_autoregressive"] == pytest.approx(tree["round_ms"] / autoregressive["round_ms"])
    assert tree["projected_tokens_per_s"] is None  # nothing is published for this shape
    assert capsys.readouterr().out.count("ddtree") == 1


def test_floor_of_qwen3_8b():
    """15.0 GB of weights and 151 MB of keys and values at 4.39 TB/s; from 185 rows on, arithmetic."""
    target, drafter = TARGETS["qwen3-8b"], dflash_config("qwen3-8b")
    one = decode_step.round_work(target, drafter, "autoregressive", 1, 1024)["verify"]
    assert one.bytes == pytest.approx(15.14e9 + 0.151e9, rel=0.002)
    assert one.floor_ms == pytest.approx(3.48, abs=0.01)
    wide = decode_step.round_work(target, drafter, "ddtree", 256, 1024)
    attention = 4 * 36 * 256 * (1024 + 256) * 32 * 128
    assert wide["verify"].floor_ms == pytest.approx((2 * 256 * 7.57e9 + attention) / 790e9, rel=0.001)
    assert wide["accept+commit"].bytes == 5 * 4096 * 4096 * 2
    # Five layers of the target's own size, and the head once more.
    layer = 4096 * (6144 + 4096 + 3 * 12288) * 2
    assert wide["draft"].bytes == pytest.approx(5 * layer + 151936 * 4096 * 2 + 5 * 2 * 8 * 1024 * 128 * 2)


def test_one_token_of_qwen3_30b_a3b_reads_its_active_weights():
    """3.3e9 parameters are active, the embedding of 0.31e9 among them."""
    one = decode_step.pass_work(TARGETS["qwen3-30b-a3b"], 1, 0)
    assert one.bytes / 2 == pytest.approx(3.35e9 - 0.31e9, rel=0.02)
    many = decode_step.pass_work(TARGETS["qwen3-30b-a3b"], 256, 0)
    assert many.bytes / 2 == pytest.approx(30.5e9 - 0.31e9, rel=0.01)


@pytest.mark.parametrize("shape", TARGETS)
def test_every_shape_can_be_shortened(shape):
    target, drafter = decode_step.shortened(shape, 4)
    check_fits(drafter, target)
    assert decode_step.round_work(target, drafter, "ddtree", 64, 1024)["verify"].bytes > 0


def test_methods_come_in_the_order_of_the_table():
    args = decode_step.parse(["--methods", "ddtree,autoregressive"])
    assert args.methods == ["autoregressive", "ddtree"]
    with pytest.raises(SystemExit):
        decode_step.parse(["--methods", "magic"])
