"""
What goes wrong with servers for tests.

::

    ServerError           RuntimeError: the root
    ├── ServerMissing     no such server here, and none can be installed
    ├── StartFailed       it ended, or did not answer in time; shows its log
    │   └── PortTaken     ... because somebody else listens on its port
    └── Unmanaged         the server is not ours, so it cannot be killed or paused
"""

from __future__ import annotations


class ServerError(RuntimeError):
    """Something is wrong with a server, not with the code under test."""


class ServerMissing(ServerError):
    """The server is not on this machine, and could not be installed."""


class StartFailed(ServerError):
    """The server ended, or was not ready in time; the message ends with its log."""


class PortTaken(StartFailed):
    """Somebody else listens on the port that the server was to use."""


class Unmanaged(ServerError):
    """The server was given by its URL: its process cannot be controlled from here."""
