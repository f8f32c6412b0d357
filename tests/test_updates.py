"""New values for weights: what is refused, what they cost, and what becomes of those that plain torch gives."""

import copy
import hashlib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from placewise.executor.guards import MappedWeight, ReleasedWeight
from placewise.executor.load import LoadedPipeline
from placewise.executor.report import report_run
from placewise.plans.document import Fits, Plan, Reader
from placewise.plans.errors import ExecutionError, InputError, ReadOnlyWeightError, ReleasedWeightError
from placewise.plans.policy import Hold, Home
from torch import nn

from .modules import Block, Tower, build, load, save
from .readings import Fate, plan_of

LAYERS = 4
IDS = torch.tensor([[1, 2, 3, 10], [4, 5, 6, 0]])
WEIGHT = "blocks.1.blocks.0.weight"
NEW = torch.arange(256.0).reshape(16, 16) / 256
MAPPED, PHASE, STAYS = (Home.mapped, Hold.layer), (Home.mapped, Hold.phase), (Home.mapped, Hold.always)
PAGEABLE, DEVICE, LOCKED = (Home.pageable, Hold.layer), (Home.device, Hold.always), (Home.locked, Hold.layer)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Path]:
    path = save(build(Tower), tmp_path / "model.safetensors")
    before = hashlib.sha256(path.read_bytes()).digest()
    yield path
    assert hashlib.sha256(path.read_bytes()).digest() == before


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def loaded(
    path: Path, fate: Fate, *, reader: Reader = Reader.mapping, host_margin: int | None = 1 << 20
) -> LoadedPipeline:
    """Every layer with one fate, the fixed part mapped, all on the CPU."""
    return load(with_margin(plan_of(path, [fate] * LAYERS, STAYS, reader=reader), host_margin), path, Tower)


def with_margin(plan: Plan, host_bytes: int | None) -> Plan:
    assert isinstance(plan.verdict, Fits)
    verdict = plan.verdict.model_copy(update={"margin_bytes": {"host": host_bytes}})
    return plan.model_copy(update={"verdict": verdict})


def output(pipeline: LoadedPipeline) -> torch.Tensor:
    result: torch.Tensor = pipeline["model"](IDS)
    return result


def expected(changes: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    """What the plain module gives with new values."""
    tower = build(Tower)
    for name, value in (changes or {}).items():
        tower.get_parameter(name).copy_(value)
    result: torch.Tensor = tower(IDS)
    return result


def error_of(call: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("fate", [MAPPED, PHASE, STAYS, PAGEABLE, DEVICE, LOCKED])
def test_a_bad_value_or_name_is_refused_and_changes_nothing(checkpoint: Path, fate: Fate) -> None:
    pipeline = loaded(checkpoint, fate)
    good = {"blocks.0.blocks.0.weight": NEW}
    assert error_of(lambda: pipeline.update("model", {**good, WEIGHT: NEW[:3]}), InputError) == (
        f"component 'model': weight '{WEIGHT}' is (16, 16) float32, and its new value (3, 16) float32\n"
        "hint: give a value of the weight's own shape and dtype, or plan a checkpoint that has the new ones"
    )
    assert "(16, 16) bfloat16" in error_of(
        lambda: pipeline.update("model", {**good, WEIGHT: NEW.bfloat16()}), InputError
    )
    assert error_of(lambda: pipeline.update("model", {**good, "blocks.9.*": NEW}), InputError) == (
        "component 'model' has no weight 'blocks.9.*'\nhint: names are those of the module's state_dict()"
    )
    assert "has no data" in error_of(lambda: pipeline.update("model", {**good, WEIGHT: NEW.to("meta")}), InputError)
    assert error_of(lambda: pipeline.update("modle", good), InputError) == (
        "there is no component 'modle'\nhint: there are model"
    )
    assert torch.equal(output(pipeline), expected())
    assert pipeline.components["model"].replaced_bytes == 0


def test_tied_names_are_one_weight(checkpoint: Path) -> None:
    pipeline = loaded(checkpoint, MAPPED)
    zeros, ones = torch.zeros(11, 16), torch.ones(11, 16)
    message = error_of(lambda: pipeline.update("model", {"head.weight": ones, "embed.weight": zeros}), InputError)
    assert message.startswith("component 'model': weight 'embed.weight' is given two values, one of them by 'embed.")
    pipeline.update("model", {"head.weight": ones, "embed.weight": ones.clone()})
    tower = pipeline["model"]
    assert isinstance(tower, Tower)
    assert tower.head.weight is tower.embed.weight
    assert torch.equal(output(pipeline), expected({"embed.weight": ones}))


def test_patterns_functions_and_buffers(checkpoint: Path) -> None:
    """Functions get copies one by one: the one before is gone when the next is made."""
    pipeline = loaded(checkpoint, MAPPED)
    alive: list[weakref.ref[torch.Tensor]] = []

    def doubled(old: torch.Tensor) -> torch.Tensor:
        assert all(each() is None for each in alive)
        alive.append(weakref.ref(old))
        return old.mul_(2)

    pipeline.update("model", {"blocks.*.blocks.0.weight": doubled, "blocks.*.calls": torch.tensor(5)})
    names = [f"blocks.{number}.blocks.0.weight" for number in range(LAYERS)]
    plain = build(Tower)
    assert torch.equal(output(pipeline), expected({name: plain.get_parameter(name) * 2 for name in names}))
    assert len(alive) == LAYERS
    block = pipeline["model"].get_submodule("blocks.2")
    assert isinstance(block, Block)
    assert block.calls == 6
    message = error_of(lambda: pipeline.update("model", {WEIGHT: lambda old: old[0]}), InputError)
    assert message.startswith(f"component 'model': weight '{WEIGHT}' is (16, 16) float32, and its new value (16,)")


@pytest.mark.parametrize("fate", [MAPPED, PHASE, STAYS, DEVICE])
def test_a_whole_state_dict_and_values_that_are_swapped(checkpoint: Path, fate: Fate) -> None:
    pipeline = loaded(checkpoint, fate)
    other = build(Tower, seed=1)
    pipeline.update("model", other.state_dict())
    assert torch.equal(output(pipeline), other(IDS))
    first, second = "blocks.0.blocks.0.weight", "blocks.3.blocks.1.weight"
    weights = dict(pipeline.components["model"].weights())
    pipeline.update("model", {first: weights[second], second: weights[first]})
    one, two = other.get_parameter(first).clone(), other.get_parameter(second).clone()
    other.get_parameter(first).copy_(two)
    other.get_parameter(second).copy_(one)
    assert torch.equal(output(pipeline), other(IDS))


@pytest.mark.parametrize("margin", [2 * NEW.nbytes - 1, None])
def test_copies_of_mapped_weights_stay_within_what_the_plan_left(checkpoint: Path, margin: int | None) -> None:
    pipeline = loaded(checkpoint, MAPPED, host_margin=margin)
    two = {WEIGHT: NEW, "blocks.2.blocks.0.weight": NEW}
    left = "2.00 KiB" if margin else "an unknown amount"
    assert error_of(lambda: pipeline.update("model", two), ExecutionError) == (
        f"component 'model': new values of mapped weights take 2.00 KiB (2048 bytes) of the host, and the plan leaves"
        f" {left}\nhint: plan the layers that change with home pageable, or with more host memory"
    )
    assert torch.equal(output(pipeline), expected())
    if margin:
        for value in (NEW, NEW + 1, NEW):
            pipeline.update("model", {WEIGHT: value})  # One copy, written again.
        assert pipeline.components["model"].replaced_bytes == NEW.nbytes
        assert torch.equal(output(pipeline), expected({WEIGHT: NEW}))


def test_weights_in_memory_are_written_there_and_take_nothing_more(checkpoint: Path) -> None:
    pipeline = loaded(checkpoint, PAGEABLE, host_margin=0)
    before = pipeline.machines["cpu"].memory().allocated_bytes
    pipeline.update("model", {WEIGHT: NEW})
    assert pipeline.machines["cpu"].memory().allocated_bytes == before
    assert torch.equal(output(pipeline), expected({WEIGHT: NEW}))


def test_a_layer_in_use_is_not_updated(checkpoint: Path) -> None:
    pipeline = loaded(checkpoint, MAPPED)
    messages: list[str] = []

    def inside(_: nn.Module, __: object, ___: object) -> None:
        messages.append(error_of(lambda: pipeline.update("model", {WEIGHT: NEW}), ExecutionError))
        pipeline.update("model", {"blocks.2.blocks.0.weight": NEW})  # On its way at most.

    handle = pipeline["model"].get_submodule("blocks.1.blocks.1").register_forward_hook(inside)
    assert torch.equal(output(pipeline), expected({"blocks.2.blocks.0.weight": NEW}))
    assert messages == [
        "component 'model': layer 'blocks.1' is in use, so its weights cannot be updated\n"
        "hint: update between forwards; release() ends a use that an interrupt left behind"
    ]
    handle.remove()
    pipeline.update("model", {WEIGHT: NEW})
    assert torch.equal(output(pipeline), expected({"blocks.2.blocks.0.weight": NEW, WEIGHT: NEW}))


@pytest.mark.parametrize("reader", [Reader.direct, Reader.buffered, Reader.mapping])
def test_a_layer_that_was_updated_whole_is_not_read_any_more(checkpoint: Path, reader: Reader) -> None:
    pipeline = loaded(checkpoint, MAPPED, reader=reader)
    other = build(Tower, seed=1)
    pipeline.update("model", {name: value for name, value in other.named_parameters() if name.startswith("blocks.")})
    output(pipeline)
    (report,) = report_run(pipeline, {}).components
    assert sum(report.read_bytes.values()) == 0
    assert torch.equal(dict(pipeline.components["model"].weights())[WEIGHT], other.get_parameter(WEIGHT))


@pytest.mark.parametrize("fate", [MAPPED, PHASE, STAYS, PAGEABLE, DEVICE])
@pytest.mark.parametrize("after_a_pass", [False, True])
def test_a_parameter_that_is_assigned_is_taken_over(checkpoint: Path, fate: Fate, *, after_a_pass: bool) -> None:
    pipeline = loaded(checkpoint, fate)
    if after_a_pass:
        output(pipeline)
    pipeline["model"].get_submodule("blocks.1.blocks.0").weight = nn.Parameter(NEW.clone(), requires_grad=False)
    for _ in range(2):
        assert torch.equal(output(pipeline), expected({WEIGHT: NEW}))
        pipeline.release()
    assert torch.equal(dict(pipeline.components["model"].weights())[WEIGHT], NEW)


def assigned(module: nn.Module, value: torch.Tensor) -> None:
    module.weight = nn.Parameter(value, requires_grad=False)


def set_by_data(module: nn.Module, value: torch.Tensor) -> None:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    weight.data = value


@pytest.mark.parametrize(
    ("give", "fate"),
    [(assigned, fate) for fate in (MAPPED, PHASE, STAYS, PAGEABLE, DEVICE)]
    + [(set_by_data, PHASE), (set_by_data, DEVICE)],
)
def test_an_update_sees_what_plain_torch_gave_before(
    checkpoint: Path, give: Callable[[nn.Module, torch.Tensor], None], fate: Fate
) -> None:
    pipeline = loaded(checkpoint, fate)
    output(pipeline)
    linear = pipeline["model"].get_submodule("blocks.1.blocks.0")
    give(linear, NEW.clone().t())
    pipeline.update("model", {WEIGHT: lambda old: old * 2})
    assert torch.equal(output(pipeline), expected({WEIGHT: NEW.t() * 2}))
    if give is assigned or fate is DEVICE:
        give(linear, NEW + 1)
    pipeline.update("model", {WEIGHT: NEW})
    assert torch.equal(output(pipeline), expected({WEIGHT: NEW}))
    assert torch.equal(dict(pipeline.components["model"].weights())[WEIGHT], NEW)


@pytest.mark.parametrize("fate", [PHASE, STAYS, DEVICE])
def test_parameters_that_are_swapped_are_taken_over(checkpoint: Path, fate: Fate) -> None:
    pipeline, plain = loaded(checkpoint, fate), build(Tower)
    output(pipeline)
    for module in (pipeline["model"], plain):
        one, two = module.get_submodule("blocks.0.blocks.0"), module.get_submodule("blocks.1.blocks.0")
        one.weight, two.weight = two.weight, one.weight
    for _ in range(2):
        assert torch.equal(output(pipeline), plain(IDS))
        pipeline.release()


def test_a_value_that_is_a_view_of_its_own_weight(checkpoint: Path) -> None:
    pipeline = loaded(checkpoint, DEVICE)
    turned = build(Tower).get_parameter(WEIGHT).t().clone()
    pipeline.update("model", {WEIGHT: pipeline["model"].get_parameter(WEIGHT).t()})
    assert torch.equal(output(pipeline), expected({WEIGHT: turned}))


@pytest.mark.parametrize(("fate", "on_device"), [(PHASE, False), (PHASE, True), (STAYS, False), (DEVICE, True)])
def test_data_that_is_a_view_of_its_own_weight(checkpoint: Path, fate: Fate, *, on_device: bool) -> None:
    fixed = DEVICE if on_device else STAYS
    pipeline = load(
        with_margin(plan_of(checkpoint, [fate] * LAYERS, fixed, on_device=on_device), 1 << 20), checkpoint, Tower
    )
    ids = IDS.to(pipeline.device("model"))
    pipeline["model"](ids)
    weight = pipeline["model"].get_parameter(WEIGHT)
    weight.data = weight.data.t()
    turned = build(Tower).get_parameter(WEIGHT).t()
    for _ in range(2):
        assert torch.equal(pipeline["model"](ids).cpu(), expected({WEIGHT: turned}))
        pipeline.release()


@pytest.mark.parametrize("fate", [MAPPED, PHASE, STAYS, PAGEABLE, DEVICE])
def test_load_state_dict_by_assignment_is_taken_over(checkpoint: Path, fate: Fate) -> None:
    pipeline, other = loaded(checkpoint, fate), build(Tower, seed=1)
    pipeline["model"].load_state_dict(other.state_dict(), assign=True)
    tower = pipeline["model"]
    assert isinstance(tower, Tower)
    tower.head.weight = tower.embed.weight  # Assigning unties, in the plain module too.
    for _ in range(2):
        assert torch.equal(output(pipeline), other(IDS))


def test_load_state_dict_by_copies_is_refused_where_it_would_be_lost(checkpoint: Path) -> None:
    other = build(Tower, seed=1).state_dict()
    for fate, why in (
        (MAPPED, "is released, and copy_ would write it"),
        (PAGEABLE, "is released, and copy_ would write it"),
        (STAYS, "is a view of the checkpoint file, and copy_ would write it"),
    ):
        pipeline = loaded(checkpoint, fate)
        with pytest.raises(RuntimeError) as caught:
            pipeline["model"].load_state_dict(other)
        for line in str(caught.value).splitlines()[1:]:
            assert "is a view of the checkpoint file" in line or why in line
        assert torch.equal(output(pipeline), expected())


def by_data(weight: nn.Parameter) -> None:
    """As peft merges."""
    weight.data += NEW.to(weight.device)


def by_new_data(weight: nn.Parameter) -> None:
    weight.data = weight.data + NEW.to(weight.device)


def in_place(weight: nn.Parameter) -> None:
    weight.add_(NEW.to(weight.device))


@pytest.mark.parametrize("write", [by_data, by_new_data, in_place])
def test_a_write_is_refused_or_kept_and_never_lost(checkpoint: Path, write: Callable[[nn.Parameter], None]) -> None:
    plain = build(Tower).get_parameter(WEIGHT)
    merged = expected({WEIGHT: plain + NEW})
    for fate, error in ((MAPPED, ReleasedWeightError), (PAGEABLE, ReleasedWeightError), (STAYS, ReadOnlyWeightError)):
        pipeline = loaded(checkpoint, fate)
        output(pipeline)
        with pytest.raises(error, match=f"weight '{WEIGHT}' is "):
            write(pipeline["model"].get_parameter(WEIGHT))
        assert torch.equal(output(pipeline), expected())
    for fate in (PHASE, DEVICE):
        pipeline = loaded(checkpoint, fate)
        output(pipeline)
        write(pipeline["model"].get_parameter(WEIGHT))
        for _ in range(2):
            assert torch.equal(output(pipeline), merged)
            pipeline.release()
        if fate is PHASE:
            assert pipeline.components["model"].replaced_bytes == NEW.nbytes


@pytest.mark.parametrize("write", [by_data, by_new_data, in_place])
def test_a_write_on_a_device_goes_home_with_the_phase(checkpoint: Path, write: Callable[[nn.Parameter], None]) -> None:
    fates = [PHASE, (Home.pageable, Hold.phase)] * 2
    pipeline = load(plan_of(checkpoint, fates, DEVICE, on_device=True), checkpoint, Tower)
    ids = IDS.to(pipeline.device("model"))
    names = [f"blocks.{number}.blocks.0.weight" for number in range(LAYERS)]
    pipeline["model"](ids)
    for name in names:
        write(pipeline["model"].get_parameter(name))
    plain = build(Tower)
    merged = expected({name: plain.get_parameter(name) + NEW for name in names})
    for _ in range(2):
        assert torch.equal(pipeline["model"](ids).cpu(), merged)
        pipeline.release()


@pytest.mark.parametrize("fate", [MAPPED, PAGEABLE])
def test_a_write_while_a_layer_is_in_use_is_kept(checkpoint: Path, fate: Fate) -> None:
    pipeline = loaded(checkpoint, fate)
    handle = (
        pipeline["model"]
        .get_submodule("blocks.1")
        .register_forward_pre_hook(lambda block, _: by_data(block.get_parameter("blocks.0.weight")))
    )
    weight = build(Tower).get_parameter(WEIGHT)
    for times in (1, 2):
        assert torch.equal(output(pipeline), expected({WEIGHT: sum((NEW for _ in range(times)), weight)}))
    handle.remove()
    assert torch.equal(output(pipeline), expected({WEIGHT: weight + NEW + NEW}))


def test_a_copy_that_is_lent_is_a_plain_parameter_to_others(checkpoint: Path) -> None:
    pipeline = loaded(checkpoint, PHASE)
    output(pipeline)
    weight = pipeline["model"].get_parameter(WEIGHT)
    assert isinstance(weight, nn.Parameter)
    twin = copy.deepcopy(weight)
    assert type(twin) is nn.Parameter
    assert torch.equal(twin, weight)
    with pytest.raises(ExecutionError, match=f"weight '{WEIGHT}' is on cpu for a while"):
        pipeline["model"].get_submodule("blocks.1.blocks.0").to(torch.float64)
    assert torch.equal(output(pipeline), expected())


@pytest.mark.parametrize("fate", [MAPPED, PHASE])
def test_what_cannot_be_taken_over_is_an_error_that_update_heals(checkpoint: Path, fate: Fate) -> None:
    pipeline = loaded(checkpoint, fate)
    inner = pipeline["model"].get_submodule("blocks.1.blocks.0")
    inner.weight = nn.Parameter(torch.zeros(16, 3), requires_grad=False)
    assert f"weight '{WEIGHT}' is (16, 16) float32, and its new value (16, 3) float32" in error_of(
        lambda: output(pipeline), InputError
    )
    pipeline.update("model", {WEIGHT: NEW})
    assert torch.equal(output(pipeline), expected({WEIGHT: NEW}))
    pipeline.release()
    del inner.weight
    assert error_of(lambda: output(pipeline), InputError).startswith(
        f"component 'model': weight '{WEIGHT}' was replaced or removed"
    )
    pipeline.update("model", {WEIGHT: NEW})
    assert torch.equal(output(pipeline), expected({WEIGHT: NEW}))


def test_a_tied_weight_that_is_replaced_in_one_place_is_refused(checkpoint: Path) -> None:
    pipeline = load(with_margin(plan_of(checkpoint, [MAPPED] * LAYERS, PHASE), 1 << 20), checkpoint, Tower)
    tower = pipeline["model"]
    assert isinstance(tower, Tower)
    tower.head.weight = nn.Parameter(torch.zeros(11, 16), requires_grad=False)
    message = error_of(lambda: output(pipeline), InputError)
    assert "weight 'embed.weight' was replaced or removed, and is bound at embed.weight, head.weight" in message


def test_a_module_that_is_replaced_computes_with_its_own_weights(checkpoint: Path) -> None:
    """diffusers 11791: a layer that was replaced after offloading was given stale tensors."""
    for fate in (MAPPED, PHASE, STAYS, DEVICE):
        pipeline, plain = loaded(checkpoint, fate), build(Tower)
        for module in (pipeline["model"], plain):
            linears = module.get_submodule("blocks.1.blocks")
            assert isinstance(linears, nn.ModuleList)
            linears[0] = build(lambda: nn.Linear(16, 16), seed=2)
        for _ in range(2):
            assert torch.equal(output(pipeline), plain(IDS))


def test_a_mapped_weight_that_stays_becomes_a_plain_parameter(checkpoint: Path) -> None:
    pipeline = loaded(checkpoint, STAYS)
    assert isinstance(pipeline["model"].get_parameter(WEIGHT), MappedWeight)
    pipeline.update("model", {WEIGHT: NEW})
    weight = pipeline["model"].get_parameter(WEIGHT)
    assert not isinstance(weight, (MappedWeight, ReleasedWeight))
    weight.zero_()  # Its memory is its own.
    assert torch.equal(output(pipeline), expected({WEIGHT: torch.zeros(16, 16)}))
