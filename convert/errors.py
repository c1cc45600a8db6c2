"""The error and the warning of the converter."""

from pathlib import Path


class ConversionError(ValueError):
    """A source that cannot be converted; one line that names file, key, expected and found."""


class ConversionWarning(UserWarning):
    """A source that is converted on an assumption, or with something in it left out."""


def mismatch(file: str | Path, key: str, *, expected: object, found: object) -> ConversionError:
    """The error for a value that is not what it must be."""
    return ConversionError(f"{file}: {key}: expected {expected}, found {found}")
