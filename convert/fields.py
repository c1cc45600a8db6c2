"""Typed reading of a config.json: every value is checked where it is read, and an error names file and key."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.errors import ConversionError, mismatch

_REQUIRED: Any = object()


class Fields:
    """A JSON object with its file name; `prefix` is the place of a nested object, for errors."""

    def __init__(self, file: str | Path, data: Mapping[str, Any], prefix: str = ""):
        self.file, self.data, self.prefix = file, data, prefix

    @classmethod
    def read(cls, file: Path) -> "Fields":
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConversionError(f"{file}: missing") from None
        except (OSError, ValueError) as error:
            raise ConversionError(f"{file}: cannot be read as JSON: {error}") from None
        if not isinstance(data, dict):
            raise mismatch(file, "(top level)", expected="an object", found=type(data).__name__)
        return cls(file, data)

    def __contains__(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self.data.get(key) is not None

    def error(self, key: str, *, expected: object, found: object) -> ConversionError:
        return mismatch(self.file, self.prefix + key, expected=expected, found=found)

    def nested(self, key: str) -> "Fields":
        """The object at `key`; an empty one where it is missing or null."""
        value = self.data.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(key, expected="an object", found=type(value).__name__)
        return Fields(self.file, value, f"{self.prefix}{key}.")

    def integer(self, key: str, default: Any = _REQUIRED, *, least: int = 1, most: int | None = None) -> int:
        value = self._get(key, default, f"an integer of {least} or more")
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, expected=f"an integer of {least} or more", found=repr(value))
        if most is not None and value > most:
            raise self.error(key, expected=f"at most {most}", found=value)
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        value = self._get(key, default, "a number")
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, expected="a finite number", found=repr(value))
        return float(value)

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        value = self._get(key, default, "true or false")
        if value is not default and not isinstance(value, bool):
            raise self.error(key, expected="true or false", found=repr(value))
        return value

    def integers(self, key: str, default: Any = _REQUIRED) -> tuple[int, ...]:
        """A list of integers, or a single one."""
        value = self._get(key, default, "a list of integers")
        if value is default:
            return value
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            raise self.error(key, expected="a list of integers", found=repr(value))
        return tuple(values)

    def strings(self, key: str, length: int) -> tuple[str, ...] | None:
        """A list of `length` strings; None where it is missing."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(isinstance(v, str) for v in value):
            raise self.error(key, expected=f"a list of {length} names", found=repr(value))
        return tuple(value)

    def only(self, key: str, allowed: tuple[Any, ...], default: Any) -> Any:
        """The value of `key`, which must be one of `allowed`."""
        value = self.data.get(key)
        value = default if value is None else value
        if value not in allowed:
            names = " or ".join(map(repr, allowed))
            raise self.error(key, expected=names, found=repr(value))
        return value

    def _get(self, key: str, default: Any, expected: str) -> Any:
        value = self.data.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.error(key, expected=expected, found="nothing" if key not in self.data else "null")
        return default
