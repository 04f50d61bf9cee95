"""The runner of the documentation notices a page that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.markdown import Block, PageError, blocks, stories
from tests.docs.story import Story, assert_output

PAGE = Path("page.md")


def read(text: str) -> list[Block]:
    """The blocks of a page."""
    return blocks(PAGE, text)


def run(text: str, directory: Path) -> None:
    """Runs all stories of a page in one directory."""
    for story in stories(read(text)):
        teller = Story(directory)
        for block in story:
            teller.tell(block)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```\ncode\n```\n", "must name its language"),
        ("```python\ncode\n", "never closed"),
        ("<!-- run: never -->\n```python\n```\n", "cannot read"),
        ("<!-- run: continue -->\n\n```python\n```\n", "no block follows"),
    ],
)
def test_unreadable_page_is_refused(text: str, message: str) -> None:
    """A block that could be missed is an error."""
    with pytest.raises(PageError, match=message):
        read(text)


def test_block_that_continues_nothing_is_refused() -> None:
    """The first block of a page starts a story."""
    with pytest.raises(PageError, match="nothing stands before it"):
        stories(read("<!-- run: continue -->\n```python\n```\n"))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\n1 / 0\n```\n", ZeroDivisionError),
        ("```ruby\nputs 1\n```\n", PageError),
        ("```text\ncode?\n```\n", PageError),
        ("<!-- run: drawing -->\n```python\n1\n```\n", PageError),
        ("```console\nls\n```\n", PageError),
        ("```console\n$ false\n```\n", AssertionError),
        ("```console\n$ echo a\nb\n```\n", AssertionError),
        ("```python\nprint(1)\n```\n<!-- run: output -->\n```text\n2\n```\n", AssertionError),
        ("<!-- run: by noxfile.py -->\n```console\n$ not there\n```\n", AssertionError),
        ("```cron\n* * * * * exit 3\n```\n", AssertionError),
    ],
)
def test_block_that_does_not_do_what_it_says_fails(text: str, error: type[Exception], tmp_path: Path) -> None:
    """Wrong code, wrong output, unknown languages: none passes."""
    with pytest.raises(error):
        run(text, tmp_path)


def test_story_shares_namespace_directory_and_files(tmp_path: Path) -> None:
    """What continues sees what was there before."""
    run(
        "<!-- run: file a.txt -->\n```text\nhello\n```\n"
        "<!-- run: continue -->\n```console\n$ cat a.txt\nhello\n```\n"
        "<!-- run: continue -->\n```python\nx = 1\n```\n"
        "text\n"
        "<!-- run: continue -->\n```python\nx += 1\nprint(x)\n```\n"
        "<!-- run: output -->\n```text\n2\n```\n",
        tmp_path,
    )


def test_new_story_starts_afresh(tmp_path: Path) -> None:
    """Without the comment a block sees nothing of the one before."""
    with pytest.raises(NameError):
        run("```python\nx = 1\n```\n```python\nx\n```\n", tmp_path)


def test_traceback_names_the_line_of_the_page(tmp_path: Path) -> None:
    """Who breaks a page is led to it."""
    with pytest.raises(ZeroDivisionError) as caught:
        run("text\n\n```python\nx = 0\n1 / x\n```\n", tmp_path)

    assert caught.traceback[-1].lineno + 1 == 5
    assert str(caught.traceback[-1].path) == str(PAGE)


def test_dots_stand_for_anything_but_nothing_else_does() -> None:
    """Expected output is compared in full."""
    (block,) = read("```text\n```\n")

    assert_output(block, expected="a ... c\n", printed="a b\nb c  \n")
    with pytest.raises(AssertionError):
        assert_output(block, expected="a\n", printed="a\nb\n")
