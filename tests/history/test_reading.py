"""Histories as files: what is written is read, in both forms, and what others write too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockkit_tools.history import MalformedHistory, Stay, parse, read, write

STAYS = [
    Stay("a", "p1", 100, returned=120, token=7, leaving=200, left=230),
    Stay("a", "p2", 110, returned=210, token=8, leaving=300),
    Stay("a", "p3", 115, returned=160),
    Stay('b "\N{SNOWMAN}\\', "p4", 240),
    Stay("a", "p5", 320, returned=330, token=9, leaving=330, left=330),
]


@pytest.mark.parametrize("name", ["history.edn", "history.json"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    """Calls as they were; processes as Jepsen's: reused after a release or refusal, and never when nobody knows."""
    path = tmp_path / name
    write(path, STAYS)
    text = path.read_text()
    first, *_, last = parse(text)
    locks = read(text)

    assert len(text.splitlines()) == len(parse(text)) == 16
    assert list(first.items())[:5] == [
        ("index", 0),
        ("process", 0),
        ("type", "invoke"),
        ("f", "acquire"),
        ("value", None),
    ]
    assert list(first.items())[5:] == [("time", 0), ("lock", "a"), ("client", "p1")]
    assert (last["f"], last["type"], last["process"], last["time"]) == ("release", "ok", 2, 231)
    assert [(call.process, call.f, call.value, call.returned is None) for call in locks["a"]] == [
        (0, "acquire", 7, False),
        (1, "acquire", 8, False),
        (0, "release", None, False),
        (2, "acquire", 9, False),
        (2, "release", None, False),
        (1, "release", None, True),
    ]
    assert [(call.process, call.returned) for call in locks['b "\N{SNOWMAN}\\']] == [(0, None)]


def test_form_follows_the_name(tmp_path: Path) -> None:
    """JSON for .json, one operation a line; else EDN, with keywords and nil."""
    write(tmp_path / "history.json", STAYS[:1])
    write(tmp_path / "history.edn", STAYS[:1])

    assert json.loads((tmp_path / "history.json").read_text().splitlines()[1])["value"] == 7
    assert (
        (tmp_path / "history.edn")
        .read_text()
        .startswith(
            '{:index 0, :process 0, :type :invoke, :f :acquire, :value nil, :time 0, :lock "a", :client "p1"}\n'
        )
    )


CALL = "{:process 3 :type :invoke :f :acquire}"
END = "{:type :ok, :f :acquire, :value 5, :process 3}"
KILL = "{:process :nemesis :type :info :f :kill}"
OTHER = '{:process 3 :type :ok :f :acquire :value 5, :time 5N :x [1.5 #{:a} "a\\"]"]}'
JSON_CALL = '{"process": 3, "type": "invoke", "f": "acquire"}'
JSON_END = '{"process": 3, "type": "ok", "f": "acquire", "value": 5}'


@pytest.mark.parametrize(
    "text",
    [
        f"{CALL}{END}",
        f"; a comment\n[{CALL} #jepsen.history.Op{END}]",
        f"({CALL}\n{OTHER})",
        f"{KILL}{CALL}{KILL}{END}",
        f"[{JSON_CALL}, {JSON_END}]",
        f"{JSON_CALL}\n\n{JSON_END}\n".replace(": ", ":"),
    ],
)
def test_forms_of_others(text: str) -> None:
    """One map after another or a list of them; with comments, tags and values that do not matter here."""
    ((call,),) = read(text).values()

    assert (call.process, call.f, call.value) == (3, "acquire", 5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{:process 0 :type :invoke", "is not closed"),
        ("{:process 0 :type}", "half a pair"),
        ("[{:process 0 :type :invoke :f :acquire})", "closes nothing"),
        ("}", "closes nothing"),
        ('{:process "0', "no EDN at character"),
        ('{"process": 0,', "Expecting"),
        ("17", "has no process, type or f"),
        ("{:process 0 :f :acquire}", "has no process, type or f"),
        ("{:process 0 :type :maybe :f :acquire}", "has the type 'maybe'"),
        ("{:process 0 :type :ok :f :acquire}", "that did not begin"),
        ("{:process 0 :type :invoke :f :acquire}{:process 0 :type :invoke :f :release}", "has not ended"),
        (
            "{:process 0 :type :invoke :f :x}{:process 0 :type :info :f :x}{:process 0 :type :invoke :f :x}",
            "has not ended",
        ),
    ],
)
def test_malformed_history_is_refused(text: str, said: str) -> None:
    """Nothing is guessed: a verdict on half a history would be worth nothing."""
    with pytest.raises(MalformedHistory, match=said):
        read(text)
