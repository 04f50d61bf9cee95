"""
Reads protocol buffers without their description.

The backend's own ``.proto`` has what locks need and no more; the doctor asks a few things beside, and reads a field or
two of each answer. Source: "Encoding", Protocol Buffers documentation.
"""

from __future__ import annotations

__all__ = ["Fields", "decode"]

Fields = dict[int, "list[int | bytes]"]
"""By field number, all values in order: numbers (varint and fixed), or bytes (text, bytes, messages)."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}


def decode(data: bytes) -> Fields:
    """
    Read a message.

    Raises:
        ValueError: It is none.
    """
    fields: Fields = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        value: int | bytes
        if kind == _VARINT:
            value, at = _varint(data, at)
        elif kind == _BYTES:
            length, at = _varint(data, at)
            value, at = data[at : at + length], at + length
        elif kind in _WIDTHS:
            value, at = int.from_bytes(data[at : at + _WIDTHS[kind]], "little"), at + _WIDTHS[kind]
        else:
            message = f"no protocol buffer: wire type {kind}"
            raise ValueError(message)
        if at > len(data):
            message = "no protocol buffer: it ends within a field"
            raise ValueError(message)
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Give the number that begins there, and where the next field does."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:  # noqa: PLR2004 - the last byte of a number
            return value, at
    message = "no protocol buffer: it ends within a number"
    raise ValueError(message)
