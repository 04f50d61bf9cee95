"""Lock names from the arguments of decorated functions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest

from lockkit.errors import ConfigurationError
from lockkit.naming import NameTemplate


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
    ],
)
def test_name_is_formatted_with_the_bound_arguments(
    template: str, arguments: tuple[int, ...], keywords: dict[str, object], name: str
) -> None:
    """Positional, keyword and default arguments alike."""
    assert NameTemplate(template, sell).name(arguments, keywords) == name


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


def test_field_that_cannot_be_formatted_is_a_configuration_error() -> None:
    """An attribute that is missing only at the call."""
    with pytest.raises(ConfigurationError, match="cannot be formatted"):
        NameTemplate("{order.id}", sell).name((7,), {})


def test_wrong_arguments_raise_as_the_function_would() -> None:
    """A `TypeError`, before any lock is asked for."""
    with pytest.raises(TypeError, match="product_id"):
        NameTemplate("{product_id}", sell).name((), {})
