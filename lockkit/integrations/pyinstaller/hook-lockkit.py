# ruff: noqa: N999 - PyInstaller names hooks so
"""
Adds to a bundle what lockkit imports by name when it is first used, which PyInstaller cannot see.

Those are its backends, the modules of `lockkit` that load late, and the drivers of SQL that are installed. A backend
without its driver says at its first use what to install.
"""

from importlib.util import find_spec

from PyInstaller.utils.hooks import collect_data_files, collect_submodules, copy_metadata

_TOOLS = {"bench", "cli", "integrations", "lab", "simulation", "testing"}

hiddenimports = [
    *collect_submodules("lockkit", filter=lambda name: _TOOLS.isdisjoint(name.split(".")[1:2])),
    *filter(find_spec, ("psycopg", "psycopg_binary", "pymysql")),
]
datas = [*collect_data_files("lockkit", includes=["**/*.lua"]), *copy_metadata("lockkit")]
