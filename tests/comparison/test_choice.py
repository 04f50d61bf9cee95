"""The questions of docs/choose lead typical needs to the right backend, and promise what backends declare."""

from __future__ import annotations

import re
from html import unescape

import pytest

from lockkit.configuration import registry
from lockkit.url import parse
from tests.comparison.choice import NEEDS, Need, load, paths
from tests.comparison.choice_page import PAGE, install
from tests.docs.story import ROOT

CHOICE = load()
PATHS = list(paths(CHOICE))
QUESTIONS_MAX = 5
WITH_URL = {name: backend for name, backend in CHOICE.backends.items() if backend.url}


def section_of(name: str) -> str:
    """What the page says of a backend."""
    return PAGE.read_text().partition(f'<section data-backend="{name}"')[2].partition("</section>")[0]


def ends(wanted: str, *advice: str) -> set[str]:
    """The backends that somebody who wants this is led to, with any of these pieces of advice."""
    return {
        end
        for answers, end in PATHS
        if answers[0].id == wanted and (not advice or {answer.advice for answer in answers} & {*advice})
    }


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.story)
def test_need_leads_to_its_backend(need: Need) -> None:
    """Answered in the order in which the page asks: one click for each answer, and the result needs no more."""
    name, advice, given = CHOICE.first, [], list[str]()
    for wanted in need.answers:
        (answer,) = (each for each in CHOICE.questions[name].answer if each.id == wanted)
        name = answer.leads_to(given)
        given.append(wanted)
        advice += [answer.advice] * bool(answer.advice)

    assert (name, advice) == (need.backend, need.advice)


def test_payments_end_at_a_key_once_and_a_guard() -> None:
    """And at a backend that has `client.once`, whatever lock they wanted."""
    text = CHOICE.advice["outside"].text

    assert all(word in text for word in ("a key by which it recognises", "`client.once`", "guard"))
    for wanted in ("one", "leader", "permits", "once", "readers"):
        assert ends(wanted, "outside")
        assert {end for end in ends(wanted, "outside") if not CHOICE.backends[end].capabilities.notes} == set()


def test_permits_are_compared_by_slot() -> None:
    """A guard for all would refuse a holder whose permit is valid, once one with a higher token has written."""
    advised = {answer.advice for answers, _ in PATHS if answers[0].id == "permits" for answer in answers} - {""}

    assert advised == {"permits", "efficiency", "slots", "outside"}
    assert all(word in CHOICE.advice["slots"].text for word in ("per slot", "`permit.slot`", "use a lock"))


def test_permits_are_promised_no_order_that_they_do_not_have() -> None:
    """Where each slot is a lock, waiters try, and nothing wakes them."""
    for end in ends("permits"):
        can = CHOICE.backends[end].capabilities
        if can.permits == "slots":
            assert not can.fair
            assert "- A permit is one of `limit` locks: its waiters try about twice a second, in no order." in (
                section_of(end).splitlines()
            )


def test_wrong_data_come_with_what_keeps_them_right() -> None:
    """Also those in one SQL database: no path ends without advice, but for the transaction, which needs no lock."""
    for answers, end in PATHS:
        expected = () if end == "transaction" else (answers[0].id, answers[1].advice)
        assert tuple(answer.advice for answer in answers if answer.advice) == expected
        assert "" not in expected
    for text in (CHOICE.advice["guard"].text, CHOICE.backends["transaction"].because):
        assert "condition" in text
        assert "unique constraint" in text
        assert "compare the token" in text


def test_django_settings_come_with_the_client_that_reads_them() -> None:
    """`lockkit.connect()` does not: it would lock files of one machine, without a warning."""
    told = {name for name in WITH_URL if "LOCKKIT = " in section_of(name)}

    assert told == {"postgresql", "mariadb"}
    for name in told:
        section = section_of(name)
        assert "`from lockkit.integrations.django import client`" in section
        assert "`client().lock(…)`" in section
        assert "[Django](../integrations/django.md)" in section


def test_no_more_than_five_questions() -> None:
    """On no path, and no path asks a question twice."""
    assert max(len(answers) for answers, _ in PATHS) <= QUESTIONS_MAX


def test_every_question_backend_and_advice_is_reached() -> None:
    """What nobody can be led to is left out."""
    goes = {go for answers, _ in PATHS for answer in answers for go in (answer.go, *answer.instead.values())}
    asked = {CHOICE.first} | goes

    assert CHOICE.questions.keys() <= asked
    assert CHOICE.backends.keys() == {end for _, end in PATHS}
    assert CHOICE.advice.keys() == {answer.advice for answers, _ in PATHS for answer in answers} - {""}


def test_every_backend_of_lockkit_is_recommended_to_somebody() -> None:
    """In each of its modes, and each page in docs/backends is linked, but for those of distributions of their own."""
    classes = {
        registry.find(url.scheme, dict(url.query).get("mode")) for url in map(parse, (b.url for b in WITH_URL.values()))
    }
    everything = {registry.find(scheme, mode) for scheme in registry.BUILTIN for mode in registry.modes(scheme)}

    assert classes == everything
    own = {path.name.removeprefix("lockkit-") for path in ROOT.glob("packages/*")}
    pages = {path.stem for path in ROOT.glob("docs/backends/*.md")}
    assert {backend.page for backend in WITH_URL.values()} == pages - own


@pytest.mark.parametrize("name", WITH_URL)
def test_url_can_be_pasted(name: str) -> None:
    """It parses, a client takes it, and what it needs to run is what the page installs."""
    backend = CHOICE.backends[name]
    url = parse(backend.url)

    assert backend.capabilities.scope in {"process", "machine", "network"}
    extra = registry.BUILTIN[url.scheme].extra
    assert install(backend) == f'pip install ".[{f"cli,{extra}" if extra else "cli"}]"  # in a clone'


@pytest.mark.parametrize("name", CHOICE.backends)
def test_servers_can_be_checked_with_what_is_installed(name: str) -> None:
    """
    The two commands of a section belong together: the doctor needs the driver of its URL.

    All users of the machine can see the arguments of a command, so the URL, with its password, is none.
    """
    found = re.findall(r"\.\[(.*?)\].*\nLOCKKIT_URL='?([^' ]*)'? lockkit doctor<", unescape(section_of(name)))
    ((extras, url),) = found

    assert extras.split(",") == list(filter(None, ["cli", registry.BUILTIN[parse(url).scheme].extra]))


def test_backends_have_what_the_answers_require() -> None:
    """Who needs a lock that survives the loss of a server is never led to one that does not."""
    can = {name: backend.capabilities for name, backend in WITH_URL.items()}
    for answers, end in PATHS:
        for answer in answers:
            for capability, allowed in answer.requires.items():
                assert getattr(can[end], capability) in allowed, (end, answer.text)


@pytest.mark.parametrize("name", CHOICE.backends)
def test_alternatives_are_others(name: str) -> None:
    """Each backend names what else to look at, and never itself."""
    others = [other.go for other in CHOICE.backends[name].alternative]

    assert others
    assert name not in others
    assert set(others) <= CHOICE.backends.keys()
