"""
Plays a scene on real processes and a throw-away Redis, and takes down what is measured.

Pauses are SIGSTOP, deaths SIGKILL, restarts those of the server. The order of the steps is that of the scene, also on a
busy machine: before a fault, a client does what comes before it; before a write, and before a paused client goes on,
the others do.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, Final

from lockkit.backends.redis.keys import lock_key
from lockkit.errors import ConfigurationError
from lockkit.lab.record import Grant, Lane, Mark, Message, Record, Span, Wait
from lockkit.lab.run import Result
from lockkit.lab.services import NAME
from lockkit.lab.stage import REASONS, WAIT_SHOWN, Storage, find_overlaps
from lockkit.lab.verdict import judge
from lockkit.testing.servers import RedisServer, ServerError

if TYPE_CHECKING:
    from collections.abc import Collection

    from lockkit.lab.record import Tone
    from lockkit.lab.run import Run
    from lockkit.lab.scenario import Scene, Step
    from lockkit.units import Instant, Seconds

__all__ = ["TTL", "beside", "measure"]

TTL = 3.0
"""ttl of a measured scene unless another is asked for, seconds. Shorter ones are over sooner, and depend more on how
busy the machine is."""

PATIENCE = 30.0
"""Seconds after which a process that should have answered never will."""

LOOK_SECONDS = 0.01
"""Pause between two looks at the key of the lock. Longer draws the server's lane less exactly."""

PLAYABLE: Final = {"acquire", "check", "write", "release", "pause", "kill"}
NODE_PLAYABLE: Final = {"stop", "pause"}


def beside(run: Run) -> Run:
    """
    Play the scenes of a simulated run for real, and put each beside the simulated one.

    Args:
        run: What was simulated.

    Raises:
        ConfigurationError: As for `measure`.
    """
    for result in run.results:
        _check_playable(result.scene)
    results = []
    for result in run.results:
        simulated, real = (
            replace(result.scene, title=f"{result.scene.title}: {word}") for word in ("simulated", "measured")
        )
        record = measure(real)
        results += [
            replace(result, scene=simulated),
            Result(real, record, judge(real, record), measured=True),
        ]
    return replace(run, results=tuple(results))


def measure(scene: Scene) -> Record:
    """
    Play a scene for real. It takes as long as it says.

    Raises:
        ConfigurationError: It has something that cannot be done to real processes, or there is no Redis here.
    """
    _check_playable(scene)
    try:
        with RedisServer() as server:
            theatre = _Theatre(scene, server)
            try:
                theatre.play()
            finally:
                theatre.close()
            return theatre.record
    except ServerError as error:
        message = f"--real needs a redis-server on this machine: {str(error).partition(chr(10))[0]}"
        raise ConfigurationError(message) from error


def _check_playable(scene: Scene) -> None:
    steps = [step for step in scene.steps if not step.backends or scene.backends[0].kind in step.backends]
    if scene.backends[0].kind != "redis":
        message = f"--real plays scenes on redis only, and {scene.title!r} runs on {scene.backends[0]}"
        raise ConfigurationError(message)
    for step in steps:
        if step.action not in (NODE_PLAYABLE if step.on_node else PLAYABLE) or step.delay:
            message = f"--real cannot play {step.action!r}{' with delay' if step.delay else ''} of {scene.title!r}"
            raise ConfigurationError(message)


class _Actor:
    """One client process, and the orders that it has not done yet."""

    def __init__(self, theatre: _Theatre, name: str, url: str, ttl: Seconds) -> None:
        self.name = name
        self.paused = False
        self.dead = False
        self.grant: Grant | None = None
        self.wait: Wait | None = None
        self.pending: list[float] = []
        self._theatre = theatre
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lockkit.lab.real_client", url, NAME, str(ttl)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def order(self, at: Instant, **order: Any) -> None:
        """Have a step done."""
        if not self.dead:
            self.pending.append(at)
            self.send(order)

    def send(self, value: object) -> None:
        """Write a line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """Stop it, let it go on, or kill it."""
        self._process.send_signal(number)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._theatre.heard(self, json.loads(line))


class _Theatre:
    """One measured scene. All that happens is taken down under one lock."""

    def __init__(self, scene: Scene, server: RedisServer) -> None:
        self.scene = scene
        self.record = Record(scene.ttl)
        self.record.lanes += [Lane(name, "client", name) for name in scene.clients]
        self.record.lanes.append(Lane("server", "server", "server"))
        if any(step.action == "write" for step in scene.steps):
            self.record.lanes.append(Lane("storage", "storage", "storage"))
        self._server = server
        self._storage = Storage(self)
        self._changed = threading.Condition()
        self._ready = 0
        self._start = inf
        self._at: float | None = None
        self._closing = threading.Event()
        self._owners: dict[str, str] = {}
        self.actors = {name: _Actor(self, name, server.url, scene.ttl) for name in scene.clients}
        self._watcher = threading.Thread(target=self._watch_server, daemon=True)

    # -- what `Storage` needs of a stage -------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds since the start; of the event that is being taken down."""
        return time.monotonic() - self._start if self._at is None else self._at

    @property
    def world(self) -> _Theatre:
        """Stands for the simulated world."""
        return self

    def mark(self, lane: str, text: str, tone: Tone = "plain") -> Mark:
        """Write a line of the story."""
        mark = Mark(self.now, lane, text, tone)
        self.record.marks.append(mark)
        return mark

    # -- the play ------------------------------------------------------------------------------------------------------

    def play(self) -> None:
        """Let it happen."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._ready == len(self.actors), PATIENCE):
                message = "--real: a client process did not start"
                raise ConfigurationError(message)
        self._start = time.monotonic()
        self._watcher.start()
        todo = [(step.at, "begin", step) for step in self.scene.steps]
        todo += [(step.at + step.seconds, "end", step) for step in self.scene.steps if step.seconds is not None]
        for at, part, step in sorted(todo, key=lambda one: one[0]):
            time.sleep(max(0.0, at - self.now))
            if part == "begin" and (step.on_node or step.action in {"pause", "kill"}):
                self._let_finish(at, self.actors.values() if step.on_node else [self.actors[step.who]])
            elif step.action == "write" or (part == "end" and not step.on_node):
                self._let_finish(at, [actor for actor in self.actors.values() if actor.name != step.who])
            getattr(self, f"_{part}")(step)
        self._let_finish(inf, self.actors.values())
        time.sleep(0.05 * self.scene.ttl)
        self._finish()

    def _let_finish(self, at: Instant, actors: Collection[_Actor]) -> None:
        """Wait until clients have done what comes before a time; not for those that stand still, and not for ever."""

        def finished() -> bool:
            return all(actor.paused or actor.dead or all(one >= at for one in actor.pending) for actor in actors)

        with self._changed:
            self._changed.wait_for(finished, 3 * self.scene.ttl)

    def _begin(self, step: Step) -> None:
        with self._changed:
            if step.on_node:
                self._begin_node(step)
                return
            actor = self.actors[step.who]
            if step.action == "pause":
                actor.paused = True
                self.mark(step.who, f"{step.who} is paused: its program stands still and cannot know.", "fault")
                end = inf if step.seconds is None else self.now + step.seconds
                self.record.spans.append(Span(step.who, "paused", self.now, end))
                actor.signal(signal.SIGSTOP)
            elif step.action == "kill":
                self._kill(actor)
            else:
                actor.order(step.at, do=step.action, timeout=step.timeout, check=step.check)

    def _kill(self, actor: _Actor) -> None:
        actor.signal(signal.SIGKILL)
        actor.dead = True
        self.mark(actor.name, f"{actor.name} dies.", "fault")
        self.record.dead[actor.name] = self.now
        if actor.grant is not None and actor.grant.noticed is None:
            actor.grant.noticed, actor.grant.how = self.now, "died"

    def _begin_node(self, step: Step) -> None:
        self.record.faults.add(f"node {step.action}" + (" without data" if step.lose_data else ""))
        end = inf if step.seconds is None else self.now + step.seconds
        if step.action == "stop":
            self.mark("server", f"server crashes{' and loses its data' if step.lose_data else ''}.", "fault")
            self.record.spans.append(Span("server", "down", self.now, end))
            self._server.kill()
        else:
            self.mark("server", "server stops answering.", "fault")
            self.record.spans.append(Span("server", "paused", self.now, end))
            self._server.pause()

    def _end(self, step: Step) -> None:
        if step.on_node and step.action == "stop":
            self._server.start()
        with self._changed:
            kind = "down" if step.on_node and step.action == "stop" else "paused"
            for span in self.record.spans:
                if span.lane == step.who and span.kind == kind:
                    span.end = self.now
            if step.on_node:
                self.mark("server", "server is back, empty." if kind == "down" else "server answers again.")
                if kind == "paused":
                    self._server.resume()
            elif not self.actors[step.who].dead:
                self.mark(step.who, f"{step.who} runs again.")
                self.actors[step.who].paused = False
                self.actors[step.who].signal(signal.SIGCONT)

    # -- what the clients report ---------------------------------------------------------------------------------------

    def heard(self, actor: _Actor, event: dict[str, Any]) -> None:
        """Take down what a client has reported."""
        with self._changed:
            self._at = None if self._start == inf else event["at"] - self._start
            getattr(self, f"_heard_{event['what']}")(actor, event)
            self._at = None
            self._changed.notify_all()

    def _heard_ready(self, actor: _Actor, event: dict[str, Any]) -> None:
        del actor, event
        self._ready += 1

    def _heard_done(self, actor: _Actor, event: dict[str, Any]) -> None:
        del event
        actor.pending.pop(0)

    def _heard_asks(self, actor: _Actor, event: dict[str, Any]) -> None:
        del event
        actor.wait = Wait(actor.name, self.now)
        self.record.waits.append(actor.wait)

    def _heard_granted(self, actor: _Actor, event: dict[str, Any]) -> None:
        assert actor.wait is not None, "it has asked"
        actor.wait.end, actor.wait.granted = self.now, True
        actor.grant = Grant(actor.name, event["token"], self.now, self.now + event["left"])
        self._owners[event["owner"]] = actor.name
        self.record.grants.append(actor.grant)
        self.mark(actor.name, f"{actor.name} gets the lock: {{token:{event['token']}}}.")

    def _heard_failed(self, actor: _Actor, event: dict[str, Any]) -> None:
        assert actor.wait is not None, "it has asked"
        actor.wait.end = self.now
        self.mark(actor.name, f"{actor.name} does not get the lock ({event['error']}).", "notice")

    def _heard_renewed(self, actor: _Actor, event: dict[str, Any]) -> None:
        if actor.grant is not None and actor.grant.token == event["token"] and actor.grant.noticed is None:
            actor.grant.valid_until = self.now + event["left"]

    def _heard_checked(self, actor: _Actor, event: dict[str, Any]) -> None:
        held = event["left"] is not None
        text = f": {event['left']:.1f} s left." if held else ": lost. It stops here."
        self.mark(actor.name, f"{actor.name} checks its lease{text}", "plain" if held else "good")

    def _heard_unwritten(self, actor: _Actor, event: dict[str, Any]) -> None:
        text = "looks at its lease before it writes: lost." if event["held"] else "has no lock."
        self.mark(actor.name, f"{actor.name} {text} It does not write.", "good")

    def _heard_write(self, actor: _Actor, event: dict[str, Any]) -> None:
        del event
        assert actor.grant is not None, "it has a lease"
        message = Message(actor.name, "storage", self.now, None, "write")
        self.record.messages.append(message)
        self._at = None  # it arrives now
        self._storage.receive(actor.grant, message)
        if not actor.dead:
            actor.send("answered")

    def _heard_releases(self, actor: _Actor, event: dict[str, Any]) -> None:
        del event
        self.mark(actor.name, f"{actor.name} releases the lock.")
        if actor.grant is not None and actor.grant.noticed is None:
            actor.grant.noticed, actor.grant.how = self.now, "released"

    def _heard_late(self, actor: _Actor, event: dict[str, Any]) -> None:
        del event
        self.mark(actor.name, f"{actor.name}'s release is too late, and lockkit says so (LockLost).", "good")

    def _heard_unanswered(self, actor: _Actor, event: dict[str, Any]) -> None:
        del event
        self.mark(actor.name, f"The server does not answer {actor.name}'s release.", "notice")

    def _heard_lost(self, actor: _Actor, event: dict[str, Any]) -> None:
        if actor.grant is not None and actor.grant.noticed is None:
            actor.grant.noticed, actor.grant.how = self.now, event["reason"]
            text = f"{actor.name} learns that its lease is lost: {REASONS[event['reason']]}."
            self.mark(actor.name, text, "notice")

    # -- the server's lane ---------------------------------------------------------------------------------------------

    def _watch_server(self) -> None:
        """Look at the key of the lock, again and again."""
        import redis  # noqa: PLC0415 - the driver

        key, span = lock_key("lockkit", NAME), None
        client = redis.Redis.from_url(self._server.url, socket_timeout=1.0, retry=None)
        while not self._closing.is_set():
            try:
                value = client.get(key)
            except (redis.RedisError, OSError):
                value = None
            owner = value.decode() if isinstance(value, bytes) else ""
            with self._changed:
                if span is not None and span.who != owner:
                    span.end, span = self.now, None
                if span is None and owner:
                    offered = owner.startswith("next:")
                    span = Span("server", "offered" if offered else "kept", self.now, inf, owner)
                    self.record.spans.append(span)
            self._closing.wait(LOOK_SECONDS)
        client.close()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._closing.set()
        self._watcher.join(PATIENCE)
        with self._changed:
            record, end = self.record, self.now
            for grant in record.grants:
                self._draw_grant(grant, end)
            for wait in record.waits:
                until = min(record.dead.get(wait.client, inf), end if wait.end is None else wait.end)
                if until - wait.start > WAIT_SHOWN * self.scene.ttl:
                    record.spans.append(Span(wait.client, "waits", wait.start, until, wait.client))
                    text = f"{wait.client} asks for the lock and has to wait."
                    record.marks.append(Mark(wait.start, wait.client, text))
            record.end = max([mark.at for mark in record.marks], default=end) * 1.06
            record.marks.sort(key=lambda mark: mark.at)
            record.overlaps += find_overlaps(record)
            for span in record.spans:
                span.end = min(span.end, record.end)
                owner = span.who.removeprefix("next:")
                span.who = self._owners.get(owner, owner)
            self._start = -inf  # what is reported from now on is not part of it

    def _draw_grant(self, grant: Grant, end: float) -> None:
        record = self.record
        noticed = end if grant.noticed is None else grant.noticed
        valid_until = min(grant.valid_until, noticed)
        record.spans.append(Span(grant.client, "holds", grant.start, valid_until, grant.client, grant.token))
        if noticed > grant.valid_until + 0.03 * self.scene.ttl:
            record.spans.append(Span(grant.client, "believes", grant.valid_until, noticed, grant.client, grant.token))
            text = f"{grant.client}'s lease ends. {grant.client} stands still and does not know."
            record.marks.append(Mark(grant.valid_until, grant.client, text, "notice"))

    def close(self) -> None:
        """End all processes."""
        self._closing.set()
        for actor in self.actors.values():
            actor.close()
