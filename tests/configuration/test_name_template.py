"""Lock names from the arguments of decorated functions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from typing import Any

import pytest

from lockkit.configuration.name_template import NameTemplate
from lockkit.errors import ConfigurationError


@dataclass
class Order:
    """Something with an attribute."""

    id: int


def sell(product_id: int, amount: int = 1, *rest: int, order: Order | None = None, **options: int) -> None:
    """Have every kind of parameter."""
    del product_id, amount, rest, order, options


@pytest.mark.parametrize(
    ("template", "arguments", "keywords", "name"),
    [
        ("plain", (7,), {}, "plain"),
        ("stock:{product_id}", (7,), {}, "stock:7"),
        ("stock:{product_id}", (), {"product_id": 7}, "stock:7"),
        ("{product_id}/{amount}", (7,), {}, "7/1"),
        ("{product_id:04d}", (7,), {}, "0007"),
        ("{order.id}", (7,), {"order": Order(3)}, "3"),
        ("{options[x]}", (7,), {"x": 5}, "5"),
        ("{rest[0]}", (7, 1, 9), {}, "9"),
        ("{{literal}}", (7,), {}, "{literal}"),
        ("{product_id}{{{amount}}}", (7,), {}, "7{1}"),
        ("{product_id!r}:{amount:>3}", ("7",), {}, "'7':  1"),
        ("{options[x]:{amount}}/{product_id}", (7, 4), {"x": 5}, "   5/7"),
    ],
)
def test_name_is_formatted_with_the_bound_arguments(
    template: str, arguments: tuple[int, ...], keywords: dict[str, object], name: str
) -> None:
    """Positional, keyword and default arguments alike."""
    assert NameTemplate(template, sell).name(arguments, keywords) == name


def move(a: object, b: object) -> None:
    """Have two parameters."""
    del a, b


AWKWARD = [*"%-725{}é/\n", "", "%3A", "%253A", "::", "a:", ":b", "--", "x-y", "25", "None"]


@pytest.mark.parametrize(
    "template",
    [
        "export:{a}:{b}", "{a}-{b}", "{a}::{b}", "{a}2{b}", "{a}:%{b}", "{a}{{{b}", "{b}/{a}", "{a!s}:{b!s}", "{a} {b}",
        "{a}A{b}5", "{a}--{b}-", "{a}:{b}:{a}", "{a}é{b}",
    ],
)  # fmt: skip
def test_different_arguments_give_different_names(template: str) -> None:
    """``export:{user}:{number}``: else the second caller of a `once` would get the result of the first."""
    bound = NameTemplate(template, move)
    names = {bound.name((a, b), {}) for a in AWKWARD for b in AWKWARD}
    assert len(names) == len(AWKWARD) ** 2


@pytest.mark.parametrize(
    ("template", "arguments", "name"),
    [
        ("export:{a}:{b}", ("alice@example.com", "A-7_b.c~d+e"), "export:alice@example.com:A-7_b.c~d+e"),
        ("export:{a}:{b}", ("Łódź 5/6", 7), "export:Łódź 5/6:7"),
        ("export:{a}:{b}", ("alice:7", "100%"), "export:alice%3A7:100%25"),
        ("{a}-{b}", ("x-y", "z"), "x%2Dy-z"),
        ("a:{a}", ("100%:{x}", None), "a:100%:{x}"),
        ("{a}:{b}", (None, True), "None:True"),
    ],
)
def test_values_read_as_they_are_where_nothing_can_be_mistaken(
    template: str, arguments: tuple[object, ...], name: str
) -> None:
    """So the name can be had by hand, for `holders`, in a shell or in another program."""
    assert NameTemplate(template, move).name(arguments, {}) == name


@pytest.mark.parametrize("template", ["{a}{b}", "x{a}{b}y", "{a}%{b}", "{a}:{b}{a}"])
def test_fields_that_cannot_be_told_apart_are_refused(template: str) -> None:
    """No encoding of the values could help: ("1", "23") and ("12", "3")."""
    with pytest.raises(ConfigurationError, match="different values would give the same name"):
        NameTemplate(template, move)


@pytest.mark.parametrize("template", ["{nobody}", "{}", "{0}", "{nobody.id}", "{unclosed", "closed}"])
def test_wrong_field_is_refused_at_decoration(template: str) -> None:
    """Not at the first call, at night."""
    with pytest.raises(ConfigurationError):
        NameTemplate(template, sell)


def test_message_lists_the_parameters() -> None:
    """Says what could have been meant."""
    with pytest.raises(ConfigurationError, match="it has: product_id, amount, rest, order, options"):
        NameTemplate("{product}", sell)


def test_generators_are_refused() -> None:
    """Their body runs after the call, when the lock would be free again."""

    def generate() -> Iterator[int]:
        yield 1

    async def generate_async() -> AsyncIterator[int]:
        yield 1

    for function in (generate, generate_async):
        with pytest.raises(ConfigurationError, match="Use `with` inside it"):
            NameTemplate("x", function)


def test_what_is_not_a_function_is_refused() -> None:
    """What another decorator has made of a method: it would no longer be one, or cannot be called at all."""
    decorators: list[Callable[[Any], Any]] = [staticmethod, classmethod, property]
    for decorated in [decorator(sell) for decorator in decorators]:
        kind = type(decorated).__name__
        with pytest.raises(ConfigurationError, match=f"a {kind} and not a function: put .*below the others"):
            NameTemplate("x", decorated)


def test_function_without_known_parameters_is_refused() -> None:
    """As many that are written in C; and one that wraps itself, whose layers are looked at once."""

    def unknown() -> None: ...

    def looped() -> None: ...

    unknown.__signature__ = "what it takes"  # type: ignore[attr-defined] # as a mistaken decorator does
    looped.__wrapped__ = looped  # type: ignore[attr-defined] # the same

    for function in (unknown, looped):
        with pytest.raises(ConfigurationError, match=r"cannot decorate .*Decorate a function that calls it"):
            NameTemplate("x", function)


def test_field_that_cannot_be_formatted_is_a_configuration_error() -> None:
    """An attribute that is missing only at the call."""
    with pytest.raises(ConfigurationError, match="cannot be formatted"):
        NameTemplate("{order.id}", sell).name((7,), {})


def test_wrong_arguments_raise_as_the_function_would() -> None:
    """A `TypeError`, before any lock is asked for."""
    with pytest.raises(TypeError, match="product_id"):
        NameTemplate("{product_id}", sell).name((), {})


class Shop:
    """Something callable, with fields."""

    async def __call__(self, product_id: int) -> None:
        """Be a coroutine function."""
        del product_id


async def sell_async(product_id: int) -> None:
    """Be a coroutine function."""
    del product_id


@wraps(sell_async)
def wrapper(product_id: int) -> Coroutine[Any, Any, None]:
    """Look like one."""
    return sell_async(product_id)


@wraps(wrapper)
def outer_wrapper(product_id: int) -> Coroutine[Any, Any, None]:
    """Wrap the wrapper."""
    return wrapper(product_id)


@pytest.mark.parametrize(
    ("function", "is_coroutine", "wraps_coroutine"),
    [
        (sell, False, False),
        (partial(sell, 7), False, False),
        (Order, False, False),
        (print, False, False),
        (sell_async, True, False),
        (partial(sell_async), True, False),
        (partial(partial(Shop())), True, False),
        (Shop(), True, False),
        (Shop().__call__, True, False),
        (wrapper, False, True),
        (partial(wrapper), False, True),
        (outer_wrapper, False, True),
        (lru_cache(wrapper), False, True),
    ],
)
def test_coroutine_functions_are_recognized(
    *, function: Callable[..., object], is_coroutine: bool, wraps_coroutine: bool
) -> None:
    """By themselves, and through what hides them."""
    template = NameTemplate("x", function)

    assert (template.is_coroutine, template.wraps_coroutine) == (is_coroutine, wraps_coroutine)


def test_task_that_a_function_returns_is_cancelled() -> None:
    """It has not run yet: the refusal can still prevent it."""

    async def main() -> None:
        ran = []

        async def work() -> None:
            ran.append(1)

        task = asyncio.ensure_future(work())
        with pytest.raises(ConfigurationError, match="object of type Task"):
            NameTemplate("x", sell).finished(task)
        await asyncio.wait([task])
        assert (ran, task.cancelled()) == ([], True)

    asyncio.run(main())


def test_awaitable_that_a_coroutine_returned_is_a_value() -> None:
    """A task that is to go on, for example: only coroutines and generators have certainly been forgotten."""

    async def main() -> None:
        task = asyncio.ensure_future(asyncio.sleep(0))
        assert NameTemplate("x", sell).finished(task, awaited=True) is task
        await task

    asyncio.run(main())


def test_message_does_not_show_the_arguments_of_a_partial() -> None:
    """They may be secrets."""
    with pytest.raises(ConfigurationError) as caught:
        NameTemplate("{nobody}", partial(sell, 4711))

    assert "4711" not in str(caught.value)
