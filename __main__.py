"""The command line. Data goes to stdout and everything else to stderr.

Exit codes: 0 fits, or done; 1 the execution failed, or would mix devices; 2 bad usage or input; 3 refused, nothing
fits; 4 drifted, the plan's facts no longer hold. What a command needs is imported when it runs, so that help is quick.
"""

import gc
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from . import __version__
from .arguments import PATH, planning_options
from .plans.errors import DeviceMismatchError, DriftError, InputError, PlacewiseError, RefusedError
from .terminal import count_bar, part_bar, say, stdout

if TYPE_CHECKING:
    from .options import Request
    from .plans.document import Plan

_GC_THRESHOLD = 100_000

EXIT_FAILED, EXIT_INPUT, EXIT_REFUSED, EXIT_DRIFTED = 1, 2, 3, 4


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, package_name="placewise")
def cli() -> None:
    """Plan where the weights of a PyTorch pipeline rest, before anything is loaded.

    \b
    Exit codes:
      0  fits, or done
      1  the execution failed, or would mix devices
      2  bad usage or input
      3  refused: nothing fits
      4  drifted: the plan's facts no longer hold
    """


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON, for --machine elsewhere.")
@click.argument("model", type=PATH, required=False)
def facts(model: Path | None, as_json: bool) -> None:
    """Measure this machine: host memory, accelerators, and the disk that holds MODEL."""
    from . import api

    machine = api.measure(model)
    if as_json:
        click.echo(machine.model_dump_json(indent=2))
    else:
        from .plans.facts_text import print_machine

        print_machine(machine, stdout())


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print the inventory as JSON.")
@click.argument("path", type=PATH)
def inspect(path: Path, as_json: bool) -> None:
    """Show what a checkpoint holds, from its headers alone."""
    from .models.pipeline import read_pipeline
    from .plans.pipeline import Workload

    pipeline = read_pipeline(path, workload=Workload())
    if as_json:
        click.echo(pipeline.model_dump_json(indent=2))
    else:
        from .plans.text import print_pipeline

        print_pipeline(pipeline, stdout())


@cli.command()
@click.argument("path", type=PATH)
@click.option(
    "-o", "--output", type=PATH, help="Write the plan to this file; those of several machines to this folder."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON instead of text.")
@planning_options
def plan(path: Path, output: Path | None, as_json: bool, trace: bool, **given: object) -> None:
    """Plan the model at PATH and print the plan. Nothing is loaded.

    PATH is a safetensors file, or the folder of one, of a transformers model or of a diffusers pipeline. With facts
    of several machines there is one plan for each, and a table of them.
    """
    from . import options
    from .planner.compile import compile_plan
    from .plans.codec import plan_to_json, write_file

    asked = options.request_of(path, trace=say if trace else None, given=given)
    if len(asked.machines) > 1:
        _plan_hosts(asked, output, as_json=as_json)
        return
    made = compile_plan(asked.pipeline, asked.machine, asked.policy, asked.workload, version=__version__)
    if output is not None:
        write_file(output, plan_to_json(made))
    _show(made, as_json=as_json)


@cli.command()
@click.argument("path", type=PATH)
@click.option("-o", "--output", type=PATH, help="Draw the picture to this .png or .svg file.")
@click.option("--points", type=click.IntRange(2, 64), default=8, show_default=True, help="Device sizes to plan for.")
@planning_options
def frontier(path: Path, output: Path | None, points: int, trace: bool, **given: object) -> None:
    """Print what memory buys: the cost of a request over device and host memory, up to the machine's own."""
    from . import options
    from .planner.frontier import frontier as sweep
    from .planner.frontier import grid_size
    from .planner.text import draw_frontier, print_frontier

    asked = options.request_of(path, trace=say if trace else None, given=given)
    bar = count_bar("planning", grid_size(asked.machine, points))
    found = sweep(
        asked.pipeline,
        asked.machine,
        asked.policy,
        asked.workload,
        steps=points,
        version=__version__,
        progress=bar,
    )
    print_frontier(found, stdout())
    if output is not None:
        draw_frontier(found, output, title=asked.pipeline.name)
        say(f"drawn to {output}")


@cli.command()
@click.argument("model", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print the rates as JSON.")
def calibrate(model: Path, as_json: bool) -> None:
    """Measure this machine's rates in some seconds: the disk that holds MODEL, memory, links, compute.

    They are kept for later plans on this machine, and for this disk.
    """
    from .planner.calibrating.cache import save_calibration
    from .planner.calibrating.calibrate import calibrate as measure
    from .planner.measuring.accelerators import measure_accelerators
    from .plans.calibration_text import print_calibration

    bar = part_bar()
    found = measure(model, measure_accelerators(), progress=bar)
    file = save_calibration(found)
    if as_json:
        click.echo(found.model_dump_json(indent=2))
    else:
        print_calibration(found, stdout())
    say(f"kept in {file}")


@cli.command()
@click.argument("plan_file", metavar="PLAN", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def show(plan_file: Path, as_json: bool) -> None:
    """Print a plan that was written before."""
    from .plans.codec import read_plan

    _show(read_plan(plan_file), as_json=as_json)


@cli.command()
@click.argument("plan_file", metavar="PLAN", type=PATH)
def explain(plan_file: Path) -> None:
    """Print a plan with its reasons, and what more of each axis would buy: by planning again with 1 GiB more of it."""
    from .planner.text import print_worths
    from .planner.worth import worths
    from .plans.codec import read_plan

    made = read_plan(plan_file)
    _show(made, as_json=False)
    print_worths(worths(made), stdout())


@cli.command()
@click.argument("before", type=PATH)
@click.argument("after", type=PATH)
def diff(before: Path, after: Path) -> None:
    """Print what moved from plan BEFORE to plan AFTER, what that changes, and what changed beneath."""
    from .plans.codec import read_plan
    from .plans.diff import diff_plans
    from .plans.diff_text import print_difference

    print_difference(diff_plans(read_plan(before), read_plan(after)), stdout())


@cli.command()
@click.argument("plan_file", metavar="PLAN", type=PATH)
@click.option("--model", type=PATH, default=Path(), help="The path that was planned.  [default: this folder]")
@click.option("--devices", is_flag=True, help="Find operations on two devices instead, on tensors without data.")
@click.option("--at-rest", is_flag=True, help="With --devices: weights answer where they rest, as in other runtimes.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def check(plan_file: Path, model: Path, devices: bool, at_rest: bool, as_json: bool) -> None:
    """Tell whether a plan's facts still hold: the checkpoint, the host, the accelerators. Names each that changed.

    With --devices each component makes a sample pass, on devices that need not be here and before anything is loaded,
    and each operation that mixes two devices is named.
    """
    from . import api
    from .plans.codec import read_plan

    made = read_plan(plan_file)
    if at_rest and not devices:
        raise InputError("--at-rest goes with --devices")
    if devices:
        _check_devices(made, plan_file, model, at_rest=at_rest, as_json=as_json)
        return
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
    say(f"{plan_file}: all facts hold")


@cli.command()
@click.argument("plan_file", metavar="PLAN", type=PATH)
@click.option("--model", type=PATH, default=Path(), help="The path that was planned.  [default: this folder]")
@click.option("--passes", type=click.IntRange(1), default=1, show_default=True, help="Forwards of each component.")
@click.option("--report", "in_full", is_flag=True, help="Print every segment too, and what moving weights took.")
@click.option("--timeline", type=PATH, help="Draw fetch, wait and compute of the last pass to this .png or .svg file.")
@click.option("--json", "as_json", is_flag=True, help="Print the report, which is the full one, as JSON.")
def run(plan_file: Path, model: Path, passes: int, in_full: bool, timeline: Path | None, as_json: bool) -> None:
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
    pipeline = api.load(made, model, progress=count_bar("loading", total))
    ran = run_samples(pipeline, passes, record=timeline is not None)
    report = report_run(pipeline, ran)
    if as_json:
        click.echo(report.model_dump_json(indent=2))
    else:
        print_report(report, stdout(), in_full=in_full)
    if timeline is not None:
        from .executor.timeline import draw_timelines

        draw_timelines({name: one.spans for name, one in ran.items()}, timeline)
        say(f"drawn to {timeline}")


@cli.command()
def demo() -> None:
    """Plan and run a real sentence encoder and a small pipeline, and show that no bit of what they give changes."""
    from .demo import run_demo

    run_demo(stdout())


@cli.command()
def schema() -> None:
    """Print the JSON Schema of the plan document."""
    from .plans.schema import schema_json

    click.echo(schema_json(), nl=False)


def _plan_hosts(asked: "Request", output: Path | None, *, as_json: bool) -> None:
    """Plan for several machines, and end with the code for refused where one of the plans is."""
    from .planner.hosts import plan_hosts
    from .planner.text import print_hosts
    from .plans.codec import plan_to_json, write_file

    bar = count_bar("planning", len(asked.machines))
    plans = plan_hosts(asked.pipeline, asked.machines, asked.policy, asked.workload, version=__version__, progress=bar)
    if output is not None:
        for name, made in plans.items():
            write_file(output / f"{name}.json", plan_to_json(made))
    if as_json:
        import json

        click.echo(json.dumps({name: made.model_dump(mode="json") for name, made in plans.items()}, indent=2))
    else:
        print_hosts(plans, stdout())
    if any(made.verdict.kind == "refused" for made in plans.values()):
        raise SystemExit(EXIT_REFUSED)


def _check_devices(made: "Plan", plan_file: Path, model: Path, *, at_rest: bool, as_json: bool) -> None:
    from . import api

    found = api.check_devices(made, model, at_rest=at_rest)
    if as_json:
        import json
        from dataclasses import asdict

        click.echo(json.dumps(asdict(found), indent=2))
    else:
        for each in found.mixed:
            click.echo(str(each))
    for part, why in found.unchecked.items():
        say(f"{part} could not be checked: {why}")
    if found.mixed:
        raise DeviceMismatchError(
            f"{plan_file}: {len(found.mixed)} operations are on two devices",
            hint="make what they take where the component computes, not where its weights rest",
        )
    if found.unchecked:
        raise InputError(
            f"{plan_file}: could not be checked: {', '.join(found.unchecked)}",
            hint="placewise.check_devices(plan, model, request, modules={name: module}) runs code of your own",
        )
    say(f"{plan_file}: no operation is on two devices")


def _show(made: "Plan", *, as_json: bool) -> None:
    """Print a plan, and end with the code of its verdict."""
    if as_json:
        from .plans.codec import plan_to_json

        click.echo(plan_to_json(made), nl=False)
    else:
        from .plans.text import print_plan

        print_plan(made, stdout())
    if made.verdict.kind == "refused":
        raise SystemExit(EXIT_REFUSED)


def _fail(error: PlacewiseError, code: int) -> NoReturn:
    click.echo(f"error: {error}", err=True)
    raise SystemExit(code)


def main() -> None:
    """Run the command line, and turn errors into one message and an exit code."""
    # Imports make many objects that stay. Looking through them again and again takes a twelfth of what planning does.
    gc.set_threshold(_GC_THRESHOLD)
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
