"""Takes a lock many times, and writes to a witness file when it is inside: ``hammer.py URL WITNESS FACE ROUNDS``."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path


def main(url: str, witness: str, face: str, rounds: int) -> None:
    """Run one process's share."""
    fd = os.open(witness, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    if face == "blocking":
        with lockkit.connect(url) as client:
            lock = client.lock("hammer", ttl=30, timeout=90)
            for _ in range(rounds):
                with lock as lease:
                    inside(fd, lease.token)
    else:
        asyncio.run(main_async(url, fd, rounds))


async def main_async(url: str, fd: int, rounds: int) -> None:
    """As `main`, by four tasks."""
    async with lockkit.aio.connect(url) as client:

        async def task() -> None:
            lock = client.lock("hammer", ttl=30, timeout=90)
            for _ in range(rounds // 4):
                async with lock as lease:
                    inside(fd, lease.token)

        await asyncio.gather(*(task() for _ in range(4)))
        for _ in range(rounds % 4):
            async with client.lock("hammer", ttl=30, timeout=90) as lease:
                inside(fd, lease.token)


def inside(fd: int, token: int) -> None:
    """Write when we come and when we go: a line of another process in between shows two holders."""
    os.write(fd, b"enter %d %d\n" % (os.getpid(), token))
    os.write(fd, b"leave %d %d\n" % (os.getpid(), token))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    import lockkit
    import lockkit.aio

    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
