"""Statistics against values worked out by hand."""

import pytest

from ddtree_jax.evaluation.plots import plot_all
from ddtree_jax.evaluation.runs import Results
from ddtree_jax.evaluation.summary import (
    acceptance_by_depth,
    best_widths,
    ends_in_loop,
    histogram,
    markdown,
    summarise,
)


def record(name, prompt, variant, lengths, seconds, tokens=None):
    tokens = tokens if tokens is not None else list(range(1 + sum(lengths)))
    method, _, width = variant.partition("-")
    return {
        "set": name, "id": prompt, "turn": 0, "variant": variant, "method": method,
        "num_nodes": int(width) if width else None, "tokens": tokens, "text": "", "seconds": seconds,
        "accepted_lengths": lengths,
    }  # fmt: skip


RECORDS = [
    record("a", "1", "autoregressive", [1] * 9, 2.0),
    record("a", "2", "autoregressive", [1] * 3, 1.0),
    record("b", "1", "autoregressive", [1] * 4, 1.0),
    record("a", "1", "ddtree-16", [4, 5], 1.0),
    record("a", "2", "ddtree-16", [3], 0.5),
    record("b", "1", "ddtree-16", [2, 2], 0.5, tokens=[0, 1, 2, 3, 9]),
]


def test_rows():
    rows = {(r["set"], r["variant"]): r for r in summarise(RECORDS, "autoregressive")}
    tree = rows["a", "ddtree-16"]
    assert tree["accepted"] == pytest.approx((4.5 + 3) / 2)  # mean over prompts of per-prompt means
    assert tree["accepted_pooled"] == pytest.approx(12 / 3)
    assert tree["tokens_per_second"] == pytest.approx(14 / 1.5)
    assert tree["speedup"] == pytest.approx((14 / 1.5) / (14 / 3))
    assert (tree["same_text"], tree["compared"]) == (2, 2)
    assert (rows["b", "ddtree-16"]["same_text"], rows["b", "ddtree-16"]["compared"]) == (0, 1)
    both = rows["all", "ddtree-16"]
    assert both["accepted"] == pytest.approx((3.75 + 2) / 2)  # each set with the same weight
    assert both["accepted_pooled"] == pytest.approx(16 / 5)
    assert both["histogram"] == {2: 2, 3: 1, 4: 1, 5: 1}
    assert markdown(list(rows.values())).count("\n") == 2 + len(rows)


def test_histogram_and_depth():
    lengths = [1, 3, 3, 4]
    assert histogram(lengths) == {1: 1, 3: 2, 4: 1}
    # 3 of 4 rounds accepted depth 1, all of these depth 2, one of three depth 3.
    assert acceptance_by_depth(lengths) == pytest.approx([3 / 4, 1, 1 / 3])
    assert acceptance_by_depth([]) == []


def test_loops():
    assert not ends_in_loop(list(range(64)))
    assert ends_in_loop([7, *range(20), *range(20)])
    assert ends_in_loop([5] * 17)
    assert not ends_in_loop([5] * 16)  # one 16-gram, not repeated
    assert not ends_in_loop([])


def test_each_method_at_its_best_width():
    wide = [record(r["set"], r["id"], "ddtree-32", [2, 3], s) for r, s in zip(RECORDS[3:], (0.1, 0.1, 9.0))]
    look = [record(r["set"], r["id"], "lookup", [2, 3], 1.0) for r in RECORDS[3:]]
    rows = summarise([*RECORDS, *wide, *look], "autoregressive")
    speed = {r["variant"]: r["tokens_per_second"] for r in rows if r["set"] == "all"}
    assert speed["ddtree-32"] > speed["ddtree-16"]  # on average, though it is slower on set b
    shown = best_widths(rows)
    assert [r["variant"] for r in shown if r["set"] == "b"] == ["autoregressive", "ddtree-32", "lookup"]
    assert {r["set"] for r in shown} == {"a", "b", "all"}
    # One set needs no average to decide.
    alone = [r for r in summarise([*RECORDS, *wide], "autoregressive") if r["set"] == "b"]
    assert [r["variant"] for r in best_widths(alone)] == ["autoregressive", "ddtree-16"]


def test_plots(tmp_path):
    paths = plot_all(summarise(RECORDS, "autoregressive"), tmp_path)
    assert [p.stat().st_size > 5000 for p in paths] == [True] * 4


def test_records_hold_any_text(tmp_path):
    odd = record("a", "1", "dflash", [2], 1.0) | {"text": "line\u2028paragraph\u2029next\u0085end"}
    Results(tmp_path, {}).append([odd])
    again = Results(tmp_path, {})
    assert again.records == [odd] and again.has(("a", "dflash", 0, "1"))
