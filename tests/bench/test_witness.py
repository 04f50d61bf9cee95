from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockkit_tools.bench.witness import Section, judge, judge_permits

NOTES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=12)


def sections(*spans: tuple[int, int], tokens: tuple[int | None, ...] = ()) -> list[Section]:
    """Sections of as many contenders, in nanoseconds."""
    given = tokens or (None,) * len(spans)
    return [
        Section(began, ended, token, who) for who, ((began, ended), token) in enumerate(zip(spans, given, strict=True))
    ]


@pytest.mark.parametrize(
    ("spans", "overlaps"),
    [
        ([], 0),
        ([(0, 5)], 0),
        ([(0, 5), (6, 9)], 0),
        ([(0, 5), (5, 9)], 0),
        ([(0, 5), (4, 9)], 1),
        ([(0, 9), (2, 3), (5, 6)], 2),
        ([(5, 9), (0, 6)], 1),
        ([(0, 9), (2, 3), (9, 12)], 1),
    ],
)
def test_overlaps_are_counted(spans: list[tuple[int, int]], overlaps: int) -> None:
    """A section inside another counts, also when a short one lies between; touching is no overlap."""
    verdict = judge(sections(*spans))

    assert verdict.overlaps == overlaps
    assert bool(verdict.broken) == bool(overlaps)


@given(NOTES)
def test_an_overlap_is_found_exactly_when_two_sections_share_time(notes: list[tuple[int, int]]) -> None:
    """Compared with looking at every pair."""
    spans = [(began, began + length) for began, length in notes]
    anybody = any(max(a[0], b[0]) < min(a[1], b[1]) for i, a in enumerate(spans) for b in spans[:i] if a[0] != b[0])
    together = any(a[0] == b[0] and a[1] > a[0] and b[1] > b[0] for i, a in enumerate(spans) for b in spans[:i])

    found = judge(sections(*spans)).overlaps > 0

    inside = any(
        a[0] < b[0] < a[1] or b[0] < a[0] < b[1] for i, a in enumerate(spans) for b in spans[:i]
    )  # also a moment inside a longer section
    assert found == (anybody or together or inside)


def test_tokens_must_increase_in_the_order_of_the_sections() -> None:
    """An equal one is as bad as a lower one; sections without a token are passed over."""
    good = judge(sections((0, 1), (2, 3), (4, 5), tokens=(1, None, 2)))
    equal = judge(sections((0, 1), (2, 3), tokens=(1, 1)))
    lower = judge(sections((2, 3), (0, 1), (4, 5), tokens=(8, 9, 9)))

    assert not good.broken
    assert equal.disorders == 1
    assert lower.disorders == 2
    assert "token 8 of contender 0 came after 9" in lower.broken


@pytest.mark.parametrize(
    ("writers", "overlaps"),
    [
        ((False, False, False), 0),
        ((True, False, False), 2),
        ((False, False, True), 1),
        ((False, True, False), 2),
    ],
)
def test_readers_may_overlap_and_writers_may_not(writers: tuple[bool, ...], overlaps: int) -> None:
    """Each section that met a writer, or a writer that met a section, counts once."""
    met = sections((0, 9), (2, 8), (4, 6))

    verdict = judge(one._replace(writes=writes) for one, writes in zip(met, writers, strict=True))

    assert verdict.overlaps == overlaps
    assert bool(verdict.broken) == bool(overlaps)


@pytest.mark.parametrize(("permits", "excess"), [(3, 0), (2, 1), (1, 3)])
def test_permits_in_excess_are_counted(permits: int, excess: int) -> None:
    """Of four sections, of which three are inside at one time; a section that ends makes room for the next."""
    verdict = judge_permits(sections((0, 5), (1, 9), (2, 4), (5, 6)), permits)

    assert verdict.overlaps == excess
    assert bool(verdict.broken) == bool(excess)
