"""What the drivers take."""

from __future__ import annotations

import subprocess
import sys

# A thread is held up in the middle of its first import of a driver while another thread asks what the driver takes.
SCRIPT = """
import importlib, sys, threading, time
from lockkit.backends.sql import options

inside, errors = threading.Event(), []

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "pymysql.constants" and threading.current_thread() is importing:
            inside.set()
            time.sleep(0.3)

def run(function, *args):
    try:
        function(*args)
    except BaseException as error:
        errors.append(error)

sys.meta_path.insert(0, Slow())
importing = threading.Thread(target=run, args=(importlib.import_module, "pymysql"))
importing.start()
assert inside.wait(60)
asking = threading.Thread(target=run, args=(options._keywords, "pymysql"))
asking.start()
importing.join()
asking.join()
assert not errors, errors
"""


def test_two_threads_import_a_driver_at_once() -> None:
    """Neither gets a module that is not ready. Without the order of `_submodule` it happens in every second run."""
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60)
        assert not done.returncode, done.stderr


def test_sync_client_loads_nothing_of_sqlalchemy_for_asyncio() -> None:
    """Which takes a third of the time that SQLAlchemy takes."""
    code = "import lockkit, sys; lockkit.connect('sqlite:///x.db'); print('sqlalchemy.ext.asyncio' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=110, text=True)

    assert done.stdout == "False\n"
