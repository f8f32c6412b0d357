"""Every operator gives on the simulated device the bits that it gives on the CPU."""

# The cases are tables of lambdas over tensors:
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import pytest
import torch
from placewise.executor.simulation.accelerator import SimulatedTensor, simulated_device
from torch import nn
from torch.nn import functional as F

SIM = "sim:4"
Mode = Callable[[], AbstractContextManager[object]]
Size = tuple[int, ...] | str
Case = tuple[Callable[..., object], *tuple[Size, ...]]
MODES: dict[str, Mode] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": contextlib.nullcontext,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    simulated_device(4, capacity_bytes=1 << 28)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def assert_equal_bits(there: object, here: object) -> None:
    if isinstance(here, torch.Tensor):
        assert isinstance(there, SimulatedTensor)
        back = there.detach().cpu().resolve_conj()
        assert (back.dtype, back.shape) == (here.dtype, here.shape)
        torch.testing.assert_close(back, here.detach().resolve_conj(), rtol=0, atol=0, equal_nan=True)
    elif isinstance(here, (list, tuple)):
        assert isinstance(there, (list, tuple))
        for one, other in zip(there, here, strict=True):
            assert_equal_bits(one, other)
    else:
        assert there == here


def in_place(x: torch.Tensor) -> object:
    y = x.clone()
    parts = [y.add_(1).mul_(2).clone(), y[0].zero_().clone(), y.t_().clone(), y.unsqueeze_(0).clone()]
    y.squeeze_().copy_(y * 2)
    return [*parts, F.silu(F.relu(y, inplace=True), inplace=True), y]


def put(x: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[places] = values
    y[y > 1] = 0
    y[0, 1:3] = 7
    y.index_put_((places, places), values[:, 0], accumulate=True)
    return y.index_fill_(0, places[:1], 3.0).masked_scatter_(y == 7, values)


def into(x: torch.Tensor) -> object:
    grown = torch.add(x, x, out=x.new_empty(0))
    return grown, torch.mul(x, x, out=torch.empty_like(x)), torch.matmul(x, x.T, out=x.new_empty(8, 8))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def reductions(x: torch.Tensor) -> object:
    return (
        x.sum(), x.mean(-1), x.var(-1), x.std(), x.norm(dim=1), x.amax(0), x.max(0), x.prod(), x.logsumexp(1),
        x.argmax(), x.any(), torch.var_mean(x, -1), x.nanmean(), x.float().quantile(0.5), x.count_nonzero(),
    )  # fmt: skip


def elementwise(x: torch.Tensor) -> object:
    return (
        x.pow(2), x.square(), x.abs().rsqrt(), x.float_power(2), x.exp(), x.sin(), x.atan2(x), x.clip(0), x // 2, x % 2,
        torch.lerp(x, x + 1, 0.3), torch.addcmul(x, x, x, value=0.3), torch.true_divide(x, 3), 1 - x, x.erf(), -x,
        F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.mish(x), F.relu6(x), F.selu(x), F.softplus(x), F.glu(x),
        F.logsigmoid(x), F.hardswish(x), torch.sigmoid(x), torch.tanh(x), F.dropout(x, 0.5, training=False),
    )  # fmt: skip


def shapes(x: torch.Tensor) -> object:
    return (
        torch.cat([x, x], 1), torch.stack([x, x]), torch.hstack([x, x]), x.chunk(2, -1), x.repeat(2, 1), x.tile(2),
        x.repeat_interleave(2, 0), x.roll(1, 0), x.flip(0), x.unfold(1, 3, 2), torch.outer(x[0], x[1]), x.mT,
        torch.meshgrid(x[0], x[1], indexing="ij"), x.tril(), x.diagonal(), x.movedim(0, 1), x.swapaxes(0, 1),
    )  # fmt: skip


def ordered(x: torch.Tensor) -> object:
    return x.cumsum(-1), x.cumprod(0), x.topk(5), x.sort(descending=True), x.argsort(), x.msort(), x.median()


def casts(x: torch.Tensor) -> object:
    return (
        x.double().float(), x.half(), x.bfloat16(), x.long(), x.bool(), x.to(torch.float8_e4m3fn).float(),
        x.view(torch.uint8), x.type(torch.float64),
    )  # fmt: skip


def pooled(x: torch.Tensor) -> object:
    return F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, 3)


def padded(x: torch.Tensor) -> object:
    return [F.pad(x, (1, 2, 2, 1), mode=mode) for mode in ("constant", "reflect", "replicate", "circular")]


def resized(x: torch.Tensor) -> object:
    modes = ("nearest", "nearest-exact", "area", "bilinear", "bicubic")
    return [F.interpolate(x, size=(13, 17), mode=mode) for mode in modes]


def losses(x: torch.Tensor, y: torch.Tensor) -> object:
    return F.mse_loss(x, y), F.cosine_similarity(x, y), F.normalize(x), F.cross_entropy(x, y.argmax(-1))


def attention(
    *, masked: Callable[[torch.Tensor], torch.Tensor] | None = None, **options: bool
) -> Callable[..., object]:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        chosen = None if masked is None else masked(mask)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=chosen, **options)

    return attend


QKV = ((2, 4, 17, 16), (2, 4, 17, 16), (2, 4, 17, 16), (2, 1, 17, 17))

# The operands' sizes, and what is done with them; a size that begins with "i" is one of indices below 8.
CASES: dict[str, Case] = {
    "linear": (F.linear, (2, 7, 32), (48, 32), (48,)),
    "linear without bias": (F.linear, (2, 7, 32), (48, 32)),
    "linear of a matrix": (F.linear, (5, 32), (48, 32), (48,)),
    "linear of a vector": (F.linear, (32,), (48, 32), (48,)),
    "linear of a transposed batch": (lambda x, w, b: F.linear(x.mT, w, b), (9, 32, 3), (48, 32), (48,)),
    "linear of batch second": (lambda x, w, b: F.linear(x.transpose(0, 1), w, b), (3, 9, 32), (48, 32), (48,)),
    "addmm": (torch.addmm, (48,), (5, 32), (32, 48)),
    "baddbmm": (torch.baddbmm, (3, 5, 48), (3, 5, 32), (3, 32, 48)),
    "matmul 3x2": (torch.matmul, (3, 5, 32), (32, 48)),
    "matmul 4x3": (torch.matmul, (2, 3, 5, 32), (3, 32, 4)),
    "matmul 1x3": (torch.matmul, (32,), (3, 32, 5)),
    "matmul 3x1": (torch.matmul, (3, 5, 32), (32,)),
    "matmul 1x1": (torch.matmul, (32,), (32,)),
    "einsum of heads": (lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b), (2, 4, 9, 16), (2, 4, 9, 16)),
    "einsum of three": (lambda a, b, c: torch.einsum("bi,ij,bj->b", a, b, c), (4, 16), (16, 16), (4, 16)),
    "bilinear": (F.bilinear, (5, 8), (5, 9), (7, 8, 9), (7,)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (64,), w, b), (3, 9, 64), (64,), (64,)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (64,), w), (3, 9, 64), (64,)),
    "rms_norm with eps": (lambda x: F.rms_norm(x, (64,), eps=1e-6), (3, 9, 64)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), (2, 16, 9, 9), (16,), (16,)),
    "instance_norm": (F.instance_norm, (2, 16, 9, 9)),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), (2, 8, 33), (16, 8, 3), (16,)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2), (2, 8, 33, 33), (16, 8, 3, 3), (16,)),
    "conv2d same": (lambda x, w, b: F.conv2d(x, w, b, padding="same"), (2, 8, 33, 33), (16, 8, 3, 3), (16,)),
    "conv2d by channel": (lambda x, w, b: F.conv2d(x, w, b, groups=8), (2, 8, 33, 33), (8, 1, 3, 3), (8,)),
    "conv2d channels last": (
        lambda x, w, b: F.conv2d(x.contiguous(memory_format=torch.channels_last), w, b),
        (2, 8, 33, 33), (16, 8, 3, 3), (16,),
    ),
    "conv3d": (F.conv3d, (1, 4, 9, 9, 9), (8, 4, 3, 3, 3), (8,)),
    "conv_transpose2d": (lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), (2, 8, 9, 9), (8, 4, 3, 3), (4,)),
    "softmax": (lambda x: (F.softmax(x, -1), F.softmax(x, -1, dtype=torch.float32), F.log_softmax(x, 0)), (5, 37)),
    "embedding": (F.embedding, "i35", (8, 16)),
    "embedding_bag": (F.embedding_bag, "i57", (8, 16)),
    "attention": (attention(), *QKV),
    "attention, causal": (attention(is_causal=True), *QKV),
    "attention, boolean mask": (attention(masked=lambda mask: mask > 0), *QKV),
    "attention, added mask": (attention(masked=lambda mask: mask), *QKV),
    "attention, grouped": (attention(enable_gqa=True), QKV[0], (2, 2, 17, 16), (2, 2, 17, 16), QKV[3]),
    "attention, long": (attention(), (1, 2, 600, 64), (1, 2, 600, 64), (1, 2, 600, 64), (1, 1)),
    "rotary": (rotate, (2, 4, 9, 16), (9, 16), (9, 16)),
    "interpolate": (resized, (2, 3, 9, 9)),
    "pad": (padded, (2, 3, 6, 6)),
    "pool": (pooled, (2, 3, 8, 8)),
    "unfold and shuffle": (lambda x: (F.unfold(x, 3), F.pixel_shuffle(x, 2), F.channel_shuffle(x, 2)), (2, 4, 6, 6)),
    "grid_sample": (lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), (2, 3, 9, 9), (2, 5, 5, 2)),
    "elementwise": (elementwise, (5, 38)),
    "reductions": (reductions, (5, 37)),
    "ordered": (ordered, (5, 37)),
    "shapes": (shapes, (5, 38)),
    "casts": (casts, (5, 37)),
    "losses": (losses, (5, 37), (5, 37)),
    "scatter": (
        lambda x, i, s: (x.scatter(1, i, s), x.scatter_add(1, i, s), x.gather(1, i), x.index_add(1, i[0], s)),
        (5, 37), "i58", (5, 8),
    ),
    "index": (lambda x, i: (x[i], x[:, i], x[i, i], x[x > 0], x.index_select(0, i), x.take(i)), (8, 37), "i6"),
    "index_put": (put, (8, 37), "i6", (6, 37)),
    "where": (lambda x: (torch.where(x > 0, x, 0.0), x.masked_fill(x > 0, -torch.inf), torch.where(x > 0)), (5, 37)),
    "in place": (in_place, (5, 37)),
    "out": (into, (8, 37)),
}  # fmt: skip
WRITES = {"in place", "out", "index_put"}  # writes to a leaf that requires a gradient are autograd's to refuse

COMPLEX: dict[str, Case] = {
    "rotary by polar": (
        lambda x, f: torch.view_as_real(
            torch.view_as_complex(x.reshape(2, 9, 8, 2)) * torch.polar(torch.ones_like(f), f)
        ).flatten(2),
        (2, 9, 16), (9, 8),
    ),
    "conjugates": (
        lambda x: (
            torch.view_as_real(torch.complex(x, x).conj().resolve_conj()),
            torch.complex(x, x).conj() * torch.complex(x, -x),
            torch.complex(x, x).conj().imag + 1, torch.complex(x, x).angle(), torch.exp(1j * x),
        ),
        (5, 8),
    ),
    "fft": (lambda x: (torch.fft.rfft(x), torch.fft.irfft(torch.fft.rfft(x)), torch.fft.fft2(x)), (5, 36)),
    "linalg": (lambda x: (torch.linalg.qr(x), torch.linalg.svd(x), torch.linalg.norm(x), torch.det(x)), (6, 6)),
    "cdist": (torch.cdist, (30, 8), (40, 8)),
    "integers": (
        lambda i: (F.one_hot(i), i.unique(), torch.bincount(i.flatten()), i // 3, i & 3, ~i, torch.isin(i, i[0])),
        "i57",
    ),
}  # fmt: skip


def operands(sizes: Sequence[Size], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    for size in sizes:
        if isinstance(size, str):
            yield torch.randint(8, [int(digit) for digit in size[1:]])
        else:
            yield torch.randn(*size).to(dtype)


def check(case: Case, dtype: torch.dtype, mode: str) -> None:
    run, *sizes = case
    here = list(operands(sizes, dtype))
    there = [each.to(SIM) for each in here]
    if mode == "grad":
        for each in (*here, *there):
            each.requires_grad_(each.is_floating_point())
    with MODES[mode]():
        assert_equal_bits(run(*there), run(*here))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_operators(name: str, dtype: torch.dtype, mode: str) -> None:
    if not (mode == "grad" and name in WRITES):
        check(CASES[name], dtype, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", COMPLEX)
def test_operators_of_single_precision(name: str, mode: str) -> None:
    check(COMPLEX[name], torch.float32, mode)


@pytest.mark.parametrize("name", ["linear of batch second", "matmul 1x3", "attention, added mask"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_path_follows_the_weights_requires_grad_as_on_the_cpu(name: str, mode: Mode) -> None:
    run, *sizes = CASES[name]
    here = [each.requires_grad_() for each in operands(sizes, torch.float32)]
    there = [each.detach().to(SIM).requires_grad_() for each in here]
    with mode():
        assert_equal_bits(run(*there), run(*here))


def attend(module: nn.Module, x: torch.Tensor) -> object:
    return module(x, x, x)


def attend_masked(module: nn.Module, x: torch.Tensor) -> object:
    return module(x, x, x, key_padding_mask=torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device))


def packed(module: nn.Module, x: torch.Tensor) -> object:
    sequence = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([9, 5, 3]), batch_first=True)
    output, state = module(sequence)
    return nn.utils.rnn.pad_packed_sequence(output, batch_first=True)[0], state


def call(module: nn.Module, x: torch.Tensor) -> object:
    return module(x)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[..., object]]] = {
    "attention": (lambda: nn.MultiheadAttention(32, 4, batch_first=True), attend),
    "attention, masked": (lambda: nn.MultiheadAttention(32, 4, batch_first=True), attend_masked),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), call),
    "encoder layer, norm first": (
        lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True, activation="gelu"),
        call,
    ),
    "decoder layer": (
        lambda: nn.TransformerDecoderLayer(32, 4, 64, batch_first=True),
        lambda module, x: module(x, x),
    ),
    "lstm": (lambda: nn.LSTM(32, 24, 2, batch_first=True, bidirectional=True), call),
    "lstm, packed": (lambda: nn.LSTM(32, 24, 2, batch_first=True), packed),
    "gru": (lambda: nn.GRU(32, 24, 2, batch_first=True, bidirectional=True), call),
    "gru, packed": (lambda: nn.GRU(32, 24, 2, batch_first=True), packed),
    "rnn": (lambda: nn.RNN(32, 24, 2, batch_first=True), call),
    "lstm cell": (lambda: nn.LSTMCell(32, 24), lambda module, x: module(x[0])),
    "batch norm": (lambda: nn.BatchNorm1d(9), call),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, dtype: torch.dtype, mode: str) -> None:
    make, run = MODULES[name]
    torch.manual_seed(0)
    module, x = make().eval().to(dtype), torch.randn(3, 9, 32).to(dtype)
    there = copy.deepcopy(module).to(SIM)
    with MODES[mode]():
        assert_equal_bits(run(there, x.to(SIM)), run(module, x))


def test_nested_tensors_are_refused_by_name() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True).eval().to(SIM)
    padding = torch.arange(9, device=SIM).expand(3, 9) > 4
    with torch.no_grad(), pytest.raises(NotImplementedError) as caught:
        encoder(torch.ones(3, 9, 32, device=SIM), src_key_padding_mask=padding)
    assert str(caught.value) == (
        "aten._nested_tensor_from_mask.default gave a nested tensor, and a simulated device holds strided ones only\n"
        "hint: for nn.TransformerEncoder, pass enable_nested_tensor=False"
    )
