"""
The built site as a reader sees it, at the width of a desktop and of a phone: ``nox -s browser``.

Not among the tests that run everywhere, because it needs Chromium and the built site in ``site/``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest

from lockkit_tools.lab import html, load, run, scenario_names
from lockkit_tools.servers import wait_until
from tests.browser.chromium import Chromium
from tests.comparison.choice import NEEDS, Need
from tests.comparison.choice import load as load_choice
from tests.conventions.sources import ROOT

SITE = ROOT / "site"
PAGES = sorted(str(path.parent.relative_to(SITE)) for path in SITE.rglob("index.html"))
WIDTHS = {"desktop": 1280, "phone": 360}
TABS_MAX = 300
TABS = 8
CHOICE = load_choice()

# What reaches beyond the right edge of the window, unless it is in something that scrolls by itself.
OUTSIDE = """
(() => {
  const width = document.documentElement.clientWidth, found = [];
  for (const element of (document.querySelector(".md-content") ?? document.body).querySelectorAll("*")) {
    const box = element.getBoundingClientRect();
    if (!box.width || box.right <= width + 1 || element.closest("svg")) continue;
    let parent = element.parentElement;
    while (parent && getComputedStyle(parent).overflowX === "visible") parent = parent.parentElement;
    if (!parent || parent === document.documentElement || parent === document.body)
      found.push(`${element.tagName} at ${Math.round(box.right)}: ${element.textContent.trim().slice(0, 60)}`);
  }
  return found;
})()
"""

# Tables that must be scrolled sideways to be read.
WIDE_TABLES = """
[...document.querySelectorAll(".md-typeset__scrollwrap")]
  .filter((wrap) => wrap.scrollWidth > wrap.clientWidth + 1)
  .map((wrap) => wrap.textContent.trim().slice(0, 60))
"""

# Text whose contrast is below that of WCAG 2.2, success criterion 1.4.3: 4.5, and 3 for large text.
PALE = """
(() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const light = (c) => [0, 1, 2].map((i) => c[i] / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = new Set();
  const root = document.querySelector(".md-content") ?? document.body;
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement, style = getComputedStyle(element);
    const hidden = !element.offsetParent || element.closest("svg, .headerlink, script, style, noscript, .md-nav");
    if (!node.data.trim() || hidden) continue;
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      layers.push(colour);
      if (colour[3] === 1) break;
    }
    const behind = layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
    const [a, b] = [light(over(parse(style.color), behind)), light(behind)].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize), bold = Number(style.fontWeight) >= 700;
    const enough = size >= 24 || (bold && size >= 18.66) ? 3 : 4.5;
    const ratio = (a + 0.05) / (b + 0.05);
    const what = `${element.tagName}.${element.className}: ${node.data.trim().slice(0, 40)}`;
    if (ratio < enough) found.add(`${ratio.toFixed(2)} ${what}`);
  }
  return [...found].slice(0, 10);
})()
"""

# Where the focus is, and whether a reader sees it there: in view, and marked.
FOCUS = """
(() => {
  const active = document.activeElement, hidden = active.matches("input.md-option, input.md-toggle");
  const element = hidden ? active.nextElementSibling : active;  // the theme hides a switch behind the next label
  const box = element.getBoundingClientRect(), style = getComputedStyle(element);
  const inView = box.width > 0 && box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
  const marked = style.outlineStyle !== "none" || style.boxShadow !== "none" || element.matches(".md-skip, input");
  return [inView, marked, `${active.tagName}.${active.className}: ${element.outerHTML.slice(0, 200)}`];
})()
"""


class Handler(SimpleHTTPRequestHandler):
    """Files of the site, without a line on stderr for each."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The site, served on this machine."""
    assert PAGES, "build the site first: nox -s docs"
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(SITE)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """One browser for all."""
    with Chromium(tmp_path_factory.mktemp("chromium")) as chromium:
        yield chromium


@pytest.fixture
def choose(browser: Chromium, address: str) -> Chromium:
    """The page of questions, on a phone."""
    browser.look(WIDTHS["phone"])
    browser.load(f"{address}/choose/")
    return browser


@pytest.mark.parametrize("page", PAGES)
def test_page_can_be_read(browser: Chromium, address: str, page: str) -> None:
    """Nothing is out of sight or has to be scrolled sideways but code and wide tables; all text stands out."""
    for name, width in WIDTHS.items():
        browser.look(width)
        if name == "desktop":
            browser.load(f"{address}/{page}/")
            assert browser.run(PALE) == []

        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run(OUTSIDE) == []


@pytest.mark.parametrize("page", PAGES)
def test_text_stands_out_in_the_dark(browser: Chromium, address: str, page: str) -> None:
    """As in the light colour scheme."""
    browser.look(WIDTHS["desktop"], scheme="dark")

    browser.load(f"{address}/{page}/")

    assert browser.run(PALE) == []


@pytest.mark.parametrize("page", [".", "choose", "explanation/lab", "comparison/capabilities", "reference/errors"])
def test_focus_is_seen(browser: Chromium, address: str, page: str) -> None:
    """Who uses the keyboard sees where the next Enter goes."""
    browser.look(WIDTHS["desktop"])
    browser.load(f"{address}/{page}/")
    seen = set()

    for _ in range(TABS):
        browser.press("Tab")
        in_view, marked, what = browser.run(FOCUS)
        assert in_view, what
        assert marked, what
        seen.add(what)

    assert len(seen) > TABS // 2


@pytest.mark.parametrize("name", scenario_names())
def test_page_of_the_lab_can_be_read(browser: Chromium, tmp_path: Path, name: str) -> None:
    """What ``lockkit lab --html`` writes, in both colour schemes."""
    path = tmp_path / "lab.html"
    path.write_text(html.draw(run(load(name)), f"lockkit lab {name}"), encoding="utf-8")

    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for width in WIDTHS.values():
        for scheme in schemes:
            browser.look(width, 900, scheme=scheme)
            browser.load(path.as_uri())
            height = browser.run("document.documentElement.scrollHeight")
            browser.look(width, height, scheme=scheme)

            assert browser.run("document.documentElement.scrollWidth") <= width
            assert browser.run(OUTSIDE) == []
            assert browser.run(PALE) == []


@pytest.mark.parametrize("page", ["choose", "comparison/capabilities", "comparison/choosing", "comparison"])
def test_tables_that_help_to_choose_need_no_scrolling_on_a_phone(browser: Chromium, address: str, page: str) -> None:
    """All columns are in view."""
    browser.look(WIDTHS["phone"])

    browser.load(f"{address}/{page}/")

    assert browser.run(WIDE_TABLES) == []


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_start_page_shows_code_and_install_without_scrolling(
    browser: Chromium, address: str, width: int, height: int
) -> None:
    """On a laptop and on a phone; the code does not have to be scrolled sideways either."""
    browser.look(width, height)
    browser.load(f"{address}/")

    code, install, wide = browser.run("""
    (() => {
      const bottom = (element) => element.getBoundingClientRect().bottom;
      const code = document.querySelector(".md-content .highlight pre code");
      const install = [...document.querySelectorAll(".md-content p")].find((p) => /pip install/.test(p.textContent));
      return [bottom(code), bottom(install), code.scrollWidth > code.clientWidth];
    })()
    """)
    assert 0 < code < install <= height
    assert not wide


# -- the questions -----------------------------------------------------------------------------------------------------


def shown(browser: Chromium, attribute: str) -> list[str]:
    """The questions, backends or advice in view."""
    script = f"[...document.querySelectorAll('.choose section[{attribute}]')]"
    script += f".filter(e => e.offsetParent).map(e => e.getAttribute('{attribute}'))"
    names: list[str] = browser.run(script)
    return names


@contextmanager
def changed_address(browser: Chromium) -> Iterator[None]:
    """Wait until the page shows what another address means."""
    before = browser.run("location.hash")
    yield

    def pending() -> str | None:
        shown, now = browser.run("[document.querySelector('.choose').dataset.shown, location.hash]")
        return None if shown == now != before else f"{before} is still shown"

    wait_until(pending)


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.story)
def test_need_leads_to_its_backend(choose: Chromium, need: Need) -> None:
    """By clicks on what is in view, and by no more than nine."""
    for answer in need.answers:
        (question,) = shown(choose, "data-question")
        with changed_address(choose):
            choose.run(f"document.querySelector('[data-question={question}] [data-answer={answer}]').click()")

    assert shown(choose, "data-backend") == [need.backend]
    assert shown(choose, "data-advice-text") == list(need.advice)
    assert shown(choose, "data-question") == []
    url = choose.run("document.querySelector('section:not([hidden]) .url')?.textContent ?? ''")
    assert url == CHOICE.backends[need.backend].url


def test_questions_can_be_answered_with_the_keyboard(choose: Chromium) -> None:
    """Tab leads to the answers, Enter takes one, and the focus is on the next question then."""
    for expected in ("harm", "who", "run"):
        for _ in range(TABS_MAX):
            choose.press("Tab")
            if choose.run("document.activeElement?.dataset.go") == expected:
                break
        with changed_address(choose):
            choose.press("Enter")

        assert shown(choose, "data-question") == [expected]
        assert choose.run("document.activeElement.id") == f"ask-{expected}"


def test_answers_can_be_changed_shared_and_gone_back(choose: Chromium, address: str) -> None:
    """The address holds them."""
    with changed_address(choose):
        choose.run("document.querySelector('[data-question=want] [data-answer=one]').click()")
    with changed_address(choose):
        choose.run("history.back()")
    assert shown(choose, "data-question") == ["want"]

    choose.load(f"{address}/choose/#want=one&harm=store&who=machines&run=etcd")
    assert shown(choose, "data-backend") == ["etcd"]
    with changed_address(choose):
        choose.run("document.querySelectorAll('.trail li a')[2].click()")
    assert shown(choose, "data-question") == ["who"]


def test_address_of_a_section_shows_it(choose: Chromium, address: str) -> None:
    """As a search or a link from another page gives it."""
    choose.load(f"{address}/choose/#use-redlock")
    assert shown(choose, "data-backend") == ["redlock"]

    choose.load(f"{address}/choose/#nothing=there")
    assert shown(choose, "data-question") == [CHOICE.first]


def test_page_without_scripts_is_a_list_of_links(browser: Chromium, address: str) -> None:
    """All questions and backends are there, and each answer leads to one of them."""
    browser.look(WIDTHS["phone"])
    browser.scripts(on=False)
    try:
        browser.load(f"{address}/choose/")
        everything: dict[str, Any] = {name: shown(browser, name) for name in ("data-question", "data-backend")}
        dead = browser.run(
            "[...document.querySelectorAll('[data-answer]')].filter(a => !document.querySelector(a.hash)).length"
        )
    finally:
        browser.scripts(on=True)

    assert everything == {"data-question": [*CHOICE.questions], "data-backend": [*CHOICE.backends]}
    assert dead == 0


# What readers look for, and the page that must be among the first three that the site's search finds.
SEARCHES = {
    "context manager": "tutorials/first-lock",
    "leader election": "how-to/elect-a-leader",
    "fencing token": "how-to/guard-your-storage",
    "Lease.extend": "reference/api/sync",
    "changelog": "changelog",
    "install": "tutorials/first-lock",
    "windows": "reference/versions",
    "redlock payments": "how-to/charge-once",
    "kubernetes": "integrations/kubernetes",
    "django migrate": "integrations/django",
    "celery twice": "integrations/celery",
    "postgres": "databases/postgresql",
    "upgrade": "reference/versions",
    "pgbouncer": "databases/postgresql",
    "elasticache": "how-to/managed-services",
    "cron": "how-to/run-a-cron-job-once",
    "rate limit": "how-to/limit-concurrent-calls",
    "stuck lock": "how-to/see-who-holds-a-lock",
    "timeout": "how-to/choose-a-ttl",
    "read write lock": "how-to/many-readers-one-writer",
    "installation": "tutorials/first-lock",
    "double booking": "tutorials/first-lock",
    "mutex": "tutorials/first-lock",
    "semaphore": "how-to/limit-concurrent-calls",
    "idempotency": "how-to/charge-once",
    "singleton": "how-to/elect-a-leader",
    # Plurals of words that the page has in the singular.
    "alerts": "how-to/observe",
    "dashboards": "how-to/observe",
    "webhooks": "integrations/fastapi",
    "deadlocks": "how-to/transfer-between-accounts",
}
FOUND = """
(() => {
  const links = [...document.querySelectorAll(".md-search-result__item > .md-search-result__link:first-child")];
  const shown = document.querySelector(".md-search-result__meta")?.textContent ?? "";
  const pages = links.map((link) => new URL(link.href).pathname.split("/").filter(Boolean).join("/"));
  return /matching/.test(shown) ? pages : [];
})()
"""


@pytest.fixture(scope="module")
def searching(browser: Chromium, address: str) -> Iterator[Chromium]:
    """The start page, with the index of the search, and its first results."""
    browser.search(on=True)
    browser.look(WIDTHS["desktop"])
    browser.load(f"{address}/?q=lock")
    wait_until(lambda: None if browser.run(FOUND) else "no results for lock")
    yield browser
    browser.search(on=False)


@pytest.mark.parametrize("query", SEARCHES)
def test_search_finds_the_page_first(searching: Chromium, query: str) -> None:
    """By the theme's own search, in the browser."""
    before = searching.run(FOUND)
    searching.run(
        f"{{ const box = document.querySelector('.md-search__input'); box.value = {query!r};"
        " box.dispatchEvent(new Event('keyup')); }"
    )

    wait_until(lambda: None if searching.run(FOUND) not in ([], before) else f"no results for {query}")

    assert SEARCHES[query] in searching.run(FOUND)[:3]
