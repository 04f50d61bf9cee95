"""
``lockkit doctor``: examines the servers behind a URL and says what can happen to locks there.

One module per kind of server. Each finding comes from a `Check` with a stable id and a fixed severity, so that a script
may rely on them. Nothing is written: to no server, no table, no directory.
"""

from lockkit.doctor.examination import Diagnosis, examine
from lockkit.doctor.findings import Check, Finding, Severity

__all__ = ["Check", "Diagnosis", "Finding", "Severity", "examine"]
