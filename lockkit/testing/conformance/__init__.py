"""
The conformance suite: what every backend of lockkit must do, in the sync and the async API.

On a backend that has a URL::

    pytest --pyargs lockkit.testing.conformance --lockkit-url=litelock:///tmp/locks.db

In the tests of a backend's own project::

    from lockkit.testing.conformance import ConformanceSuite, Target


    class TestLitelock(ConformanceSuite):
        @pytest.fixture
        def lockkit_url(self, tmp_path):
            return f"litelock://{tmp_path}/locks.db"

A backend that no entry point registers is named by ``module:Class``: override ``lockkit_target`` and return
``Target(url, backend="litelock:LiteBackend")`` (on the command line ``--lockkit-backend``).

Which cases apply is decided by the backend's `lockkit.backend.Capabilities`; the others are skipped with a reason that
starts with ``not promised:``. At the end of the run a table tells how many ran on which backend and face.

Cases use lock names of their own, except those about unusual names, and leave nothing held.
They may run in parallel under pytest-xdist. On a machine where what must happen takes longer than 20 seconds, set
``LOCKKIT_TEST_PATIENCE``. ``LOCKKIT_TEST_PROCESSES`` and ``LOCKKIT_TEST_SECONDS`` have more processes contend for one
lock, and longer.
"""

from __future__ import annotations

from lockkit.testing.conformance.base import Cases, Need, Target, case, cases, needs
from lockkit.testing.conformance.crashes import Crashes
from lockkit.testing.conformance.election import Elections
from lockkit.testing.conformance.exclusion import Exclusion
from lockkit.testing.conformance.expiry import Expiry
from lockkit.testing.conformance.inspection import Arguments, Inspection
from lockkit.testing.conformance.lifetime import Closing, Leftovers
from lockkit.testing.conformance.listing import Listing
from lockkit.testing.conformance.loss import Loss
from lockkit.testing.conformance.names import Names
from lockkit.testing.conformance.notes import Notes
from lockkit.testing.conformance.once import Onces
from lockkit.testing.conformance.queueing import Queueing
from lockkit.testing.conformance.readwrite import ReadWrite
from lockkit.testing.conformance.release import Releasing
from lockkit.testing.conformance.semaphores import Semaphores
from lockkit.testing.conformance.tickets import Tickets
from lockkit.testing.conformance.tokens import Tokens
from lockkit.testing.conformance.waiting import GivingUp, Timeouts

__all__ = ["Cases", "ConformanceSuite", "Need", "Target", "case", "cases", "needs"]


class ConformanceSuite(
    Exclusion,
    Tokens,
    Expiry,
    Loss,
    Releasing,
    Timeouts,
    GivingUp,
    Queueing,
    ReadWrite,
    Semaphores,
    Names,
    Inspection,
    Listing,
    Arguments,
    Closing,
    Leftovers,
    Crashes,
    Elections,
    Onces,
    Notes,
    Tickets,
):
    """All cases. Derive a class ``Test…`` from it and override `lockkit_url` or `lockkit_target`."""
