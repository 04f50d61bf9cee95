"""What the drivers take."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A thread is held up in the middle of its first import of a driver while another thread asks what the driver takes.
SCRIPT = """
import importlib, sys, threading, time
import lockkit.backends.sql.options

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
asking = threading.Thread(target=run, args=(importlib.import_module, "lockkit.backends.sql.mysql"))
asking.start()
importing.join()
asking.join()
assert not errors, errors
"""


def test_two_threads_import_a_driver_at_once() -> None:
    """Neither gets a module that is not ready. Without the order of its imports it happens in every second run."""
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60)
        assert not done.returncode, done.stderr


def test_client_loads_no_sqlalchemy() -> None:
    """Which takes longer than all else."""
    code = "import lockkit, sys; lockkit.connect('sqlite:///x.db'); print('sqlalchemy' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=110, text=True)

    assert done.stdout == "False\n"


CONNECT = "lockkit.connect(sys.argv[1])"


def refusal(url: str, call: str = CONNECT, *, before: str = "", **environment: str) -> str:
    """What `lockkit.connect`, or another call, says of a URL in a new process."""
    code = f"""
import sys
{before}
import lockkit
try:
    {call}
except lockkit.ConfigurationError as error:
    print(error)
"""
    variables = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code, url], capture_output=True, text=True, check=False, timeout=110, env=variables
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.parametrize("query", ["", "?sslmode=require"])
@pytest.mark.parametrize("call", [CONNECT, "from lockkit import doctor; doctor.examine(sys.argv[1])"])
def test_driver_that_is_missing_is_named(query: str, call: str) -> None:
    """Also where an option is the driver's: it is not unknown. And by the doctor, to whom it may come first."""
    words = refusal(f"postgresql://h/db{query}", call, before="sys.modules['psycopg'] = None")

    assert words.endswith("pip install 'lockkit[postgresql]'\n")
    assert "the driver psycopg" in words
    assert "unknown option" not in words


@pytest.mark.parametrize("query", ["", "?sslmode=require"])
def test_driver_that_cannot_be_loaded_is_no_traceback(query: str) -> None:
    """As psycopg without libpq, which is what `pip install psycopg` gives."""
    words = refusal(f"postgresql://h/db{query}", PSYCOPG_IMPL="none")

    assert "cannot be loaded (requested psycopg implementation 'none' unknown)" in words
    assert words.endswith("pip install 'lockkit[postgresql]'\n")


def test_driver_of_another_database_does_not_matter() -> None:
    """It is not loaded."""
    assert "unknown option 'tll' for sqlite:///x.db" in refusal("sqlite:///x.db?tll=3", PSYCOPG_IMPL="none")
