"""What the scenarios of the lab show, and that a seed repeats them. Their verdicts are in the table of their page."""

from __future__ import annotations

import json

import pytest

from lockkit_tools.lab import Result, as_data, load, run, scenario_names, story


def only(name: str, *, backend: str, fenced: bool = False) -> Result:
    """Return the one scene of a scenario on a backend."""
    (result,) = run(load(name), backend=backend, fenced=fenced).results
    return result


def promises(result: Result) -> dict[str, str]:
    """Return the state of each promise."""
    return {promise.name: promise.state for promise in result.verdict.promises}


def texts(result: Result) -> list[str]:
    """Return the lines of the story."""
    return [mark.text for mark in story(result)]


@pytest.mark.parametrize("name", scenario_names())
def test_verdict_does_not_depend_on_seed(name: str) -> None:
    """The scenes are about the order of events, not about luck. Which verdict is right: tests/lab/test_docs.py."""
    verdicts = {tuple(result.verdict.word for result in run(load(name), seed=seed).results) for seed in range(1, 7)}

    assert len(verdicts) == 1


@pytest.mark.parametrize("name", scenario_names())
def test_the_same_seed_gives_the_same_run(name: str) -> None:
    """A picture in a bug report can be made again."""
    one, other = (json.dumps(as_data(run(load(name), seed=5))) for _ in range(2))

    assert one == other


def test_another_seed_gives_other_latencies() -> None:
    """The seed counts."""
    one, other = (json.dumps(as_data(run(load("gc-pause"), seed=seed))["scenes"]) for seed in (5, 6))

    assert one != other


@pytest.mark.parametrize("backend", ["redis", "redlock", "etcd", "zookeeper"])
def test_pause_breaks_the_data_of_every_backend_and_the_guard_refuses_the_write(backend: str) -> None:
    """Sanfilippo's point: the pause is no matter of the algorithm. Kleppmann's: the token helps."""
    unfenced, fenced = (only("gc-pause", backend=backend, fenced=on) for on in (False, True))

    assert promises(unfenced) == {"one": "held", "late": "broken", "data": "broken", "tokens": "held", "free": "held"}
    assert "A's old write REPLACES B's newer one: data is lost." in texts(unfenced)
    assert promises(fenced) == {"one": "held", "late": "broken", "data": "held", "tokens": "held", "free": "held"}
    assert "A's write with token 1 is REFUSED: storage has seen token 2." in texts(fenced)
    assert [write.accepted for write in fenced.record.writes] == [True, False]


def test_deadline_comes_before_the_server_frees_the_lock() -> None:
    """A holder that is cut off gives up first, and the next one gets the lock after that."""
    result = only("partition", backend="redis")
    older, newer = result.record.grants
    (kept,) = [span for span in result.record.spans if span.kind == "kept" and span.who == "A"]

    assert older.noticed is not None
    assert older.noticed == pytest.approx(older.valid_until, abs=0.01)
    assert older.valid_until < kept.end <= newer.start
    assert "A looks at its lease before it writes: lost. It does not write." in texts(result)


def test_delayed_restart_keeps_the_forgetful_node_from_voting() -> None:
    """The span in which it does not vote is drawn, and lasts longer than what it may have forgotten."""
    result = only("restart-without-data", backend="redlock")
    (silent,) = [span for span in result.record.spans if span.kind == "silent"]

    assert silent.lane == "node3"
    assert not [span for span in result.record.spans if span.lane == "node3" and span.who == "B"]


def test_clock_jump_ends_one_vote_and_makes_two_holders() -> None:
    """A keeps nodes 1 and 2, B gets 3, 4 and 5."""
    result = only("clock-jump", backend="redlock")
    holders = {(span.lane, span.who) for span in result.record.spans if span.kind == "kept"}

    assert result.record.overlaps
    assert holders >= {("node1", "A"), ("node2", "A"), ("node3", "A"), ("node3", "B"), ("node4", "B"), ("node5", "B")}


def test_hand_off_is_a_wake_up_and_not_a_poll() -> None:
    """The next in the queue has the lock a few messages after the release."""
    result = only("hand-off", backend="redis")
    first, second, third = result.record.grants

    assert [grant.client for grant in (first, second, third)] == ["A", "B", "C"]
    for older, newer in ((first, second), (second, third)):
        assert older.noticed is not None
        assert newer.start - older.noticed < 0.1


def test_leader_stops_before_the_next_one_leads() -> None:
    """The grace begins before the deadline, and the next term after it."""
    result = only("election", backend="redis")
    (stopping,) = [span for span in result.record.spans if span.kind == "stopping"]
    older, newer = result.record.grants

    assert stopping.start < older.valid_until - 3.0
    assert older.valid_until < newer.start


def test_two_rounds_are_two_messages_to_each_node() -> None:
    """Round one asks, round two writes the token."""
    record = only("two-rounds", backend="redlock").record

    for kind in ("acquire", "fence"):
        asked = [one.target for one in record.messages if one.kind == kind and one.source == "A"]
        assert sorted(asked) == [f"node{index}" for index in range(1, 6)]


def test_output_says_where_a_model_stands_in() -> None:
    """Nobody takes the model of etcd for its code."""
    assert "model" in only("gc-pause", backend="etcd").parts
    assert "lockkit's engine and Redlock backend" in only("gc-pause", backend="redlock").parts


def test_json_has_everything_that_was_drawn() -> None:
    """Programs get what people see."""
    (scene,) = as_data(run(load("gc-pause"), fenced=True))["scenes"]

    assert scene["verdict"] == "contained"
    assert scene["writes"][-1]["accepted"] is False
    assert {span["kind"] for span in scene["spans"]} >= {"holds", "believes", "paused", "kept", "waits"}
    assert [event["at"] for event in scene["events"]] == sorted(event["at"] for event in scene["events"])
    json.dumps(scene, allow_nan=False)
