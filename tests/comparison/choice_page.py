"""Writes docs/choose/index.md from the questions, and from what each backend declares of itself."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from lockkit.backend import Capabilities
from lockkit.configuration import registry
from lockkit.url import parse
from tests.comparison.choice import DATA, Answer, Backend, Choice, load
from tests.comparison.markdown import by_line

PAGE = DATA.parent / "index.md"

HEAD = """\
---
hide: [toc]
---

# Choose a backend

<!-- Written by `nox -s comparison` from decision.toml and the capabilities that the backends declare. -->

<link rel="stylesheet" href="choose.css">

At most five questions lead to the lines to paste, to what they promise, and to what they do not.

<noscript markdown="1">
Without scripts, this page is a list: start at the first question and follow the link of your answer.
</noscript>
"""

TAIL = """
[Comparing backends](../comparison/choosing.md) and [Capabilities](../comparison/capabilities.md) show all of them.

<script src="choose.js"></script>
"""

DOCTOR = (
    "`lockkit doctor` reports what endangers locks on your servers, and how to fix it: \n"
    "see [Check your servers](../how-to/check-your-servers.md)."
)
SCOPE = {
    "process": "Locks out the other threads and tasks of the process.",
    "machine": "Locks out the other processes of the machine.",
    "network": "Locks out the processes of all machines that use the same servers.",
}
CRASH = {
    "ttl": "A dead holder's lock is free after its ttl.",
    "session": "A dead holder's lock is free when its session ends, after its ttl.",
    "connection": "A dead holder's lock is free when its connection ends: if the process dies, at once.",
    "process": "A dead holder's lock is free at once.",
}


def promises(can: Capabilities) -> Iterator[str]:
    """What a backend promises, in sentences."""
    yield SCOPE[can.scope]
    yield CRASH[can.crash_release]
    if can.fair:
        yield "Clients are served first come, first served."
    if can.wakeup == "push":
        yield "A release wakes the next waiter."
    if can.survives_node_loss:
        yield "A held lock stays exclusive when a minority of the servers is lost."
    if can.survives_data_loss:
        yield "Tokens keep increasing after the data are lost."
    offered = [name for name, there in _calls(can).items() if there]
    if offered:
        yield f"Also offers {_series(offered)}."


def limits(can: Capabilities) -> Iterator[str]:
    """What a backend does not promise, in sentences."""
    yield can.caveat
    if can.scope == "process":
        yield "Locks, and the records of `client.once`, end with the process."
    if not can.survives_node_loss and can.scope == "network":
        kept = "" if can.crash_release == "connection" else " and no replica has its data"
        yield f"If the server is lost for good{kept}, held locks are lost with it."
    if not can.survives_data_loss:
        yield "If all servers lose their data, tokens may start lower."
    if not can.fair:
        yield "Clients are served in no particular order."
    if can.permits == "slots":
        yield "A permit is one of `limit` locks: its waiters try about twice a second, in no order."
    if can.wakeup == "poll":
        yield "Waiters poll, so a hand-off takes longer."
    if can.min_ttl >= 1:
        yield "The shortest ttl is 1 s." if can.ttl_granularity < 1 else "A ttl is whole seconds, at least 1."
    missing = [name for name, there in _calls(can).items() if not there]
    if missing:
        yield f"Does not offer {_series(missing, 'or')}."


def _calls(can: Capabilities) -> dict[str, bool]:
    return {"`client.rwlock`": can.shared_mode, "`client.once`": can.notes, "`client.names`": can.listing}


def _series(words: list[str], last: str = "and") -> str:
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def install(backend: Backend) -> str:
    """The command that installs what a backend needs, and the command line."""
    extra = registry.BUILTIN[parse(backend.url or backend.check).scheme].extra
    return f'pip install ".[{",".join(filter(None, ["cli", extra]))}]"  # in a clone'


def text() -> str:
    """The whole page."""
    choice = load()
    sections = [
        *(_question(choice, name) for name in choice.questions),
        *(_backend(choice, name) for name in choice.backends),
        *(_advice(choice, name) for name in choice.advice),
    ]
    opening = f'<div class="choose" data-first="{choice.first}" markdown="1">'
    return "\n\n".join([f"{HEAD}\n{opening}", *sections, f"</div>\n{TAIL}"])


def _anchor(choice: Choice, name: str) -> str:
    return f"#{'ask' if name in choice.questions else 'use'}-{name}"


def _question(choice: Choice, name: str) -> str:
    question = choice.questions[name]
    answers = "\n".join(f"- {_link(choice, answer)}" for answer in question.answer)
    return f"""\
<section data-question="{name}" markdown="1">

## {question.ask} {{ #ask-{name} }}

{question.why}

{answers}

</section>"""


def _link(choice: Choice, answer: Answer) -> str:
    data = f'data-answer="{answer.id}" data-go="{answer.go}" data-short="{answer.short}"'
    if answer.instead:
        data += f' data-instead="{" ".join(f"{given}:{go}" for given, go in answer.instead.items())}"'
    also = "".join(_also_instead(choice, go, answer) for go in dict.fromkeys(answer.instead.values()))
    if answer.advice:
        data += f' data-advice="{answer.advice}"'
        beside = f"[{choice.advice[answer.advice].title}](#advice-{answer.advice})"
        also += f"<span class=also> (see also: {beside})</span>"
    return f"[{answer.text}]({_anchor(choice, answer.go)}){{ {data} }}{also}"


def _also_instead(choice: Choice, go: str, answer: Answer) -> str:
    """Where the answer leads after other answers, for readers without scripts."""
    shorts = {each.id: each.short for question in choice.questions.values() for each in question.answer}
    # Two questions may have the same answer.
    after = _series([*dict.fromkeys(shorts[given] for given, other in answer.instead.items() if other == go)], "or")
    title = choice.backends[go].title if go in choice.backends else choice.questions[go].ask
    return f"<span class=also> (after “{after}”: [{title}]({_anchor(choice, go)}))</span>"


def _backend(choice: Choice, name: str) -> str:
    backend = choice.backends[name]
    paste = f"\n```python\n{backend.code.strip()}\n```\n" if backend.code else ""
    if backend.url:
        paste += f"\n<pre class=url><code>{escape(backend.url)}</code></pre>\n"
        can = backend.capabilities
        promised, limited = [*promises(can)], [*limits(can)]
    else:
        promised, limited = [*backend.promises], [*backend.limits]
    because = backend.because.strip().replace(". ", ".\n")
    page = f"[{backend.title}](../backends/{backend.page}.md)" if backend.page else ""
    others = [
        f"{each.when}: [{choice.backends[each.go].title}]({_anchor(choice, each.go)})" for each in backend.alternative
    ]
    # Not as an argument, as `lockkit --help` says: all users of the machine can see the password in it.
    check = f"LOCKKIT_URL={_quoted(backend.url or backend.check)} lockkit doctor"
    return f"""\
<section data-backend="{name}" markdown="1">

## {backend.title} {{ #use-{name} }}

{because}
{paste}
### It promises {{ #it-promises-{name} }}

{_items(promised)}

### It does not promise {{ #it-does-not-promise-{name} }}

{_items(limited)}

### Run and check {{ #check-{name} }}

<pre><code>{escape(install(backend), quote=False)}
{escape(check)}</code></pre>

{DOCTOR}
Read more: {", ".join(filter(None, [page, backend.more]))}.

### Choose another one if … {{ #instead-of-{name} }}

{_items(others)}

</section>"""


def _items(sentences: list[str]) -> str:
    return "\n".join(f"- {by_line(sentence)}" for sentence in sentences)


def _quoted(url: str) -> str:
    """A URL for the shell."""
    return f"'{url}'" if "?" in url else url


def _advice(choice: Choice, name: str) -> str:
    advice = choice.advice[name]
    return f"""\
<section data-advice-text="{name}" markdown="1">

## {advice.title} {{ #advice-{name} }}

{advice.text.strip()}

</section>"""
