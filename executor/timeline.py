"""What happened when in a pass: fetches, waits and computing, layer by layer, and their picture."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..plans.picture import new_figure, save_figure
from .component import LoadedComponent
from .machine import Machine
from .resident import entries_of
from .slots import Span, SpanKind

_COLOURS = {SpanKind.fetch: "tab:blue", SpanKind.wait: "tab:red", SpanKind.compute: "tab:green"}


@contextmanager
def recorded(loaded: LoadedComponent) -> Generator[list[Span]]:
    """Fill a list with what happens to a component meanwhile.

    Its device is waited for after every layer, so that computing is timed and not its launch.
    """
    spans: list[Span] = []
    with ExitStack() as stack:
        for label, root in loaded.layers.items():
            for entry in entries_of(loaded.module.get_submodule(root)):
                for handle in _watch(entry, label, loaded.resident.machine, spans):
                    stack.callback(handle.remove)
        stack.callback(loaded.resident.record, None)
        loaded.resident.record(spans)
        yield spans


def _watch(entry: nn.Module, label: str, machine: Machine, spans: list[Span]) -> Sequence[RemovableHandle]:
    begun: list[float] = []

    def begin(_: nn.Module, __: object) -> None:
        begun.append(perf_counter())

    def end(_: nn.Module, __: object, ___: object) -> None:
        machine.synchronize()
        spans.append(Span(kind=SpanKind.compute, layer=label, begin_s=begun.pop(), end_s=perf_counter()))

    # After the layer has its weights, and before it gives them up.
    return entry.register_forward_pre_hook(begin), entry.register_forward_hook(end, prepend=True)


def draw_timelines(timelines: Mapping[str, Sequence[Span]], path: Path) -> None:
    """Draw each component's pass: a row per layer, in the order of use. Needs matplotlib.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    drawn = {name: _rows(spans) for name, spans in timelines.items() if spans}
    heights = [1 + 0.22 * len(rows) for rows in drawn.values()] or [1]
    figure = new_figure(10, sum(heights) + 0.5)
    grid = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, rows) in zip(grid, drawn.items(), strict=False):
        start = min(span.begin_s for spans in rows.values() for span in spans)
        for number, spans in enumerate(rows.values()):
            for place, (kind, colour) in enumerate(_COLOURS.items()):
                bars = [
                    ((span.begin_s - start) * 1e3, (span.end_s - span.begin_s) * 1e3)
                    for span in spans
                    if span.kind is kind
                ]
                axes.broken_barh(bars, (number - 0.4 + 0.27 * place, 0.27), color=colour)
        axes.set_yticks(range(len(rows)), rows, fontsize=7)
        axes.invert_yaxis()
        axes.set(xlabel="ms since the pass began", title=name)
        axes.grid(axis="x", alpha=0.3)
        for kind, colour in _COLOURS.items():
            axes.barh(0, 0, color=colour, label=kind)
        axes.legend(loc="upper right", fontsize=7)
    save_figure(figure, path)


def _rows(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Spans by layer, in the order in which layers computed; what only was fetched comes last."""
    computed = [span for span in spans if span.kind is SpanKind.compute]
    rows: dict[str, list[Span]] = {}
    for span in (*sorted(computed, key=lambda span: span.begin_s), *spans):
        rows.setdefault(span.layer, [])
    for span in spans:
        rows[span.layer].append(span)
    return rows
