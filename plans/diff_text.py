"""The difference of two plans, for people."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .diff import Difference
from .units import format_bytes


def print_difference(difference: Difference, console: Console) -> None:
    """Print causes, moves and figures; or that there is no difference."""
    if not (difference.causes or difference.moves or difference.figures):
        console.print("the plans do not differ")
        return
    for title, lines in (("Beneath", difference.causes), ("Figures", difference.figures)):
        if lines:
            console.print(Text(title, style="bold"))
            for line in lines:
                console.print(f"  {line}")
    if difference.moves:
        console.print(Text("Moved", style="bold"))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False)
        for move in difference.moves:
            table.add_row(move.subject, format_bytes(move.bytes), f"{move.before} -> {move.after}")
        console.print(table)
