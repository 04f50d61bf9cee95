"""
Histories of lock operations: read, written and checked for linearizability.

``nox -s chaos -- --history=FILE``, ``lockkit verify --history FILE`` and the simulation write them, in the operation
format of Jepsen, as EDN or JSON. ``python -m lockkit_tools.history FILE --model=fenced-mutex`` checks a file.
"""

from lockkit_tools.history.checker import Verdict, check
from lockkit_tools.history.models import MODELS, LockModel, Model, UnknownOperation
from lockkit_tools.history.reading import MalformedHistory, Operation, parse, read
from lockkit_tools.history.stays import Stay, write

__all__ = [
    "MODELS",
    "LockModel",
    "MalformedHistory",
    "Model",
    "Operation",
    "Stay",
    "UnknownOperation",
    "Verdict",
    "check",
    "parse",
    "read",
    "write",
]
