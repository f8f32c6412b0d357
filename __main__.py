"""The command line. Data goes to stdout and everything else to stderr.

Exit codes: 0 fits, or done; 1 the execution failed; 2 bad usage or input; 3 refused, nothing fits; 4 drifted, the
plan's facts no longer hold. What a command needs is imported when it runs, so that help is quick.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from .plans.errors import DriftError, InputError, PlacewiseError, RefusedError
from .plans.units import parse_bytes

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
    from .planner.facts import measure_machine

    machine = measure_machine(model)
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
@click.option("--policy", "policy_name", default="auto", show_default=True, help="A preset, or a policy's JSON file.")
@click.option("--reserve", type=_SIZE, help="Host memory to keep free, instead of the policy's.")
@click.option("--override", "overrides", multiple=True, metavar="PART:KEY=VALUE,...",
              help="Such as transformer.blocks:home=mapped or vae:compute_device=cpu.")  # fmt: skip
@click.option("--machine", "machine_file", type=_PATH, help="Facts of another machine, from `facts --json`.")
@click.option("--host-memory", type=_SIZE, help="Available host memory of a machine that is not here.")
@click.option("--device-memory", type=_SIZE, help="Free memory of an accelerator that is not here.")
@click.option("--device", help="That accelerator's name [default: cuda:0]; sim:0 is simulated; cpu means none.")
@click.option("--steps", type=click.IntRange(0), help="Sampling steps of a request.")
@click.option("--tokens", type=click.IntRange(1), help="Tokens that a request generates.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Batch size of a request.")
@click.option("--height", type=click.IntRange(1), help="Height in pixels.")
@click.option("--width", type=click.IntRange(1), help="Width in pixels.")
@click.option("--frames", type=click.IntRange(1), help="Frames of video.")
@click.option("--passes", "passes", multiple=True, metavar="COMPONENT=N", help="Forwards per request.")
@click.option("--activations", multiple=True, metavar="COMPONENT=SIZE", help="Peak activation memory of one pass.")
def plan(
    path: Path,
    output: Path | None,
    as_json: bool,
    policy_name: str,
    reserve: int | None,
    overrides: tuple[str, ...],
    machine_file: Path | None,
    host_memory: int | None,
    device_memory: int | None,
    device: str | None,
    passes: tuple[str, ...],
    activations: tuple[str, ...],
    **workload: int | None,
) -> None:
    """Plan the model at PATH and print the plan. Nothing is loaded.

    PATH is a safetensors file, or the folder of one, of a transformers model or of a diffusers pipeline.
    """
    from . import api, options
    from .plans.codec import plan_to_json

    counts = options.pairs_of(passes, "--passes")
    sizes = options.pairs_of(activations, "--activations")
    made = api.plan(
        path,
        machine=options.machine_of(path, machine_file, host_memory, device_memory, device),
        policy=options.policy_of(policy_name, reserve, overrides),
        workload=options.workload_of(workload),
        passes={name: options.whole_number(count, "--passes") for name, count in counts.items()},
        activation_bytes={name: parse_bytes(size) for name, size in sizes.items()},
    )
    if output is not None:
        options.write_whole(output, plan_to_json(made))
    _show(made, as_json=as_json)


@cli.command()
@click.argument("plan_file", metavar="PLAN", type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def show(plan_file: Path, as_json: bool) -> None:
    """Print a plan that was written before."""
    from .plans.codec import read_plan

    _show(read_plan(plan_file), as_json=as_json)


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
    click.echo(f"{plan_file}: all facts hold", err=True)


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
    """A progress bar on stderr that counts bytes; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        return lambda _: None
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    bar = Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task(label, total=total)
    bar.start()

    def advance(count: int) -> None:
        bar.advance(task, count)
        if bar.finished:
            bar.stop()

    return advance


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
