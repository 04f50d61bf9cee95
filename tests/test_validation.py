from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import timedelta
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockkit import validation
from lockkit.backend import decode_metadata
from lockkit.errors import ConfigurationError

BASE = {"host": "h", "pid": 7, "started": 1.5}
SPECIALS = ["", "{}", "/", "/.\x00 ", "%", "]^-\\[", frozenset("é/😀")]


class Seat(StrEnum):
    """Names as an application may keep them."""

    WINDOW = "seat:12A"


class Mixed(str, Enum):  # noqa: UP042 - the older form is what applications have
    """An enumeration whose str() is not its value."""

    RED = "red"


# -- lock_name -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given_name", "name"), [(Seat.WINDOW, "seat:12A"), (Mixed.RED, "red")])
@pytest.mark.parametrize("check", [validation.lock_name, validation.label])
def test_lock_name_of_str_subclass_is_plain_str(check: Callable[[object], str], given_name: str, name: str) -> None:
    """What goes inwards has no surprising methods. Labels too."""
    result = check(given_name)

    assert result == name
    assert type(result) is str


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("", "empty"),
        ("x" * 256, "at most 255 UTF-8 bytes, not 256"),
        ("é" * 128, "at most 255 UTF-8 bytes, not 256"),
        ("a\0b", "NUL"),
        ("é\0", "NUL"),
        ("\ud800", "surrogate"),
        (b"seat", "bytes"),
        (None, "NoneType"),
        (12, "int"),
        (["seat"], "list"),
    ],
)
def test_lock_name_refuses_everything_else(name: object, part: str) -> None:
    """The message says what was wrong; the name is on the error where it is one."""
    with pytest.raises(ConfigurationError, match=part) as caught:
        validation.lock_name(name)

    assert caught.value.name == (name if isinstance(name, str) else None)


@given(st.text(st.characters(codec=None)))
@example("x" * 255)
@example("é" * 127)
def test_lock_name_accepts_exactly_the_contract(name: str) -> None:
    """1 to 255 UTF-8 bytes without NUL."""
    try:
        valid = 1 <= len(name.encode()) <= 255 and "\0" not in name
    except UnicodeEncodeError:
        valid = False

    if valid:
        assert validation.lock_name(name) == name
    else:
        with pytest.raises(ConfigurationError):
            validation.lock_name(name)


def test_message_about_long_name_is_short() -> None:
    """A megabyte given as a name does not land in the log."""
    with pytest.raises(ConfigurationError) as caught:
        validation.lock_name("x" * 1_000_000)

    assert len(str(caught.value)) < 250


# -- seconds, ttl, timeout -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "messages"),
    [
        # A bool is a mistake for another parameter, a text one for an option of a URL.
        *((value, ("x must be seconds", "ttl must be seconds", "timeout must be seconds"))
          for value in (True, False, "1", b"1", [1], 1j, timedelta)),
        (None, ("x must be seconds", "ttl must be seconds", "")),
        # Also an int that no float can hold.
        *((value, ("x must be a finite", "ttl must be", r"timeout must be .*None waits"))
          for value in (math.nan, math.inf, -math.inf, 10**400, -(10**400))),
        # No lock is immortal, also where the backend has no minimum.
        *((value, ("", r"more than 0 and less than 1e\+09", "")) for value in (0, 0.0, -0.0, 1e9, timedelta(0))),
        # In `threading` -1 waits without limit: the message names what does here.
        *((value, ("x must be 0 or more seconds", "more than 0", r"0 or more seconds, not .*None waits without limit"))
          for value in (-1, -0.001, timedelta(seconds=-1))),
    ],
)  # fmt: skip
def test_time_spans_are_finite_numbers_in_their_range(value: object, messages: tuple[str, str, str]) -> None:
    """Of each check the message, empty where it is accepted; the error of a timeout says which lock it is about."""
    checks: list[Callable[[], float | None]] = [
        lambda: validation.seconds(value, "x"),
        lambda: validation.ttl(value, 0.0, name="seat"),
        lambda: validation.timeout(value, name="seat", backend="memory://"),
    ]
    for check, message, facts in zip(
        checks, messages, [(None, None), ("seat", None), ("seat", "memory://")], strict=True
    ):
        if not message:
            assert check() == (value.total_seconds() if isinstance(value, timedelta) else value)
            continue
        with pytest.raises(ConfigurationError, match=message) as caught:
            check()
        assert (caught.value.name, caught.value.backend) == facts


@pytest.mark.parametrize(("value", "number"), [(2, 2.0), (0.5, 0.5), (timedelta(minutes=1), 60.0)])
def test_time_spans_become_float_seconds(value: object, number: float) -> None:
    """Int, float and timedelta mean the same."""
    for result in (validation.seconds(value, "x"), validation.ttl(value, 0.01), validation.timeout(value)):
        assert result == number
        assert type(result) is float


def test_time_spans_have_a_minimum() -> None:
    """Which 0 is or is not; of a ttl that of the backend."""
    assert validation.ttl(1, 1.0) == validation.ttl(timedelta(seconds=1), 1.0) == 1.0

    with pytest.raises(ConfigurationError, match="x must be more than 0 seconds, not 0"):
        validation.seconds(0, "x", exclusive=True)
    with pytest.raises(ConfigurationError, match="1 or more seconds on this backend"):
        validation.ttl(0.9, 1.0)


@given(st.floats() | st.integers(), st.floats(0.001, 10))
def test_ttl_accepts_exactly_the_contract(value: float, min_ttl: float) -> None:
    """Finite, at least the minimum, below the maximum."""
    if min_ttl <= value < validation.TTL_MAX:
        assert validation.ttl(value, min_ttl) == value
    else:
        with pytest.raises(ConfigurationError):
            validation.ttl(value, min_ttl)


# -- metadata ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "added"),
    [
        (None, {}),
        ("free text", {"text": "free text"}),
        ({}, {}),
        ({"job": "é", "n": [1, 2.5, None, True, {"k": "v"}]}, {"job": "é", "n": [1, 2.5, None, True, {"k": "v"}]}),
        (MappingProxyType({"job": "x"}), {"job": "x"}),
    ],
)
def test_metadata_is_an_ascii_json_object_with_the_base(value: object, added: dict[str, object]) -> None:
    """Read back, it is the base and what the application added."""
    text = validation.metadata(value, BASE)

    assert text.isascii()
    assert json.loads(text) == {**BASE, **added}


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ({"host": "other"}, "must not have the keys 'host'"),
        ({"pid": 1, "started": 2}, "'pid', 'started'"),
        ({1: "x"}, "the key 1 is not a str"),
        ({"a": [{"b": {None: 1}}]}, "the key None is not a str"),
        ({("a",): 1}, "JSON"),
        ({"a": {1, 2}}, "JSON"),
        ({"a": object()}, "JSON"),
        ({"a": math.nan}, "JSON"),
        ({"a": "\ud800"}, "JSON"),
        ("\udc80", "JSON"),
        (b"bytes", "not bytes"),
        (12, "not int"),
        ([("a", 1)], "not list"),
        ("x" * 5000, "at most 4096"),
        ({"a": "é" * 700}, "at most 4096"),
    ],
)
def test_metadata_that_cannot_be_kept_is_refused(value: object, part: str) -> None:
    """Nothing is dropped, replaced or converted in silence."""
    with pytest.raises(ConfigurationError, match=part):
        validation.metadata(value, BASE)


def test_metadata_that_contains_itself_is_refused() -> None:
    """As is what is nested too deeply to be written."""
    circular: dict[str, object] = {}
    circular["self"] = circular
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]

    for value in (circular, {"deep": deep}):
        with pytest.raises(ConfigurationError, match="JSON"):
            validation.metadata(value, BASE)


def test_metadata_limit_is_inclusive() -> None:
    """4096 bytes fit, 4097 do not."""
    room = validation.METADATA_BYTES_MAX - len(validation.metadata("", BASE))

    assert len(validation.metadata("x" * room, BASE)) == validation.METADATA_BYTES_MAX
    with pytest.raises(ConfigurationError, match="not 4097"):
        validation.metadata("x" * (room + 1), BASE)


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text().filter(lambda key: key not in BASE), _json, max_size=4))
def test_metadata_comes_back_as_it_was_given(value: dict[str, object]) -> None:
    """For everything that JSON can hold, within the limit."""
    try:
        text = validation.metadata(value, BASE)
    except ConfigurationError:
        assert len(json.dumps({**BASE, **value}, separators=(",", ":"))) > validation.METADATA_BYTES_MAX
    else:
        assert json.loads(text) == {**BASE, **value}


# -- escape --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "special", "escaped"),
    [
        ("seat:12A", "{}", "seat:12A"),
        ("a{b}", "{}", "a%7Bb%7D"),
        ("a/b", "/", "a%2Fb"),
        ("100%", "", "100%25"),
        ("%2F", "/", "%252F"),
        ("é/", "é", "%C3%A9/"),
        ("a]b^c-d\\e", "]^-\\", "a%5Db%5Ec%2Dd%5Ce"),
        ("\n\0", "\n\0", "%0A%00"),
    ],
)
def test_escape_writes_utf8_bytes_in_capitals(name: str, special: str, escaped: str) -> None:
    """The form that other clients of the store rely on."""
    assert validation.escape(name, special) == escaped
    assert validation.escape(name, frozenset(special)) == escaped


@given(st.text() | st.text(st.sampled_from("a%/{2F5é"), max_size=6), st.sampled_from(SPECIALS))
@example("%2F", "/")
def test_escape_is_undone_by_unescape(name: str, special: str | frozenset[str]) -> None:
    """So no two names share an escaped form; and no special character is left."""
    escaped = validation.escape(name, special)

    assert validation.unescape(escaped) == name
    assert not set(escaped) & (set(special) - {"%"})


@pytest.mark.parametrize("text", ["%", "a%2", "%zz", "%é0", "%-1", "%ff", "%C3", "%+2"])
def test_unescape_refuses_what_escape_never_writes(text: str) -> None:
    """A foreign client's key is distinguished from an escaped name."""
    with pytest.raises(ConfigurationError, match="not an escaped lock name"):
        validation.unescape(text)


@given(st.text(st.sampled_from("a%2Fé0:"), max_size=12))
def test_percent_decode_agrees_with_the_standard_library(text: str) -> None:
    """Where the bytes are UTF-8, and with a lone percent sign left alone."""
    try:
        expected = unquote(text, errors="strict")
    except UnicodeDecodeError:
        with pytest.raises(ValueError, match="UTF-8"):
            validation.percent_decode(text)
    else:
        assert validation.percent_decode(text) == expected


# -- options -------------------------------------------------------------------------------------------------------

from_minus_1_to_9 = validation.parse_int(-1, 9)
from_1 = validation.parse_int(1)
choice = validation.parse_choice("table", "row", "advisory")
SECONDS, TTL = "must be 0 or more seconds", r"more than 0 and less than 1e\+09 seconds"
WRONG_SECONDS = ("", "-1", "nan", "inf", "1e999", "30s", " 1", "1_0", "٣", "1.2.3", None, True, -1, [1])
"""What `float` alone would take is refused too."""


@pytest.mark.parametrize(
    ("parse", "values", "result"),
    [
        *((parse, values, number) for parse in (validation.parse_seconds, validation.parse_ttl) for values, number in (
            (("30", 30), 30.0), (("1.5",), 1.5), ((".5",), 0.5), (("1e3",), 1000.0), ((timedelta(seconds=3),), 3.0))),
        (validation.parse_seconds, ("0", 0), 0.0),
        (validation.parse_bool, (True, 1, "1", "true", "True", "YES", "on"), True),
        (validation.parse_bool, (False, 0, "0", "false", "No", "off"), False),
        (from_minus_1_to_9, ("-1", -1), -1),
        (from_minus_1_to_9, ("0",), 0),
        (from_minus_1_to_9, ("9", 9), 9),
        (from_1, ("1000000",), 1_000_000),
        (choice, ("row",), "row"),
        (validation.parse_text, ("a",), "a"),
    ],
)  # fmt: skip
def test_options_are_parsed(parse: Callable[[object], object], values: tuple[object, ...], result: object) -> None:
    """The same option may be given in a URL and in a call."""
    for value in values:
        assert parse(value) == result
        assert type(parse(value)) is type(result)


@pytest.mark.parametrize(
    ("parse", "values", "message"),
    [
        (validation.parse_seconds, WRONG_SECONDS, SECONDS),
        (validation.parse_ttl, (*WRONG_SECONDS, "0", 0, "1e9", 1e9), TTL),
        # The command line takes a unit, a URL does not.
        (validation.parse_seconds, ("1m30s",), f"{SECONDS}, without a unit$"),
        (validation.parse_ttl, ("1m30s",), f"{TTL}, without a unit$"),
        (validation.parse_seconds, ("soon",), f"{SECONDS}$"),
        # Truthiness decides nothing: ``"no way"`` is not true.
        (validation.parse_bool, ("", "2", 2, "ja", None, 1.0, []), "1, true, yes or on"),
        (from_minus_1_to_9, ("10", "-2", 10, "", "--1", "1.0", 1.0, "²", "٣", True, None, "9" * 5000),
         "a whole number from -1 to 9"),
        (from_1, (0,), "a whole number, 1 or more"),
        (choice, ("advisroy",), r"one of table, row, advisory \(did you mean 'advisory'\?\)"),
        (choice, (None,), r"one of table, row, advisory$"),
        # An empty prefix is more likely a missing variable.
        (validation.parse_text, ("", None, 1), "non-empty"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(parse: Callable[[object], object], values: tuple[object, ...], message: str) -> None:
    """With what is accepted."""
    for value in values:
        with pytest.raises(ValueError, match=message):
            parse(value)


class ChangingDict(dict[str, int]):
    """As one that another thread changes."""

    def items(self) -> Any:  # noqa: ANN401 - none
        """Fail."""
        raise RuntimeError("dictionary changed size during iteration")


FITS = validation.VALUE_BYTES_MAX - 2  # and the quotation marks


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        {1, 2},
        b"x",
        "\ud800",
        {(1, 2): 3},
        "x" * (FITS + 1),
        ChangingDict(a=1),
        json.loads("[" * 64 + "]" * 64),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_value_that_could_not_be_read_again_is_refused(value: object) -> None:
    """What the application stores with a lock; nested one deeper than what can be read."""
    with pytest.raises(ValueError, match=r"."):
        validation.encode_json(value)


@pytest.mark.parametrize("value", [0, False, "", [], {}, None, "x" * FITS, json.loads("[" * 63 + "]" * 63)])
def test_every_other_value_is_read_as_it_was_written(value: object) -> None:
    """Also those that are false."""
    assert validation.decode_json(validation.encode_json(value)) == value


# -- what messages show ----------------------------------------------------------------------------------------------


class Unprintable:
    """Such as an object of a mapped class whose session has ended."""

    def __repr__(self) -> str:
        raise LookupError


@pytest.mark.parametrize(("value", "part"), [(10**5000, "int"), (Unprintable(), "Unprintable")], ids=["digits", "repr"])
def test_value_that_cannot_be_shown_is_refused_all_the_same(value: object, part: str) -> None:
    """With the error that other wrong values get: Python writes no int of more than 4300 digits."""
    for check in (
        lambda: validation.ttl(value, 0.0),
        lambda: validation.timeout(value),
        lambda: validation.seconds(value, "delay"),
        lambda: validation.lock_name(value),
        lambda: validation.flag(value, "renew"),
    ):
        with pytest.raises(ConfigurationError, match=part):
            check()


# -- JSON of other clients -----------------------------------------------------------------------------------------

HOSTILE = {
    "lists": "[" * 4000,
    "objects": '{"a":' * 2000,
    "closed": "[" * 65 + "]" * 65,
    "long": "x" * 10_000_000,
    "long JSON": '"' + "x" * 10_000_000 + '"',
    "infinite": '{"a":1e999999}',
    "named infinite": '{"a":-Infinity}',
    "digits": f'{{"a":{"9" * 5000}}}',
    "NaN": '{"started":NaN}',
    "lone surrogate": "\ud800",
    "quotes": '"' * 100_000,
    "escapes": '"' + "\\" * 100_001,
    "cut off": '{"a":"\\ud8',
}
"""Texts that are no JSON, or none that anybody can go on with."""


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_text_of_strangers_is_shown_and_never_raises(text: str) -> None:
    """As bytes, too; what comes of it can be printed, and stored as JSON again."""
    for given_text in (text, text.encode("utf-8", "surrogatepass")):
        with pytest.raises(ValueError, match=r"."):
            validation.decode_json(given_text)
        found = decode_metadata(given_text)
        assert [*found] == ["text"]
        assert len(found["text"]) <= 4 * 4096
        assert json.dumps(found, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a":1,"a":2}', {"a": 2}),
        (r'{"a":"\ud800","b":"\udc00\ud800","c":"\\ud800"}', {"a": "\ufffd", "b": "\ufffd\ufffd", "c": "\\ud800"}),
        (r'{"a":"\ud83d\ude00"}', {"a": "\U0001f600"}),
        ('{"a":"\ud800"}', {"a": "\ufffd"}),
        (b'{"a":"\xff"}', {"a": "\ufffd"}),
        ('{"host":[1],"pid":"x","started":true}', {"host": [1], "pid": "x", "started": True}),
        ("[" * 64 + "]" * 64, None),
        ('"[[[[' + "[" * 4000 + '\\""', None),
        ("5", 5),
        ("", {}),
        (None, {}),
    ],
)
def test_json_of_strangers_is_decoded(text: str | bytes | None, value: object) -> None:
    """Texts without lone surrogates, brackets in texts count for nothing, wrong types stay what they are."""
    found = decode_metadata(text)
    assert value is None or found == (value if isinstance(value, dict) else {"text": value})
    assert json.dumps(found, ensure_ascii=False).encode()
    if text:
        validation.decode_json(text)


def test_metadata_that_nobody_could_decode_is_refused() -> None:
    """At the call that gives it."""
    deep: object = 1
    for _ in range(validation.JSON_DEPTH_MAX):
        deep = [deep]
    with pytest.raises(ConfigurationError, match="nested"):
        validation.metadata({"deep": deep}, BASE)
    assert isinstance(deep, list)
    text = validation.metadata({"deep": deep[0]}, BASE)
    assert decode_metadata(text)["deep"] == deep[0]
