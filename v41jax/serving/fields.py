"""Reads the fields of a JSON body, each with its type and what is legal; says which is wrong, and why."""

import json
import math
from typing import Any


class BadRequest(ValueError):
    """What a caller asked for cannot be done: one sentence, the field, and the HTTP status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        """Keeps the parts."""
        super().__init__(message)
        self.param, self.status = param, status


def _no_constant(name: str):
    raise BadRequest(f"the body holds {name}, which is no JSON number")


def parse_object(body: bytes) -> dict[str, Any]:
    """Parses a body that is one JSON object; BadRequest for any other."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except BadRequest:
        raise
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, an endless number, or nested too deep
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body is a JSON {_kind(value)}; it must be an object")
    return value


class Fields:
    """A JSON object that is read field by field; null stands for absence, and at the end nothing may be left."""

    def __init__(self, body: dict[str, Any], prefix: str = ""):
        """Reads from a copy; `prefix` names where the object stands in messages."""
        self._body, self._prefix = {name: value for name, value in body.items() if value is not None}, prefix

    def take(self, name: str, default: Any = None) -> Any:
        """Takes a value of any type."""
        return self._body.pop(name, default)

    def text(self, name: str, default: str | None = None) -> str | None:
        """Takes a string that is whole Unicode."""
        value = self.take(name, default)
        return value if value is None else self.check_text(name, value)

    def check_text(self, name: str, value: Any) -> str:
        """Checks a value that must be a string that is whole Unicode."""
        if not isinstance(value, str):
            raise self.wrong(name, f"is a JSON {_kind(value)}; it must be a string")
        if any("\ud800" <= c <= "\udfff" for c in value):
            raise self.wrong(name, "holds half of a surrogate pair; it must be Unicode text")
        return value

    def flag(self, name: str) -> bool:
        """Takes true or false; false if absent."""
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, f"is a JSON {_kind(value)}; it must be true or false")
        return value

    def whole(self, name: str, default: int | None, low: int, high: int) -> int | None:
        """Takes a whole number between two."""
        value = self.take(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name, f"is {_short(value)}; it must be a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Takes a number between two."""
        value = self.take(name, default)
        ok = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
        if not ok or not low <= value <= high:
            raise self.wrong(name, f"is {_short(value)}; it must be a number from {low} to {high}")
        return float(value)

    def only(self, name: str, *legal: Any):
        """Takes a field that is known, and of which this server does one thing only."""
        value = self.take(name, legal[0])
        if value not in legal or isinstance(value, bool) != isinstance(legal[0], bool):
            raise self.wrong(name, f"is {_short(value)}; this server supports {json.dumps(legal[0])} only")

    def done(self):
        """Raises BadRequest if a field is left that nothing has read."""
        if self._body:
            name = next(iter(self._body))
            raise self.wrong(_short(name).strip('"'), "is not a field of this endpoint")

    def wrong(self, name: str, what: str) -> BadRequest:
        """Makes the error of a field."""
        return BadRequest(f"{self._prefix}{name} {what}", f"{self._prefix}{name}")


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
