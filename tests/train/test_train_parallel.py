"""Two devices do what one does: the same answers, the same step, the same scores."""

import jax
import numpy as np
import pytest
from tiny_train import tiny_config, tiny_rows, tiny_target

from ddtree_jax.api import generate
from ddtree_jax.config import DecodeConfig
from ddtree_jax.loading import Drafter
from ddtree_jax.train.answering import Question, answer, merge
from ddtree_jax.train.evaluate import evaluate
from ddtree_jax.train.parallel import row_mesh
from ddtree_jax.train.step import Models, init_state, to_device, train_step
from ddtree_jax.train.trainer import train

TARGET = tiny_target()
pytestmark = pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two devices")


@pytest.mark.parametrize("loss", ["decay", "dpace"])
def test_a_step_on_two_devices_is_the_step_on_one(loss):
    rows = tiny_rows(8)
    # Rows of very different numbers of labels: a mean of means would differ from the mean of all.
    rows.labels[0, 20:] = False
    results = []
    for devices in (1, 2):
        models = Models.of(tiny_config(loss=loss, batch_size=4, devices=devices), TARGET.config)
        assert (models.mesh is None) == (devices == 1)
        state = init_state(models, TARGET.params, 4)
        state, sums = train_step(models, state, TARGET.params, to_device(rows.take(np.arange(4)), models.mesh))
        results.append(jax.device_get((state.optimizer, sums)))  # Adam's first moments are the gradient
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), *results)
    assert results[0][1]["labels"].sum() > 0


@pytest.mark.slow
def test_a_run_on_two_devices_scores_and_resumes(tmp_path):
    rows, held = tiny_rows(6), {"held": tiny_rows(3, seed=9)}
    config = tiny_config(devices=2, steps=4, checkpoint_every=2)
    whole = train(TARGET, rows, config, tmp_path / "a", eval_rows=held, quiet=True)
    alone = Models.of(tiny_config(devices=1), TARGET.config)
    expected = evaluate(alone, jax.device_get(whole.params), TARGET.params, held["held"])
    assert whole.evaluation.documents == expected.documents > 0
    np.testing.assert_allclose(whole.evaluation.loss, expected.loss, rtol=1e-4)
    np.testing.assert_allclose(whole.evaluation.accepted, expected.accepted, rtol=1e-6)
    drafter = Drafter(whole.config, whole.params)  # decodes beside a target on one device
    assert generate(TARGET, drafter, [[5, 6]], DecodeConfig(num_nodes=4, max_new_tokens=4)).tokens[0]
    # What two devices began, one can go on with.
    again = train(TARGET, rows, tiny_config(devices=1, steps=6), tmp_path / "a", resume=True, quiet=True)
    assert again.steps == 6


def test_devices_that_are_not_there_or_do_not_divide_the_batch_are_refused():
    with pytest.raises(ValueError, match="devices: 99 asked for, 2 of platform cpu"):
        row_mesh(99, 99)
    with pytest.raises(ValueError, match=r"multiple of devices \(2\); found 3"):
        row_mesh(3, 2)
    assert row_mesh(3) is None
    assert row_mesh(4).size == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_devices_give_the_answers_of_one(temperature):
    rng = np.random.default_rng(3)
    questions = [Question(i, rng.integers(4, 99, int(rng.integers(1, 9))).tolist(), i + 7) for i in range(11)]
    found = []
    for devices in (1, 2):
        batches = answer(
            TARGET.config, TARGET.params, questions, temperature=temperature, max_new_tokens=6, slots=3, refill=2,
            devices=devices,
        )  # fmt: skip
        found.append({a.request: a.tokens for batch in batches for a in batch})
    assert len(found[0]) == 11 and found[0] == found[1]


def test_merge_raises_what_a_thread_raised_and_stops_the_others():
    ended = []

    def endless():
        try:
            n = 0
            while True:
                yield (n := n + 1)
        finally:
            ended.append(True)

    def broken():
        yield 0
        raise RuntimeError("lost the device")

    with pytest.raises(RuntimeError, match="lost the device"):
        for _ in merge([endless, broken]):
            pass
    assert ended == [True]
    assert sorted(merge([lambda: iter([1, 3]), lambda: iter([2])])) == [1, 2, 3]
