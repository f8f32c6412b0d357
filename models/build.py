"""Modules from their own configuration, without weights: parameters on meta, buffers computed as the class does."""

import importlib
import json
import mmap
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..plans.errors import ExecutionError
from ..plans.heap import FRESH_BLOCK_BYTES
from ..plans.pipeline import Component


def build_module(component: Component, folder: Path, dtype: torch.dtype) -> nn.Module:
    """The component's module in eval mode, built by its library from the configuration in `folder`.

    Args:
        component: says library and class.
        folder: holds config.json.
        dtype: torch's default while building, as the library's own loader sets it, so that computed buffers agree.

    Raises:
        ExecutionError: the library is not installed, or the component names no class that can be built.
        InputError: the reference pipeline has no such class, or the class no such configuration.
    """
    if component.library not in _BUILDERS or component.class_name is None:
        raise ExecutionError(
            f"component '{component.name}' does not say how it is built (library {component.library!r})",
            hint="build the module yourself, on the meta device, and give it: load(..., modules={name: module})",
        )
    library = _imported(component.library, f"component '{component.name}'")
    with parameters_on_meta(), _default_dtype(dtype):
        module: nn.Module = _BUILDERS[component.library](library, component.class_name, folder)
    if hasattr(module, "tie_weights"):
        cast(Any, module).tie_weights()  # Transformers' own: ties are part of its classes.
    return module.eval()


def build_pipeline(folder: Path, modules: Mapping[str, nn.Module], devices: Mapping[str, torch.device]) -> Any:
    """The pipeline of a folder with model_index.json, over modules that are there already: diffusers' or the reference.

    Schedulers, tokenizers and processors are loaded by diffusers; no code of the folder runs.

    Args:
        folder: holds the index.
        modules: the components by name.
        devices: where each of them computes.

    Raises:
        ExecutionError: diffusers is not installed, or cannot build it, or its components compute on several devices,
            between which its code would not move their inputs.
    """
    if json.loads((folder / "model_index.json").read_bytes()).get("_class_name") == "ReferencePipeline":
        from .reference.pipeline import ReferencePipeline

        return ReferencePipeline(components=modules, devices=devices)
    names = sorted({str(device) for device in devices.values()})
    if len(names) > 1:
        raise ExecutionError(
            f"the pipeline's components compute on {', '.join(names)}, and diffusers' own code on one",
            hint="plan them all on one device, or call the components yourself",
        )
    library = _imported("diffusers", f"pipeline {folder}")
    try:
        return library.DiffusionPipeline.from_pretrained(folder, local_files_only=True, **modules)
    except (OSError, ValueError, AttributeError) as error:
        raise ExecutionError(
            f"diffusers cannot build the pipeline {folder}: {error}",
            hint="build it yourself over the modules: PipelineClass(unet=loaded['unet'], ...)",
        ) from error


def _imported(library: str, what: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError:
        raise ExecutionError(
            f"{what} is built by {library}, which is not installed", hint=f"pip install 'placewise[{library}]'"
        ) from None


def _from_transformers(library: Any, class_name: str, folder: Path) -> nn.Module:
    config = library.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model = getattr(library, class_name)(config)
    if (folder / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = library.GenerationConfig.from_pretrained(folder, local_files_only=True)
    return cast(nn.Module, model)


def _from_diffusers(library: Any, class_name: str, folder: Path) -> nn.Module:
    model: Any = getattr(library, class_name)
    return cast(nn.Module, model.from_config(model.load_config(folder, local_files_only=True)))


def _from_reference(_: Any, class_name: str, folder: Path) -> nn.Module:
    from .reference.components import from_folder

    return from_folder(class_name, folder)


_BUILDERS = {"transformers": _from_transformers, "diffusers": _from_diffusers, "placewise": _from_reference}


@contextmanager
def parameters_on_meta() -> Generator[None]:
    """While active, a parameter that is registered goes to the meta device; buffers stay what they are.

    Non-persistent buffers are in no checkpoint, so they must be computed for real; parameters are not needed, since
    each is about to be bound. At any moment at most one parameter's memory is reserved, and none of it touched by
    classes that leave the filling to their initialisation, which then runs on meta.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # A parameter that is on meta already keeps its identity: it may be tied.
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        with _Sparing():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


_FILLS = frozenset(("normal_", "kaiming_normal_", "log_normal_", "exponential_", "cauchy_"))
"""Methods of tensors and functions of torch.nn.init, by name, that fill their first argument."""


class _Sparing(TorchFunctionMode):
    """Spares memory that would stay after the build.

    Random fills on meta are left out, for which torch would first import 68 MiB of compilers and symbolic algebra.
    What is large and empty is mapped by itself: freed in the heap, it leaves a gap, which activations then fill for
    good.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) in _FILLS and (filled := [*args, *kwargs.values()][0]).is_meta:
            return filled
        if func in (torch.empty, torch.zeros) and kwargs.keys() <= {"dtype", "device"}:
            twin = func(*args, **{**kwargs, "device": "meta"})
            if twin.nbytes >= FRESH_BLOCK_BYTES and func(0, **kwargs).device.type == "cpu":
                return torch.frombuffer(mmap.mmap(-1, twin.nbytes), dtype=twin.dtype).view(twin.shape)
        return func(*args, **kwargs)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    if dtype.is_floating_point and dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
