"""The changelog of the next release can be assembled, and has every fragment."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

from tests.conventions.sources import ROOT

FRAGMENTS = sorted(path for path in (ROOT / "changelog.d").glob("*.md") if path.name != "README.md")
KINDS = [
    kind["directory"] for kind in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
]


def test_fragments_have_a_kind_and_say_something() -> None:
    """TOPIC.KIND.md; towncrier passes over a file with another name in silence."""
    kind = re.compile(rf"[\w-]+\.({'|'.join(KINDS)})\.md")

    assert [path.name for path in FRAGMENTS if not kind.fullmatch(path.name)] == []
    assert [path.name for path in FRAGMENTS if not path.read_text().strip().endswith((".", ")", "`"))] == []


def test_changelog_is_assembled() -> None:
    """All fragments, under a heading for each kind, newest release first."""
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9.9", "--date", "2030-01-02"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)

    assert "## 9.9.9 (2030-01-02)" in done.stdout
    words = " ".join(done.stdout.split())
    assert [path.name for path in FRAGMENTS if " ".join(path.read_text().split()) not in words] == []
    assert re.findall(r"^### (\w+)$", done.stdout, re.MULTILINE) == [
        kind.capitalize() for kind in KINDS if any(f".{kind}." in path.name for path in FRAGMENTS)
    ]
