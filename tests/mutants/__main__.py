"""
Changes the code in one place at a time and asks the tests: ``python -m tests.mutants --seed=1 --count=300``.

First it runs the tests on unchanged code, and leaves out those that fail or take long; ``--tests=FILE`` keeps that for
other shards. ``--count=0`` only shows the table of results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.mutants.areas import AREAS, sql_commands
from tests.mutants.changes import changes

ROOT, PRIVATE = Path(__file__).parents[2], Path(tempfile.mkdtemp(prefix="mutants-"))
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:cacheprovider", "--hypothesis-seed=0")
# Seconds that a test may take on unchanged code (a simulation, which computes: the second); then on a mutant: of a test
# until it has hung, of all tests, and until the next tests start beside the first ones, which find most mutants.
LONGEST, LONGEST_COMPUTED, PATIENCE, WHOLE, ALONE = 2, 10, 30, 300, 30


def choose(seed: int, count: int) -> list[dict[str, Any]]:
    """Choose mutants of all areas, by the lines that can be changed."""
    found: dict[str, list[dict[str, Any]]] = {area: [] for area in AREAS}
    for area, (patterns, language, _, commands) in AREAS.items():
        for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
            text, where = path.read_text(), str(path.relative_to(ROOT))
            for start, end, new, kind in sorted(changes(language, path.suffix, text)):
                place = (re.findall(r"^(?:class |def )?(\w+)", text[:start], re.MULTILINE) or [""])[-1]
                mutant = {"area": area, "path": where, "line": text.count("\n", 0, start) + 1, "kind": kind}
                mutant |= {"text": text[:start] + new + text[end:], "tests": commands or sql_commands(where, place)}
                found[area].append(mutant)
    lines = {area: len({(mutant["path"], mutant["line"]) for mutant in found[area]}) for area in AREAS}
    shares = {area: max(AREAS[area][2] * count // 300, count * lines[area] // sum(lines.values())) for area in AREAS}
    shares["engine"] -= sum(shares.values()) - count
    chosen = []
    for area, mutants in found.items():
        sys.stdout.write(f"{area}: {len(mutants)} candidates in {lines[area]} lines\n")
        chosen += random.Random(f"{seed} {area}").sample(mutants, min(shares[area], len(mutants)))
    random.Random(seed).shuffle(chosen)
    return chosen


def start(output: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Run pytest in the private copy."""
    copy, environment = PRIVATE / "copy", {"PYTHONPATH": str(PRIVATE / "copy"), "TMPDIR": str(PRIVATE / "tmp")}
    command, to = [*PYTEST, *arguments], output.open("wb")
    return subprocess.Popen(command, cwd=copy, env=os.environ | environment, stdout=to, stderr=to, process_group=0)


def measure(command: str) -> list[str]:
    """Give pytest's arguments for the tests of a command that pass and are fast, the fastest first."""
    words, output = shlex.split(command), PRIVATE / str(hash(command))
    paths = [str(path.relative_to(ROOT)) for word in words if "/" in word for path in sorted(ROOT.glob(word))]
    options = [word for word in words if "/" not in word]
    start(output, "-vv", "--durations=0", "-m", "not slow", *(paths or ["--version"]), *options).wait()
    failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output.read_text(), re.MULTILINE)
    times = re.findall(r"^([\d.]+)s call +(.*)$", output.read_text(), re.MULTILINE)
    longest = LONGEST_COMPUTED if "simulation" in command else LONGEST
    kept = sorted((float(took), test) for took, test in times if float(took) <= longest and test not in failed)
    sys.stdout.write(
        f"{command}: {len(kept)} of {len(times)} tests, {sum(took for took, _ in kept):.0f} s; {failed=}\n"
    )
    return [*(test for _, test in kept), *options] if kept else []


def judge(tests: list[list[str]]) -> dict[str, Any]:
    """Run tests until one fails."""
    began, runs = time.monotonic(), dict[Path, subprocess.Popen[bytes]]()
    codes: list[int | None] = [None]
    while not any(codes) and (None in codes or len(runs) < len(tests)) and time.monotonic() < began + WHOLE:
        if len(runs) < len(tests) and (None not in codes or time.monotonic() > began + ALONE * len(runs)):
            output = PRIVATE / f"out{len(runs)}"
            output.with_suffix(".tests").write_text("\n".join(tests[len(runs)]))
            runs[output] = start(output, "-x", "-q", f"--timeout={PATIENCE}", f"@{output}.tests")
        time.sleep(0.1)
        codes = [run.poll() for run in runs.values()]
    for run in runs.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    text = "".join(output.read_text() for output, code in zip(runs, codes, strict=True) if code)
    hung = "Timeout (>" in text or (not any(codes) and None in codes)
    outcome = "hung" if hung else "caught" if any(codes) else "survived"
    failed = re.findall(r"^(?:FAILED|ERROR) tests/.*", text, re.MULTILINE)
    return {"outcome": outcome, "failed": failed, "seconds": round(time.monotonic() - began)}


def main() -> None:
    """Make mutants, and a table of what became of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--shard", default="1/1", help="of so many processes, which this is")
    parser.add_argument("--tests", type=Path, default=PRIVATE / "tests", help="keeps what was measured")
    parser.add_argument("--results", type=Path, default=Path("mutants.json"), help="a line for each is added")
    parser.add_argument("--unchanged", action="store_true", help="change nothing: what is caught then is luck")
    given = parser.parse_args()
    part, parts = map(int, given.shard.split("/"))
    mutants = choose(given.seed, given.count)
    shutil.copytree(ROOT, PRIVATE / "copy", ignore=shutil.ignore_patterns(".*"))
    PRIVATE.chmod(0o755)  # PostgreSQL runs as another user
    (PRIVATE / "tmp").mkdir()
    tests = json.loads(given.tests.read_text()) if given.tests.exists() else {}
    commands = sorted({command for mutant in mutants for command in mutant["tests"]} - set(tests))
    with ThreadPoolExecutor(3) as pool:
        tests |= dict(zip(commands, pool.map(measure, commands), strict=True))
    given.tests.write_text(json.dumps(tests))
    for number, mutant in enumerate(mutants[part - 1 :: parts]):
        (PRIVATE / "tmp").mkdir(exist_ok=True)
        original, path, text = ROOT / mutant["path"], PRIVATE / "copy" / mutant["path"], mutant.pop("text")
        path.write_text(original.read_text() if given.unchanged else text)
        os.utime(path, (number, number))  # byte code is kept by seconds and size
        asked = [tests[command] for command in mutant.pop("tests") if tests[command]]
        result = judge(asked)
        if result["outcome"] != "survived":  # once may be luck
            result = judge(asked)
        shutil.copy2(original, path)
        shutil.rmtree(PRIVATE / "tmp", ignore_errors=True)
        with given.results.open("a") as file:
            file.write(json.dumps(mutant | result) + "\n")
    results = [json.loads(line) for line in given.results.read_text().splitlines()] if given.results.exists() else []
    counts = Counter((result["area"], outcome) for result in results for outcome in ("mutants", result["outcome"]))
    for area in AREAS:
        row = [f"{counts[area, column]:4} {column}" for column in ("mutants", "caught", "hung", "survived")]
        sys.stdout.write(f"{area:12}{'  '.join(row)}\n")
    survivors = [result for result in results if result["outcome"] == "survived"]
    sys.stdout.writelines(f"{result['path']}:{result['line']}: {result['kind']}\n" for result in survivors)
    shutil.rmtree(PRIVATE)


if __name__ == "__main__":
    main()
