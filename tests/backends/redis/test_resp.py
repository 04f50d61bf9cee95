"""The protocol of Redis: every kind of reply, however it is cut."""

from __future__ import annotations

import math

import pytest

from lockkit.backends.redis.resp import Parser, Push, Reply, ServerSaid, bulk, pack

REPLIES: list[tuple[bytes, Reply]] = [
    (b"+OK\r\n", b"OK"),
    (b":-12\r\n", -12),
    (b"$3\r\na\r\n\r\n", b"a\r\n"),
    (b"$0\r\n\r\n", b""),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"*0\r\n", []),
    (b"*3\r\n:1\r\n$1\r\nx\r\n*1\r\n+y\r\n", [1, b"x", [b"y"]]),
    (b"_\r\n", None),
    (b"#t\r\n", True),
    (b"#f\r\n", False),
    (b",1.5\r\n", 1.5),
    (b",inf\r\n", math.inf),
    (b"(123456789012345678901234567890\r\n", 123456789012345678901234567890),
    (b"=7\r\ntxt:abc\r\n", b"abc"),
    (b"%2\r\n+a\r\n:1\r\n+b\r\n:2\r\n", [b"a", 1, b"b", 2]),
    (b"~2\r\n:1\r\n:2\r\n", [1, 2]),
    (b"|1\r\n+about\r\n:9\r\n:5\r\n", 5),
]


def same(reply: object, expected: object) -> bool:
    """Equal, also in type: True is not 1 here."""
    return reply == expected and type(reply) is type(expected)


@pytest.mark.parametrize(("data", "expected"), REPLIES)
def test_reply_is_read_however_it_is_cut(data: bytes, expected: Reply) -> None:
    """Nothing comes out before the last byte, and then just the reply."""
    for cut in range(len(data)):
        parser = Parser()
        assert parser.feed(data[:cut]) == []
        (reply,) = parser.feed(data[cut:])
        assert same(reply, expected)
        assert parser.feed(b":7\r\n") == [7]


@pytest.mark.parametrize("data", [b"-ERR bad\r\n", b"!7\r\nERR bad\r\n"])
def test_error_is_a_value(data: bytes) -> None:
    """With its code."""
    (reply,) = Parser().feed(data)

    assert isinstance(reply, ServerSaid)
    assert (reply.code, reply.text) == ("ERR", "ERR bad")


def test_push_is_told_from_a_reply() -> None:
    """Messages out of turn have a type of their own."""
    push, reply = Parser().feed(b">2\r\n+message\r\n:1\r\n:5\r\n")

    assert isinstance(push, Push)
    assert list(push) == [b"message", 1]
    assert reply == 5


def test_many_replies_at_once_and_a_piece_of_the_next() -> None:
    """Complete ones come out, the rest waits."""
    parser = Parser()

    assert parser.feed(b":1\r\n:2\r\n$5\r\nab") == [1, 2]
    assert parser.feed(b"cde\r\n") == [b"abcde"]
    assert parser.feed(b":3\r\n:4\r\n") == [3, 4]


@pytest.mark.parametrize(
    "data",
    [b"HTTP/1.1 400 Bad Request\r\n", b"\r\n", b"?\r\n", b":one\r\n", b"$five\r\n", b"*1\r\n,x\r\n", b"*two\r\n"],
)
def test_another_protocol_is_refused(data: bytes) -> None:
    """A web server behind the port, say."""
    with pytest.raises(ConnectionError, match="not the Redis protocol"):
        Parser().feed(data)


def test_packed_commands_are_arrays_of_their_arguments() -> None:
    """What is packed is read back as bytes."""
    (reply,) = Parser().feed(pack(b"\xff\r\n$1", "gr\u00fcn", "", b"", 0, -(2**70)))

    assert reply == [b"\xff\r\n$1", "gr\u00fcn".encode(), b"", b"", b"0", str(-(2**70)).encode()]
    assert pack("a", 1).endswith(bulk("a") + bulk(1))
