"""What can happen to a message."""

from __future__ import annotations

import pytest

from lockkit_tools.simulation import Conditions, Network, NoAnswer, Node, Process, Task, World


class Setting:
    """A process, a node, and what the node ran."""

    def __init__(self, conditions: Conditions | None = None) -> None:
        """Connect them."""
        self.world = World(1)
        self.network = Network(self.world, conditions or Conditions())
        self.node = Node(self.world, "node")
        self.process = self.world.process("p")
        self.ran: list[object] = []

    def send(self, what: object = "x", timeout: float = 1.0, process: Process | None = None) -> Task[object]:
        """Call the node, in a task."""
        process = process or self.process
        calling = self.network.call(process, self.node, lambda: self._run(what), timeout)
        return process.start(calling, "call", awaited=True)

    def call(self, what: object = "x", process: Process | None = None) -> object:
        """Call the node and give its answer, or "no answer"."""
        task = self.send(what, process=process)
        self.world.run(task=task)
        try:
            return task.result()
        except NoAnswer:
            return "no answer"

    def _run(self, what: object) -> object:
        self.ran.append(what)
        return what


def test_lost_answer_was_run() -> None:
    """The caller cannot tell it from a lost request."""
    setting = Setting(Conditions(answers_lost=1.0))

    assert setting.call() == "no answer"
    assert setting.ran == ["x"]


@pytest.mark.parametrize(("requests", "answers", "ran"), [(True, False, []), (False, True, ["x"]), (True, True, [])])
def test_cut_loses_one_direction_or_both(*, requests: bool, answers: bool, ran: list[str]) -> None:
    """Between one process and one node; others are not concerned."""
    setting = Setting()
    setting.network.cut(setting.process, setting.node, requests=requests, answers=answers)

    assert setting.call() == "no answer"
    assert setting.ran == ran
    assert setting.call("other", process=setting.world.process("q")) == "other"
    setting.network.heal(setting.process, setting.node)
    assert setting.call("healed") == "healed"


def test_stopped_node_refuses_and_forgets() -> None:
    """What it had not run is gone, new requests are refused at once, and its services are told about their data."""
    setting = Setting()
    lost: list[bool] = []
    setting.node.stopped.append(lost.append)
    setting.node.pause()
    assert setting.call("early") == "no answer"

    setting.node.stop(lose_data=True)
    before = setting.world.now
    assert setting.call() == "no answer"
    assert setting.world.now - before < 0.1
    setting.node.start()
    setting.node.resume()

    assert setting.call("again") == "again"
    assert setting.ran == ["again"]
    assert lost == [True]


def test_wall_clock_jumps_and_the_monotonic_clock_does_not() -> None:
    """Expiry counts on the one, tokens on the other."""
    world = World(1)
    node = Node(world, "node", rate=1.001, wall_offset=-5.0)
    world.run(until=1000.0)
    before, wall_before = node.now(), node.wall_us()

    node.wall_clock.jump(-100.0)

    assert node.now() == before == pytest.approx(1001.0)
    assert wall_before - node.wall_us() == pytest.approx(100e6)
