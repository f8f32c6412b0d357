"""Operations whose operands are on two devices, found on fake tensors: no weights, no data, no device.

Torch is imported with this module.
"""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ...models.build import build_module
from ...models.inputs.passes import latents_of, pass_of
from ...models.layers import layer_prefix
from ...models.operands import mismatch, mixes_devices, written_arguments
from ...plans.document import Placement, Plan, Refused
from ...plans.errors import InputError, PlacewiseError, RefusedError
from ...plans.policy import Home
from .fakes import CPU, dtype_of, faked, quiet, why

_CROSSINGS: Final = frozenset((torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default))
"""What moves bytes between devices may have both."""

_SWITCHING: Final = frozenset(
    ["__getitem__", "__setitem__", "__invert__", "contiguous", "copy_", "nonzero", "uniform_", "split", "new_tensor"]
)
"""Methods that switch to their tensor's device before any operator."""

_FIRST_CUDA: Final = torch.device("cuda", 0)

_NOBODYS: Final = 100
"""The first index of a CUDA device that no machine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedDevices:
    """One operation that a real device refuses.

    Attributes:
        module: the component's name and the dotted name within it, `vae.decoder.conv_in`; `request` outside of all.
        operation: the operator's name, as torch has it.
        devices: the first two that its operands are on, by the plan's names.
    """

    module: str
    operation: str
    devices: tuple[str, str]

    def __str__(self) -> str:
        return f"{self.module}: {self.operation} on {self.devices[0]} and {self.devices[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCheck:
    """What a check found: every operation on two devices, and, with the reason, each part that could not be run."""

    mixed: tuple[MixedDevices, ...]
    unchecked: Mapping[str, str]


class DryPipeline:
    """Modules on fake tensors, with the face of a loaded pipeline: `pipeline["vae"]`, `pipeline.device("vae")`."""

    def __init__(self, modules: Mapping[str, nn.Module], devices: Mapping[str, torch.device]) -> None:
        self._modules, self._devices = modules, devices

    def __getitem__(self, component: str) -> nn.Module:
        return self._modules[component]

    def device(self, component: str) -> torch.device:
        """Where a component computes, whatever its weights' homes: inputs, masks and tables are made there."""
        return self._devices[component]


def check_devices(
    plan: Plan,
    root: Path,
    request: Callable[[DryPipeline], object] | None = None,
    *,
    modules: Mapping[str, nn.Module] | None = None,
    at_rest: bool = False,
) -> DeviceCheck:
    """Run components as the plan places them, on fake tensors, and find every operation on two devices.

    A weight is on its component's compute device whenever it computes, and so are buffers. What an operation on two
    devices gives is on the compute device, so that one mistake is told once, and the run goes on. Nothing is loaded.

    Args:
        plan: one that fits; its devices need not be here.
        root: the model's folder, which holds the configurations of library classes.
        request: the code to run; a sample pass of each component where it is null.
        modules: built by the caller, on meta; they get back what they had.
        at_rest: let a weight's `device` answer where it rests, as under FSDP's CPU offload; else it answers where the
            component computes, as the executor has it.

    Raises:
        RefusedError: the plan does not fit.
        InputError: `modules` names a component that the plan does not have.
    """
    if isinstance(plan.verdict, Refused):
        raise RefusedError("the plan is refused: nothing fits", hint="`placewise show` prints the causes")
    placements = {placement.component: placement for placement in plan.placements}
    for name in modules or {}:
        if name not in placements:
            raise InputError(f"the plan has no component '{name}'", hint=f"it has {', '.join(placements)}")
    devices = _stand_ins(placement.compute_device for placement in plan.placements)
    computes = {name: devices[placement.compute_device] for name, placement in placements.items()}
    watch = _Watch({device: name for name, device in devices.items()})
    unchecked: dict[str, str] = {}
    with quiet(), ExitStack() as stack:
        built = _built(plan, root, modules or {}, unchecked)
        fake = stack.enter_context(_FakeMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.no_grad())
        for name, module in built.items():
            away = _away(placements[name], module) if at_rest else frozenset[str]()
            stack.enter_context(faked(module, fake, partial(_place, computes[name], away)))
            stack.enter_context(watch.within(name, module, computes[name]))
        stack.enter_context(_NoGuards(watch, devices))
        stack.enter_context(watch)
        if request is not None:
            with _reasons("request", unchecked):
                request(DryPipeline(built, computes))
        else:
            latents = latents_of((each, root / each.checkpoint.root) for each in plan.pipeline.components)
            for name, module in built.items():
                with _reasons(name, unchecked):
                    with computes[name]:
                        sample = pass_of(module, plan.workload, latents)
                    sample.call(**sample.arguments)
    return DeviceCheck(mixed=tuple(watch.found), unchecked=unchecked)


def _built(plan: Plan, root: Path, modules: Mapping[str, nn.Module], unchecked: dict[str, str]) -> dict[str, nn.Module]:
    components = {component.name: component for component in plan.pipeline.components}
    built: dict[str, nn.Module] = {}
    for name in (placement.component for placement in plan.placements):
        with _reasons(name, unchecked):
            if name not in modules:
                folder = root / components[name].checkpoint.root
                built[name] = build_module(components[name], folder, dtype_of(components[name]))
            else:
                built[name] = modules[name]
    return built


def _stand_ins(names: Iterable[str]) -> dict[str, torch.device]:
    """For each of a plan's devices one that fake tensors can be on in every build of torch: those of CUDA."""
    found = {"cpu": CPU}
    for at, name in enumerate(sorted(set(names) - found.keys())):
        kind, _, index = name.partition(":")
        found[name] = torch.device("cuda", int(index or 0) if kind == "cuda" else _NOBODYS + at)
    return found


def _away(placement: Placement, module: nn.Module) -> frozenset[str]:
    """Parameters whose home is not on the compute device. The checkpoint may spell them with a prefix of the class."""
    homes = {
        "" if segment.stack is None else layer_prefix(segment.stack, number): segment.home
        for segment in placement.segments
        for number in ([0] if segment.stack is None else [at for run in segment.layers for at in range(*run)])
    }
    base = f"{getattr(module, 'base_model_prefix', '')}.".removeprefix(".")
    away: set[str] = set()
    for name, _ in module.named_parameters():
        spelled = {name, f"{base}{name}", name.removeprefix(base)}
        within = [each[: dot.start()] for each in spelled for dot in re.finditer(r"\.", each)]
        home = next((homes[prefix] for prefix in within if prefix in homes), homes.get(""))
        if home is not Home.device:
            away.add(name)
    return frozenset(away)


def _place(compute: torch.device, away: frozenset[str], name: str) -> torch.device:
    return CPU if name in away else compute


@contextmanager
def _reasons(part: str, unchecked: dict[str, str]) -> Generator[None]:
    """Keep in mind what kept a part from being run."""
    try:
        yield
    except PlacewiseError as error:
        unchecked[part] = error.message
    except Exception as error:  # Other people's code runs here, and may raise anything.
        unchecked[part] = why(error)


class _FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Touches no device, also where there are some: torch would look for simulated ones among them."""

    @property
    def avoid_device_init(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Make tensors of Python's numbers on the CPU, and then move them."""
        return True


class _NoGuards(TorchFunctionMode):
    """Keeps torch from asking for the state of devices that are not here, which some of its bindings do.

    Some methods switch to their tensor's device: until their first operator they are told that this is the CPU. Devices
    that code names are exchanged for those that stand for them; without an index the first is meant.

    Args:
        watch: sees that first operator.
        stand_ins: by the plan's names.
    """

    def __init__(self, watch: "_Watch", stand_ins: Mapping[str, torch.device]) -> None:
        super().__init__()
        self._watch = watch
        self._stand_ins = {_indexed(name): device for name, device in {"cuda": _FIRST_CUDA, **stand_ins}.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            func, args = torch.Tensor.to, (args[0], "cuda", *args[2:])
        if func is torch.Tensor.to:
            args = (args[0], *map(self._stand_in, args[1:]))
        if "device" in kwargs:
            kwargs["device"] = self._stand_in(kwargs["device"])
        name = getattr(func, "__name__", "")
        if name != "__get__":
            args, kwargs = self._watch.lend(args, kwargs)
        self._watch.hidden = next(iter(args), None) if name in _SWITCHING else None
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            # Some functions look at their operands' devices before any operator does.
            devices = [each.device for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            other = next((device for device in devices if device != devices[0]), None)
            if other is None:
                raise
            args, kwargs = self._watch.together(args, kwargs)
            result = func(*args, **kwargs)
            self._watch.note(name, (devices[0], other))
            return result

    def _stand_in(self, value: object) -> object:
        return self._stand_ins.get(_indexed(str(value)), value) if isinstance(value, str | torch.device) else value


def _indexed(name: str) -> str:
    return name if ":" in name else f"{name}:0"


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """While active, notes each operation on two devices, and goes on as if there were one.

    Args:
        names: the plan's, by device.
    """

    def __init__(self, names: Mapping[torch.device, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[MixedDevices, None] = {}
        self._names = names
        self._there: dict[int, torch.Tensor] = {}  # By id of a weight that rests elsewhere, what computes.
        self.hidden: object = None  # A tensor that is told to be on the CPU until its first operator.
        self._within: list[tuple[str, torch.device | None]] = [("request", None)]

    @contextmanager
    def within(self, component: str, module: nn.Module, compute: torch.device) -> Generator[None]:
        """Within it a component's modules are told apart, and its weights compute on a device wherever they rest."""
        self._there |= {id(each): _like(each, compute) for each in module.parameters() if each.device != compute}

        def enter(path: str, *_: object) -> None:
            self._within.append((path, compute))

        def leave(*_: object) -> None:
            self._within.pop()

        with ExitStack() as hooks:
            for name, part in module.named_modules():
                path = f"{component}.{name}" if name else component
                hooks.callback(part.register_forward_pre_hook(partial(enter, path)).remove)
                hooks.callback(part.register_forward_hook(leave, always_call=True).remove)
            yield

    def lend(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments, with what computes in place of weights that rest elsewhere."""
        if not self._there:
            return args, kwargs
        lent: tuple[tuple[Any, ...], dict[str, Any]]
        lent = tree_map_only(torch.Tensor, lambda each: self._there.get(id(each), each), (args, kwargs))
        return lent

    def note(self, operation: str, devices: tuple[torch.device, torch.device]) -> None:
        """Keep an operation on two devices in mind."""
        first, second = (self._names.get(device, str(device)) for device in devices)
        self.found[MixedDevices(module=self._within[-1][0], operation=operation, devices=(first, second))] = None

    def together(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], on: torch.device | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments on one device, by default the one that is computed on, or the first beside the CPU."""
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        on = on or self._within[-1][1] or next(each.device for each in tensors if each.device != CPU)
        moved: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
            torch.Tensor, lambda each: each if each.device == on else _like(each, on), (args, kwargs)
        )
        return moved

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default and args[0] is self.hidden:
            return CPU
        self.hidden = None
        if func not in _CROSSINGS and mixes_devices(func, args, kwargs):
            if (devices := mismatch(func, args, kwargs)) is not None:
                self.note(str(func), devices)
            written = [each.device for each in written_arguments(func, args, kwargs) if isinstance(each, torch.Tensor)]
            args, kwargs = self.together(args, kwargs, written[0] if written else None)
        if func is torch.ops.aten.convolution.default:
            # Torch makes what has one dimension contiguous itself, and asks for the state of the device to do so.
            args = (*(torch.empty_like(each, memory_format=torch.contiguous_format) for each in args[:2]), *args[2:])
        return func(*args, **kwargs)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
