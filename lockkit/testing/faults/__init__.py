"""
The fault suite: what must be true of every backend when its server is dead, frozen, restarted, cut off, late or full.

In every case:

- there is no second holder, and the holder is notified at its deadline at latest;
- each call ends within its bounds, with an error that names the backend and no password;
- the client goes on working when the server is back;
- tokens never go back, and nothing stays held beyond the ttl.

Say what can be done to your server, by a class of its own, and derive from the suite::

    from lockkit.testing.faults import Faults, FaultSuite, Target


    class LiteServer(Faults):
        def freeze(self):
            os.kill(self.pid, signal.SIGSTOP)

        def thaw(self):
            os.kill(self.pid, signal.SIGCONT)

        def heal(self):
            self.thaw()


    class TestLiteFaults(FaultSuite):
        @pytest.fixture
        def lockkit_faults(self, server):
            return LiteServer(Target(server.url))

Cases about a fault whose method you do not override are skipped, with the reason. The table at the end of the run
counts them.
"""

from __future__ import annotations

from lockkit.testing.faults.answers import Cuts, LateAnswers, LostAnswers
from lockkit.testing.faults.base import FaultCases, Faults, Step
from lockkit.testing.faults.outages import Outages, Restarts
from lockkit.testing.faults.refusals import Refusals
from lockkit.testing.target import Target

__all__ = ["FaultCases", "FaultSuite", "Faults", "Step", "Target"]


class FaultSuite(Outages, Restarts, Cuts, LostAnswers, LateAnswers, Refusals):
    """All cases. Derive a class ``Test…`` from it and override `lockkit_faults`."""
