"""Token-wise modules: those of the libraries are found, no other is, and chunks change nothing but rounding."""

# The cases are tables of lambdas over tensors, and the libraries have no types.
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownParameterType=false

import copy
import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from placewise.models.tokenwise import run_in_chunks, token_wise
from torch import nn
from torch.nn import functional as F

from .modules import Gated, GatedTower, build, on_meta

transformers: Any = pytest.importorskip("transformers")
diffusers: Any = pytest.importorskip("diffusers")
attention: Any = pytest.importorskip("diffusers.models.attention")

WIDTH = 16
TEXT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 99,
}
FLUX = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 1,
    "num_single_layers": 1,
    "joint_attention_dim": 32,
    "axes_dims_rope": [2, 2, 4],
}


def transformer(name: str, **config: object) -> Callable[[], nn.Module]:
    """A model of transformers by the first part of its classes' names."""
    return lambda: getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**config))


def t5(activation: str) -> Callable[[], nn.Module]:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    return lambda: transformers.T5EncoderModel(transformers.T5Config(**sizes, feed_forward_proj=activation))


def feed_forward(activation: str) -> Callable[[], nn.Module]:
    return lambda: attention.FeedForward(WIDTH, activation_fn=activation, dropout=0.5)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "llama": (transformer("Llama", **TEXT), {"LlamaMLP": 2}),
    "qwen2": (transformer("Qwen2", **TEXT), {"Qwen2MLP": 2}),
    "qwen3": (transformer("Qwen3", **TEXT), {"Qwen3MLP": 2}),
    "gemma2": (transformer("Gemma2", **TEXT), {"Gemma2MLP": 2}),
    "phi3": (transformer("Phi3", **TEXT, pad_token_id=0), {"Phi3MLP": 2}),
    "distilbert": (transformer("DistilBert", dim=WIDTH, n_layers=2, n_heads=2, hidden_dim=48), {"FFN": 2}),
    "clip": (lambda: transformers.CLIPTextModel(transformers.CLIPTextConfig(**TEXT)), {"CLIPMLP": 2}),
    "t5": (t5("relu"), {"T5LayerFF": 2}),
    "t5 gated": (t5("gated-gelu"), {"T5LayerFF": 2}),
    "flux": (lambda: diffusers.FluxTransformer2DModel(**FLUX), {"FeedForward": 2}),
    **{
        activation: (feed_forward(activation), {"FeedForward": 1})
        for activation in ("gelu", "gelu-approximate", "geglu", "geglu-approximate", "swiglu", "linear-silu")
    },
    # Its two halves are modules of their own, each as wide as its output or its input.
    "bert": (transformer("Bert", **TEXT), {}),
    # It reads shapes.
    "gpt2": (transformer("GPT2", n_embd=WIDTH, n_layer=2, n_head=2), {}),
}


def found_in(module: nn.Module) -> dict[str, int]:
    names = [type(each).__name__ for each in token_wise(module, ())]
    return {name: names.count(name) for name in names}


def each_token_by_itself(module: nn.Module, tokens: torch.Tensor) -> None:
    """The definition: a permutation of tokens is one of the outputs, and a changed token changes its own output."""
    count = len(tokens)
    plain = module(tokens)
    order = torch.randperm(count)
    torch.testing.assert_close(module(tokens[order]), plain[order])
    for changed in range(count):
        other = tokens.clone()
        other[changed] = torch.randn_like(other[changed])
        differs = (module(other) - plain).abs().amax(dim=-1) > 1e-4
        assert differs.tolist() == [token == changed for token in range(count)]


@pytest.mark.parametrize(("make", "expected"), MODELS.values(), ids=MODELS)
def test_the_feed_forwards_of_the_libraries_are_found_and_are_token_wise(
    make: Callable[[], nn.Module], expected: dict[str, int]
) -> None:
    assert found_in(on_meta(make)) == expected
    real = build(make)
    assert found_in(real) == expected
    with torch.no_grad():
        for module in token_wise(real, ()):
            tokens = torch.randn(5, WIDTH)
            for weight in module.parameters():
                weight.copy_(torch.randn(weight.shape) / 4)
            each_token_by_itself(module, tokens)
            whole = module(tokens.reshape(1, 5, WIDTH))
            run_in_chunks(module, 2)
            torch.testing.assert_close(module(tokens.reshape(1, 5, WIDTH)), whole)


class Program(nn.Module):
    """A feed-forward with steps of anybody's between its two products."""

    def __init__(self, *steps: "Step") -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.norm = nn.LayerNorm(4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(4 * WIDTH))
        self.places = nn.Parameter(torch.randn(3, 4 * WIDTH))
        self.register_buffer("sum", torch.zeros(4 * WIDTH))
        self.plain = torch.ones(4 * WIDTH)
        self.calls = 0
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        for step in self.steps:
            y = step(self, y)
        result: torch.Tensor = self.down(y)
        return result


Step = Callable[[Any, torch.Tensor], torch.Tensor]

BY_TOKEN: dict[str, Step] = {
    "gelu": lambda _, y: F.gelu(y),
    "norm": lambda m, y: m.norm(y),
    "scale": lambda m, y: y * (1 + m.scale),
    "square": lambda _, y: y**2 - 1,
    "root mean square": lambda _, y: y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6),
    "gate": lambda m, y: m.up(y.chunk(4, dim=-1)[0]),
    "split": lambda m, y: m.up(torch.split(y, WIDTH, dim=-1)[1]),
    "dtype": lambda _, y: y.to(torch.float64).to(y.dtype) if y.dtype == torch.float32 else y,
    "silent dropout": lambda _, y: F.dropout(y, training=False),
    "product": lambda m, y: m.up(torch.matmul(y, m.up.weight)),
}


def write(module: Any, y: torch.Tensor) -> torch.Tensor:
    module.sum += 1
    return torch.add(y, module.sum)


def rebind(module: Any, y: torch.Tensor) -> torch.Tensor:
    module.sum = module.sum + 1
    return torch.add(y, module.sum)


def count(module: Any, y: torch.Tensor) -> torch.Tensor:
    module.calls += 1
    return torch.mul(y, module.calls)


def swallow(_: Any, y: torch.Tensor) -> torch.Tensor:
    try:
        return y - y.mean(dim=0, keepdim=True)
    except Exception:
        return y


def branch(_: Any, y: torch.Tensor) -> torch.Tensor:
    return y if y.sum() > 0 else -y


ACROSS_TOKENS: dict[str, Step] = {
    "mean": lambda _, y: y - y.mean(dim=0, keepdim=True),
    "mean of the last but one": lambda _, y: y - y.mean(-2, keepdim=True),
    "mean of all": lambda _, y: y - y.mean(),
    "running sum": lambda _, y: y.cumsum(-2),
    "shift": lambda _, y: y.roll(1, -2),
    "reverse": lambda _, y: y.flip(-2),
    "softmax": lambda _, y: y.softmax(-2),
    "scores": lambda _, y: y @ y.transpose(-1, -2) @ y,
    "places": lambda m, y: y + m.places,
    "indices": lambda _, y: y - y[..., :1, :],
    "shape": lambda _, y: y / y.shape[-2],
    "rank": lambda _, y: y * y.ndim,
    "length": lambda _, y: y * len(y),
    "norm of two": lambda _, y: F.layer_norm(y, (3, 4 * WIDTH)),
    "chunks": lambda _, y: torch.cat(y.chunk(2, dim=-2)[::-1], -2),
    "the first thousand": lambda _, y: torch.split(y, 1000, dim=-2)[0],
    "features for tokens": lambda m, y: torch.matmul(y.mean(-1), m.places),
    "in place": lambda _, y: y.mul_(2),
    "in place by an operator": lambda _, y: y.__iadd__(1),
    "in place by a flag": lambda _, y: F.relu(y, inplace=True),
    "noise": lambda _, y: y + torch.rand_like(y),
    "noise for all": lambda m, y: y + torch.rand(4 * WIDTH),
    "dropout": lambda _, y: F.dropout(y, training=True),
    "a tensor from elsewhere": lambda m, y: y * m.plain,
    "values": lambda _, y: y * y.max().item(),
    "kernels": lambda _, y: torch.ops.aten.flip(y, [-2]),
    "state in a buffer": write,
    "a buffer anew": rebind,
    "state": count,
    "an error caught": swallow,
    "a branch on values": branch,
}


@pytest.mark.parametrize("step", ACROSS_TOKENS.values(), ids=ACROSS_TOKENS)
def test_nothing_that_might_tell_tokens_apart_is_token_wise(step: Step) -> None:
    module = build(lambda: Program(step))
    with torch.no_grad():
        copy.deepcopy(module)(torch.randn(2, 3, WIDTH))  # What does not run would not be judged.
    before = {name: id(value) for name, value in [*vars(module).items(), *module.named_buffers()]}
    assert token_wise(module, ()) == ()
    assert {name: id(value) for name, value in [*vars(module).items(), *module.named_buffers()]} == before
    assert torch.equal(module.get_buffer("sum"), torch.zeros(4 * WIDTH))


@given(st.lists(st.sampled_from(sorted(BY_TOKEN)), max_size=4), st.integers(0, 9), st.integers(1, 9))
@settings(max_examples=20)
def test_whatever_goes_token_by_token_is_found_and_chunks_do_not_change_it(
    names: list[str], tokens: int, chunk_tokens: int
) -> None:
    module = build(lambda: Program(*(BY_TOKEN[name] for name in names)))
    assert token_wise(module, ()) == (module,)
    with torch.no_grad():
        given = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
        whole = module(given)
        if tokens:
            each_token_by_itself(module.double(), given.double())
            module.float()
        run_in_chunks(module, chunk_tokens)
        found = module(given)
    assert found.shape == whole.shape
    torch.testing.assert_close(found, whole)


@given(
    st.lists(st.sampled_from(sorted(BY_TOKEN)), max_size=2),
    st.sampled_from(sorted(ACROSS_TOKENS)),
    st.lists(st.sampled_from(sorted(BY_TOKEN)), max_size=2),
)
@settings(max_examples=20)
def test_one_step_across_tokens_is_enough(before: list[str], step: str, after: list[str]) -> None:
    event(step)
    steps = [BY_TOKEN[name] for name in before], ACROSS_TOKENS[step], [BY_TOKEN[name] for name in after]
    assert token_wise(build(lambda: Program(*steps[0], steps[1], *steps[2])), ()) == ()


def test_the_outermost_is_taken_unless_layers_are_within() -> None:
    stack = build(lambda: nn.Sequential(*(Gated(WIDTH) for _ in range(3))))
    first, second, third = stack.children()
    assert token_wise(stack, ()) == (stack,)
    assert token_wise(stack, ("0", "1", "2")) == (first, second, third)
    assert token_wise(stack, ("1.up",)) == (first, third)
    tower = build(lambda: GatedTower(width=WIDTH))
    assert [type(each) for each in token_wise(tower, ())] == [Gated] * 4


def test_a_module_with_hooks_beneath_or_another_forward_is_left_alone() -> None:
    hooked, patched = build(lambda: Gated(WIDTH)), build(lambda: Gated(WIDTH))
    hooked.get_submodule("up").register_forward_hook(lambda *_: None)
    patched.forward = patched.forward
    assert token_wise(hooked, ()) == token_wise(patched, ()) == ()


def test_a_lone_projection_is_not_worth_chunks() -> None:
    wide = build(lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8 * WIDTH), nn.GELU()))
    assert token_wise(wide, ()) == token_wise(build(lambda: nn.Linear(WIDTH, WIDTH)), ()) == ()


@pytest.mark.parametrize("shape", [(7, WIDTH), (1, WIDTH), (0, WIDTH), (WIDTH,), (2, 0, WIDTH), (3, 1, 5, WIDTH)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_any_rank_and_any_mode(shape: tuple[int, ...], mode: Callable[[], Any]) -> None:
    plain, chunked = build(lambda: Gated(WIDTH)), build(lambda: Gated(WIDTH))
    run_in_chunks(chunked, 3)
    given = torch.randn(shape)
    with mode():
        torch.testing.assert_close(chunked(given), plain(given))
        torch.testing.assert_close(chunked(x=given), plain(given))
        across = given.movedim(0, -2) if len(shape) > 2 else given
        torch.testing.assert_close(chunked(across), plain(across))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = chunked(given), plain(given)
        assert found.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected)


def test_gradients_are_those_of_the_whole() -> None:
    plain, chunked = build(lambda: Gated(WIDTH)), build(lambda: Gated(WIDTH))
    run_in_chunks(chunked, 3)
    for module in (plain, chunked):
        module(torch.ones(7, WIDTH)).square().sum().backward()
    for one, other in zip(plain.parameters(), chunked.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(other.grad, one.grad)


@given(tokens=st.integers(1, 40), most=st.integers(1, 40))
def test_no_part_is_larger_than_asked_and_there_are_as_few_as_can_be(tokens: int, most: int) -> None:
    seen: list[int] = []
    module = Gated(2)
    module.up.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    run_in_chunks(module, 1)
    run_in_chunks(module, most)
    with torch.no_grad():
        module(torch.ones(tokens, 2))
    assert sum(seen) == tokens
    assert max(seen) <= most
    assert len(seen) == -(-tokens // most)


def test_hooks_run_once_and_other_calls_run_whole() -> None:
    class Scaled(Gated):
        def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x if scale is None else x * scale)

    plain, chunked = build(lambda: Scaled(WIDTH)), build(lambda: Scaled(WIDTH))
    run_in_chunks(chunked, 3)
    calls: list[int] = []
    chunked.register_forward_pre_hook(lambda *_: calls.append(1))
    chunked.register_forward_hook(lambda *_: calls.append(2))
    given = torch.randn(7, WIDTH)
    chunked(given)
    assert calls == [1, 2]
    assert torch.equal(chunked(given, torch.arange(7)[:, None]), plain(given, torch.arange(7)[:, None]))


def test_a_chunked_module_looks_as_before_is_copied_by_itself_and_freed_at_once() -> None:
    module = build(lambda: Gated(WIDTH))
    shown = repr(module), inspect.signature(module.forward), list(module.state_dict())
    run_in_chunks(module, 3)
    assert isinstance(module, Gated)
    assert (repr(module), inspect.signature(module.forward), list(module.state_dict())) == shown
    twin = copy.deepcopy(module)
    expected = module(torch.ones(7, WIDTH))
    with torch.no_grad():
        for weight in twin.parameters():
            weight.zero_()
    assert torch.equal(module(torch.ones(7, WIDTH)), expected)
    assert not twin(torch.ones(7, WIDTH)).any()
    reference = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert reference() is None
    finally:
        gc.enable()
