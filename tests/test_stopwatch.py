"""The stopwatch of the tests themselves."""

from __future__ import annotations

import os
import subprocess
import time

from tests.stopwatch import Stopwatch


def test_it_measures_what_a_call_takes() -> None:
    """Waiting counts: so a call that takes too long fails its test."""
    watch = Stopwatch()
    time.sleep(0.5)
    took = watch.stop()

    assert took > 0.2
    assert watch.stop() == took


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
