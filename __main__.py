"""The command line. Data goes to stdout and everything else to stderr.

Exit codes: 0 fits, or done; 1 the execution failed; 2 bad usage or input; 3 refused, nothing fits; 4 drifted, the
plan's facts no longer hold. What a command needs is imported when it runs, so that help is quick.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from .plans.errors import DriftError, InputError, PlacewiseError, RefusedError
from .plans.units import parse_bytes, parse_rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from .plans.document import Plan

EXIT_FAILED, EXIT_INPUT, EXIT_REFUSED, EXIT_DRIFTED = 1, 2, 3, 4

_PATH = click.Path(path_type=Path)


class Size(click.ParamType[int]):
    """A number of bytes such as `12GiB`."""

    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the size; anything else is a usage error."""
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except InputError as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)


_SIZE = Size()


def _planning_options(command: "Callable[..., None]") -> "Callable[..., None]":
    """The options that say what to plan, for which machine, and how."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class Rate(click.ParamType[int]):
    """A number of bytes per second such as `2.5GB/s`."""

    name = "rate"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the rate; anything else is a usage error."""
        if isinstance(value, int):
            return value
        try:
            return parse_rate(value)
        except InputError as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)


_RATE = Rate()
_OPTIONS = (
    click.option("--policy", default="auto", show_default=True, help="A preset, or a policy's JSON file."),
    click.option("--reserve", type=_SIZE, help="Host memory to keep free, instead of the policy's."),
    click.option(
        "--override",
        multiple=True,
        metavar="PART:KEY=VALUE,...",
        help="Such as transformer.blocks:home=mapped or vae:compute_device=cpu.",
    ),
    click.option("--machine", "facts", type=_PATH, help="Facts of another machine, from `facts --json`."),
    click.option("--host-memory", type=_SIZE, help="Available host memory of a machine that is not here."),
    click.option("--device-memory", type=_SIZE, help="Free memory of an accelerator that is not here."),
    click.option("--device", help="Its name  [default: cuda:0]; sim:0 is simulated, cpu means none."),
    click.option("--disk", "disk_rate", type=_RATE, help="Cold read rate of a disk that is not here: 2GB/s."),
    click.option("--link", "link_rate", type=_RATE, help="Copy rate to an accelerator that is not here: 12GB/s."),
    click.option("--steps", type=click.IntRange(0), help="Sampling steps of a request."),
    click.option("--tokens", type=click.IntRange(1), help="Tokens that a request generates."),
    click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Batch size of a request."),
    click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Processes on this host."),
    click.option("--height", type=click.IntRange(1), help="Height in pixels."),
    click.option("--width", type=click.IntRange(1), help="Width in pixels."),
    click.option("--frames", type=click.IntRange(1), help="Frames of video."),
    click.option("--passes", multiple=True, metavar="COMPONENT=N", help="Forwards per request."),
    click.option("--activations", multiple=True, metavar="COMPONENT=SIZE", help="Peak activation memory of a pass."),
    click.option("--trace", is_flag=True, help="Trace activations and FLOPs; takes seconds, and imports torch."),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="placewise")
def cli() -> None:
    """Plan where the weights of a PyTorch pipeline rest, before anything is loaded.

    \b
    Exit codes:
      0  fits, or done
      1  the execution failed
      2  bad usage or input
      3  refused: nothing fits
      4  drifted: the plan's facts no longer hold
    """


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON, for --machine elsewhere.")
@click.argument("model", type=_PATH, required=False)
def facts(model: Path | None, as_json: bool) -> None:
    """Measure this machine: host memory, accelerators, and the disk that holds MODEL."""
    from .options import with_calibration
    from .planner.facts import measure_machine

    machine = measure_machine(model)
    if model is not None:
        machine = with_calibration(machine, model)
    if as_json:
        click.echo(machine.model_dump_json(indent=2))
    else:
        from .plans.facts_text import print_machine

        print_machine(machine, _stdout())


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print the inventory as JSON.")
@click.argument("path", type=_PATH)
def inspect(path: Path, as_json: bool) -> None:
    """Show what a checkpoint holds, from its headers alone."""
    from .models.pipeline import read_pipeline
    from .plans.pipeline import Workload

    pipeline = read_pipeline(path, workload=Workload())
    if as_json:
        click.echo(pipeline.model_dump_json(indent=2))
    else:
        from .plans.text import print_pipeline

        print_pipeline(pipeline, _stdout())


@cli.command()
@click.argument("path", type=_PATH)
@click.option("-o", "--output", type=_PATH, help="Write the plan to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON instead of text.")
@_planning_options
def plan(path: Path, output: Path | None, as_json: bool, trace: bool, **given: object) -> None:
    """Plan the model at PATH and print the plan. Nothing is loaded.

    PATH is a safetensors file, or the folder of one, of a transformers model or of a diffusers pipeline.
    """
    from . import api, options
    from .planner.compile import compile_plan
    from .plans.codec import plan_to_json

    asked = options.request_of(path, trace=_say if trace else None, given=given)
    made = compile_plan(asked.pipeline, asked.machine, asked.policy, asked.workload, version=api.version())
    if output is not None:
        options.write_whole(output, plan_to_json(made))
    _show(made, as_json=as_json)


@cli.command()
@click.argument("path", type=_PATH)
@click.option("-o", "--output", type=_PATH, help="Draw the picture to this .png or .svg file.")
@click.option("--points", type=click.IntRange(2, 64), default=8, show_default=True, help="Device sizes to plan for.")
@_planning_options
def frontier(path: Path, output: Path | None, points: int, trace: bool, **given: object) -> None:
    """Print what memory buys: the cost of a request over device and host memory, up to the machine's own."""
    from . import api, options
    from .planner.frontier import frontier as sweep
    from .planner.frontier import grid_size
    from .planner.text import draw_frontier, print_frontier

    asked = options.request_of(path, trace=_say if trace else None, given=given)
    bar = _bar("planning", grid_size(asked.machine, points))
    found = sweep(
        asked.pipeline,
        asked.machine,
        asked.policy,
        asked.workload,
        steps=points,
        version=api.version(),
        progress=bar,
    )
    print_frontier(found, _stdout())
    if output is not None:
        draw_frontier(found, output, title=asked.pipeline.name)
        _say(f"drawn to {output}")


@cli.command()
@click.argument("model", type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print the rates as JSON.")
def calibrate(model: Path, as_json: bool) -> None:
    """Measure this machine's rates in some seconds: the disk that holds MODEL, memory, links, compute.

    They are kept for later plans on this machine, and for this disk.
    """
    from .planner.accelerators import measure_accelerators
    from .planner.calibrate import calibrate as measure
    from .planner.calibration_cache import save_calibration
    from .plans.calibration_text import print_calibration

    bar = _part_bar()
    found = measure(model, measure_accelerators(), progress=bar)
    file = save_calibration(found)
    if as_json:
        click.echo(found.model_dump_json(indent=2))
    else:
        print_calibration(found, _stdout())
    _say(f"kept in {file}")


@cli.command()
@click.argument("plan_file", metavar="PLAN", type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def show(plan_file: Path, as_json: bool) -> None:
    """Print a plan that was written before."""
    from .plans.codec import read_plan

    _show(read_plan(plan_file), as_json=as_json)


@cli.command()
@click.argument("plan_file", metavar="PLAN", type=_PATH)
def explain(plan_file: Path) -> None:
    """Print a plan with its reasons, and what more of each axis would buy: by planning again with 1 GiB more of it."""
    from .planner.text import print_worths
    from .planner.worth import worths
    from .plans.codec import read_plan

    made = read_plan(plan_file)
    _show(made, as_json=False)
    print_worths(worths(made), _stdout())


@cli.command()
@click.argument("before", type=_PATH)
@click.argument("after", type=_PATH)
def diff(before: Path, after: Path) -> None:
    """Print what moved from plan BEFORE to plan AFTER, what that changes, and what changed beneath."""
    from .plans.codec import read_plan
    from .plans.diff import diff_plans
    from .plans.diff_text import print_difference

    print_difference(diff_plans(read_plan(before), read_plan(after)), _stdout())


@cli.command()
@click.argument("plan_file", metavar="PLAN", type=_PATH)
@click.option("--model", type=_PATH, default=Path(), help="The path that was planned.  [default: this folder]")
@click.option("--json", "as_json", is_flag=True, help="Print the changed facts as JSON.")
def check(plan_file: Path, model: Path, as_json: bool) -> None:
    """Tell whether a plan's facts still hold: the checkpoint, the host, the accelerators. Names each that changed."""
    from . import api
    from .plans.codec import read_plan

    made = read_plan(plan_file)
    changes = api.check(made, model)
    if as_json:
        import json

        rows = [{"fact": change.fact, "planned": change.planned, "now": change.now} for change in changes]
        click.echo(json.dumps(rows, indent=2))
    else:
        for change in changes:
            click.echo(f"{change.fact}: planned {change.planned}, now {change.now}")
    if changes:
        raise DriftError(f"{plan_file}: {len(changes)} facts have changed", hint="plan again with `placewise plan`")
    _say(f"{plan_file}: all facts hold")


@cli.command()
@click.argument("plan_file", metavar="PLAN", type=_PATH)
@click.option("--model", type=_PATH, default=Path(), help="The path that was planned.  [default: this folder]")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def run(plan_file: Path, model: Path, as_json: bool) -> None:
    """Execute a plan: load it, check every home, run sample inputs, and print predicted against observed."""
    from . import api
    from .plans.codec import read_plan

    made = read_plan(plan_file)
    if made.verdict.kind == "refused":
        raise RefusedError(f"{plan_file}: the plan is refused: nothing fits", hint="`placewise show` prints why")
    if changes := api.check(made, model):
        named = "; ".join(f"{change.fact}: planned {change.planned}, now {change.now}" for change in changes)
        raise DriftError(f"{plan_file}: {named}", hint="plan again with `placewise plan`")
    from .executor.report import report_run, run_samples
    from .executor.report_text import print_report

    total = sum(segment.packed_bytes for placement in made.placements for segment in placement.segments)
    pipeline = api.load(made, model, progress=_bar("loading", total))
    report = report_run(pipeline, run_samples(pipeline))
    if as_json:
        click.echo(report.model_dump_json(indent=2))
    else:
        print_report(report, _stdout())


@cli.command()
def demo() -> None:
    """Plan and run a real sentence encoder three ways, and show that its embeddings are the same to the bit."""
    from .demo import run_demo

    run_demo(_stdout())


@cli.command()
def schema() -> None:
    """Print the JSON Schema of the plan document."""
    from .plans.schema import schema_json

    click.echo(schema_json(), nl=False)


def _show(made: "Plan", *, as_json: bool) -> None:
    """Print a plan, and end with the code of its verdict."""
    if as_json:
        from .plans.codec import plan_to_json

        click.echo(plan_to_json(made), nl=False)
    else:
        from .plans.text import print_plan

        print_plan(made, _stdout())
    if made.verdict.kind == "refused":
        raise SystemExit(EXIT_REFUSED)


def _stdout() -> "Console":
    """The terminal, or plain text of a fixed width where stdout is not one. Rich heeds NO_COLOR."""
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=120)


def _bar(label: str, total: int) -> "Callable[[int], None]":
    """A progress bar on stderr that counts to `total`; nothing where stderr is no terminal."""
    done = 0
    tell = _part_bar()

    def advance(count: int) -> None:
        nonlocal done
        done += count
        tell(label, done / total if total else 1.0)

    return advance


def _part_bar() -> "Callable[[str, float], None]":
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


def _say(text: str) -> None:
    """A line on stderr."""
    click.echo(text, err=True)


def _fail(error: PlacewiseError, code: int) -> NoReturn:
    click.echo(f"error: {error}", err=True)
    raise SystemExit(code)


def main() -> None:
    """Run the command line, and turn errors into one message and an exit code."""
    try:
        cli.main(standalone_mode=True)
    except InputError as error:
        _fail(error, EXIT_INPUT)
    except RefusedError as error:
        _fail(error, EXIT_REFUSED)
    except DriftError as error:
        _fail(error, EXIT_DRIFTED)
    except PlacewiseError as error:
        _fail(error, EXIT_FAILED)


if __name__ == "__main__":
    main()
