"""Checkpoints: round trip, refusals that name what is wrong, and never a half-written folder."""

import gc
import json
import os
import re
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import checkpoint, inventory
from ddtree_jax.checkpoint import CheckpointError, load_config, load_params, open_checkpoint, save_checkpoint
from ddtree_jax.models.abstract import abstract_params, init_params
from ddtree_jax.testing import tiny_drafter_config, tiny_target_config


@pytest.fixture
def config():
    return tiny_target_config(num_layers=2, sliding_windows=(None, 8))


@pytest.fixture
def params(config):
    return init_params(config, jax.random.key(0))


@pytest.fixture
def saved(tmp_path, config, params):
    save_checkpoint(tmp_path / "model", config, params, {"note.txt": b"hello"}, source="somewhere")
    return tmp_path / "model"


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_round_trip(tmp_path, dtype):
    config = tiny_target_config(dtype=dtype)
    params = init_params(config, jax.random.key(0))
    save_checkpoint(tmp_path / "model", config, params)
    loaded = load_params(tmp_path / "model", abstract_params(config))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(loaded))
    same(loaded, params)
    assert load_config(tmp_path / "model") == config


def test_numpy_leaves_and_small_batches(tmp_path, config, params, monkeypatch):
    monkeypatch.setattr(checkpoint, "_BATCH_BYTES", 1)
    monkeypatch.setattr(checkpoint, "_READ_BYTES", 1)
    save_checkpoint(tmp_path / "model", config, jax.tree.map(np.asarray, params))
    same(load_params(tmp_path / "model", abstract_params(config)), params)


def test_drafter(tmp_path, config):
    drafter = tiny_drafter_config(config)
    params = init_params(drafter, jax.random.key(0))
    save_checkpoint(tmp_path / "drafter", drafter, params)
    assert load_config(tmp_path / "drafter", "drafter") == drafter
    same(load_params(tmp_path / "drafter", abstract_params(drafter)), params)
    with pytest.raises(CheckpointError, match=r"config\.json: kind: expected 'target', found 'drafter'"):
        load_config(tmp_path / "drafter", "target")


def test_description_and_extra_files(saved, params, tmp_path):
    description = json.loads((saved / "config.json").read_text())
    assert {k: description[k] for k in ("format", "version", "kind", "source", "parameters")} == {
        "format": "ddtree_jax", "version": 1, "kind": "target", "source": "somewhere",
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
    }  # fmt: skip
    assert (saved / "note.txt").read_bytes() == b"hello"
    assert sorted(os.listdir(saved)) == ["config.json", "files.json", "note.txt", "params"]
    assert os.listdir(tmp_path) == ["model"]


def test_sharding_of_the_caller_is_used(saved, config):
    device = jax.devices()[1]
    sharding = jax.sharding.SingleDeviceSharding(device)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract_params(config)
    )
    loaded = load_params(saved, abstract)
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(loaded))


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.unlink(), "missing; this is not a checkpoint"),
        (lambda f: f.write_text("{"), "cannot be read"),
        (lambda f: f.write_text("[]"), "format: expected 'ddtree_jax', found 'list'"),
        (lambda f: f.write_text('{"model_type": "qwen3"}'), "format: expected 'ddtree_jax', found None"),
        (lambda f: edit(f, version=2), "version: expected 1, found 2"),
        (lambda f: edit(f, kind="judge"), r"kind: expected one of \['drafter', 'target'\], found 'judge'"),
        (lambda f: edit(f, config={}), r"config: TargetConfig: unknown fields \[\], missing fields \['arch"),
    ],
)
def test_bad_config(saved, change, message):
    change(saved / "config.json")
    with pytest.raises(CheckpointError, match=rf"model/config\.json: {message}"):
        load_config(saved)


def test_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: expected a checkpoint folder, found nothing there"):
        load_config(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: expected a checkpoint folder, found a file"):
        load_config(tmp_path / "file")


def _with(tree, path, leaf):
    *groups, last = path.split("/")
    tree = node = jax.tree.map(lambda x: x, tree)
    for key in groups:
        node = node.setdefault(key, {})
    if leaf is None:
        del node[last]
    else:
        node[last] = leaf
    return tree


@pytest.mark.parametrize(
    ("path", "leaf", "message"),
    [
        ("norm/weight", jax.ShapeDtypeStruct((33,), jnp.float32), r"shape: expected \(33,\), found \(32,\)"),
        ("norm/weight", jax.ShapeDtypeStruct((32,), jnp.bfloat16), "dtype: expected bfloat16, found float32"),
        ("norm/bias", jax.ShapeDtypeStruct((3,), jnp.float32), r"expected shape \(3,\), found no such tensor"),
        ("layers_1/mlp/down_proj/weight", None, r"expected no such tensor, found shape \(32, 48\)"),
    ],
)
def test_params_that_do_not_fit(saved, config, path, leaf, message):
    with pytest.raises(CheckpointError, match=rf"model/params: {path}: {message}"):
        load_params(saved, _with(abstract_params(config), path, leaf))


# Orbax leaves coroutines of a failed read to the garbage collector; they are collected within this test.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_damaged_files_without_a_list(saved, config):
    """Checkpoints of before there was a list of files, whose damage shows when Orbax reads them."""
    os.remove(saved / "files.json")
    abstract = abstract_params(config)
    largest = max((p for p in saved.glob("params/**/d/*") if p.is_file()), key=lambda p: p.stat().st_size)
    for file in (largest, saved / "params" / "state" / "_METADATA", saved / "params" / "state" / "manifest.ocdbt"):
        content = file.read_bytes()
        for keep in (0, len(content) // 2):
            file.write_bytes(content[:keep])
            with pytest.raises(CheckpointError, match=r"model/params: truncated or damaged: ") as caught:
                load_params(saved, abstract)
            assert "\n" not in str(caught.value)
        file.write_bytes(content)
    load_params(saved, abstract)
    os.rename(saved / "params", saved / "elsewhere")
    with pytest.raises(CheckpointError, match=r"model/params: missing"):
        load_params(saved, abstract)
    gc.collect()


def damage_of(saved, config):
    with pytest.raises(CheckpointError) as caught:
        load_params(saved, abstract_params(config))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_damaged_file_is_named(saved, config, capfd):
    files = [path for path in saved.glob("params/**/*") if path.is_file() and path.stat().st_size]
    assert len(files) > 5
    for file in files:
        content = file.read_bytes()
        size = len(content)
        for keep in (0, size // 2):
            file.write_bytes(content[:keep])
            expected = f"{file}: truncated or damaged: expected {size} bytes, found {keep}"
            assert damage_of(saved, config) == expected
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert damage_of(saved, config) == f"{file}: damaged: expected the content that was written, found another"
        file.unlink()
        assert damage_of(saved, config) == f"{file}: missing: expected {size} bytes"
        file.write_bytes(content)
    load_params(saved, abstract_params(config))
    assert "Traceback" not in capfd.readouterr().err  # Orbax has not been let at any of it


@pytest.mark.parametrize("text", ["", "[]", '{"params/x": 3}', '{"params/x": {}}'])
def test_a_damaged_list_of_files_is_named(saved, config, text):
    (saved / "files.json").write_text(text)
    assert damage_of(saved, config).startswith(f"{saved / 'files.json'}: damaged: expected a list of files, found ")


def test_a_fingerprint_tells_what_was_written_anew(tmp_path, saved, config, params):
    before = inventory.fingerprint(saved)
    shutil.copytree(saved, tmp_path / "copy", copy_function=shutil.copyfile)  # with other times
    assert inventory.fingerprint(tmp_path / "copy") == before and re.fullmatch("[0-9a-f]{12}", before)
    (tmp_path / "copy" / ".DS_Store").write_bytes(b"of a file manager")
    assert inventory.fingerprint(tmp_path / "copy") == before
    (tmp_path / "copy" / "NOTES.md").write_text("tried at temperature 1")
    (tmp_path / "copy" / inventory.FILE).unlink()  # optional, as in checkpoints of before there was one
    assert inventory.fingerprint(tmp_path / "copy") == before
    (tmp_path / "copy" / "tokenizer_config.json").write_text("{}")
    assert inventory.fingerprint(tmp_path / "copy") != before
    # Of the same shapes and sizes, large enough that no content is hashed.
    with mock.patch.object(inventory, "_HASHED_BYTES", 0):
        before = inventory.fingerprint(saved)
        other = jax.tree.map(lambda x: x + 1, params)
        save_checkpoint(saved, config, other, {"note.txt": b"hello"}, source="somewhere", overwrite=True)
        assert inventory.fingerprint(saved) != before


def test_overwriting_swaps_at_once(tmp_path, monkeypatch):
    """Where the system can swap two folders, there is no moment without a checkpoint."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    if not checkpoint._exchange(new, old):
        pytest.skip("this system cannot swap folders")
    assert (old / "name").read_text() == "new" and (new / "name").read_text() == "old"
    monkeypatch.setattr(checkpoint.os, "rename", lambda *_: pytest.fail("renamed"))
    checkpoint._replace(new, old)
    assert (old / "name").read_text() == "old" and not new.exists()


def test_nothing_is_overwritten_unasked(saved, config, params):
    with pytest.raises(CheckpointError, match=r"model: already exists; pass overwrite"):
        save_checkpoint(saved, config, params)
    assert (saved / "note.txt").exists()
    save_checkpoint(saved, config, params, overwrite=True)
    assert not (saved / "note.txt").exists()
    same(load_params(saved, abstract_params(config)), params)
    assert os.listdir(saved.parent) == ["model"]


def test_overwrite_spares_what_is_not_a_checkpoint_of_the_kind(tmp_path, saved, config, params):
    drafter = tiny_drafter_config(config)
    with pytest.raises(CheckpointError, match=r"will not be overwritten: .*expected 'drafter', found 'target'"):
        save_checkpoint(saved, drafter, init_params(drafter, jax.random.key(0)), overwrite=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    (tmp_path / "plain").write_text("x")
    for name in ("home", "plain"):
        with pytest.raises(CheckpointError, match=f"{name}: will not be overwritten: "):
            save_checkpoint(tmp_path / name, config, params, overwrite=True)
    (tmp_path / "empty").mkdir()
    save_checkpoint(tmp_path / "empty", config, params)


def test_a_link_stays_a_link(tmp_path, saved, config, params):
    (tmp_path / "latest").symlink_to(saved)
    save_checkpoint(tmp_path / "latest", config, params, overwrite=True)
    assert (tmp_path / "latest").is_symlink() and not (saved / "note.txt").exists()
    assert sorted(os.listdir(tmp_path)) == ["latest", "model"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("overwrite", [False, True])
def test_failure_in_the_middle(tmp_path, config, params, monkeypatch, error, overwrite):
    monkeypatch.setattr(checkpoint, "_BATCH_BYTES", 1)
    out = tmp_path / "model"
    if overwrite:
        save_checkpoint(out, config, params)
    with pytest.raises(error):
        with open_checkpoint(out, config, overwrite=overwrite) as writer:
            writer.add_group("norm", params["norm"])
            raise error
    assert os.listdir(tmp_path) == (["model"] if overwrite else [])
    if overwrite:
        same(load_params(out, abstract_params(config)), params)


def test_failing_rename_brings_the_old_one_back(tmp_path, saved, config, params, monkeypatch):
    rename, calls = os.rename, []

    def second_fails(a, b):
        calls.append((a, b))
        if len(calls) == 2:
            raise OSError(28, "No space left on device", str(b))
        rename(a, b)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_exchange", lambda a, b: False)  # as on systems that cannot swap
        patch.setattr(checkpoint.ocp.partial, "finalize", _after(checkpoint.ocp.partial.finalize, patch, second_fails))
        with pytest.raises(CheckpointError, match="No space left on device"):
            save_checkpoint(saved, config, params, overwrite=True)
    assert len(calls) == 3
    assert (saved / "note.txt").exists()
    assert os.listdir(tmp_path) == ["model"]


def _after(finalize, patch, rename):
    """Orbax renames too: only the renames after it are to fail."""

    def run(path):
        finalize(path)
        patch.setattr(checkpoint.os, "rename", rename)

    return run


class _Twice(dict):
    def items(self):
        return [*super().items(), *super().items()]


def test_writer_refusals(tmp_path, config, params):
    with pytest.raises(CheckpointError, match="params/norm/weight: dtype: expected float32, found bfloat16"):
        save_checkpoint(tmp_path / "a", config, {"norm": {"weight": jnp.ones(32, jnp.bfloat16)}})
    with pytest.raises(CheckpointError, match="params: expected at least one group, found none"):
        save_checkpoint(tmp_path / "a", config, {})
    for name in ("config.json", "params", "../x", "a/b"):
        with pytest.raises(CheckpointError, match="expected a plain file name"):
            save_checkpoint(tmp_path / "a", config, params, {name: b""})
    with pytest.raises(CheckpointError, match=r"missing\.txt: No such file"):
        save_checkpoint(tmp_path / "a", config, params, {"x": tmp_path / "missing.txt"})
    with pytest.raises(CheckpointError, match="params/norm: written twice"):
        save_checkpoint(tmp_path / "a", config, _Twice(norm=params["norm"]))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/model: cannot be created: "):
        save_checkpoint(tmp_path / "file" / "model", config, params)
    assert os.listdir(tmp_path) == ["file"]


def test_what_a_reader_says_is_cut_to_what_helps():
    long = "DATA_LOSS: chunk [0, 0] is damaged. See full TensorStore details: <bound method of TensorStore({"
    assert checkpoint._first_line(ValueError(long)) == "DATA_LOSS: chunk [0, 0] is damaged."
    assert checkpoint._first_line(KeyError()) == "KeyError"
