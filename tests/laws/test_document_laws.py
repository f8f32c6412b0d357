"""Laws of the plan as a document: what is written is read back, and nothing else is."""

import hashlib
import json
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placewise.plans.codec import canonical_json, plan_from_json, plan_to_json, seal
from placewise.plans.document import FORMAT_MAJOR, FORMAT_MINOR, Plan
from placewise.plans.errors import PlanFormatError

from ..questions import Case
from ..strategies import cases

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

plans = cases().map(Case.compile)
"""Plans that fit and plans that do not."""

HAND = "a plan is never edited by hand: change the policy or the facts and plan again"


def document_of(plan: Plan) -> Any:
    return json.loads(plan_to_json(plan))


def objects_in(value: Json, path: str = "") -> list[tuple[str, dict[str, Json]]]:
    """Every record of a document with its place; maps of counts and the mark of the maker are left out."""
    found: list[tuple[str, dict[str, Json]]] = []
    if isinstance(value, dict):
        found.append((path, value))
        for name, part in value.items():
            if name not in ("made_by", "dtype_bytes", "because", "margin_bytes", "peak_bytes"):
                found += objects_in(part, f"{path}.{name}".removeprefix("."))
    elif isinstance(value, list):
        for at, part in enumerate(value):
            found += objects_in(part, f"{path}[{at}]")
    return found


def sealed(document: dict[str, Any]) -> str:
    """The document with the digest that the writer of its version gives it, by the document's own definition."""
    content = {name: value for name, value in document.items() if name not in ("digest", "made_by")}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return json.dumps({**document, "digest": "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()})


def refusal(text: str) -> PlanFormatError:
    with pytest.raises(PlanFormatError) as caught:
        plan_from_json(text)
    return caught.value


@given(plans)
def test_i5_round_trip(plan: Plan) -> None:
    text = plan_to_json(plan)
    again = plan_from_json(text)
    assert again == plan
    assert plan_to_json(again) == text
    assert plan_from_json(text.encode()) == plan


@given(plans)
def test_i5_canonical_form_round_trips_too(plan: Plan) -> None:
    text = canonical_json(plan)
    assert plan_from_json(text) == plan
    assert canonical_json(plan_from_json(text)) == text


@given(plans)
def test_i5_the_digest_is_over_all_but_itself_and_the_maker(plan: Plan) -> None:
    document = document_of(plan)
    assert json.loads(sealed(document))["digest"] == plan.digest
    document["made_by"]["version"] = "9.9"
    assert plan_from_json(json.dumps(document)).digest == plan.digest


@given(plans)
def test_i5_sealing_again_changes_nothing(plan: Plan) -> None:
    assert seal(plan) == plan
    assert seal(plan.model_copy(update={"digest": "sha256:stale"})) == plan


@given(plans, st.data())
def test_i5_unknown_fields_of_a_newer_minor_are_ignored(plan: Plan, data: st.DataObject) -> None:
    document = document_of(plan)
    minor = data.draw(st.integers(FORMAT_MINOR + 1, 99))
    document["format_version"] = f"{FORMAT_MAJOR}.{minor}"
    _, place = data.draw(st.sampled_from(objects_in(document)))
    place["not_known_here"] = {"anything": [1, None]}
    again = plan_from_json(sealed(document))
    assert again.model_copy(update={"format_version": plan.format_version, "digest": plan.digest}) == plan


@given(plans, st.data())
def test_i5_ignored_fields_are_under_the_digest_too(plan: Plan, data: st.DataObject) -> None:
    document = document_of(plan) | {"format_version": f"{FORMAT_MAJOR}.{FORMAT_MINOR + 1}", "not_known_here": 1}
    written = json.loads(sealed(document))
    written["not_known_here"] = data.draw(st.integers(2, 9))
    error = refusal(json.dumps(written))
    assert error.message == f"the plan: the content does not match its digest {written['digest']}"
    assert error.hint == HAND


@given(plans, st.data())
def test_i5_an_unknown_field_of_this_minor_is_refused(plan: Plan, data: st.DataObject) -> None:
    document = document_of(plan)
    path, place = data.draw(st.sampled_from(objects_in(document)))
    place["not_known_here"] = 1
    error = refusal(sealed(document))
    assert error.hint == "make the plan again with `placewise plan`"
    field, _, rest = error.message.removeprefix("the plan: unknown field in '").partition("'")
    assert rest == ""
    assert untagged(field) == f"{path}.not_known_here".removeprefix(".")


def untagged(field: str) -> str:
    """Without the kinds that the path has beside the fields that hold a union."""
    kinds = "fits refused measured unlimited unmeasurable malformed unknown given deinterleave transpose cast"
    for kind in kinds.split():
        field = field.replace(f".{kind}.", ".")
    return field


@given(plans, st.integers(0, 99).filter(lambda major: major != FORMAT_MAJOR), st.integers(0, 99))
def test_i5_another_major_version_is_refused(plan: Plan, major: int, minor: int) -> None:
    error = refusal(sealed(document_of(plan) | {"format_version": f"{major}.{minor}"}))
    assert error.message == (
        f"the plan: format_version {major}.{minor} is of another major version; this is a reader of {FORMAT_MAJOR}.x"
    )
    assert error.hint == "make the plan again with this version, or read it with the version that made it"


@given(plans, st.data())
def test_i5_edited_content_is_refused(plan: Plan, data: st.DataObject) -> None:
    document = document_of(plan)
    part = data.draw(st.sampled_from(document["pipeline"]["components"]))
    part["passes"] += data.draw(st.integers(1, 9))
    error = refusal(json.dumps(document))
    assert error.message == f"the plan: the content does not match its digest {plan.digest}"
    assert error.hint == HAND
