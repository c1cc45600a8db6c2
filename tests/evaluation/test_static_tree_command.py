"""`python -m ddtree_jax static-tree`: what is measured, the file, its use, refusals."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ddtree_jax as dt
from ddtree_jax.__main__ import main
from ddtree_jax.commands.static_tree import find_tree
from ddtree_jax.decode.proposers import Chain, DFlashProposer, TextRows
from ddtree_jax.evaluation.ranks import comb, comb_config, measure_ranks, ranks_of_text
from ddtree_jax.models.cache import KVCache
from ddtree_jax.models.decoder import Decoder
from ddtree_jax.tree import parse_choices, static_bits
from ddtree_jax.tree.best_static import MISSED, UNKNOWN


@pytest.fixture(scope="module")
def models(tiny_checkpoints):
    target = dt.load_target(tiny_checkpoints / "target")
    return target, dt.load_drafter(tiny_checkpoints / "drafter", target)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "few.jsonl"
    file.write_text('{"id": "a", "turns": ["hi"]}\n{"id": "b", "turns": ["why?"]}\n')
    return file


def test_comb_is_in_level_order():
    choices = comb(3, 2)
    assert choices == ((0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1))
    assert parse_choices(choices, max_depth=3, max_rank=1, max_nodes=7) == choices


@pytest.mark.slow
def test_ranks_are_those_of_the_drafters_distributions(models):
    """Against the marginals of a drafter that is given each round's context by itself."""
    target, drafter = models
    config = dt.DecodeConfig(max_new_tokens=24, temperature=1.0, seed=3, stop_token_ids=())
    ranks = 60  # of 260, so that a random drafter hits at times
    (paths,) = measure_ranks(target, drafter, [[5, 6, 7]], config, ranks)
    rounds = list(dt.trace(target, drafter, [5, 6, 7], comb_config(config, drafter, ranks)))
    last = rounds[-1]
    text = last.text_tokens + last.walk.tokens[0, : last.walk.length[0]].tolist()
    assert len(paths) == len(rounds) and (paths >= 0).any() and (paths == MISSED).any()
    for length, path, best in zip(
        (len(seen.text_tokens) for seen in rounds), paths, best_tokens(target, drafter, text, rounds), strict=True
    ):
        for depth, token in enumerate(text[length : length + 3]):
            rank = best[depth].index(token)
            assert path[depth] == (rank if rank < ranks else MISSED)
        assert (path[len(text) - length :] == UNKNOWN).all()


def traced(text_length, tokens, walk, length):
    """A round as `trace` yields it, with nothing but what is looked at."""
    tree = types.SimpleNamespace(tokens=np.array([tokens]))
    walk = types.SimpleNamespace(tokens=np.array([walk]), length=np.array([length]))
    return dt.RoundTrace(tree, None, walk, TEXT[:text_length])


TEXT = [9, 4, 5, 6, 7, 8]


def test_ranks_of_a_text():
    # Two depths, two ranks: below the root, the best and second tokens of depth 1, then of depth 2.
    rounds = [
        traced(2, [4, 5, 0, 0, 6], [5, 6, 0], 2),  # 5 first, 6 second
        traced(4, [6, 0, 0, 8, 0], [7, 0, 0], 1),  # 7 missed, 8 first
        traced(5, [7, 8, 0, 1, 2], [8, 3, 0], 2),  # 8 first; the text ends there
    ]
    assert ranks_of_text(rounds, 2, stops=(8,)).tolist() == [[0, 1], [MISSED, 0], [0, UNKNOWN]]
    assert ranks_of_text(rounds, 2, stops=()).tolist() == [[0, 1], [MISSED, 0], [0, MISSED]]  # 3 follows
    assert ranks_of_text([], 2, stops=()).size == 0


def best_tokens(target, drafter, text, rounds):
    """For each round, per depth, all token ids by falling probability."""
    decoder = Decoder(target.config)
    proposer = DFlashProposer(target=decoder, config=drafter.config, depth=3, shape=Chain())
    tokens = jnp.array([text], jnp.int32)
    # One pass over the whole text serves all rounds: what stands at a position does not depend on what follows.
    out = jax.jit(decoder.apply, static_argnums=5)(
        {"params": target.params}, tokens, jnp.arange(len(text), dtype=jnp.int32)[None],
        jnp.asarray(static_bits(np.tri(len(text), dtype=bool)))[None],
        KVCache.empty(target.config, batch=1, rows=8), proposer.taps,
    )  # fmt: skip

    @jax.jit
    def log_probs(count, root):
        rows = TextRows(tokens, out.hidden, out.features, count)
        cache = proposer.absorb(drafter.params, target.params, proposer.init_cache(1, 64), rows)
        return proposer.log_probs(drafter.params, target.params, cache, root)

    for seen in rounds:
        count = jnp.array([len(seen.text_tokens) - 1], jnp.int32)
        root = jnp.array(seen.text_tokens[-1:], jnp.int32)
        yield np.argsort(-np.asarray(log_probs(count, root)[0]), axis=-1).tolist()


def test_find_tree():
    paths = np.array([[0, 0], [0, 1], [1, 0], [MISSED, 0]])
    found = find_tree(paths, 3, 4)
    # Depth 1: 1/2, 1/4. Depth 2, of three rounds: 2/3, 1/3.
    assert (found["tree_choices"], found["num_nodes"]) == ("[(0,), (1,), (0, 0)]", 4)
    assert found["expected_accepted_length"] == pytest.approx(1 + 1 / 2 + 1 / 4 + 1 / 2 * 2 / 3)
    assert found["replayed_accepted_length"] == pytest.approx((3 + 2 + 2 + 1) / 4)
    with pytest.raises(ValueError, match="in 1 rounds none of the drafter's 3 best tokens was right"):
        find_tree(np.array([[MISSED, 0]]), 3, 4)


def pair(folder):
    return ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]


@pytest.mark.slow
def test_file_and_its_use(tiny_checkpoints, prompts, tmp_path, capsys):
    out = tmp_path / "tree.json"
    args = ["--prompts", str(prompts), "--max-new-tokens", "24", "--temperature", "1", "--seed", "3"]
    code = main(["static-tree", *pair(tiny_checkpoints), *args, "--num-nodes", "6", "--ranks", "60", "--out", str(out)])
    said = capsys.readouterr().out
    assert code == 0
    found = json.loads(out.read_text())
    assert found["tree_choices"] in said and found["num_nodes"] <= 6 and found["prompts"] == 2
    assert np.array(found["hits"]).shape == (3, 60)
    assert found["expected_accepted_length"] > 1

    use = ["--method", "static_tree", "--tree-choices", str(out), "--chat", "--json"]
    assert main(["generate", *pair(tiny_checkpoints), *args, *use]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(r["method"], r["num_nodes"]) for r in records} == {("static_tree", found["num_nodes"])}


@pytest.mark.parametrize(
    "args,message",
    [
        (["--num-nodes", "1"], "--num-nodes must be 2..512, root included; found 1"),
        (["--ranks", "171"], "ranks must be 1..170 with 3 drafted tokens; found 171"),
        (["--draft-depth", "4"], "draft_depth must be 1..3; found 4"),
        (["--limit", "0"], "--limit must be 1 or more; found 0"),
        (["--out", "missing/tree.json"], "missing/tree.json: is no file in an existing folder"),
    ],
)
def test_refusals(tiny_checkpoints, prompts, tmp_path, capsys, args, message):
    args = ["--prompts", str(prompts), "--out", str(tmp_path / "tree.json"), *args]
    assert main(["static-tree", *pair(tiny_checkpoints), *args]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not (tmp_path / "tree.json").exists()
