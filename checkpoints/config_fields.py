"""Reads fields of a Hugging Face ``config.json`` with checks. Every error names the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.core.errors import ModelError
from pdserve.core.kv_layout import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The fields of ``values``, which are the content of the file ``origin``. All methods raise `ModelError`."""

    values: Mapping[str, Any]
    origin: str

    def error(self, what: str) -> ModelError:
        """An error about this file."""
        return ModelError(f"{self.origin}: {what}")

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least ``least``. A missing key is ``default``, or an error if that is None."""
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            wanted = "a positive whole number" if least else "a whole number of 0 or more"
            raise self.error(f"'{key}' must be {wanted}, got {value!r}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; null is false."""
        value = self.values.get(key, default)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"'{key}' must be true or false, got {value!r}")
        return bool(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        return self.as_positive(self.values.get(key, default), f"'{key}'")

    def positive_or_none(self, key: str, default: float | None = None) -> float | None:
        """A positive number, or None for null. A missing key is ``default``."""
        return None if self.values.get(key, default) is None else self.positive(key, default)

    def as_positive(self, value: Any, what: str) -> float:
        """``value`` if it is a positive number; ``what`` names it in the error."""
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(f"{what} must be a positive number, got {value!r}")
        return float(value)

    def object(self, key: str) -> Mapping[str, Any]:
        """A JSON object; missing and null are empty."""
        value = self.values.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.error(f"'{key}' must be an object, got {value!r}")
        return value

    def dtype(self) -> str:
        """The dtype of the weights, float32 by default."""
        dtype = str(self.values.get("dtype") or self.values.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise self.error(f"dtype {dtype!r} is not supported; supported: {sorted(DTYPE_BYTES)}")
        return dtype

    def architecture(self) -> str:
        """The first of ``architectures``; '?' if there is none."""
        names = self.values.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else "?"
