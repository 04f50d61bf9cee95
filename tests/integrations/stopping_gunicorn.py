"""Configuration of gunicorn for `test_stopping.py`, as on the page "Stop processes"."""

import signal
import sys


def post_worker_init(worker: object) -> None:
    """Have uvicorn's workers end by `sys.exit`, so that functions of `atexit` run."""
    del worker
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
