"""Activations and work of a component, counted in one pass on fake tensors: no weights, no data, no device.

Torch is imported with this module, so nothing that has to be cheap imports it.
"""

# Torch's own types are partial here.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ...models.build import build_module
from ...models.dataflow import is_generator
from ...models.inputs.ask import Latents
from ...models.inputs.passes import Pass, latents_of, pass_of
from ...models.layers import layer_prefix
from ...models.tokenwise import run_in_chunks, token_wise
from ...plans.errors import PlacewiseError
from ...plans.pipeline import (
    ChunkedPeak,
    Component,
    Pipeline,
    RowFlops,
    StackFlops,
    TracedActivations,
    UnknownActivations,
    Workload,
)
from .fakes import dtype_of, faked, quiet, why
from .live_bytes import LiveBytes
from .moved_bytes import MovedBytes
from .row_flops import RowCounter
from .stacks import Stacks

_MOST_SIZES = 4

Traced = TracedActivations | UnknownActivations


def trace_pipeline(
    pipeline: Pipeline, root: Path, workload: Workload, progress: Callable[[str], None] | None = None
) -> Pipeline:
    """The pipeline with its unknown activations traced. What the caller gave stays, and so does what cannot be traced.

    What the workload does not state and was assumed instead is said in the pipeline's notes.

    Args:
        pipeline: as read from files.
        root: the model's folder, which the components' paths start from.
        workload: the shapes of one request.
        progress: told a component's name before it is traced, which takes seconds.
    """
    latents = latents_of([(component, root / component.checkpoint.root) for component in pipeline.components])
    components: list[Component] = []
    notes = list(pipeline.notes)
    for component in pipeline.components:
        if isinstance(component.activations, UnknownActivations):
            if progress is not None:
                progress(component.name)
            traced, assumed = _trace(component, root / component.checkpoint.root, workload, latents)
            notes += [f"{component.name}: {what} for its activations" for what in assumed]
            component = component.model_copy(update={"activations": traced})
        components.append(component)
    return pipeline.model_copy(update={"components": tuple(components), "notes": tuple(notes)})


def trace_component(component: Component, folder: Path, workload: Workload) -> Traced:
    """Peak of live activation bytes, buffers among them, and FLOPs of one pass at the workload's shapes.

    The class is built from its configuration alone and run on fake tensors of the CPU: what its kernels return is
    counted, the scratch memory inside them is not. All texts are taken to be padded, so a mask is made for them; a
    causal model prefills all tokens and keeps its cache; an autoencoder decodes. Where modules are token-wise, a few
    more passes say what chunks of tokens save. Takes seconds, and no memory that grows with the weights.

    Args:
        component: says library, class and stored dtypes; the dtype of most bytes is computed in.
        folder: holds config.json.
        workload: the shapes; what it does not state is assumed as the class' own pipelines do.

    Returns:
        Unknown, with the reason, for all that cannot be built, called or run without data. Nothing is raised.
    """
    return _trace(component, folder, workload, latents_of([(component, folder)]))[0]


def _trace(
    component: Component, folder: Path, workload: Workload, latents: Latents | None
) -> tuple[Traced, tuple[str, ...]]:
    try:
        with quiet():
            module = build_module(component, folder, dtype_of(component))
            return _run(module, component, workload, latents)
    except PlacewiseError as error:
        return UnknownActivations(why=error.message), ()
    except Exception as error:  # Other people's code runs here, and may raise anything.
        return UnknownActivations(why=why(error)), ()


def _run(
    module: nn.Module, component: Component, workload: Workload, latents: Latents | None
) -> tuple[TracedActivations, tuple[str, ...]]:
    layers = [layer_prefix(stack.name, number) for stack in component.stacks for number in range(stack.layers)]
    chunkable = token_wise(module, layers)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad(), faked(module, fake):
        live = LiveBytes([*module.parameters(), *module.buffers()])
        # Buffers are copied to where the module computes, whatever the plan.
        live.live += sum(buffer.nbytes for buffer in module.buffers())
        rows = RowCounter()
        flops = FlopCounterMode(display=False, custom_mapping={_CPU_ATTENTION: _attention_flops, **rows.formulas})
        moved = MovedBytes(flops.flop_registry)
        stacks = Stacks(module, [stack.name for stack in component.stacks], live)
        with flops, _stack_flops(module, component, flops) as by_stack, _tokens_of(chunkable) as tokens, live:
            planned = pass_of(module, workload, latents)
            with moved:
                stacks.run_all(partial(_call, planned))
        peak, assumed = live.peak, planned.assumed
        del planned

        def run() -> None:
            live.peak = live.live  # What the module keeps of a pass is there in the next one too.
            with live:
                _call(pass_of(module, workload, latents))

        def pass_in_chunks(size: int) -> int:
            for each in chunkable:
                run_in_chunks(each, size)
            if not stacks.run_few(run):
                run()
            return live.peak

        later = _later_passes(module, component, workload, latents)
        sizes = _chunk_sizes(max(tokens, default=0))
        if sizes:
            stacks.check(run)
        chunked = _chunked_peaks(sizes, pass_in_chunks)
    traced = TracedActivations(
        peak_bytes=peak,
        flops=flops.get_total_flops(),
        layer_flops=tuple(StackFlops(stack=stack, flops=count) for stack, count in sorted(by_stack.items())),
        row_flops=rows.counted(),
        later_row_flops=later,
        moved_bytes=moved.moved,
        fresh_bytes=moved.fresh,
        chunked=tuple(each for each in chunked if each.peak_bytes < peak),
    )
    return traced, assumed


def _later_passes(
    module: nn.Module, component: Component, workload: Workload, latents: Latents | None
) -> tuple[RowFlops, ...]:
    """Products of the passes after the first, where a model generates one token in each; none where all are alike."""
    if component.passes == 1 or not is_generator(component.class_name):
        return ()
    rows = RowCounter()
    with FlopCounterMode(display=False, custom_mapping=rows.formulas):
        _call(pass_of(module, workload.model_copy(update={"tokens": 1}), latents))
    return rows.counted()


@contextmanager
def _tokens_of(modules: Iterable[nn.Module]) -> Generator[list[int]]:
    """How many tokens each call of these modules takes."""
    seen: list[int] = []

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        seen.extend(value.shape[:-1].numel() for value in given if isinstance(value, torch.Tensor))

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(see, with_kwargs=True).remove)
        yield seen


def _chunk_sizes(tokens: int) -> list[int]:
    """At most four powers of two below the tokens, the largest first; less than 128 would not keep a device busy."""
    powers = [1 << exponent for exponent in range(7, (tokens - 1).bit_length())]
    return powers[:: -1 if len(powers) <= _MOST_SIZES else -2][:_MOST_SIZES]


def _chunked_peaks(sizes: Iterable[int], peak_of: Callable[[int], int]) -> list[ChunkedPeak]:
    """The peak of each size, the smallest first. Where smaller chunks save nothing, something else is the peak."""
    peaks: list[ChunkedPeak] = []
    for size in sizes:
        peak = peak_of(size)
        if peaks and peak >= peaks[-1].peak_bytes:
            break
        peaks.append(ChunkedPeak(chunk_tokens=size, peak_bytes=peak))
    return peaks[::-1]


def _call(planned: Pass) -> None:
    planned.call(**planned.arguments)


@contextmanager
def _stack_flops(module: nn.Module, component: Component, flops: FlopCounterMode) -> Generator[Counter[str]]:
    """Count what is spent within the layers of each stack. A layer that is no module of its own counts nothing."""
    spent: Counter[str] = Counter()
    modules: dict[str, nn.Module] = dict(module.named_modules())
    with ExitStack() as hooks:
        for stack in component.stacks:

            def enter(_: nn.Module, __: Any, stack: str = stack.name) -> None:
                spent[stack] -= flops.get_total_flops()

            def leave(_: nn.Module, __: Any, ___: Any, stack: str = stack.name) -> None:
                spent[stack] += flops.get_total_flops()

            for number in range(stack.layers):
                layer = modules.get(layer_prefix(stack.name, number))
                if layer is not None:
                    hooks.callback(layer.register_forward_pre_hook(enter).remove)
                    hooks.callback(layer.register_forward_hook(leave).remove)
        yield spent


_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The attention of a fake CPU, for which torch's counter has no formula."""


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Two products of `queries x keys` scores; shapes are (batch, heads, tokens, width). A causal half counts too."""
    batch, heads, queries, width = query
    return 2 * cast(int, batch * heads * queries * key[2] * (width + value[3]))
