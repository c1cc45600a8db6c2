"""Turns SRC of the command line into a local folder or file; a hub id is downloaded."""

import re
from pathlib import Path

from convert.errors import ConversionError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Weights only as safetensors, and only from the top folder: other formats and originals are large and unused.
_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]


def locate(source: str | Path, revision: str | None = None) -> Path:
    """A local path as it is; "owner/name" through huggingface_hub where no such path exists.

    Raises ConversionError: nothing there, huggingface_hub missing, the download failed.
    """
    path = Path(source).expanduser()
    if path.exists():
        if revision is not None:
            raise ConversionError(f"{source}: --revision is for hub ids; this is a local path")
        return path
    if isinstance(source, Path) or not _HUB_ID.fullmatch(source) or source.startswith((".", "~")):
        expected = "a folder, a .gguf file or a hub id (owner/name)"
        raise ConversionError(f"{source}: expected {expected}, found nothing there")
    return _download(source, revision)


def _download(hub_id: str, revision: str | None) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise ConversionError(
            f"{hub_id}: no such path; to take it as a hub id, pip install 'ddtree-jax[hub]'"
        ) from None
    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, revision=revision, allow_patterns=_PATTERNS, ignore_patterns=["*/*"]
            )
        )
    except Exception as error:  # the hub client raises what its transport raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConversionError(f"{hub_id}: no such path, and not to be had from the hub: {reason}") from None
