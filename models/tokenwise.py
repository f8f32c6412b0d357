"""Token-wise modules: which they are in a component, and running them over a few tokens at a time.

A module is token-wise where its output at each token depends on its input at that token alone. Tokens are counted over
all dimensions but the last, which holds a token's features. Run over parts of the tokens, such a module gives the same
output but for the rounding of matrix products of other row counts, and its inner tensors are as large as a part.
Attention is never token-wise; a module that divides its own tokens says so by a method `set_chunk_tokens`.
"""

# Torch's own types are partial here.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from math import ceil
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_NAMES = """
abs add clamp clone contiguous div elu erf exp gelu hardswish leaky_relu log maximum minimum mish mul neg pow relu
relu6 rsqrt selu sigmoid silu softplus sqrt square sub tanh true_divide __rdiv__ __rsub__
bfloat16 double float half to type type_as
"""
_POINTWISE = frozenset(_NAMES.split())
_PRODUCTS = frozenset(("linear", "matmul"))
_NORMS = frozenset(("layer_norm", "rms_norm"))
_QUERIES = frozenset(("device", "dtype"))
_DIM_AT: Mapping[str, int] = {"mean": 1, "glu": 1, "chunk": 2, "split": 2}
"""Where these take the dimension that they work along."""

_LEAD = (2, 3)
"""The tokens of a trial, in two dimensions of different sizes, so that one that is lost shows."""

_TOKENS = "_chunk_tokens"
"""The attribute of a chunked module that says how many tokens it takes at once."""


@runtime_checkable
class Chunks(Protocol):
    """A module that is not token-wise, such as an attention, and knows how to take a few tokens at a time."""

    def set_chunk_tokens(self, tokens: int) -> None:
        """Take at most so many tokens at once from the next forward on."""
        ...


def token_wise(module: nn.Module, layers: Iterable[str]) -> tuple[nn.Module, ...]:
    """The outermost modules of a tree that gain from running over parts of the tokens: token-wise ones, and `Chunks`.

    Token-wise ones have a tensor within that is wider than their input and their output. A module without children,
    such as a lone projection, is none: its whole output has to be there all the same. Each candidate is tried on six
    tokens, and every function of torch that it calls is looked at. Pointwise ones, products with weights, norms, means
    and splits along the last dimension pass; shapes, indices, writes in place, factories, and all that is not known do
    not. Neither does a module with hooks beneath it, nor one whose attributes the trial changes. Nothing is raised.

    Args:
        module: in eval mode; on meta, or with weights.
        layers: names of modules whose weights are fetched for each call, so that none is called once for each part.
    """
    above = {layer[:end] for layer in layers for end in range(len(layer)) if end == 0 or layer[end] == "."}
    return tuple(_outermost(module, "", above))


def _outermost(module: nn.Module, name: str, above: Container[str]) -> Iterator[nn.Module]:
    if name not in above and (isinstance(module, Chunks) or _gains(module)):
        yield module
        return
    for child_name, child in module.named_children():
        yield from _outermost(child, f"{name}.{child_name}" if name else child_name, above)


def _gains(module: nn.Module) -> bool:
    """Whether a module is token-wise, with a tensor within that is wider than its input and its output."""
    inner = list(module.modules())
    hooked = any(each._forward_hooks or each._forward_pre_hooks for each in inner[1:])
    if len(inner) == 1 or hooked or "forward" in vars(module):
        return False
    # No module says how wide its input is; it is the last dimension of some weight.
    likely = {(weight.shape[-1], weight.dtype, weight.device) for weight in module.parameters() if weight.ndim}
    return any(
        _passes(module, torch.zeros(*_LEAD, width, dtype=dtype, device=device))
        for width, dtype, device in sorted(likely, key=str)
        if dtype.is_floating_point
    )


def _passes(module: nn.Module, tokens: torch.Tensor) -> bool:
    trial = _Trial(tokens, [*module.parameters(), *module.buffers()])
    with _restored(module) as is_unchanged:
        try:
            with torch.no_grad(), trial:
                output = module.forward(tokens)
        except Exception:  # Other people's code runs here, on an input that it may not be made for.
            return False
        return (
            is_unchanged()
            and not trial.refused
            and id(output) in trial.varying
            and trial.widest > max(tokens.shape[-1], output.shape[-1])
        )


@contextmanager
def _restored(module: nn.Module) -> Generator[Callable[[], bool]]:
    """Undo what is done to the attributes of a tree; gives a function that says whether nothing was."""
    tables: list[dict[str, Any]] = []
    for each in module.modules():
        tables += cast("list[dict[str, Any]]", [vars(each), each._parameters, each._buffers, each._modules])
    before = [dict(table) for table in tables]

    def is_unchanged() -> bool:
        return all(
            table.keys() == was.keys() and all(table[key] is was[key] for key in was)
            for table, was in zip(tables, before, strict=True)
        )

    try:
        yield is_unchanged
    finally:
        for table, was in zip(tables, before, strict=True):
            table.clear()
            table.update(was)


class _NotTokenWiseError(Exception):
    """Ends a trial. The code that is tried may catch it, so the trial keeps in mind that it was raised."""


class _Trial(TorchFunctionMode):
    """Looks at each function that is called. Tensors vary with the tokens or are constant, and no others pass.

    All are kept, so that no id comes twice.
    """

    def __init__(self, tokens: torch.Tensor, constants: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.varying = {id(tokens): tokens}
        self.constant = {id(constant): constant for constant in constants}
        self.widest = 0
        self.refused = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        varies = [id(tensor) in self.varying for tensor in given]
        constants = [tensor for tensor, does in zip(given, varies, strict=True) if not does]
        known = bool(given) and all(id(tensor) in self.constant for tensor in constants)
        written = kwargs.get("inplace") or kwargs.get("out") is not None
        if not known or written or not _is_admitted(_name(func), args, kwargs, varies, constants):
            self._refuse()
        results = func(*args, **kwargs)
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, torch.Tensor):
                if any(varies):
                    if result.shape[:-1] != _LEAD:
                        self._refuse()
                    self.varying[id(result)] = result
                    self.widest = max(self.widest, result.shape[-1])
                else:
                    self.constant[id(result)] = result
        return results

    def _refuse(self) -> None:
        self.refused = True
        raise _NotTokenWiseError


def _name(function: Any) -> str:
    """A function's name; a property's where it is read."""
    name: str = getattr(function, "__name__", "")
    return function.__self__.__name__ if name == "__get__" else name


def _is_admitted(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    varies: Sequence[bool],
    constants: Iterable[torch.Tensor],
) -> bool:
    """Whether a function treats each token by itself, whatever the rank of what varies."""
    if name in _POINTWISE:
        # A constant of more dimensions could tell one token from the next.
        return not any(varies) or all(constant.ndim <= 1 for constant in constants)
    if name in _PRODUCTS:
        return not any(varies[1:]) and all(constant.ndim <= 2 for constant in constants)
    if name in _NORMS:
        return not any(varies[1:]) and len(args) > 1 and len(args[1]) == 1
    if name in _DIM_AT:
        at = _DIM_AT[name]
        return kwargs.get("dim", args[at] if len(args) > at else None) in (-1, (-1,), [-1])
    if name == "dropout":
        return kwargs.get("training") is False
    return name in _QUERIES


def run_in_chunks(module: nn.Module, tokens: int) -> None:
    """Let each forward of a module take at most so many tokens at once, in parts as equal as can be.

    One of `Chunks` is told. An instance that is token-wise gets a subclass of its class and no reference to itself: its
    hooks run once for each call, a copy is chunked as well, and deleting it frees it at once. A call with anything but
    one tensor runs whole. A second call changes the number.
    """
    if isinstance(module, Chunks):
        module.set_chunk_tokens(tokens)
        return
    if _TOKENS not in vars(module):
        module.__class__ = _chunked(type(module))  # type: ignore[arg-type]  # mypy finds the class not hashable
    vars(module)[_TOKENS] = tokens


@cache
def _chunked(kind: type[nn.Module]) -> type[nn.Module]:
    whole: Callable[..., Any] = kind.forward

    @wraps(whole)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        match (*args, *kwargs.values()):
            case (torch.Tensor() as tokens,) if tokens.shape[:-1].numel() > vars(self)[_TOKENS]:

                def run(part: torch.Tensor) -> Any:
                    return whole(self, part) if args else whole(self, **dict.fromkeys(kwargs, part))

                return _in_parts(run, tokens, vars(self)[_TOKENS])
            case _:
                return whole(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__, "forward": forward})


def parts(start: int, stop: int, most: int) -> list[slice]:
    """As few parts of `[start, stop)` as can be of at most so many tokens, as equal as can be; of nothing, none."""
    count = stop - start
    size = ceil(count / ceil(count / most)) if count else most
    return [slice(begin, min(begin + size, stop)) for begin in range(start, stop, size)]


def _in_parts(run: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor, most: int) -> torch.Tensor:
    """Run over parts of at most so many tokens, and write what comes back into one tensor."""
    rows = tokens.flatten(0, -2)
    head, *others = parts(0, len(rows), most)
    first = run(rows[head])
    result = first.new_empty((len(rows), first.shape[-1]))
    result[head] = first
    del first  # The next part's inner tensors would stand beside it.
    for part in others:
        result[part] = run(rows[part])
    return result.view(*tokens.shape[:-1], result.shape[-1])
