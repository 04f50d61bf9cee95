"""Import time: what a program pays that imports a library, and what it gets loaded with it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from typing import ClassVar

from lockkit.testing.fork_servers import environment
from lockkit.units import Seconds
from lockkit_tools.bench.parts import now_ns, spread
from lockkit_tools.bench.settings import Settings
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.worker_pool import WorkerFailed
from lockkit_tools.bench.workloads.base import Figure, Measured, Workload
from lockkit_tools.servers.temporary import TemporaryDirectory

LIST_MODULES = """
import sys
before = set(sys.modules)
{statements}
loaded = sorted(set(sys.modules) - before)
import json
print(json.dumps(loaded))
"""


class Imports(Workload):
    """A bare interpreter and one that runs the statements, in turns."""

    name = "import"
    title = "Import"
    explains = (
        "The run time of an interpreter with the import minus that without it: of minima and of medians. "
        "The byte code is already compiled, and the files are in the system's cache."
    )
    silent = "The first start after an installation or reboot takes several times as long."
    figures: ClassVar[tuple[Figure, ...]] = (
        # Not the least of the rounds: of a difference that would be the round in which the bare one was disturbed.
        Figure("over_min_ms", "over bare, minima ms"),
        Figure("over_median_ms", "over bare, medians ms"),
        Figure("bare_min_ms", "bare min ms", "min"),
        Figure("modules", "modules", "max", 0),
        Figure("third_party", "third-party", "max", 0),
    )
    headline = "over_min_ms"
    long = True

    def inapplicable(self, subject: Subject) -> str:
        """Only subjects made for it: see `lockkit_tools.bench.catalog`."""
        if subject.workloads != (self.name,):
            return "imports are measured once for each library, not for each URL"
        return ""

    def measure(self, subject: Subject, settings: Settings) -> Measured:
        """See `Workload.measure`. ``subject.target`` holds the statements."""
        bare, full = list[int](), list[int]()
        # Whatever the user's environment says about byte code: it is compiled once, as it is for an installed package.
        with TemporaryDirectory("bench") as cache:
            python = partial(_python, cache=str(cache), patience=settings.patience)
            loaded: list[str] = json.loads(python(LIST_MODULES.format(statements=subject.target)))
            for _ in range(settings.imports):
                for times, statements in ((bare, "pass"), (full, subject.target)):
                    began = now_ns()
                    python(statements)
                    times.append(now_ns() - began)
        without, with_it = spread(bare, "ms"), spread(full, "ms")
        own = re.findall(r"import (\w+)", subject.target)
        foreign = sorted({name.partition(".")[0] for name in loaded}.difference(sys.stdlib_module_names, own))
        return Measured(
            {
                "over_min_ms": with_it["min_ms"] - without["min_ms"],
                "over_median_ms": with_it["median_ms"] - without["median_ms"],
                "bare_min_ms": without["min_ms"],
                "modules": len(loaded),
                "third_party": len(foreign),
            },
            details={"third_party": foreign},
        )


def _python(statements: str, *, cache: str, patience: Seconds) -> str:
    """Run statements in a new interpreter; give what they print."""
    variables = {**environment(), "PYTHONPYCACHEPREFIX": cache}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", statements],
            env=variables,
            capture_output=True,
            text=True,
            timeout=patience,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise WorkerFailed(f"no end within {patience:g} s") from None
    except subprocess.CalledProcessError as error:
        complaint = error.stderr.strip().splitlines()
        raise WorkerFailed(complaint[-1] if complaint else f"status {error.returncode}") from error
    return done.stdout
