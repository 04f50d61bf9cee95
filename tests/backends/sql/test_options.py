"""What the drivers take."""

from __future__ import annotations

import pytest

from tests.programs import printed

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
    for _ in range(4):
        printed("-c", SCRIPT)


def test_client_loads_no_sqlalchemy() -> None:
    """Which takes longer than all else."""
    code = "import lockkit, sys; lockkit.connect('sqlite:///x.db'); print('sqlalchemy' in sys.modules)"

    assert printed("-c", code) == "False\n"


@pytest.mark.parametrize(
    ("url", "call", "implementation", "words"),
    [
        # Where an option is the driver's, it is not unknown.
        ("postgresql://h/db", "lockkit.connect", "", "the driver psycopg"),
        ("postgresql://h/db?sslmode=require", "lockkit.connect", "", "the driver psycopg"),
        ("postgresql://h/db?sslmode=require", "lockkit.doctor.examine", "", "the driver psycopg"),
        # As psycopg without libpq, which is what `pip install psycopg` gives.
        ("postgresql://h/db", "lockkit.connect", "none", "cannot be loaded (requested psycopg implementation 'none'"),
        # The driver of another database is not loaded.
        ("sqlite:///x.db?tll=3", "lockkit.connect", "none", "unknown option 'tll' for sqlite:///x.db"),
    ],
)
def test_driver_that_cannot_be_loaded_is_named(url: str, call: str, implementation: str, words: str) -> None:
    """With what to install; by the doctor, too, to whom it may come first."""
    code = f"""
import sys
if not {implementation!r}:
    sys.modules["psycopg"] = None
import lockkit.doctor
try:
    {call}({url!r})
except lockkit.ConfigurationError as error:
    print(error)
"""
    said = printed("-c", code, PSYCOPG_IMPL=implementation)

    assert words in said
    if url.startswith("postgresql"):
        assert said.endswith("pip install 'lockkit[postgresql]'\n")
        assert "unknown option" not in said
