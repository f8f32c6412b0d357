"""Chunked passes over the first layers of a stack: they tell what passes over all of them tell, or are not taken."""

# Torch's own types are partial here, and the libraries have none.
# pyright: reportUnknownMemberType=false

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from placewise.models.reference.config import SIZES
from placewise.planner.tracing import stacks, trace
from placewise.planner.tracing.trace import trace_component
from placewise.plans.pipeline import TracedActivations, Workload
from torch import nn

from .modules import on_meta
from .real_passes import LLAMA, WIDE, component, stack

T5 = {"model_type": "t5", "d_model": 64, "d_kv": 8, "num_heads": 2, "vocab_size": 30}


def never(*_: object) -> bool:
    return False


@dataclass
class Traces:
    """Both ways, and of each shortened pass whether it was taken."""

    taken: list[bool] = field(default_factory=list[bool])

    def both(self, trace_it: Callable[[], object]) -> tuple[TracedActivations, TracedActivations]:
        """Shortened where that is possible, and over all layers."""
        run_few, taken = stacks.Stacks.run_few, self.taken

        def spied(self: stacks.Stacks, run: Callable[[], None]) -> bool:
            taken.append(run_few(self, run))
            return taken[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stacks.Stacks, "run_few", spied)
            short = trace_it()
            patch.setattr(stacks.Stacks, "run_few", never)
            whole = trace_it()
        assert isinstance(short, TracedActivations), short
        assert isinstance(whole, TracedActivations), whole
        return short, whole


def reference(name: str, kind: str, **changes: int) -> tuple[str, str, Mapping[str, object]]:
    return "placewise", kind, {**SIZES["tiny"][name].model_dump(), **changes}


@st.composite
def models(draw: st.DrawFn) -> tuple[str, str, Mapping[str, object], str, int]:
    """Library, class, configuration, stack and layers."""
    layers, inner = draw(st.integers(5, 7)), draw(st.sampled_from((192, 320)))
    own = {"num_layers": layers, "intermediate_size": inner}
    bert = {**WIDE, "model_type": "bert", "intermediate_size": inner, "num_hidden_layers": layers}
    llama = {**LLAMA, "intermediate_size": inner, "num_hidden_layers": layers}
    cases: tuple[tuple[str, str, Mapping[str, object], str], ...] = (
        (*reference("text_encoder", "ReferenceTextEncoder", **own), "layers"),
        (*reference("transformer", "ReferenceTransformer", **own), "blocks"),
        ("transformers", "LlamaForCausalLM", llama, "model.layers"),
        ("transformers", "LlamaModel", {**llama, "use_cache": False}, "layers"),
        ("transformers", "BertModel", bert, "encoder.layer"),
        ("transformers", "T5EncoderModel", {**T5, "d_ff": inner, "num_layers": layers}, "encoder.block"),
    )
    library, kind, config, name = draw(st.sampled_from(cases))
    return library, kind, config, name, layers


@settings(max_examples=6, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(model=models(), tokens=st.integers(129, 300), batch=st.integers(1, 2))
def test_shortened_passes_tell_what_whole_ones_tell(
    tmp_path_factory: pytest.TempPathFactory,
    model: tuple[str, str, Mapping[str, object], str, int],
    tokens: int,
    batch: int,
) -> None:
    pytest.importorskip("transformers")
    library, kind, config, name, layers = model
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(config))
    made = component(library, kind, stacks=(stack(name, layers),))
    workload = Workload(batch=batch, tokens=tokens, height=32, width=32, frames=5)
    traces = Traces()
    short, whole = traces.both(lambda: trace_component(made, folder, workload))
    assert short == whole
    # A causal model keeps something of each layer.
    assert all(traces.taken) or (kind == "LlamaForCausalLM" and not any(traces.taken))


class Mlp(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, inner), nn.Linear(inner, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.up(x).relu())
        return result


class Layer(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.mlp = Mlp(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.mlp(x)
        return result


class Model(nn.Module):
    """Layers of equal or different widths, and several ways to call them."""

    main_input_name = "pixel_values"
    config = SimpleNamespace(image_size=4, num_channels=3)

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList([Layer(512 if way == "one is wider" and at == 4 else 192) for at in range(6)])

    def forward(self, pixel_values: torch.Tensor) -> object:
        x = pixel_values.flatten(1)
        kept: list[torch.Tensor] = []
        if self.way == "by number":
            for number in range(6):
                x = self.layers[number](x)
            return x
        for number, layer in enumerate(self.layers):
            if self.way == "the fourth has more about it" and number == 3:
                x = torch.cat([x, x])[: len(x)]
            x = layer(x)
            if self.way == "the last runs twice" and number == 5:
                x = layer(x)
            if self.way == "all are kept":
                kept.append(x)
            if self.way == "the last two are joined" and number > 3:
                kept.append(x)
        return torch.cat(kept) if self.way == "the last two are joined" else (x, kept)


@pytest.mark.parametrize(
    ("way", "taken"),
    [
        ("plain", True),
        ("by number", False),
        ("one is wider", False),
        ("the fourth has more about it", False),
        ("all are kept", False),
        ("the last two are joined", False),
        ("the last runs twice", False),
    ],
)
def test_layers_that_are_not_alike_all_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, *, taken: bool
) -> None:
    def build(*_: object) -> nn.Module:
        return on_meta(lambda: Model(way))

    monkeypatch.setattr(trace, "build_module", build)
    made: Any = component("mine", "Model", stacks=(stack("layers", 6),))
    traces = Traces()
    short, whole = traces.both(lambda: trace_component(made, tmp_path, Workload(batch=600)))
    assert short == whole
    assert short.chunked
    assert traces.taken[-1] is taken
    assert taken or not any(traces.taken[1:])
