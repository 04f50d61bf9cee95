"""
Three workers of a program start at the same time, and each brings the database up to date first.

Run it: ``python examples/alembic_app``. ``DATABASE_URL`` names another database than an SQLite file made for this run.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from sqlalchemy import create_engine, inspect, text

WORKERS = 3
UPGRADE = [sys.executable, "-m", "alembic", "-c", str(Path(__file__).parent / "alembic.ini"), "upgrade", "head"]


def main() -> int:
    """Start the workers, and look at what they made."""
    with tempfile.TemporaryDirectory() as directory:
        url = os.environ.get("DATABASE_URL", f"sqlite:///{directory}/shop.db")
        environment = {**os.environ, "DATABASE_URL": url}
        workers = [
            subprocess.Popen(UPGRADE, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(WORKERS)
        ]
        for number, worker in enumerate(workers, 1):
            out, _ = worker.communicate()
            print(f"worker {number}: {out.strip()}, status {worker.returncode}")
        engine = create_engine(url)
        with engine.connect() as connection:
            orders = connection.execute(text("SELECT count(*) FROM orders")).scalar_one()
        indexes = [index["name"] for index in inspect(engine).get_indexes("orders")]
        engine.dispose()
    print(f"{orders} orders, indexes: {', '.join(map(str, indexes))}")
    return int(any(worker.returncode for worker in workers) or orders != 100 or indexes != ["orders_reference"])


if __name__ == "__main__":
    sys.exit(main())
