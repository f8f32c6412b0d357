"""What is committed and can be made again: example plans, their dry runs, and the schema that they keep to."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from placewise.plans.codec import plan_from_json, plan_to_json, read_plan
from placewise.plans.document import Plan
from placewise.plans.errors import PlanFormatError
from placewise.plans.schema import schema_json

from .example_plans import DRY_RUNS, EXAMPLES, PLANS, REPOSITORY, dry_run, example_plans

SCHEMA = REPOSITORY / "plans" / "schema.json"
NAMES = tuple(example.name for example in EXAMPLES)


@pytest.fixture(scope="module")
def made() -> dict[str, Plan]:
    return {example.name: plan for example, plan in example_plans()}


def test_the_committed_files_are_these_examples() -> None:
    assert {path.stem for path in PLANS.iterdir()} == set(NAMES)
    assert {path.stem for path in DRY_RUNS.iterdir()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_what_the_planner_makes_today(name: str, made: dict[str, Plan]) -> None:
    """After a change of the planner, `make plans` writes them again, and the difference is read like code."""
    assert plan_to_json(made[name]) == (PLANS / f"{name}.json").read_text()
    assert dry_run(made[name]) == (DRY_RUNS / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_read_and_keeps_to_the_schema(name: str) -> None:
    file = PLANS / f"{name}.json"
    assert plan_to_json(read_plan(file)) == file.read_text()
    jsonschema.validate(json.loads(file.read_text()), json.loads(SCHEMA.read_text()))


def test_the_committed_schema_is_that_of_the_types() -> None:
    assert SCHEMA.read_text() == schema_json(), "`make schema` writes it again; say so in the changelog"


def test_the_schema_refuses_what_the_reader_refuses(made: dict[str, Plan]) -> None:
    document = json.loads(plan_to_json(made[NAMES[0]]))
    del document["phases"]
    with pytest.raises(jsonschema.ValidationError, match="'phases' is a required property"):
        jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    with pytest.raises(PlanFormatError, match="the plan: Field required in 'phases'"):
        plan_from_json(json.dumps(document))


def test_a_server_reads_a_plan_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from placewise.plans.codec import read_plan; "
        f"plan = read_plan(Path({str(PLANS / (NAMES[0] + '.json'))!r})); "
        "assert 'torch' not in sys.modules; print(plan.verdict.kind)"
    )
    env = {"PYTHONPATH": str(REPOSITORY / ".src")}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, cwd=tmp_path
    )
    assert ran.stdout == "fits\n"


def test_the_readme_shows_a_real_dry_run() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    shown = readme.split("```text\nh3 under")[1].split("\n  ...\n")
    real = (DRY_RUNS / "h3-12gib-device-32gib-host.txt").read_text()
    assert f"h3 under{shown[0]}" in real
    assert shown[1].split("```")[0].strip() in real
