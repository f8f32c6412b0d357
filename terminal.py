"""Where output goes: data to stdout, everything else to stderr, bars only where somebody watches."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console


def stdout() -> "Console":
    """The terminal, or plain text of a fixed width where stdout is not one. Rich heeds NO_COLOR."""
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=120)


def count_bar(label: str, total: int) -> Callable[[int], None]:
    """A progress bar on stderr that counts to `total`; nothing where stderr is no terminal."""
    done = 0
    tell = part_bar()

    def advance(count: int) -> None:
        nonlocal done
        done += count
        tell(label, done / total if total else 1.0)

    return advance


def part_bar() -> Callable[[str, float], None]:
    """A progress bar on stderr that hears a label and which part is done; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        return lambda _, __: None
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    bar = Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=1.0)
    bar.start()

    def tell(label: str, part: float) -> None:
        bar.update(task, description=label, completed=part)
        if part >= 1.0:
            bar.stop()

    return tell


def say(text: str) -> None:
    """A line on stderr."""
    click.echo(text, err=True)
