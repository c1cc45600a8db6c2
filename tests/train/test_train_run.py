"""Whole runs on tiny models: resuming, answers of the refilled batch, and a drafter that the decode loop can use."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_train import LENGTH, tiny_config, tiny_rows, tiny_target

from ddtree_jax.api import generate
from ddtree_jax.config import DecodeConfig
from ddtree_jax.loading import Drafter
from ddtree_jax.train import trainer
from ddtree_jax.train.answering import request_seed
from ddtree_jax.train.checkpoints import Checkpoints, TrainingError, read_state, write_state
from ddtree_jax.train.data import Document, pack
from ddtree_jax.train.prepare import answer_prompts
from ddtree_jax.train.trainer import train

TARGET = tiny_target()
DENSE_AND_HYBRID = pytest.mark.parametrize(
    "target",
    [TARGET, pytest.param(tiny_target(hybrid=True, delta_layers=(0,)), marks=pytest.mark.slow)],
    ids=["dense", "hybrid"],
)
PROMPTS = [[int(x) for x in np.random.default_rng(i).integers(4, 99, 3 + i)] for i in range(7)]


def final_state(folder, config):
    checkpoints = Checkpoints(folder / "checkpoints", config, "", "")
    like = trainer.init_state(trainer.Models.of(config, TARGET.config), TARGET.params, 0)
    last = checkpoints.steps()[-1]
    return last, jax.device_get(read_state(checkpoints.folder / f"step-{last:08d}" / "state", like))


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path, monkeypatch):
    config, rows = tiny_config(steps=8, checkpoint_every=3, eval_every=2), tiny_rows()
    held = {"held": tiny_rows(2, seed=9)}
    train(TARGET, rows, dataclasses.replace(config, checkpoint_every=0, eval_every=0), tmp_path / "whole", quiet=True)
    real = trainer.batch_index

    def killed(*args):
        if args[-1] == 5:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(trainer, "batch_index", killed)
    with pytest.raises(KeyboardInterrupt):
        train(TARGET, rows, config, tmp_path / "killed", eval_rows=held, quiet=True)
    monkeypatch.undo()
    assert Checkpoints(tmp_path / "killed" / "checkpoints", config, "", "").steps() == [3]
    with pytest.raises(TrainingError, match="--resume"):
        train(TARGET, rows, config, tmp_path / "killed", quiet=True)
    with pytest.raises(TrainingError, match="was trained with loss = 'decay', the config says 'dpace'"):
        train(TARGET, rows, dataclasses.replace(config, loss="dpace"), tmp_path / "killed", resume=True, quiet=True)
    with pytest.raises(TrainingError, match="other answers"):
        train(TARGET, tiny_rows(5), config, tmp_path / "killed", resume=True, quiet=True)
    train(TARGET, rows, config, tmp_path / "killed", eval_rows=held, resume=True, quiet=True)

    whole, resumed = final_state(tmp_path / "whole", config), final_state(tmp_path / "killed", config)
    assert whole[0] == resumed[0] == 8
    jax.tree.map(np.testing.assert_array_equal, whole[1], resumed[1])  # parameters, optimiser, step, schedule
    assert sorted(p.name for p in (tmp_path / "killed" / "checkpoints").iterdir()) == ["step-00000006", "step-00000008"]


def test_the_clock_ends_a_run_and_the_schedule_follows(tmp_path):
    config = tiny_config(steps=100000, max_minutes=0.1, log_every=1)
    trained = train(TARGET, tiny_rows(), config, tmp_path, quiet=True)
    assert 0 < trained.steps < 100000
    assert trained.steps == int(final_state(tmp_path, config)[1].total_steps)


@DENSE_AND_HYBRID
def test_refilled_slots_answer_like_the_decode_loop(tmp_path, target):
    config = tiny_config(temperatures=(1.0,), samples=2)
    documents = answer_prompts(target, PROMPTS, tmp_path, config, temperature=1.0, quiet=True)
    decode = DecodeConfig(method="autoregressive", max_new_tokens=12, temperature=1.0,
                          seed=tuple(request_seed(config.seed, r) for r in range(14)))  # fmt: skip
    expected = generate(target, None, [p for p in PROMPTS for _ in range(2)], decode).tokens
    assert [d.tokens[d.prompt_length :].tolist() for d in documents] == expected
    assert [d.tokens[: d.prompt_length].tolist() for d in documents] == [p for p in PROMPTS for _ in range(2)]
    shards = sorted(tmp_path.glob("shard-*.npz"))
    assert len(shards) > 2
    # A run killed after its second shard makes the others anew, and the same.
    for shard in shards[2:]:
        shard.unlink()
    again = answer_prompts(target, PROMPTS, tmp_path, config, temperature=1.0, quiet=True)
    for a, b in zip(documents, again, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)


@DENSE_AND_HYBRID
def test_an_overfitted_drafter_has_full_blocks_accepted(tmp_path, target):
    """Labels, positions, taps and masks of training are those of decoding, or nothing here would be accepted."""
    prompts = PROMPTS[:2]
    greedy = DecodeConfig(method="autoregressive", max_new_tokens=30, stop_token_ids=())
    answers = generate(target, None, prompts, greedy).tokens
    documents = [Document(np.array(p + a, np.int32), len(p)) for p, a in zip(prompts, answers, strict=True)]
    rows = pack(documents, LENGTH)
    decode = dataclasses.replace(greedy, method="dflash")

    config = tiny_config(steps=25)
    early = train(target, rows, config, tmp_path, eval_rows={"same": rows}, quiet=True)
    found = generate(target, Drafter(early.config, early.params), prompts, decode)
    assert found.tokens == answers
    # The evaluation without decoding counts what decoding accepts.
    assert early.evaluation.accepted == pytest.approx(found.mean_accepted_length, abs=1e-9)
    assert found.mean_accepted_length < 4

    config = dataclasses.replace(config, steps=400)
    late = train(target, rows, config, tmp_path, eval_rows={"same": rows}, resume=True, quiet=True)
    found = generate(target, Drafter(late.config, late.params), prompts, decode)
    assert found.tokens == answers
    for lengths in found.accepted_lengths:
        assert lengths[:-1] == [config.block_size] * (len(lengths) - 1)
    assert late.report.accuracy[-1] > 0.99


def test_a_state_of_another_layout_is_named(tmp_path):
    """Such as one from before queries, keys and values were one matrix."""
    config = tiny_config(steps=2, checkpoint_every=2)
    like = trainer.init_state(trainer.Models.of(config, TARGET.config), TARGET.params, 2)
    params = dict(like.params)
    layer = dict(params.pop("layers_0"))
    attention = dict(layer.pop("self_attn"))
    fused = attention.pop("qkv_proj")["weight"]
    attention |= {"q_proj": {"weight": fused[:32]}, "kv_proj": {"weight": fused[32:]}}
    old = like.replace(params=params | {"layers_0": layer | {"self_attn": attention}})
    write_state(tmp_path / "state", old)
    with pytest.raises(
        TrainingError, match=r"state: params/layers_0/self_attn/kv_proj/weight: found, and not expected"
    ):
        read_state(tmp_path / "state", like)
