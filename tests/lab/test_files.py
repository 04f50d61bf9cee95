"""Scenarios from TOML: what is right runs, what is wrong is refused with the line, the key and what to write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockkit.errors import ConfigurationError
from lockkit.lab import load, read_scenario, run
from lockkit.lab.run import source
from lockkit.lab.scenario import ACTIONS, BACKENDS, NODE_ACTIONS
from lockkit.lab.terminal import draw

if TYPE_CHECKING:
    from pathlib import Path

BUG = """\
title = "Two jobs at once"
backend = "redis"
ttl = 5
seed = 7
expect = "broken"

[[step]]
at = 0
client = "A"
do = "acquire"

[[step]]
at = "0.5 ttl"
node = "server"
do = "stop"
lose_data = true
for = "200 ms"

[[step]]
at = "0.6 ttl"
client = "B"
do = "acquire"
"""


def problem(text: str) -> str:
    """Return why a file is refused."""
    with pytest.raises(ConfigurationError) as caught:
        read_scenario(text, "bug.toml")
    return str(caught.value)


def test_file_runs_and_meets_its_expectation(tmp_path: Path) -> None:
    """A bug report carries the scene and what should be seen."""
    path = tmp_path / "bug.toml"
    path.write_text(BUG)
    scenario = load(str(path))
    (result,) = run(scenario).results

    assert (scenario.name, scenario.seed, result.scene.ttl) == ("bug.toml", 7, 5.0)
    assert result.verdict.word == "broken"
    assert result.as_expected


def test_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    """Editors and shells on Windows write one."""
    path = tmp_path / "bug.toml"
    path.write_text(f"\ufeff{BUG}", encoding="utf-8", newline="\r\n")

    assert load(str(path)).seed == 7


def test_other_verdict_than_expected_is_noticed() -> None:
    """A fixed bug does not stay unseen."""
    (result,) = run(read_scenario(BUG.replace('"broken"', '"kept"'), "bug.toml")).results

    assert not result.as_expected


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "Two jobs at once"', "title =", "bug.toml: this is not TOML: .*line 1"),
        ('title = "Two jobs at once"', "titel = 1", "bug.toml, line 1: titel: there is no such key; keys are .*title"),
        ("ttl = 5", "ttl = 0", r"line 3: ttl: must be 0.1 to 3600 seconds, not 0"),
        ("ttl = 5", 'ttl = "5"', r"line 3: ttl: must be 0.1 to 3600 seconds, not '5'"),
        ("seed = 7", "seed = -1", "line 4: seed: must be a whole number from 0 to 9223372036854775807, not -1"),
        ("seed = 7", "seed = true", "line 4: seed: must be a whole number"),
        ("seed = 7", f"seed = 0x{'f' * 9000}", "line 4: seed: must be a whole number"),
        ("ttl = 5", f"ttl = 0x{'f' * 9000}", "line 3: ttl: must be 0.1 to 3600 seconds"),
        ("ttl = 5", f"ttl = {'9' * 9000}", "bug.toml: this is not TOML"),
        ("ttl = 5", f"ttl = {'[' * 5000}", "bug.toml: this is not TOML"),
        ('"redis"', '"mongodb"', "line 2: backend: the lab has no backend 'mongodb'; it has redis, .*redlock"),
        ('"redis"', '"redlock?rounds=1"', "line 2: backend: .*no option 'rounds'; .*fencing, durable"),
        ('"redis"', '"by-hand"', "line 2: backend: .*give a recipe"),
        ('"broken"', '"bad"', "line 5: expect: must be one of kept, contained, broken, not 'bad'"),
        ("at = 0\n", 'at = "soon"\n', r"line 8: step\[0\].at: must be seconds, or a text such as '0.5 ttl'"),
        ("at = 0\n", "at = nan\n", r"line 8: step\[0\].at: must be seconds"),
        ("at = 0\n", f"at = {'9' * 400}\n", r"line 8: step\[0\].at: must be from 0 to 100 ttl, not 999"),
        ("at = 0\n", f"at = 0x{'f' * 9000}\n", r"line 8: step\[0\].at: must be from 0 to 100 ttl"),
        ("at = 0\n", "at = -1\n", r"line 8: step\[0\].at: must be from 0 to 100 ttl, not -1"),
        ("at = 0\n", "", r"line 7: step\[0\]: say when, by at"),
        ('client = "A"', 'client = "Z"', r"line 9: step\[0\].client: there is no client 'Z'; clients are A, B"),
        ('client = "A"', 'node = "node9"', r"line 10: step\[0\].do: must be one of pause, stop"),
        ('client = "A"\n', 'client = "A"\nnode = "server"\n', r"line 7: step\[0\]: give client or node"),
        ('do = "stop"', 'do = "explode"', r"line 15: step\[1\].do: must be one of pause, stop, clock, failover, lag"),
        ('do = "acquire"\n\n', 'do = "acquire"\nby = 3\n\n', r"line 11: step\[0\].by: 'acquire' takes no 'by'"),
        ("lose_data = true", "lose_data = 1", r"line 16: step\[1\].lose_data: must be true or false, not 1"),
        ("ttl = 5", 'clients = ["A", "server"]', "line 3: clients: server is the name of a node here"),
        ("ttl = 5", "clients = []", "line 3: clients: must be 1 to 6 different names"),
        (
            'node = "server"',
            'node = "server"\nbackends = ["redlock"]',
            r"line 14: step\[1\].node: there is no node 'server'; the step is for none of the scene's",
        ),
        ('node = "server"', 'node = "node1"', r"line 14: step\[1\].node: there is no node 'node1'; nodes are server"),
    ],
)
def test_wrong_file_is_refused_with_line_and_key(old: str, new: str, message: str) -> None:
    """The message leads to the place, and says what to write there."""
    assert old in BUG

    with pytest.raises(ConfigurationError, match=message):
        read_scenario(BUG.replace(old, new, 1), "bug.toml")


def test_line_is_right_in_a_file_of_several_scenes() -> None:
    """The second step of the second scene."""
    text = source("failover").replace('client = "B"\ndo = "acquire"', 'client = "X"\ndo = "acquire"')
    lines = text.splitlines()

    found = problem(text)

    assert "scene[0].step[3].client" in found
    number = int(found.partition("line ")[2].partition(":")[0])
    assert lines[number - 1] == 'client = "X"'


def test_no_step_is_refused() -> None:
    """An empty scene shows nothing."""
    assert "give at least one table [[step]]" in problem("ttl = 5\n")


def test_inline_tables_are_read_too() -> None:
    """TOML has several ways to write the same."""
    scenario = read_scenario('step = [{ at = 0, client = "A", do = "acquire" }]', "bug.toml")

    assert scenario.scenes[0].steps[0].action == "acquire"
    assert "bug.toml, line 1: step[0].at" in problem('step = [{ at = "x", client = "A", do = "acquire" }]')


@pytest.mark.parametrize("name", ["", "nowhere.toml", "gc", "."])
def test_unknown_scenario_names_those_that_there_are(name: str) -> None:
    """Or says that the file cannot be read."""
    with pytest.raises(ConfigurationError, match=r"there is no scenario .*gc-pause|cannot read nowhere.toml"):
        load(name)


def test_backend_that_does_not_fit_is_refused() -> None:
    """It says which do."""
    with pytest.raises(ConfigurationError, match="does not fit the backend 'etcd'; it runs on redlock"):
        run(load("two-rounds"), backend="etcd")


TIMES = st.one_of(st.floats(0, 3).map(lambda one: round(one, 3)), st.floats(0, 3).map(lambda one: f"{one:.3f} ttl"))


@st.composite
def files(draw_value: st.DrawFn) -> str:
    """Draw a file that is right."""
    kind = draw_value(st.sampled_from(["redis", "redis+sentinel", "redlock", "etcd", "by-hand?recipe=delete"]))
    nodes = BACKENDS[kind.partition("?")[0]]
    lines = [f'backend = "{kind}"', f"ttl = {draw_value(st.sampled_from([1, 2.5, 10]))}", "until = 10"]
    lines.append(f"fenced = {str(draw_value(st.booleans())).lower()}")
    for _ in range(draw_value(st.integers(1, 8))):
        on_node = draw_value(st.integers(0, 3)) == 0
        # A lock by hand elects nobody.
        actions: Any = NODE_ACTIONS if on_node else ACTIONS
        action = draw_value(st.sampled_from(sorted(actions)))
        who = draw_value(st.sampled_from(nodes if on_node else ("A", "B")))
        lines += ["[[step]]", f"at = {_toml(draw_value(TIMES))}"]
        lines += [f'{"node" if on_node else "client"} = "{who}"', f'do = "{action}"']
        if "for" in actions[action] and draw_value(st.booleans()):
            lines.append(f"for = {_toml(draw_value(TIMES))}")
        if "by" in actions[action]:
            lines.append(f"by = {_toml(draw_value(TIMES))}")
        if "delay" in actions[action] and draw_value(st.booleans()):
            lines.append(f"delay = {_toml(draw_value(TIMES))}")
        if "lose_data" in actions[action]:
            lines.append(f"lose_data = {str(draw_value(st.booleans())).lower()}")
    return "\n".join(lines)


def _toml(value: float | str) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


@settings(max_examples=60, deadline=None)
@given(text=files())
def test_every_file_that_is_read_can_be_played_and_drawn(text: str) -> None:
    """Whatever is done to whom in whatever order: no step is impossible, and no picture fails."""
    played = run(read_scenario(text, "drawn.toml"))

    assert draw(played)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_file_makes_another_error_than_a_clear_one(data: st.DataObject) -> None:
    """A line of a good file is dropped, doubled or garbled: it is read, or refused by name."""
    lines = BUG.splitlines()
    index = data.draw(st.integers(0, len(lines) - 1))
    how = data.draw(st.sampled_from(["drop", "double", "garble"]))
    garbled = data.draw(st.text(st.characters(codec="ascii"), max_size=20))
    lines[index : index + 1] = {"drop": [], "double": [lines[index]] * 2, "garble": [garbled]}[how]

    said = "bug.toml"
    try:
        read_scenario("\n".join(lines), "bug.toml")
    except ConfigurationError as error:
        said = str(error)

    assert said.startswith("bug.toml")
