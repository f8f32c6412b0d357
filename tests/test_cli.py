"""The command line: what it prints where, its exit codes, and one clear error for each bad input."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from placewise.__main__ import main
from placewise.plans.codec import read_plan
from placewise.plans.units import MIB

from .checkpoints import write_safetensors, write_transformers
from .modules import Tower, build, machine, save

REPOSITORY = Path(__file__).resolve().parent.parent
LAYERS = {f"blocks.{number}.weight": ("BF16", (1024, 1024)) for number in range(8)}
WEIGHT = "blocks.*.weight"
GIVEN = ("--host-memory", "1GiB", "--device", "sim", "--device-memory", "16MiB")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What one command left."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> "Run":
    return Run(monkeypatch, capsys)


class Run:
    """Runs the command line in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> Ran:
        self._monkeypatch.setattr(sys, "argv", ["placewise", *map(str, arguments)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        return Ran(code=int(ended.value.code or 0), out=out, err=err)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / "model.safetensors", LAYERS)


def test_a_plan_is_printed_to_stdout_and_written_when_asked(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    ran = run("plan", checkpoint, *GIVEN, "-o", tmp_path / "plan.json")
    assert (ran.code, ran.err) == (0, "")
    assert "layerwise offload, 2 slots, 1 ahead" in ran.out
    assert ran.out.splitlines()[-1].startswith("fits (activations-unknown); left: host ")
    shown = run("show", tmp_path / "plan.json")
    assert (shown.code, shown.out) == (0, ran.out)
    as_json = run("show", tmp_path / "plan.json", "--json")
    assert as_json.out == (tmp_path / "plan.json").read_text()
    assert json.loads(as_json.out)["verdict"]["kind"] == "fits"


def test_a_refused_plan_exits_with_3_and_is_written_all_the_same(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    ran = run("plan", checkpoint, *GIVEN[:-1], "1MiB", "-o", tmp_path / "plan.json")
    assert ran.code == 3
    assert "sim:0 is short in the phase of model: needs 2.00 MiB" in ran.out
    assert "it would fit with 2.22 MiB of sim:0 available" in ran.out
    executed = run("run", tmp_path / "plan.json", "--model", checkpoint)
    assert executed.code == 3
    message = f"error: {tmp_path}/plan.json: the plan is refused: nothing fits\nhint: `placewise show` prints why\n"
    assert executed.err == message


def test_what_a_refusal_says_would_fit_does_fit(run: Run, checkpoint: Path) -> None:
    refused = json.loads(run("plan", checkpoint, *GIVEN[:-1], "1MiB", "--json").out)
    (change,) = refused["verdict"]["nearest"]
    assert run("plan", checkpoint, *GIVEN[:-1], change["to_available_bytes"]).code == 0
    assert run("plan", checkpoint, *GIVEN[:-1], change["to_available_bytes"] - 1).code == 3


def test_check_names_every_fact_that_changed(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    run("plan", checkpoint, *GIVEN, "-o", plan)
    same = run("check", plan, "--model", checkpoint)
    assert (same.code, same.out, same.err) == (0, "", f"{plan}: all facts hold\n")
    write_safetensors(checkpoint, {**LAYERS, "head.weight": ("BF16", (8, 8))})
    changed = run("check", plan, "--model", checkpoint)
    assert changed.code == 4
    assert [line.split(":")[0] for line in changed.out.splitlines()] == [
        f"component model, file model.safetensors, {what}" for what in ("size_bytes", "mtime_ns", "header_sha256")
    ]
    assert changed.err == f"error: {plan}: 3 facts have changed\nhint: plan again with `placewise plan`\n"
    assert [row["fact"] for row in json.loads(run("check", plan, "--model", checkpoint, "--json").out)] == [
        line.split(": planned")[0] for line in changed.out.splitlines()
    ]
    assert run("run", plan, "--model", checkpoint).code == 4


def test_check_devices_names_every_operation_on_two_devices(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import LlamaConfig, LlamaModel
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    build(lambda: LlamaModel(config)).save_pretrained(tmp_path / "llama")  # type: ignore[operator]  # transformers' own
    plan = tmp_path / "plan.json"
    assert run("plan", tmp_path / "llama", "--device", "mps:0", "--device-memory", "1GiB", "-o", plan).code == 0
    right = run("check", plan, "--model", tmp_path / "llama", "--devices", "--at-rest")
    assert (right.code, right.out, right.err) == (0, "", f"{plan}: no operation is on two devices\n")

    forward: Any = LlamaMLP.forward  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def on_the_cpu_too(self: Any, x: Any) -> Any:
        return forward(self, x) * torch.ones(32)

    monkeypatch.setattr(LlamaMLP, "forward", on_the_cpu_too)
    wrong = run("check", plan, "--model", tmp_path / "llama", "--devices")
    assert wrong.code == 1
    assert wrong.out.splitlines() == [f"model.layers.{at}.mlp: aten.mul.Tensor on mps:0 and cpu" for at in range(2)]
    assert wrong.err == (
        f"error: {plan}: 2 operations are on two devices\n"
        "hint: make what they take where the component computes, not where its weights rest\n"
    )
    found = json.loads(run("check", plan, "--model", tmp_path / "llama", "--devices", "--json").out)
    assert found["mixed"][0] == {
        "module": "model.layers.0.mlp",
        "operation": "aten.mul.Tensor",
        "devices": ["mps:0", "cpu"],
    }


def test_check_devices_says_what_it_cannot_run(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    run("plan", checkpoint, *GIVEN, "-o", plan)
    ran = run("check", plan, "--model", checkpoint, "--devices")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "model could not be checked: component 'model' does not say how it is built (library None)\n"
        f"error: {plan}: could not be checked: model\n"
        "hint: placewise.check_devices(plan, model, request, modules={name: module}) runs code of your own\n"
    )
    alone = run("check", plan, "--model", checkpoint, "--at-rest")
    assert (alone.code, alone.err) == (2, "error: --at-rest goes with --devices\n")


def test_run_prints_predicted_against_observed(run: Run, tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64)
    build(lambda: BertModel(config)).save_pretrained(tmp_path / "bert")  # type: ignore[operator]  # transformers' own
    plan = tmp_path / "plan.json"
    assert run("plan", tmp_path / "bert", "--device", "sim:2", "--device-memory", "1MiB", "-o", plan).code == 0
    ran = run("run", plan, "--model", tmp_path / "bert", "--json")
    assert (ran.code, ran.err) == (0, "")
    report = json.loads(ran.out)
    device = next(axis for axis in report["axes"] if axis["axis"] == "sim:2")
    assert 0 < device["weights_bytes"] <= device["predicted_bytes"] < device["peak_bytes"]
    assert report["components"][0]["homes_verified"]
    assert report["components"][0]["first_pass_s"] > 0
    assert (report["components"][0]["passes"], report["components"][0]["later_pass_s"]) == (1, None)
    picture = tmp_path / "timeline.png"
    more = run("run", plan, "--model", tmp_path / "bert", "--passes", "3", "--report", "--timeline", picture)
    assert (more.code, more.err) == (0, f"drawn to {picture}\n")
    assert "predicted peak" in more.out
    assert "encoder.layer 0-2" in more.out
    assert ["model", "passes", "1", "3"] in [line.split() for line in more.out.splitlines()]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_component_without_a_class_cannot_be_run_from_the_command_line(run: Run, tmp_path: Path) -> None:
    path = save(build(Tower), tmp_path / "tower.safetensors")
    run("plan", path, "--device", "cpu", "-o", tmp_path / "plan.json")
    ran = run("run", tmp_path / "plan.json", "--model", path)
    assert ran.code == 1
    assert ran.err.startswith("error: component 'model' does not say how it is built")


RATES = ("--disk", "3GB/s", "--link", "12GB/s")


def test_explain_says_what_a_change_would_buy(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    run("plan", checkpoint, *GIVEN, *RATES, "-o", tmp_path / "plan.json")
    ran = run("explain", tmp_path / "plan.json")
    assert ran.code == 0
    assert "request: optimum by least-seconds" in ran.out
    assert "What a change would buy, per request" in ran.out
    assert "+1.00 GiB of sim:0: " in ran.out


def test_diff_lists_what_moved(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    run("plan", checkpoint, *GIVEN, "-o", tmp_path / "a.json")
    run("plan", checkpoint, *GIVEN[:-1], "64MiB", "-o", tmp_path / "b.json")
    ran = run("diff", tmp_path / "a.json", tmp_path / "b.json")
    assert ran.code == 0
    assert "device/always on sim:0" in ran.out
    assert run("diff", tmp_path / "a.json", tmp_path / "a.json").out == "the plans do not differ\n"


def test_frontier_prints_a_table_and_draws_a_picture(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    picture = tmp_path / "frontier.png"
    ran = run("frontier", checkpoint, *GIVEN, *RATES, "--points", 4, "-o", picture)
    assert (ran.code, ran.err) == (0, f"drawn to {picture}\n")
    assert len(ran.out.splitlines()) == 5
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_ranks_share_the_host(run: Run, checkpoint: Path) -> None:
    one, four = (json.loads(run("plan", checkpoint, *GIVEN, "--ranks", n, "--json").out) for n in (1, 4))
    usable = [next(b["usable_bytes"] for b in plan["budgets"] if b["axis"] == "host") for plan in (one, four)]
    assert usable[1] == usable[0] // 4


def test_a_component_is_sharded_over_ranks(run: Run, checkpoint: Path) -> None:
    shard = ("--override", "model:shard=when-too-large")
    plan = json.loads(run("plan", checkpoint, *GIVEN[:-1], "15MiB", "--ranks", 4, *shard, "--json").out)
    placement = plan["placements"][0]
    assert placement["sharding"] == {"mesh": [4], "dimension": 0, "gathered_bytes": 3 * 2 * MIB}
    assert sum(segment["packed_bytes"] for segment in placement["segments"]) == 8 * 2 * MIB // 4
    ran = run("plan", checkpoint, *GIVEN, *shard[:1], "model:shard=always")
    assert (
        ran.err == "error: the override of 'model' shards over ranks, and there is one\nhint: give more with --ranks\n"
    )


def test_trace_fills_in_activations(run: Run, tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    build(lambda: BertModel(config)).save_pretrained(tmp_path / "bert")  # type: ignore[operator]  # transformers' own
    ran = run("plan", tmp_path / "bert", "--device", "cpu", "--trace", "--json")
    assert (ran.code, ran.err) == (0, "model\n")
    plan = json.loads(ran.out)
    activations = plan["pipeline"]["components"][0]["activations"]
    assert activations["kind"] == "traced"
    assert activations["peak_bytes"] > 0
    assert activations["flops"] > 0
    assert plan["verdict"]["confidence"] == "bytes-only"


def test_calibrate_keeps_rates_that_later_plans_use(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from placewise.planner.calibrating.calibrate import calibrate
    from placewise.planner.calibrating.effort import Effort

    small = Effort(
        region_bytes=MIB,
        chunk_bytes=(MIB,),
        depths=(1,),
        finals=1,
        final_bytes=MIB,
        least_file_bytes=MIB,
        temporary_bytes=8 * MIB,
        copy_bytes=MIB,
        matmul_size=64,
        repeats=1,
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(calibrate.__kwdefaults__ or {}, "effort", small)
    path = save(build(lambda: Tower(width=256, layers=8)), tmp_path / "tower.safetensors")
    before = json.loads(run("plan", path, "--json").out)
    assert before["machine"]["calibration"] is None
    ran = run("calibrate", path, "--json")
    assert ran.code == 0
    assert ran.err.startswith("kept in ")
    rates = json.loads(ran.out)
    after = json.loads(run("plan", path, "--json").out)
    assert after["machine"]["calibration"] == rates
    # Rates of this machine say nothing of another one.
    elsewhere = json.loads(run("plan", path, "--host-memory", "1GiB", "--json").out)
    assert elsewhere["machine"]["calibration"] is None


def test_facts_of_one_machine_plan_on_another(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    facts = run("facts", "--json")
    assert facts.code == 0
    (tmp_path / "facts.json").write_text(facts.out)
    planned = run("plan", checkpoint, "--machine", tmp_path / "facts.json", "--json")
    assert json.loads(planned.out)["machine"] == json.loads(facts.out)
    assert "host available" in run("facts", checkpoint).out


def test_inspect_tells_what_is_there(run: Run, tmp_path: Path) -> None:
    folder = write_transformers(tmp_path / "bert", {f"encoder.layer.{n}.weight": ("F32", (16, 16)) for n in range(3)})
    assert "encoder.layer x 3" in run("inspect", folder).out
    assert json.loads(run("inspect", folder, "--json").out)["components"][0]["class_name"] == "BertModel"


def test_options_reach_the_plan(run: Run, checkpoint: Path) -> None:
    options = ("--steps", 7, "--batch", 2, "--passes", "model=5", "--activations", "model=3MiB", "--reserve", "64MiB")
    override = ("--override", "model.blocks:hold=layer,home=mapped")
    transforms = ("--transform", f"model:{WEIGHT}=deinterleave:2:2", "--transform", f"model:{WEIGHT}=cast:F16")
    plan = json.loads(run("plan", checkpoint, *GIVEN, *options, *override, *transforms, "--json").out)
    component = plan["pipeline"]["components"][0]
    assert component["transforms"] == [
        {"kind": "deinterleave", "tensor": WEIGHT, "groups": 2, "parts": 2},
        {"kind": "cast", "tensor": WEIGHT, "dtype": "F16"},
    ]
    assert (component["passes"], component["activations"]["peak_bytes"]) == (5, 3 << 20)
    assert (plan["workload"]["steps"], plan["workload"]["batch"]) == (7, 2)
    assert plan["budgets"][0]["reserve_bytes"] == 64 << 20
    segments = plan["placements"][0]["segments"]
    assert {(segment["home"], segment["hold"]) for segment in segments} == {("mapped", "layer")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cpu", "--device-memory", "1GiB"), "--device cpu has no --device-memory"),
        (("--device", "cuda:1"), "--device cuda:1 goes with --device-memory"),
        (("--policy", "fast"), "there is no preset 'fast'"),
        (("--override", "model"), "--override 'model' is not PART:KEY=VALUE"),
        (("--override", "model:home=attic"), "--override 'model:home=attic': Input should be"),
        (("--override", "model.block:home=mapped"), "the override 'model.block' matches nothing"),
        (("--transform", "model:a.b"), "--transform 'model:a.b' is not COMPONENT:TENSOR=KIND"),
        (("--transform", "model:a.b=turn:1"), "--transform 'model:a.b=turn:1' is not COMPONENT:TENSOR=KIND"),
        (("--transform", "model:a.b=transpose:1"), "--transform 'model:a.b=transpose:1' is not COMPONENT:TENSOR=KIND"),
        (("--transform", "model:a.b=cast:I8"), "--transform 'model:a.b=cast:I8': Input should be 'F16', 'BF16',"),
        (("--transform", "model:a.b=deinterleave:1:3"), "--transform 'model:a.b=deinterleave:1:3': Input should be"),
        (("--transform", "model:blocks.*.weigth=transpose"), "component 'model': no stored tensor matches 'blocks"),
        (("--passes", "model"), "--passes 'model' is not NAME=VALUE"),
        (("--passes", "model=none"), "--passes: 'none' is not a whole number of 1 or more"),
        (("--passes", "unet=2"), "passes: there is no component 'unet'"),
        (("--activations", "model=much"), "'much' is not a size"),
        (("--machine", "nowhere.json"), "nowhere.json: No such file or directory"),
        (("-o", "no/such/folder/plan.json"), "no/such/folder/plan.json: No such file or directory"),
    ],
)
def test_a_bad_option_is_one_error_and_exit_code_2(
    run: Run, checkpoint: Path, arguments: tuple[str, ...], message: str
) -> None:
    ran = run("plan", checkpoint, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {message}")
    assert ran.err.count("error:") == 1
    assert "Traceback" not in ran.err


def test_an_output_that_cannot_be_written_leaves_nothing(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    ran = run("plan", checkpoint, *GIVEN, "-o", tmp_path / "folder")
    assert ran.code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "model.safetensors"]


@pytest.mark.parametrize("command", ["plan", "inspect", "show", "check", "run"])
def test_a_path_that_is_not_there_is_exit_code_2(run: Run, tmp_path: Path, command: str) -> None:
    ran = run(command, tmp_path / "absent")
    assert (ran.code, ran.out) == (2, "")
    assert str(tmp_path / "absent") in ran.err


@pytest.mark.parametrize("command", ["show", "check", "run"])
def test_a_spoiled_plan_is_exit_code_2(run: Run, checkpoint: Path, tmp_path: Path, command: str) -> None:
    plan = tmp_path / "plan.json"
    run("plan", checkpoint, *GIVEN, "-o", plan)
    document = json.loads(plan.read_text())
    plan.write_text(json.dumps({**document, "colour": "blue"}))
    assert run(command, plan).err.startswith(f"error: {plan}: unknown field in 'colour'\n")
    plan.write_text(json.dumps({**document, "format_version": "9.0"}))
    ran = run(command, plan)
    assert ran.code == 2
    assert ran.err.startswith(f"error: {plan}: format_version 9.0 is of another major version")


def in_process_of_its_own(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "import sys; from placewise.__main__ import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(REPOSITORY / ".src"), "PATH": ""},
    )


@pytest.mark.parametrize("command", ["--help", "plan"])
def test_help_and_planning_cost_no_torch(checkpoint: Path, command: str) -> None:
    arguments = ("--help",) if command == "--help" else ("plan", checkpoint, *GIVEN)
    ran = in_process_of_its_own(*arguments)
    assert ran.returncode == 0
    modules = set(ran.stderr.split())
    assert "placewise.__main__" in modules
    assert not modules & {"torch", "transformers", "diffusers"}
    if command == "--help":
        assert not modules & {"pydantic", "networkx", "rich", "msgspec", "numpy", "highspy"}


def test_the_schema_command_prints_the_committed_schema(run: Run) -> None:
    assert run("schema").out == (REPOSITORY / "plans" / "schema.json").read_text()


@pytest.fixture
def fleet(tmp_path: Path) -> Callable[..., Path]:
    """A folder of facts: host and device MiB by name."""

    def write(**sizes: tuple[int, int]) -> Path:
        folder = tmp_path / "fleet"
        folder.mkdir()
        for name, (host, device) in sizes.items():
            facts = machine(host * MIB, device * MIB)
            (folder / f"{name}.json").write_text(facts.model_dump_json())
        return folder

    return write


def test_a_fleet_is_a_table_and_a_plan_for_each(
    run: Run, checkpoint: Path, tmp_path: Path, fleet: Callable[..., Path]
) -> None:
    folder = fleet(a=(1024, 16), b=(1024, 16), c=(1024, 16), d=(1024, 16), e=(1024, 64), f=(1024, 1))
    out = tmp_path / "plans"
    out.mkdir()
    ran = run("plan", checkpoint, "--machine", folder, "-o", out)
    assert (ran.code, ran.err) == (3, "")
    assert [" ".join(line.split()) for line in ran.out.splitlines()] == [
        "hosts host memory accelerators a request least left verdict",
        "a, b, c and 1 more 1.00 GiB sim:1 16.0 MiB 6.00 MiB moved 410 KiB of sim:1 fits",
        "e 1.00 GiB sim:1 64.0 MiB 0 B moved 41.6 MiB of sim:1 fits",
        "f 1.00 GiB sim:1 1.00 MiB refused: sim:1",
        "6 hosts, 3 plans; it fits on 5",
    ]
    for name in "abcdef":
        alone = run("plan", checkpoint, "--machine", folder / f"{name}.json", "--json")
        assert read_plan(out / f"{name}.json").digest == json.loads(alone.out)["digest"]
    both = run("plan", checkpoint, "--machine", folder / "a.json", "--machine", folder / "e.json", "--json")
    assert both.code == 0
    assert {name: plan["digest"] for name, plan in json.loads(both.out).items()} == {
        name: read_plan(out / f"{name}.json").digest for name in "ae"
    }


def test_what_cannot_be_a_fleet_is_refused(
    run: Run, checkpoint: Path, tmp_path: Path, fleet: Callable[..., Path]
) -> None:
    folder = fleet(a=(1024, 16), b=(1024, 16))
    twice = run("plan", checkpoint, "--machine", folder, "--machine", folder / "a.json")
    assert twice.code == 2
    assert f"{folder / 'a.json'} and {folder / 'a.json'} have one name" in twice.err
    several = run("frontier", checkpoint, "--machine", folder)
    assert (several.code, several.err) == (2, "error: facts of 2 machines were given\nhint: give one --machine\n")
    (tmp_path / "empty").mkdir()
    empty = run("plan", checkpoint, "--machine", tmp_path / "empty")
    assert empty.code == 2
    assert f"{tmp_path / 'empty'}: no facts in this folder" in empty.err
    nowhere = run("plan", checkpoint, "--machine", folder, "-o", tmp_path / "nowhere")
    assert nowhere.code == 2
    assert f"{tmp_path / 'nowhere' / 'a.json'}: No such file or directory" in nowhere.err
