"""The two conversions, from a source on disk or on the hub to a checkpoint."""

import warnings
from pathlib import Path

import tokenizers

from convert.drafter_config import drafter_config
from convert.eagle3_config import eagle3_config, is_eagle3
from convert.errors import ConversionError, ConversionWarning, mismatch
from convert.fields import Fields
from convert.gguf_source import GGUFSource, gguf_target_config
from convert.gguf_tokenizer import gguf_tokenizer_files
from convert.hf_config import DTYPES, target_config
from convert.locate import locate
from convert.mtp_config import is_mtp, mtp_config
from convert.names import drafter_name
from convert.pipeline import check_names, write_checkpoint
from convert.safetensors_source import SafetensorsSource
from convert.source import Renamed, SplitExperts
from convert.vocabulary import check_target_ids
from ddtree_jax.checkpoint import check_free, load_config
from ddtree_jax.config import DraftConfig, TargetConfig
from ddtree_jax.tokenizer import Tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def convert_target(
    src: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    progress: bool = False,
) -> TargetConfig:
    """Converts a target and its tokenizer.

    Args:
      src: a Hugging Face folder (config.json, safetensors, tokenizer.json), a hub id, or a .gguf file.
      out: checkpoint folder to write.
      dtype: "bfloat16", "float32" or "float16"; None keeps the source's own (GGUF: bfloat16).
      overwrite: replace a target checkpoint at `out`.
      revision: of a hub id.
      progress: show a bar if standard error is a terminal.

    Raises:
      ConversionError, CheckpointError: nothing was written, and whatever was at `out` is still there.
    """
    _check_dtype(dtype)
    check_free(out, "target", overwrite=overwrite)
    path = locate(src, revision)
    if path.is_file():
        if path.suffix != ".gguf":
            raise mismatch(path, "file", expected="a folder or a .gguf file", found=path.suffix or "no suffix")
        source = GGUFSource(path)
        config = gguf_target_config(source, dtype)
        files = gguf_tokenizer_files(source)
    else:
        config = target_config(path, dtype)
        source = SafetensorsSource(path)
        if config.moe is not None:
            source = SplitExperts(source)
        files = {name: path / name for name in TOKENIZER_FILES if (path / name).is_file()}
    check_names(source, config, file=path)
    _check_tokenizer(path, files, config)
    if not config.stop_token_ids:
        _warn_of_endless_texts(path)
    origin = _origin(src, revision)
    write_checkpoint(out, config, source, extra_files=files, origin=origin, overwrite=overwrite, progress=progress)
    return config


def convert_drafter(
    src: str | Path,
    out: str | Path,
    *,
    target: str | Path | TargetConfig,
    sample_from_anchor: bool = False,
    taps: tuple[int, ...] | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    progress: bool = False,
) -> DraftConfig:
    """Converts a drafter, DFlash, EAGLE-3 or a layer for multi-token prediction, and checks that it fits its target.

    Args:
      src: a folder in one of the formats of `convert.drafter_formats`, in that of EAGLE-3, or the Qwen3.5, Qwen3.6 or
        Qwen3-Next target whose prediction layer is wanted; or a hub id.
      out, dtype, overwrite, revision, progress: see `convert_target`.
      target: the converted target (its folder or its config).
      sample_from_anchor: the source has the slot layout of DSpark and DeepSpec; never guessed. Formats that always
        declare it (speculators, Open Spec) need no telling.
      taps: of EAGLE-3, zero-based blocks of the target whose output it reads; None takes what its config says.

    Raises:
      ConversionError, CheckpointError: nothing was written, and whatever was at `out` is still there.
    """
    _check_dtype(dtype)
    check_free(out, "drafter", overwrite=overwrite)
    fitted = target if isinstance(target, TargetConfig) else load_config(target, "target")
    path = locate(src, revision)
    if not path.is_dir():
        raise mismatch(path, "file", expected="a folder with config.json and safetensors", found="a file")
    settings = Fields.read(path / "config.json")
    source = SafetensorsSource(path)
    if sample_from_anchor and (is_eagle3(settings) or is_mtp(settings)):
        raise mismatch(settings.file, "sample_from_anchor", expected="a DFlash drafter", found="another kind")
    if taps is not None and not is_eagle3(settings):
        raise mismatch(settings.file, "taps", expected="an EAGLE-3 drafter", found="another kind")
    if is_eagle3(settings):
        source = Renamed(source, _eagle3_name)
        config = eagle3_config(settings, source.tensors, fitted, taps=taps, dtype=dtype)
        mapped = True
    elif is_mtp(settings):
        config = mtp_config(path, settings, fitted, dtype=dtype)
        source = source if config.moe is None else SplitExperts(source)
        mapped = False
    else:
        source = Renamed(source, drafter_name)
        config = drafter_config(path, source.tensors, fitted, sample_from_anchor=sample_from_anchor, dtype=dtype)
        mapped = config.draft_vocab_size is not None
    # t2d says again which tokens d2t names.
    check_names(source, config, file=path, unused=[("t2d", (config.target_vocab_size,))] if mapped else [])
    if mapped:
        check_target_ids(source, config.target_vocab_size)
    write_checkpoint(out, config, source, origin=_origin(src, revision), overwrite=overwrite, progress=progress)
    return config


def _eagle3_name(name: str) -> str:
    """The name of a tensor as EAGLE publishes it; vLLM's checkpoints call the layer layers.0."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _warn_of_endless_texts(path: Path) -> None:
    if path.is_file():
        where = f"{path}: tokenizer.ggml.eos_token_id: expected a token id, found nothing"
    else:
        expected = "token ids here or in generation_config.json"
        where = f"{path / 'config.json'}: eos_token_id: expected {expected}, found none"
    warnings.warn(f"{where}; texts will end at the limit only", ConversionWarning, stacklevel=3)


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise ConversionError(f"dtype: expected {' or '.join(DTYPES)}, found {dtype!r}")


def _check_tokenizer(path: Path, files: dict[str, bytes | Path], config: TargetConfig) -> None:
    """The tokenizer must be readable and must not produce an id past the embedding table."""
    content = files.get("tokenizer.json")
    if content is None:
        raise mismatch(path / "tokenizer.json", "file", expected="a tokenizer of the tokenizers library", found="none")
    if path.is_dir():  # what loading will read, read now
        try:
            Tokenizer.from_folder(path).check_chat_template()
        except ValueError as error:
            raise ConversionError(str(error) if str(path) in str(error) else f"{path}: tokenizer: {error}") from None
    text = content.decode() if isinstance(content, bytes) else content.read_text(encoding="utf-8")
    try:
        vocabulary = tokenizers.Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises bare Exception
        raise ConversionError(f"{path / 'tokenizer.json'}: cannot be read as a tokenizer: {error}") from None
    highest = max(vocabulary.values(), default=-1)
    if highest >= config.vocab_size:
        expected = f"below the {config.vocab_size} rows of the embedding"
        raise mismatch(path / "tokenizer.json", "highest token id", expected=expected, found=highest)


def _origin(src: str | Path, revision: str | None) -> str:
    """What config.json tells of the source: a name, not where it lay on somebody's disk."""
    path = Path(src).expanduser()
    name = path.resolve().name if path.exists() else str(src)
    return name if revision is None else f"{name}@{revision}"
