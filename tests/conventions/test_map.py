"""``lockkit/README.md``, the map for readers of the code, names what is there."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "lockkit"


def test_map_names_every_folder_and_only_what_exists() -> None:
    """A file that was moved or merged would send its reader nowhere; a new folder would be on no map."""
    text = (FOLDER / "README.md").read_text()
    missing = []
    for line in text.splitlines():
        names = re.findall(r"`([\w./*]+(?:\.py|\.lua|/))`", line.replace("NAME", "redis"))
        # A bare name is a file of the backend whose line it is; in the table of common files, one of each backend.
        own = next((name for name in names if re.fullmatch(r"backends/\w+/", name)), "backends/etcd")
        places = [FOLDER, FOLDER.parent, FOLDER / own, FOLDER / "backends/redis"]
        missing += [name for name in names if not any(any(place.glob(name)) for place in places)]
    folders = {
        path.relative_to(FOLDER).as_posix()
        for pattern in ("*/__init__.py", "backends/*/__init__.py")
        for path in (init.parent for init in FOLDER.glob(pattern))
    }

    assert missing == []
    assert {name for name in folders - {"backends/memory"} if f"`{name}/`" not in text} == set()
