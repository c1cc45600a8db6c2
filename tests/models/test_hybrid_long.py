"""Hybrids over more than three chunks of the delta rule, against transformers: one pass, odd chunks, single steps."""

import functools

import numpy as np
import pytest
from golden_models import GOLDENS
from test_decoder_parity import Runner, close

HYBRIDS = ["qwen3_5", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3_next", "qwen3_5_moe"))]
CHUNK = 71  # more than the 64 rows that a commit of many rows takes at a time, and odd


@functools.cache
def long_golden(name):
    with np.load(GOLDENS / "models" / name / "long.npz") as data:
        return dict(data)


@pytest.mark.parametrize("name", HYBRIDS)
def test_one_pass(name):
    gold = long_golden(name)
    logits, _ = Runner(name, taps=(0,), batch=1, capacity=8).chain(gold["tokens"][None])
    close(logits[0], gold["logits"])


@pytest.mark.parametrize("name", HYBRIDS)
def test_chunks_then_single_tokens(name):
    """Two slots go through the same text at their own pace: the state carries all that came before, in float32."""
    gold = long_golden(name)
    padded = np.pad(gold["tokens"], (0, CHUNK))
    runner = Runner(name, taps=(0,), batch=2, capacity=256)
    start = np.zeros(2, np.int32)
    for count in ([71, 5], [64, 70], [0, 65], [53, 1]):
        logits, _ = runner.chain(np.stack([padded[s : s + CHUNK] for s in start]))
        for b, n in enumerate(count):
            if n:
                close(logits[b, :n], gold["logits"][start[b] : start[b] + n])
        runner.append(count)
        start += np.asarray(count, np.int32)
    np.testing.assert_array_equal(start, [188, 141])
    for _ in range(9):
        logits, _ = runner.chain(np.stack([gold["tokens"][s : s + 1] for s in start]))
        for b, s in enumerate(start):
            close(logits[b, 0], gold["logits"][s])
        runner.append(np.ones(2, np.int32))
        start += 1


def test_the_golden_remembers_its_beginning():
    """Other tokens at the very beginning move logits two hundred tokens later by far more than the tolerance."""
    name = "qwen3_5"
    gold = long_golden(name)
    tokens = gold["tokens"].copy()
    tokens[:40] = (tokens[:40] - 3 + 17) % 93 + 3
    logits, _ = Runner(name, taps=(0,), batch=1, capacity=8).chain(tokens[None])
    assert np.abs(logits[0, -1] - gold["logits"][-1]).max() > 0.01
