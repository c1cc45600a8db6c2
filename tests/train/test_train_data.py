"""Packing, order of the data, and the files of answers."""

import dataclasses

import numpy as np
import pytest
from tiny_train import LENGTH, random_documents

from ddtree_jax.config import default_taps
from ddtree_jax.train.answers import Answer, AnswerStore, Manifest, digest_of
from ddtree_jax.train.data import Document, batch_index, pack, steps_per_epoch
from ddtree_jax.train.evaluate import walk

MANIFEST = Manifest(target="t", prompts="p", num_prompts=3, samples=2, temperature=1.0, max_new_tokens=9, seed=0,
                    vocab_size=300)  # fmt: skip


def test_every_document_is_packed_once_and_whole():
    documents = random_documents(40)
    rows = pack(documents, LENGTH)
    found = []
    for r in range(len(rows)):
        for start in np.unique(rows.starts[r]):
            end = rows.ends[r, start]
            assert np.all(rows.starts[r, start:end] == start) and np.all(rows.ends[r, start:end] == end)
            if rows.labels[r, start:end].any():
                prompt = int(np.argmax(rows.labels[r, start:end]))
                assert rows.labels[r, start + prompt : end].all()
                found.append((prompt, tuple(rows.tokens[r, start:end].tolist())))
            else:
                assert end == start + 1  # padding
    assert sorted(found) == sorted((d.prompt_length, tuple(d.tokens.tolist())) for d in documents)
    assert rows.fill > 0.7


def test_long_documents_are_cut_and_useless_ones_left_out():
    long = Document(np.arange(100, dtype=np.int32), 10)
    rows = pack([long, Document(np.arange(60, dtype=np.int32), 59)], 40)
    assert len(rows) == 1 and rows.tokens[0].tolist() == list(range(40)) and rows.labels.sum() == 30
    with pytest.raises(ValueError, match="none of 1 answers has two tokens within a row of 11 tokens"):
        pack([long], 11)


def test_order_covers_every_row_in_every_epoch_and_depends_on_seed_and_step_alone():
    steps = steps_per_epoch(7, 3)
    epochs = [np.concatenate([batch_index(7, 3, 5, e * steps + i) for i in range(steps)]) for e in range(2)]
    for epoch in epochs:
        assert set(epoch.tolist()) == set(range(7)) and len(epoch) == 9
    assert not np.array_equal(*epochs)
    np.testing.assert_array_equal(batch_index(7, 3, 5, 4), batch_index(7, 3, 5, 4))
    assert not np.array_equal(epochs[0], np.concatenate([batch_index(7, 3, 6, i) for i in range(steps)]))


@pytest.mark.parametrize("vocab_size,dtype", [(300, np.uint16), (70000, np.uint32)])
def test_answers_survive_the_disk_in_order_of_requests(tmp_path, vocab_size, dtype):
    manifest = dataclasses.replace(MANIFEST, vocab_size=vocab_size)
    store = AnswerStore(tmp_path / "a", manifest)
    store.append([Answer(4, [1, 2], [vocab_size - 1]), Answer(0, [7], [8, 9])])
    store.append([])
    again = AnswerStore(tmp_path / "a", manifest)
    again.append([Answer(3, [5], [6, 6, 6])])
    assert again.finished() == {0, 3, 4} and len(again.shards()) == 2
    with np.load(again.shards()[0]) as shard:
        assert shard["tokens"].dtype == dtype
    texts = [(d.prompt_length, d.tokens.tolist()) for d in again.documents()]
    assert texts == [(1, [7, 8, 9]), (1, [5, 6, 6, 6]), (2, [1, 2, vocab_size - 1])]


def test_answers_to_something_else_and_damage_are_refused(tmp_path):
    store = AnswerStore(tmp_path, MANIFEST)
    for key, value in (("target", "u"), ("prompts", "q"), ("max_new_tokens", 10), ("temperature", 0.0)):
        with pytest.raises(
            ValueError, match=f"{key}: expected '{value}" if isinstance(value, str) else f"{key}: expected {value}"
        ):
            AnswerStore(tmp_path, dataclasses.replace(MANIFEST, **{key: value}))
    store.append([Answer(0, [1], [2, 3])])
    shard = store.shards()[0]
    shard.write_bytes(shard.read_bytes()[:-40])
    with pytest.raises(ValueError, match="damaged"):
        store.documents()


def test_digest_sees_borders_and_order():
    assert len({digest_of(p) for p in ([[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]])}) == 3


def test_walk_commits_the_prefix_and_one_more_up_to_the_end():
    rows = pack([Document(np.arange(12, dtype=np.int32), 3)], 16)
    prefix = np.zeros((1, 16), np.int32)
    prefix[0, 3], prefix[0, 6], prefix[0, 7] = 2, 0, 4
    # Anchor 3 commits 4, 5, 6; anchor 6 commits 7; anchor 7 commits 8..11 and nothing past the end.
    assert walk(rows, prefix) == [[3, 1, 4]]


def test_default_taps_are_the_published_ones():
    assert default_taps(36, 5) == (1, 9, 17, 25, 33)
    assert default_taps(64, 5) == (1, 16, 31, 46, 61)
    assert default_taps(32, 5) == (1, 8, 15, 22, 29)
    assert default_taps(30, 1) == (15,)
    with pytest.raises(ValueError, match="5 taps do not fit a target of 6 layers"):
        default_taps(6, 5)
