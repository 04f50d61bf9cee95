"""``python -m lockkit_tools.history``: its words and its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockkit_tools.history import Stay, write
from lockkit_tools.history.__main__ import main

GOOD = [Stay("a", "p1", 1, 2, 5, 10, 11), Stay("a", "p2", 3, 12, 6, 20, 21)]
OVERLAP = [Stay("b", "p3", 1, 2, 5, 10, 11), Stay("b", "p4", 3, 9, 6, 20, 21), Stay("b", "p5", 3, 30, 7, 40)]


def run(tmp_path: Path, stays: list[Stay], *options: str) -> int:
    """Write and check."""
    write(tmp_path / "h.edn", stays)
    return main([str(tmp_path / "h.edn"), "--model=fenced-mutex", *options])


def test_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0, and how much was judged."""
    assert run(tmp_path, GOOD) == 0
    assert capsys.readouterr().out == "a: valid, 4 calls\n"


def test_invalid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1, with the shortest beginning that cannot be linearized, and who was concerned."""
    assert run(tmp_path, [*GOOD, *OVERLAP]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "a: valid, 4 calls",
        "b: invalid, 6 calls",
        "  not linearizable up to operation 7: nothing explains",
        "    process 3: acquire 6, operations 5 to 7",
        "  under way: process 4: acquire 7, operations 6 to 17",
        "  possible before: LockState(holders=(1,), fence=5, highest=5)",
    ]


@pytest.mark.parametrize(
    ("stays", "options", "status"),
    [
        ([*GOOD, *OVERLAP], ["--lock=a"], 0),
        (GOOD, ["--configurations=0"], 2),
        ([*GOOD, *OVERLAP], ["--configurations=0"], 2),
        (GOOD, ["--seconds=0", "--configurations=1023"], 0),
    ],
)
def test_unknown_is_neither(tmp_path: Path, stays: list[Stay], options: list[str], status: int) -> None:
    """2; and each lock has a search of its own."""
    assert run(tmp_path, stays, *options) == status


@pytest.mark.parametrize("options", [["--lock=c"], ["--model=nonsense"]])
def test_nothing_to_check(tmp_path: Path, options: list[str]) -> None:
    """2 as well: nothing is known."""
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, GOOD, *options)


@pytest.mark.parametrize("content", ["", "nonsense", "{"])
def test_file_that_is_no_history(tmp_path: Path, content: str) -> None:
    """2, as for one that is not there."""
    (tmp_path / "no.edn").write_text(content)
    for name in ("no.edn", "absent.edn"):
        with pytest.raises(SystemExit, match="2"):
            main([str(tmp_path / name), "--model=mutex"])


def test_locks_with_a_limit_are_semaphores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run has both; --limit is for histories that do not say it."""
    lines = [
        f'{{:process {n} :type :{kind} :f :acquire :value nil :lock "s"{limit}}}'
        for n in (0, 1)
        for kind in ("invoke", "ok")
        for limit in (" :limit 2",)
    ]
    path = tmp_path / "s.edn"
    path.write_text("\n".join(lines))

    assert main([str(path), "--model=fenced-mutex"]) == 0
    path.write_text("\n".join(lines).replace(" :limit 2", ""))
    assert main([str(path), "--model=fenced-mutex"]) == 1
    assert main([str(path), "--model=semaphore", "--limit=2"]) == 0
    assert "s: valid, 2 calls" in capsys.readouterr().out
