"""The difference of two plans, and what a reader is told of it."""

from io import StringIO

from placewise.plans.diff import diff_plans
from placewise.plans.diff_text import print_difference
from placewise.plans.document import Plan
from placewise.plans.units import GIB
from rich.console import Console

from .questions import component_of, cuda, machine_of, plan_of, stack_of

DIT = component_of("transformer", stack_of("blocks", *[GIB] * 8), fixed=GIB, passes=50, activations=0)
VAE = component_of("vae", fixed=GIB, activations=0)


def plan(device: int, host: int = 64) -> Plan:
    return plan_of(machine_of(host * GIB, cuda(device * GIB)), DIT, VAE)


def told(before: Plan, after: Plan) -> str:
    text = StringIO()
    print_difference(diff_plans(before, after), Console(file=text, width=100))
    return text.getvalue()


def test_equal_plans_do_not_differ() -> None:
    assert told(plan(12), plan(12)) == "the plans do not differ\n"


def test_only_what_moved_is_listed_with_the_cause_and_the_figures() -> None:
    difference = diff_plans(plan(9), plan(10))
    assert difference.causes == ("cuda:0: usable 8.10 GiB -> 9.00 GiB",)
    assert sum(move.bytes for move in difference.moves) < DIT.fixed_bytes + 8 * GIB
    assert {move.after.split(" on ")[1] for move in difference.moves} == {"cuda:0"}
    assert any(figure.startswith("copied to devices per request: ") for figure in difference.figures)


def test_a_refusal_is_a_difference_of_the_verdict() -> None:
    difference = diff_plans(plan(12), plan(1))
    assert "verdict: fits -> refused" in difference.figures
    assert {move.after for move in difference.moves} == {"not there"}


def test_what_a_plan_was_made_from_is_named() -> None:
    other = plan_of(machine_of(64 * GIB, cuda(12 * GIB)), DIT.model_copy(update={"passes": 4}), VAE)
    assert "pipeline: components differ" in diff_plans(plan(12), other).causes


def test_the_text_names_runs_of_layers() -> None:
    text = told(plan(6), plan(12))
    assert "Beneath\n  cuda:0: usable " in text
    assert "transformer.blocks[" in text
    assert " -> device/always on cuda:0" in text


def test_a_move_within_the_host_is_listed() -> None:
    text = told(plan(6, host=64), plan(6, host=1))
    assert "pageable/" in text
    assert "-> mapped/" in text
