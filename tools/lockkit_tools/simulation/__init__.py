"""
Lock clients on simulated time, repeatable from a seed.

The engine of lockkit runs unchanged on a `SimulatedRuntime`: virtual time, in which hours pass in milliseconds, and one
order of everything per seed. Around it a world that misbehaves: a `Network` that loses, delays and reorders messages,
a `Node` that stops, restarts and loses its data, a `Process` that is paused or killed, and a `Clock` on each machine
that runs wrong. What happened is a `History`, which `check` calls valid, invalid or unknown.

A scenario of one's own: make a `World`, a `Network`, a `LockServer` on a `Node`, a `Process` for each client, `connect`
them, start tasks with `Process.start` and let them happen with `World.run`.
A random schedule, run and judged: ``simulate(seed).verdict``. The same seed gives the same history, on every machine.

`Network`, `Node` and `Process` know nothing of locks, so a service of several independent nodes is simulated by writing
its client as another `LockBackend`.

Read/write locks and semaphores have a service of their own (`lockkit_tools.simulation.claims`), and checks of what
clients believe while they hold a lock beside others (`lockkit_tools.simulation.beliefs`).
"""

from lockkit_tools.simulation.backend import SimulatedBackend, connect
from lockkit_tools.simulation.checker import CHECKS, Limits, Problem, Verdict, check
from lockkit_tools.simulation.clock import Clock
from lockkit_tools.simulation.history import Event, History, describe
from lockkit_tools.simulation.network import CALM, Conditions, Network, NoAnswer, Node
from lockkit_tools.simulation.run import Outcome, Simulation, simulate
from lockkit_tools.simulation.runtime import SimulatedRuntime
from lockkit_tools.simulation.schedule import Fault, Schedule, draw
from lockkit_tools.simulation.server import LockServer
from lockkit_tools.simulation.world import Cancelled, Overrun, Process, ProcessDied, Task, World

__all__ = [
    "CALM",
    "CHECKS",
    "Cancelled",
    "Clock",
    "Conditions",
    "Event",
    "Fault",
    "History",
    "Limits",
    "LockServer",
    "Network",
    "NoAnswer",
    "Node",
    "Outcome",
    "Overrun",
    "Problem",
    "Process",
    "ProcessDied",
    "Schedule",
    "SimulatedBackend",
    "SimulatedRuntime",
    "Simulation",
    "Task",
    "Verdict",
    "World",
    "check",
    "connect",
    "describe",
    "draw",
    "simulate",
]
