"""
Checks of everything that a caller, a URL or a profile gives, each done once, so that the rest can rely on the values.

Every check returns the valid value or raises. The checks of arguments raise `ConfigurationError`. The parsers of
options (``parse_…``) raise `ValueError` that says what is accepted, and `lockkit.configuration.registry` adds the name
of the option and its URL.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Any, NoReturn

from lockkit.errors import ConfigurationError, plain
from lockkit.units import Seconds

__all__ = [
    "JSON_CHARS_MAX",
    "JSON_DEPTH_MAX",
    "METADATA_BYTES_MAX",
    "NAME_BYTES_MAX",
    "TTL_MAX",
    "about",
    "check_depth",
    "decode_json",
    "escape",
    "flag",
    "label",
    "lock_name",
    "makes_coroutines",
    "metadata",
    "name_prefix",
    "name_to_lock",
    "nearest",
    "on_lost",
    "parse_at_least",
    "parse_bool",
    "parse_choice",
    "parse_duration",
    "parse_int",
    "parse_seconds",
    "parse_text",
    "parse_ttl",
    "percent_decode",
    "plain",
    "seconds",
    "shown",
    "timeout",
    "ttl",
    "unescape",
]

NAME_BYTES_MAX = 255
"""Longest lock name in UTF-8 bytes: what the narrowest backend, a ``VARBINARY(255)`` column, can hold."""

TTL_MAX = 1e9
"""Limit of a ttl, seconds (31 years): in microseconds, added to the time of day, it stays within 64 bits."""

METADATA_BYTES_MAX = 4096
"""Longest metadata in bytes. Every acquisition sends it, so a larger limit would slow down all of them."""

VALUE_BYTES_MAX = 64 * 1024
"""Longest JSON text of a value of the application that is stored with a lock, UTF-8 bytes: what fits into a note on
every backend."""

JSON_CHARS_MAX = 128 * 1024
"""Longest JSON text of other clients that is decoded: twice what a note may have."""

JSON_DEPTH_MAX = 64
"""How deep JSON may be nested that is stored or decoded. Deeper, and whoever goes through it later (``repr``,
``dataclasses.asdict``) comes near Python's recursion limit; flatter than what applications store is of no use."""

_SHOWN_CHARS_MAX = 60

_TRY_ONCE = "use timeout=0 to try once"
"""For ``acquire(False)``, which means that in other libraries."""

_TIMEOUTS = "0 tries once, None waits without limit"

_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_DURATION = re.compile(rf"(?:{_DURATION_PART.pattern})+")

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # to the end if it is not closed: linear for any text
_BRACKETS = re.compile(r"[\[\]{}]")
# What stays (an escaped backslash, a pair) comes first.
_SURROGATE = re.compile(
    r"(\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    "|\\\\u[dD][89a-fA-F][0-9a-fA-F]{2}|[\ud800-\udfff]"
)

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_encode_unicode = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode


@contextmanager
def about(name: object, backend: str | None) -> Iterator[None]:
    """Have the `ConfigurationError` of a check say which call it was."""
    try:
        yield
    except ConfigurationError as error:
        error.name = name if isinstance(name, str) else None
        error.backend = backend
        raise


def lock_name(value: object) -> str:
    """
    Check a lock name.

    Args:
        value: 1 to 255 UTF-8 bytes without NUL. It is not normalised: names that differ in a byte are two locks.

    Returns:
        The name, as a plain `str` even for a subclass such as a ``StrEnum``.

    Raises:
        ConfigurationError: The name is not valid.
    """
    # In ASCII a character is a byte, so the length is known without encoding.
    if type(value) is str and value.isascii() and 0 < len(value) <= NAME_BYTES_MAX and "\0" not in value:
        return value
    return _unusual_name(value, "lock name")


def name_to_lock(value: object) -> str:
    """
    Check the name of what is to be locked, as `lock_name`; not one of an object without a text of its own.

    In ``f"charge:{order}"`` that would be the object's address: equal objects give two names, and a later object has
    the name of an earlier one.
    """
    name = lock_name(value)
    if " at 0x" in name and _ADDRESS.search(name):
        message = (
            f"lock name {shown(name)} has the address of an object, which says nothing of what it is: use what "
            "identifies it, such as {order.id}"
        )
        raise ConfigurationError(message, name=name)
    return name


def stall(value: object, *, renew: bool) -> float:
    """Check ``stall=``."""
    if not renew:
        message = (
            "stall= ends the renewal of a holder that makes no progress, and renew=False renews none: leave one out"
        )
        raise ConfigurationError(message)
    return seconds(value, "stall", exclusive=True)


def lifetime(value: object, what: str) -> float:
    """Check how long something is kept: above 0, and not longer than a ttl may be."""
    checked = seconds(value, what, exclusive=True)
    if checked > TTL_MAX:
        raise ConfigurationError(f"{what} must be at most {TTL_MAX:g} seconds, not {checked:g}")
    return checked


def flag(value: object, option: str) -> bool:
    """Check a switch: ``renew="no"`` would count as true."""
    if value is True or value is False:
        return value
    raise ConfigurationError(f"{option} must be True or False, not {shown(value)}")


def label(value: object) -> str:
    """Check the label of a lock: what metrics count it under."""
    if isinstance(value, str) and 0 < len(value) <= NAME_BYTES_MAX:
        return str.__str__(value)  # as for a name
    message = f"label must be a str of 1 to {NAME_BYTES_MAX} characters, such as 'seat:{{seat}}', not {shown(value)}"
    raise ConfigurationError(message)


def name_prefix(value: object) -> str:
    """
    Check the beginning of lock names.

    Args:
        value: 0 to 255 UTF-8 bytes without NUL. No character in it is a wildcard.

    Returns:
        The prefix, as a plain `str`.

    Raises:
        ConfigurationError: No lock name can begin like this.
    """
    return _unusual_name(value, "prefix")


def _unusual_name(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(f"{what} must be a str, such as 'seat:12A', not {_kind(value)}")
    # Not str(value): an Enum with a str base would give "Colour.RED" instead of its value.
    text = str.__str__(value)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        problem = (
            f"{what} {shown(text)} cannot be encoded as UTF-8 (it has a lone surrogate): "
            "decode the bytes that it came from with the right encoding"
        )
    else:
        if size == 0 and what == "lock name":
            problem = f"lock name must not be empty: give 1 to {NAME_BYTES_MAX} UTF-8 bytes"
        elif size > NAME_BYTES_MAX:
            problem = (
                f"{what} {shown(text)} must have at most {NAME_BYTES_MAX} UTF-8 bytes, not {size}: "
                "shorten it, or replace its long part by a hash"
            )
        elif "\0" in text:
            problem = (
                f"{what} {shown(text)} must not contain a NUL character, which most backends cannot store: remove it"
            )
        else:
            return text
    raise ConfigurationError(problem, name=text if what == "lock name" else None)


def seconds(value: object, what: str, *, exclusive: bool = False, hint: str = "") -> float:
    """
    Check a time span.

    Args:
        value: Seconds as int or float, or a `datetime.timedelta`. Finite.
        what: Name of the value, for the message.
        exclusive: Refuse 0, too.
        hint: Added to the message.

    Returns:
        Seconds.

    Raises:
        ConfigurationError: It is not a finite time span, or below 0.
    """
    number = _number(value)
    if number is None:
        raise ConfigurationError(f"{what} must be seconds (int, float or timedelta), not {_kind(value)}{hint}")
    if not math.isfinite(number):
        raise ConfigurationError(f"{what} must be a finite number of seconds, not {shown(value)}{hint}")
    if number < 0 or (exclusive and number == 0):
        least = "more than 0" if exclusive else "0 or more"
        raise ConfigurationError(f"{what} must be {least} seconds, not {shown(value)}{hint}")
    return number


def ttl(value: object, min_ttl: Seconds, *, name: str | None = None) -> float:
    """Check a ttl: how long the backend keeps a lock that is not renewed."""
    if (type(value) is float or type(value) is int) and min_ttl <= value < TTL_MAX and value > 0:
        return float(value)
    number = _number(value)
    if number is None:
        message = f"ttl must be seconds (int, float or timedelta), not {_kind(value)}: every lock needs one"
        raise ConfigurationError(message, name=name)
    # Also false for NaN.
    if not 0 < number < TTL_MAX:
        message = (
            f"ttl must be more than 0 and less than {TTL_MAX:g} seconds, not {shown(value)}: every lock needs a limit. "
            "lockkit renews it while you hold the lock, so 30 suits most uses"
        )
        raise ConfigurationError(message, name=name)
    if number < min_ttl:
        message = f"ttl must be {min_ttl:g} or more seconds on this backend (capabilities.min_ttl), not {shown(value)}"
        raise ConfigurationError(message, name=name)
    return number


def timeout(value: object, *, name: str | None = None, backend: str | None = None) -> float | None:
    """Check a timeout: how long the caller waits."""
    if value is None or (type(value) is float and 0.0 <= value < math.inf):
        return value
    with about(name, backend):
        return seconds(value, "timeout", hint=f": {_TRY_ONCE if value is False else _TIMEOUTS}")


def decode_json(text: str | bytes | bytearray, chars_max: int = JSON_CHARS_MAX) -> Any:  # noqa: ANN401 - any JSON
    """
    Decode JSON that another client, of any kind, may have written.

    Args:
        text: Of any length, in any form.
        chars_max: How long it may be.

    Returns:
        The value: nested at most `JSON_DEPTH_MAX` deep, its numbers finite, its texts without lone surrogates.

    Raises:
        ValueError: It is no such JSON, or longer than `chars_max`. Nothing else is raised.
    """
    if len(text) > chars_max:
        raise ValueError(f"it has {len(text)} characters, more than {chars_max}")
    if isinstance(text, bytes | bytearray):
        text = text.decode("utf-8", "replace")
    check_depth(text)
    if _SURROGATE.search(text):
        text = _SURROGATE.sub(_without_lone, text)
    return json.loads(text, parse_constant=_refuse_number, parse_float=_finite)


def encode_json(value: object) -> str:
    """
    Turn a value of the application into JSON text that is stored with a lock.

    Raises:
        ValueError: It is no JSON value, nested too deep, or its text is longer than `VALUE_BYTES_MAX`.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
        check_depth(f"[{text}]")  # what it is stored in is one deeper
    except (TypeError, ValueError, RuntimeError) as error:  # the last: too deep, or changed by another thread meanwhile
        raise ValueError(f"it must be made of what JSON has (dict, list, str, number, bool, None): {error}") from error
    if size > VALUE_BYTES_MAX:
        message = f"its JSON text has {size} bytes, and at most {VALUE_BYTES_MAX} can be stored: store a reference"
        raise ValueError(message)
    return text


def check_depth(text: str) -> None:
    """Check that JSON text is nested at most `JSON_DEPTH_MAX` deep."""
    if text.count("[") + text.count("{") <= JSON_DEPTH_MAX:
        return
    depth = 0
    for bracket in _BRACKETS.findall(_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > JSON_DEPTH_MAX:
            raise ValueError(f"it is nested more than {JSON_DEPTH_MAX} deep")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse_number(digits)


def _refuse_number(digits: str) -> NoReturn:
    raise ValueError(f"{digits} is no finite number")


def _without_lone(escapes: re.Match[str]) -> str:
    """Replace what is no pair in an escaped surrogate, or in a raw one."""
    return escapes[0] if escapes[1] else "\ufffd"


def metadata(value: object, base: Mapping[str, object]) -> str:
    """
    Encode the metadata that is stored with a lock, so that people see who holds it.

    Args:
        value: What the application adds: a mapping that JSON can hold, or a str, which becomes ``{"text": …}``.
        base: What lockkit says about the holder (``host``, ``pid``, ``started``); its keys cannot be replaced.

    Returns:
        A JSON object in ASCII, at most `METADATA_BYTES_MAX` long.

    Raises:
        ConfigurationError: JSON cannot hold it, it replaces a key of `base`, or it is too long.
    """
    if value is None:
        return _encode(base)
    if isinstance(value, str):
        value = {"text": value}
    elif not isinstance(value, Mapping):
        raise ConfigurationError(f"metadata must be a str, a mapping or None, not {_kind(value)}")
    taken = [key for key in value if key in base]
    if taken:
        message = f"metadata must not have the keys {', '.join(map(repr, taken))}: lockkit sets them. Use other keys"
        raise ConfigurationError(message)
    merged = {**base, **value}
    try:
        text = _encode(merged)
        # The ASCII form would hide a lone surrogate as an escape, which would then fail for the reader.
        _encode_unicode(merged).encode()
        _check_keys(merged)
        check_depth(text)
    except (TypeError, ValueError, RecursionError) as error:
        message = f"metadata cannot be stored as JSON: {error}. Use str keys, and str, finite numbers, bool, None, list"
        raise ConfigurationError(message) from error
    if len(text) > METADATA_BYTES_MAX:
        message = (
            f"metadata must have at most {METADATA_BYTES_MAX} bytes as JSON, not {len(text)}: "
            "store the data elsewhere and put a reference here"
        )
        raise ConfigurationError(message)
    return text


def on_lost(value: object, *, awaits: bool = True) -> Callable[..., object]:
    """Check the callback for a lost lease."""
    if callable(value):
        if not awaits and makes_coroutines(value):
            message = (
                f"on_lost of a sync client must not be a coroutine function ({shown(value)}): nothing would await it. "
                "Give a plain function, or use lockkit.aio"
            )
            raise ConfigurationError(message)
        return value
    raise ConfigurationError(f"on_lost must be callable as on_lost(lease, reason), not {_kind(value)}")


def makes_coroutines(function: Callable[..., object]) -> bool:
    """Tell whether calling this makes a coroutine, which somebody must await."""
    from inspect import iscoroutinefunction  # noqa: PLC0415 - `import lockkit` stays light

    return iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__)


def _check_keys(value: object) -> None:
    """Refuse keys that JSON would silently turn into a str (``{1: …}`` would come back as ``{"1": …}``)."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {shown(key)} is not a str")
            _check_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_keys(item)


def escape(name: str, special: str | frozenset[str]) -> str:
    """
    Percent-encode the characters of a name that have a meaning in a store.

    Each of `special`, and ``%`` itself, becomes its UTF-8 bytes as ``%XX`` in capitals; all others stay.
    Different names stay different, and `unescape` returns the original name.

    Args:
        name: A lock name.
        special: The characters to encode.
    """
    return _escaper(special)(name)


@lru_cache(maxsize=64)
def _escaper(special: str | frozenset[str]) -> Callable[[str], str]:
    # A pattern that finds nothing takes a third of the time of str.translate.
    pattern = re.compile(f"[{re.escape(''.join({*special, '%'}))}]")
    return partial(pattern.sub, _percent)


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())


def unescape(text: str) -> str:
    """
    Return the name that `escape` has encoded.

    Raises:
        ConfigurationError: `escape` cannot have made this: it has a ``%`` without two hexadecimal digits, or bytes that
            are not UTF-8. Other programs may have written such names into a store.
    """
    try:
        return percent_decode(text, strict=True)
    except ValueError as error:
        raise ConfigurationError(f"{shown(text)} is not an escaped lock name: {error}") from None


def percent_decode(text: str, *, strict: bool = False) -> str:
    """
    Decode ``%XX`` sequences as UTF-8.

    Args:
        text: What to decode.
        strict: Refuse a ``%`` without two hexadecimal digits after it; otherwise it stays unchanged, as in
            `urllib.parse.unquote` (which is slower to import than this function).

    Raises:
        ValueError: The bytes are not UTF-8, or see `strict`. The message does not show the text.
    """
    if "%" not in text:
        return text
    head, *parts = text.split("%")
    result = bytearray(head.encode())
    for part in parts:
        digits = part[:2]
        if len(digits) == 2 and all(digit in "0123456789abcdefABCDEF" for digit in digits):  # noqa: PLR2004 - as in %XX
            result.append(int(digits, 16))
            result += part[2:].encode()
        elif strict:
            raise ValueError("a % without two hexadecimal digits after it")
        else:
            result += f"%{part}".encode()
    with suppress(UnicodeDecodeError):
        return result.decode()
    # Raised here and not in an except block: that error, which has the text, would become its context.
    raise ValueError("percent-encoded bytes that are not UTF-8")


def parse_seconds(value: object) -> float:
    """Parse an option: 0 or more seconds, as str, number or `datetime.timedelta`."""
    number = _number(_float(value) if isinstance(value, str) else value)
    if number is None or not 0.0 <= number < math.inf:
        raise ValueError(f"must be 0 or more seconds{_without_unit(value)}")
    return number


def parse_duration(text: str) -> float:
    """
    Parse a time as people write it: ``30``, ``30s``, ``1.5h``, ``1h30m``. Units: ``ms``, ``s``, ``m``, ``h``, ``d``.

    Args:
        text: A number of seconds, or numbers with units, which are added.

    Returns:
        Seconds. A plain number may be negative: what is accepted is for the caller to check.

    Raises:
        ValueError: It is anything else.
    """
    number = _float(text)
    if number is not None:
        return number
    if not _DURATION.fullmatch(text):
        raise ValueError("must be seconds, or a time such as 500ms, 30s, 5m, 1h or 1d")
    return sum(float(count) * _UNIT_SECONDS[unit] for count, unit in _DURATION_PART.findall(text))


def parse_ttl(value: object) -> float:
    """Parse an option: a ttl in seconds, as str, number or `datetime.timedelta`."""
    number = _number(_float(value) if isinstance(value, str) else value)
    if number is None or not 0.0 < number < TTL_MAX:
        raise ValueError(f"must be more than 0 and less than {TTL_MAX:g} seconds{_without_unit(value)}")
    return number


def parse_at_least(least: Seconds) -> Callable[[object], float]:
    """Make a parser for an option that is a time, as for `parse_ttl`."""

    def parse(value: object) -> float:
        seconds = parse_ttl(value)
        if seconds < least:
            raise ValueError(f"must be at least {least:g} second{'' if least == 1 else 's'}")
        return seconds

    return parse


def _without_unit(value: object) -> str:
    """Say what is wrong with ``30s``, which `parse_duration` takes."""
    return ", without a unit" if isinstance(value, str) and _DURATION.fullmatch(value) else ""


def parse_bool(value: object) -> bool:
    """Parse an option: a switch, as a bool, 0 or 1, or one of the usual words."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (str, int)):
        text = str(value).lower()
        if text in {"1", "true", "yes", "on"}:
            return True
        if text in {"0", "false", "no", "off"}:
            return False
    raise ValueError("must be 1, true, yes or on; or 0, false, no or off")


def parse_int(minimum: int, maximum: int | None = None) -> Callable[[object], int]:
    """Make a parser for an option that is a whole number."""
    accepted = (
        f"must be a whole number, {minimum} or more"
        if maximum is None
        else f"must be a whole number from {minimum} to {maximum}"
    )

    def parse(value: object) -> int:
        number = value
        if isinstance(value, str):
            # Python refuses to convert thousands of digits; no option has more than a 64-bit number.
            digits = value.removeprefix("-")
            number = int(value) if digits.isascii() and digits.isdigit() and len(digits) < 20 else None  # noqa: PLR2004
        if (
            not isinstance(number, int)
            or isinstance(number, bool)
            or number < minimum
            or (maximum is not None and number > maximum)
        ):
            raise ValueError(accepted)
        return number

    return parse


def parse_choice(*choices: str) -> Callable[[object], str]:
    """Make a parser for an option that is one of a few words."""

    def parse(value: object) -> str:
        if isinstance(value, str) and value in choices:
            return value
        raise ValueError(f"must be one of {', '.join(choices)}{nearest(value, choices)}")

    return parse


def parse_text(value: object) -> str:
    """Parse an option: a non-empty string."""
    if not isinstance(value, str) or not value:
        raise ValueError("must be a non-empty string")
    return value


def nearest(given: object, known: tuple[str, ...] | list[str]) -> str:
    """Return ``(did you mean …?)`` for the known word that is most like the given one; empty if none is close."""
    if not isinstance(given, str):
        return ""
    import difflib  # noqa: PLC0415 - only in error messages: `import lockkit` stays light

    found = difflib.get_close_matches(given.lower(), known, n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def shown(value: object) -> str:
    """Return the repr of a value for a message, shortened if it is long. Never pass a password."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - of any class; and Python writes no int of more than 4300 digits
        text = f"<{type(value).__name__}, repr() raises {type(error).__name__}>"
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[: _SHOWN_CHARS_MAX - 1]}…"


def _kind(value: object) -> str:
    return f"{type(value).__name__} ({shown(value)})"


def _float(text: str) -> float | None:
    """Parse a plain number. `float` alone would also accept "1_0", " 1", Arabic digits and "nan"."""
    if not text or not set(text) <= set("0123456789.eE+-"):
        return None
    try:
        return float(text)
    except ValueError:
        return None


def _number(value: object) -> float | None:
    """Return seconds, or None if it is not a time span. A bool is not: ``timeout=True`` means another parameter."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:  # an int too large for a float
            return math.inf if value > 0 else -math.inf
    from datetime import timedelta  # noqa: PLC0415 - `import lockkit` stays light

    return value.total_seconds() if isinstance(value, timedelta) else None
