"""
``lockkit doctor``: examines the servers behind a URL and reports what can happen to locks there.

Each backend has an ``examine`` module. Each finding comes from a `Check` with a stable id and a fixed severity, so that
scripts can rely on them. The doctor writes to no server, no table and no directory.
"""

from lockkit.doctor.examination import Diagnosis, examine, examine_settings
from lockkit.doctor.findings import Check, Finding, Severity

__all__ = ["Check", "Diagnosis", "Finding", "Severity", "examine", "examine_settings"]
