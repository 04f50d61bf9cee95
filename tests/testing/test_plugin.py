"""What the suite shows on the command line."""

from __future__ import annotations

import subprocess
from pathlib import Path

from lockkit.testing.conformance import Cases, ConformanceSuite
from tests.programs import printed, run_python


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the public suite as a stranger does, on a few cases."""
    command = ("-m", "pytest", "-W", "error", "-o", "asyncio_default_fixture_loop_scope=function")
    suite = ("-p", "no:cacheprovider", "--pyargs", "lockkit.testing.conformance")
    return run_python(*command, *suite, *arguments, cwd=Path("/"))


def test_counts_and_what_is_not_promised_are_shown() -> None:
    """By target and face, with the reason; URLs are told apart without showing them: they may hold passwords."""
    urls = ("--lockkit-url=memory://secret1", "--lockkit-url=memory://secret2")
    done = run(*urls, "-k", "ping or processes_exclude", "-rs", "-v")

    assert done.returncode == 0, done.stdout
    for target in ("memory1", "memory2"):
        for face in ("blocking", "asyncio"):
            assert f"{target} ({face}): 1 passed, 0 failed, 1 not promised, 0 skipped" in done.stdout
    assert "not promised: it excludes only within one process" in done.stdout
    assert "SKIPPED" in done.stdout
    assert "secret" not in done.stdout


def test_options_and_unregistered_backend_are_passed_on() -> None:
    """`--lockkit-option` and `--lockkit-backend`."""
    backend = "--lockkit-backend=lockkit.backends.memory.backend:MemoryBackend"
    done = run("--lockkit-url=elsewhere://a", backend, "--lockkit-option=ttl=77", "-k", "ping")
    assert done.returncode == 0, done.stdout
    assert "elsewhere (asyncio): 1 passed" in done.stdout

    wrong = run("--lockkit-url=memory://a", "--lockkit-option=nonsense=1", "-k", "ping")
    assert wrong.returncode == 1
    assert "unknown option 'nonsense'" in wrong.stdout


def test_missing_url_is_explained() -> None:
    """Not by a traceback of a fixture that is not found."""
    done = run("-k", "ping")

    assert done.returncode != 0
    assert "--lockkit-url" in done.stdout


def test_case_that_fails_says_what_must_hold_and_whose_part_it_is() -> None:
    """So that the author of a backend knows where to look."""
    backend = "--lockkit-backend=tests.testing.broken:ConstantToken"
    done = run("--lockkit-url=memory://a", backend, "-k", "tokens_increase_from_grant_to_grant")

    assert done.returncode == 1, done.stdout
    assert "must hold: Each grant has a higher token than the one before, by whichever client." in done.stdout
    assert "the backend: `Grant.token`: the server raises it" in done.stdout
    assert "lockkit.backend.LockBackend" in done.stdout


def test_every_group_says_what_a_backend_has_to_do() -> None:
    """Groups that are the engine's work alone are not in the public suite."""
    groups = [group for group in ConformanceSuite.__mro__ if issubclass(group, Cases) and group is not Cases]

    silent = {group.__name__ for group in groups if "backend_part" not in vars(group)}

    assert silent == {"ConformanceSuite"}


def test_run_without_cases_shows_nothing() -> None:
    """The plugin is quiet in everybody else's runs."""
    assert "lockkit conformance" not in printed("-m", "pytest", "-q", "tests/testing/test_witness.py")
