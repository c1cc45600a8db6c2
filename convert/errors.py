"""The one error of the converter."""

from pathlib import Path


class ConversionError(ValueError):
    """A source that cannot be converted; one line that names file, key, expected and found."""


def mismatch(file: str | Path, key: str, *, expected: object, found: object) -> ConversionError:
    """The error for a value that is not what it must be."""
    return ConversionError(f"{file}: {key}: expected {expected}, found {found}")
