"""The stopwatch of the tests themselves."""

from __future__ import annotations

import os
import subprocess
import time

from lockkit.testing.stopwatch import Stopwatch
from tests.tries import until


def test_it_measures_what_a_call_takes() -> None:
    """Waiting counts: so a call that takes too long fails its test."""

    def counts() -> bool:
        watch = Stopwatch()
        time.sleep(0.3)
        took = watch.stop()
        assert watch.stop() == took
        return took > 0.2

    until(counts)  # not where the machine stands still meanwhile


def test_it_stands_still_while_the_process_does() -> None:
    """Stopped from outside for a second."""
    command = f"sleep 0.3; kill -STOP {os.getpid()}; sleep 1; kill -CONT {os.getpid()}"
    watch = Stopwatch()
    began = time.monotonic()
    process = subprocess.Popen(["/bin/sh", "-c", command])
    process.wait()

    lasted, took = time.monotonic() - began, watch.stop()

    assert process.returncode == 0
    assert took < lasted - 0.5
