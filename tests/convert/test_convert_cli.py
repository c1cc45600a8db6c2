"""The command line: one line, exit code 2, no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest
import synthetic_checkpoints as synthetic

import convert
from convert.__main__ import main
from convert.locate import locate
from ddtree_jax.checkpoint import load_config


@pytest.fixture
def sources(tmp_path):
    config = synthetic.target_json("llama")
    target = synthetic.write_folder(tmp_path / "hf_target", config, synthetic.target_tensors(config))
    config = synthetic.drafter_json()
    tensors = synthetic.drafter_tensors(config)
    drafter = synthetic.write_folder(tmp_path / "hf_drafter", config, tensors, tokenizer=False)
    return str(target), str(drafter)


def test_target_then_drafter(tmp_path, sources, capsys):
    target, drafter = str(tmp_path / "target"), str(tmp_path / "drafter")
    assert main(["target", sources[0], target, "--dtype", "float32"]) == 0
    assert main(["drafter", sources[1], drafter, "--target", target]) == 0
    assert load_config(target, "target").dtype == "float32"
    assert load_config(drafter, "drafter").dtype == "float32"  # as its target
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"{target}: target, 2 layers, hidden size 16, float32"
    assert err == ""
    assert main(["target", sources[0], target]) == 2
    assert main(["target", sources[0], target, "--overwrite"]) == 0
    assert capsys.readouterr().err == f"error: {target}: already exists; pass overwrite (--overwrite) to replace it\n"
    # A mistyped OUT must not cost the target.
    assert main(["drafter", sources[1], target, "--target", target, "--overwrite"]) == 2
    assert "kind: expected 'drafter', found 'target'" in capsys.readouterr().err
    assert load_config(target, "target").dtype == "bfloat16"


def test_warning_is_one_line(tmp_path, sources, capsys):
    config = Path(sources[1]) / "config.json"
    config.write_text(config.read_text().replace('"block_size": 4, ', ""))
    assert main(["target", sources[0], str(tmp_path / "target")]) == 0
    assert main(["drafter", sources[1], str(tmp_path / "drafter"), "--target", str(tmp_path / "target")]) == 0
    assert capsys.readouterr().err == f"warning: {config}: block_size: missing, 16 is assumed\n"


@pytest.mark.parametrize("value", [None, []])
def test_a_target_without_an_end_is_converted_with_a_warning(tmp_path, capsys, value):
    config = synthetic.target_json("llama", eos_token_id=value)
    source = synthetic.write_folder(tmp_path / "source", config, synthetic.target_tensors(config))
    assert main(["target", str(source), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err == (
        f"warning: {source / 'config.json'}: eos_token_id: expected token ids here or in generation_config.json, found "
        "none; texts will end at the limit only\n"
    )
    assert load_config(tmp_path / "out", "target").stop_token_ids == ()
    (source / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert main(["target", str(source), str(tmp_path / "out"), "--overwrite"]) == 0
    assert capsys.readouterr().err == ""


def test_as_a_module(tmp_path):
    command = [sys.executable, "-m", "convert", "target", "no-such-folder", str(tmp_path / "out")]
    root = Path(convert.__file__).parents[1]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: no-such-folder: expected a folder")
    assert len(result.stderr.splitlines()) == 1


def test_hub_id_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(convert.ConversionError, match=r"owner/name: no such path; .* pip install 'ddtree-jax\[hub\]'"):
        locate("owner/name")


def test_hub_id(monkeypatch, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    calls = []

    def download(hub_id, **options):
        calls.append((hub_id, options["revision"]))
        if hub_id == "owner/missing":
            raise OSError("no network\nsecond line")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("owner/name", "abc123") == tmp_path
    assert calls == [("owner/name", "abc123")]
    with pytest.raises(convert.ConversionError, match=r"^owner/missing: .* not to be had from the hub: no network$"):
        locate("owner/missing")


def test_revision_of_a_local_path(tmp_path):
    with pytest.raises(convert.ConversionError, match="--revision is for hub ids"):
        locate(tmp_path, "abc123")
