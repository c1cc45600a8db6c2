"""Frozen dataclasses from JSON: every field by name and type, so that a damaged file is one clear error."""

import dataclasses
import types
import typing
from typing import Any


def from_json[Config](cls: type[Config], data: Any) -> Config:
    """Builds a dataclass from what its `dataclasses.asdict` became in JSON; lists become tuples, objects dataclasses.

    Raises ValueError naming the class and the fields that are unknown, missing or of another type.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{cls.__name__}: expected an object, found {data!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(fields))
    required = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
    missing = sorted(required - set(data))
    if unknown or missing:
        raise ValueError(f"{cls.__name__}: unknown fields {unknown}, missing fields {missing}")
    hints = typing.get_type_hints(cls)
    return cls(**{name: _value(f"{cls.__name__}.{name}", hints[name], value) for name, value in data.items()})


def _value(where: str, kind: Any, value: Any) -> Any:
    """`value` as a `kind`, which is a plain type, a dataclass, a tuple of one of them, or a union."""
    if isinstance(kind, types.UnionType):
        kinds = typing.get_args(kind)
        if value is None and types.NoneType in kinds:
            return None
        kind = next(k for k in kinds if k is not types.NoneType)
    if dataclasses.is_dataclass(kind):
        return from_json(kind, value)
    if typing.get_origin(kind) is tuple:
        element = typing.get_args(kind)[0]
        if isinstance(value, list | tuple):
            return tuple(_value(f"{where}[{i}]", element, item) for i, item in enumerate(value))
    elif kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    elif isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
        return value
    raise ValueError(f"{where}: expected {getattr(kind, '__name__', kind)}, found {value!r}")
