import json
from pathlib import Path

import pytest
from placewise.plans.codec import canonical_json, plan_from_json, plan_to_json, read_file, read_plan, seal
from placewise.plans.document import Plan
from placewise.plans.errors import InputError, PlanFormatError

from .questions import GIB, component_of, cuda, machine_of, plan_of, stack_of

WRITTEN = "give a file that `placewise plan -o` wrote"
AGAIN = "make the plan again with `placewise plan`"


@pytest.fixture(scope="module")
def plan() -> Plan:
    encoder = component_of("encodeur_é_编码", stack_of("层", GIB, GIB), fixed=64, passes=2)
    return plan_of(machine_of(32 * GIB, cuda(GIB * 2)), encoder)


def refusal(text: str | bytes) -> str:
    with pytest.raises(PlanFormatError) as caught:
        plan_from_json(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("{} {}", "Extra data: line 1 column 4 (char 3)"),
        ('{"format_version": NaN}', "NaN is no number"),
        ('{"format_version": "1.9", "newer": -Infinity}', "-Infinity is no number"),
        (b"\xff\xfe\xfd", "'utf-16-le' codec can't decode byte 0xfd in position 2: truncated data"),
    ],
)
def test_not_json(text: str | bytes, reason: str) -> None:
    assert refusal(text) == f"the plan: not JSON: {reason}\nhint: {WRITTEN}"


def test_nested_beyond_reason() -> None:
    assert refusal('{"a":' + "[" * 200_000).startswith("the plan: not JSON: ")


@pytest.mark.parametrize("text", ["null", "[]", '"1.0"', "1", "true"])
def test_not_an_object(text: str) -> None:
    assert refusal(text) == f"the plan: not a JSON object\nhint: {WRITTEN}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{}", "None"),
        ('{"format_version": null}', "None"),
        ('{"format_version": 1.0}', "1.0"),
        ('{"format_version": "1"}', "'1'"),
        ('{"format_version": "1.0.0"}', "'1.0.0'"),
        ('{"format_version": "1.x"}', "'1.x'"),
        ('{"format_version": "1.-1"}', "'1.-1'"),
        ('{"format_version": "1.00"}', "'1.00'"),
        ('{"format_version": "\u0661.\u0660"}', "'\u0661.\u0660'"),
        ('{"format_version": ["1", "0"]}', "['1', '0']"),
    ],
)
def test_no_version(text: str, shown: str) -> None:
    assert refusal(text) == (f"the plan: format_version is {shown}, not a version such as '1.0'\nhint: {WRITTEN}")


def test_a_version_of_thousands_of_figures() -> None:
    assert refusal(json.dumps({"format_version": "1." + "9" * 5000})).endswith(
        f"not a version such as '1.0'\nhint: {WRITTEN}"
    )


def test_a_missing_field_is_named_with_the_number_of_others() -> None:
    assert refusal('{"format_version": "1.0"}') == (
        f"the plan: Field required in 'made_by' (and 11 more)\nhint: {AGAIN}"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"passes": 2,', '"passes": "2",', "Input should be a valid integer in 'pipeline.components[0].passes'"),
        ('"passes": 2,', '"passes": 2.0,', "Input should be a valid integer in 'pipeline.components[0].passes'"),
        ('"passes": 2,', '"passes": true,', "Input should be a valid integer in 'pipeline.components[0].passes'"),
        (
            '"passes": 2,',
            '"passes": 0,',
            "Input should be greater than 0 in 'pipeline.components[0].passes'",
        ),
    ],
)
def test_a_wrong_type_is_named_with_its_place(plan: Plan, old: str, new: str, message: str) -> None:
    text = plan_to_json(plan)
    assert refusal(text.replace(old, new, 1)) == f"the plan: {message}\nhint: {AGAIN}"


def test_a_layer_run_is_checked(plan: Plan) -> None:
    document = json.loads(plan_to_json(plan))
    document["placements"][0]["segments"][1]["layers"] = [[2, 2]]
    assert refusal(json.dumps(document)) == (
        "the plan: Value error, a layer run is [start, stop) with 0 <= start < stop"
        f" in 'placements[0].segments[1].layers[0]'\nhint: {AGAIN}"
    )


@pytest.mark.parametrize("digest", ["", "sha256:", "md5:0", "sha256:" + "0" * 64])
def test_a_digest_that_is_not_the_contents(plan: Plan, digest: str) -> None:
    text = plan_to_json(plan).replace(plan.digest, digest)
    assert refusal(text) == (
        f"the plan: the content does not match its digest {digest}\n"
        "hint: a plan is never edited by hand: change the policy or the facts and plan again"
    )


def test_space_and_order_of_fields_are_not_content(plan: Plan) -> None:
    document = json.loads(plan_to_json(plan))
    backwards = dict(reversed(document.items()))
    assert plan_from_json(json.dumps(backwards, indent=7)) == plan


def test_of_a_field_given_twice_the_last_counts_for_content_and_digest_alike(plan: Plan) -> None:
    text = plan_to_json(plan)
    assert plan_from_json(text.replace('"passes": 2,', '"passes": 9, "passes": 2,', 1)) == plan
    assert "digest" in refusal(text.replace('"passes": 2,', '"passes": 2, "passes": 9,', 1))


def test_names_beyond_ascii_are_written_as_they_are(plan: Plan) -> None:
    text = plan_to_json(plan)
    assert "encodeur_é_编码.层" in text
    assert "encodeur_é_编码" in canonical_json(plan)
    assert plan_from_json(text.encode()) == plan
    assert plan_from_json(json.dumps(json.loads(text), ensure_ascii=True)) == plan


def test_a_lone_surrogate_is_no_text(plan: Plan) -> None:
    document = json.loads(plan_to_json(plan))
    document["notes"] = ["\ud800"]
    assert refusal(json.dumps(document)).startswith("the plan: Invalid JSON: ")


def test_canonical_json_has_sorted_fields_and_no_spaces(plan: Plan) -> None:
    text = canonical_json(plan)
    assert text.startswith('{"budgets":[{"available_bytes":')
    assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False) == text


def test_the_document_ends_with_a_newline(plan: Plan) -> None:
    assert plan_to_json(plan).endswith("\n}\n")
    assert seal(plan) == plan


def test_a_plan_file_is_read_back(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan_to_json(plan), encoding="utf-8")
    assert read_plan(file) == plan


def test_an_error_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("[]")
    with pytest.raises(PlanFormatError) as caught:
        read_plan(file)
    assert str(caught.value) == f"{file}: not a JSON object\nhint: {WRITTEN}"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.json", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError) as caught:
            read_file(path)
        assert str(caught.value) == f"{path}: {reason}\nhint: give the path of a readable file"
