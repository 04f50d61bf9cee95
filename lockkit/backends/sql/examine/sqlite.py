"""Examines ``sqlite:`` URLs: a file. Makes none."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import cast

from lockkit.backends.sql.backend import SqlBackend
from lockkit.backends.sql.examine import common
from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity
from lockkit.file_systems import NETWORK_FILE_SYSTEMS, find_flaw_on_the_way, kind_of_file_system

_PAGE = "how-to/check-your-servers.md#sqlite"

MISSING = Check("sqlite-missing", Severity.INFO, "None: the first lock makes the file.", _PAGE)
UNUSABLE = Check("sqlite-unusable", Severity.ERROR, "No lock can be taken.", _PAGE)
NETWORK = Check(
    "sqlite-network",
    Severity.ERROR,
    "SQLite relies on locks of the file system that network ones do not keep: locks are held twice, or the file is "
    "damaged.",
    _PAGE,
)
WRITABLE_BY_OTHERS = Check(
    "sqlite-writable-by-others",
    Severity.ERROR,
    "Other users could break any lock, or replace the file: lockkit refuses it.",
    _PAGE,
)


async def examine(examination: Examination) -> None:
    """Look at the file and the tables in it."""
    backend = examination.backend_class.open(examination.url, examination.options, examination.host)
    path = Path(str(cast("SqlBackend", backend).database.engine.url.database))
    if not _examine_file(examination, path):
        return
    # Only now: to connect makes the file.
    server = await common.open_server(examination)
    try:
        ((version,),) = await server.ask("SELECT sqlite_version()")
        ((journal,),) = await server.ask("PRAGMA journal_mode")
        examination.note("version", f"SQLite {version}, journal_mode {journal}")
        await common.examine_tables(examination, server, creatable=True)
        await server.time(examination)
    finally:
        await server.close()


def _examine_file(examination: Examination, path: Path) -> bool:
    """Look at the file from outside; tell whether it can be opened."""
    folder, where = path.parent, str(path)
    if not folder.is_dir():
        examination.find(UNUSABLE, where, f"There is no directory {folder}.", f"mkdir -p -m 700 {quote(str(folder))}")
        return False
    if path.is_dir():
        examination.find(UNUSABLE, where, f"{path} is a directory.", "Name a file: sqlite:////var/lib/app/locks.db")
        return False
    kind = kind_of_file_system(folder.stat().st_dev)
    if kind in NETWORK_FILE_SYSTEMS:
        seen = f"The file lies on a network file system ({kind})."
        fix = "Name a local file, or use a backend for several machines, such as postgresql:// or redis://"
        examination.find(NETWORK, where, seen, fix)
    # The journal is made beside it.
    denied = next((one for one in (folder, path) if one.exists() and not os.access(one, os.R_OK | os.W_OK)), None)
    if denied is not None:
        fix = f"chown {os.geteuid()} {quote(str(denied))} && chmod u+rw {quote(str(denied))}"
        examination.find(UNUSABLE, where, f"This user may not write to {denied}.", fix)
        return False
    if not path.exists():
        seen = f"There is no file {path}, and this user may make it."
        examination.find(MISSING, where, seen, f"Nothing to do; or: {common.migrate_command(examination)}")
        return False
    flaw = find_flaw_on_the_way(where, group=examination.options["group"])
    if flaw is not None:
        examination.find(WRITABLE_BY_OTHERS, where, f"{flaw.path} {flaw.seen}.", flaw.fix)
        return False
    return True
