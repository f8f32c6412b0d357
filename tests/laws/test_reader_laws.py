"""Laws of readers and homes: the same bytes by every way, and nothing left behind."""

import tempfile
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from unittest.mock import patch

import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from placewise.executor.layout import Stored, as_stored, extents, pack
from placewise.executor.pages import Pages, merged, without
from placewise.executor.report import report_run
from placewise.models.headers import READ_ALIGNMENT, Header, TensorEntry, packed_bytes
from placewise.planner.draft import read_slot_bytes
from placewise.plans.document import Plan, Reader
from placewise.plans.pipeline import Cast, Deinterleave, LayerSize, Transform, Transpose
from placewise.plans.policy import Hold, Home
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  # partial there

from ..modules import build, load
from ..readings import (
    DEVICE,
    Fate,
    Shape,
    Stacked,
    Steps,
    are_gone,
    locked_bytes,
    open_files,
    plan_of,
    reader_threads,
    shift,
)

ON_CPU: tuple[Fate, ...] = (
    (Home.device, Hold.always),
    (Home.mapped, Hold.always),
    (Home.locked, Hold.always),
    (Home.mapped, Hold.layer),
    (Home.pageable, Hold.layer),
    (Home.locked, Hold.layer),
    (Home.mapped, Hold.phase),
)
IN_PLACE = ((Home.mapped, Hold.always), (Home.locked, Hold.always))
ON_DEVICE: tuple[Fate, ...] = (
    (Home.device, Hold.always),
    *(
        (home, hold)
        for home in (Home.pinned, Home.pageable, Home.mapped, Home.locked)
        for hold in (Hold.phase, Hold.layer)
    ),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn)
SHAPES = st.tuples(
    st.sampled_from(DTYPES),
    st.one_of(
        st.tuples(st.integers(0, 5)),
        st.tuples(st.integers(1, 7), st.integers(1, 7)),
        st.sampled_from([(), (1000,), (3, 4099), (33, 257), (12, 5), (24, 2, 3), (36, 129)]),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A checkpoint of one or two shards, what becomes of each layer, and how mapped ones are read.

    `steps` transform the layers' weights, those of a number in all of them, and `last` transforms the fixed one.
    """

    shapes: tuple[Shape, ...]
    steps: tuple[Steps, ...]
    last: Steps
    piece_bytes: int
    fates: tuple[Fate, ...]
    fixed: Fate
    tied: bool
    on_device: bool
    pinned: bool
    reader: Reader
    chunk_bytes: int
    depth: int
    slots: int
    ahead: int
    cached: bool
    spaces: int
    second_shard: int

    def make(self) -> Stacked:
        return Stacked(self.shapes, layers=len(self.fates), tied=self.tied, steps=self.steps, last=self.last)

    def make_stored(self) -> Stacked:
        return Stacked(self.shapes, layers=len(self.fates), tied=self.tied)


@st.composite
def steps_of(draw: st.DrawFn, shape: Shape, tensor: str) -> Steps:
    """Some of the transforms that a tensor may have, in any order."""
    dtype, extents = shape
    steps: list[Transform] = []
    for kind in draw(st.lists(st.sampled_from(["deinterleave", "transpose", "cast"]), unique=True)):
        divisors = [(g, p) for g in (2, 3, 4) for p in (2, 3) if extents and extents[0] % (g * p) == 0]
        if kind == "deinterleave" and divisors:
            groups, parts = draw(st.sampled_from(divisors))
            steps.append(Deinterleave(tensor=tensor, groups=groups, parts=parts))
        elif kind == "transpose" and len(extents) > 1:
            extents = (*extents[:-2], *extents[:-3:-1])
            steps.append(Transpose(tensor=tensor))
        elif kind == "cast" and dtype.itemsize > 1:
            steps.append(Cast(tensor=tensor, dtype=draw(st.sampled_from(["F16", "BF16", "F32", "F64"]))))
    return tuple(steps)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    on_device, slots = draw(st.booleans()), draw(st.integers(1, 3))
    pinned = on_device and draw(st.booleans())
    known = [fate for fate in (ON_DEVICE if on_device else ON_CPU) if pinned or fate[0] is not Home.pinned]
    shapes, tied = draw(st.lists(SHAPES, min_size=1, max_size=5)), draw(st.booleans())
    # The first is stored as the fixed weight where they are tied.
    steps = [draw(steps_of(shape, f"blocks.*.parts.{at}")) if at or not tied else () for at, shape in enumerate(shapes)]
    last = () if tied else draw(steps_of((torch.float32, (3,)), "last"))
    fates = st.sampled_from([fate for fate in known if fate not in IN_PLACE or not any(steps)])
    fixed = st.sampled_from([fate for fate in known if fate[1] is not Hold.layer and not (last and fate in IN_PLACE)])
    return Case(
        shapes=tuple(shapes),
        steps=tuple(steps),
        last=last,
        piece_bytes=draw(st.sampled_from((16, 600, 4 << 20))),
        fates=tuple(draw(st.lists(fates, min_size=2, max_size=5))),
        fixed=draw(fixed),
        tied=tied,
        on_device=on_device,
        pinned=pinned,
        reader=draw(st.sampled_from(Reader)),
        chunk_bytes=draw(st.sampled_from((512, 4096, 10_000, 1 << 20))),
        depth=draw(st.integers(1, 4)),
        slots=slots,
        ahead=draw(st.integers(0, slots - 1)),
        cached=draw(st.booleans()),
        spaces=draw(st.sampled_from((0, 0, 0, 1, 4))),
        second_shard=draw(st.integers(0, 63)),
    )


def save(case: Case, folder: Path) -> Path:
    """Shards in which the weights of a layer may lie apart."""
    weights = {name: weight.detach() for name, weight in build(case.make_stored).named_parameters()}
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for shard, name in enumerate(names):
        chosen = [each for each in enumerate(weights) if (case.second_shard >> each[0] % 6) & 1 == shard]
        save_file({each: weights[each].clone() for _, each in chosen}, folder / name)
        shift(folder / name, case.spaces)
    return folder / names[0]


def planned(case: Case, path: Path, device: str = DEVICE) -> Plan:
    """The plan of a case, on the CPU or on that device."""
    return plan_of(
        path,
        case.fates,
        case.fixed,
        reader=case.reader,
        chunk_bytes=case.chunk_bytes,
        depth=case.depth,
        slots=case.slots,
        ahead=case.ahead,
        on_device=case.on_device,
        pinned=case.pinned,
        device=device,
        transforms=[step for steps in (*case.steps, case.last) for step in steps],
    )


@given(case=cases())
@settings(max_examples=40)
def test_every_mixture_of_homes_holds_and_readers_gives_the_plain_bytes_and_leaves_nothing(case: Case) -> None:
    check_mixture(case, DEVICE)


def check_mixture(case: Case, device: str) -> None:
    """Run a case, on the CPU or on that device."""
    with (
        tempfile.TemporaryDirectory() as folder,
        torch.no_grad(),
        patch("placewise.executor.transport.in_page_cache", return_value=case.cached),
        patch("placewise.executor.transport._PIECE_BYTES", case.piece_bytes),
    ):
        path = save(case, Path(folder))
        locked_before, threads_before = locked_bytes(), reader_threads()
        x = torch.ones(2, dtype=torch.float64)
        expected = build(case.make)(x)
        pipeline = load(planned(case, path, device), path, case.make)
        for _ in range(2):
            assert torch.equal(pipeline["model"](x.to(pipeline.device("model"))).cpu(), expected)
        pipeline.release()
        assert torch.equal(pipeline["model"](x.to(pipeline.device("model"))).cpu(), expected)
        (report,) = report_run(pipeline, {}).components
        event(f"reader {report.reader}")
        for way, count in report.read_bytes.items():
            event(f"{way} reads: {count > 0}")
        homes = [unit.home for unit in pipeline.components["model"].units]
        assert (locked_bytes() > locked_before) == (Home.locked in homes)
        assert report.page_locked_bytes == locked_bytes() - locked_before + sum(
            unit.layout.nbytes for unit in pipeline.components["model"].units if unit.home is Home.pinned
        )
        threads = reader_threads() - threads_before
        del pipeline
        assert are_gone(threads)
        assert (locked_bytes(), open_files(path.parent)) == (locked_before, 0)


@st.composite
def stored_layers(draw: st.DrawFn) -> tuple[Stored, list[str], list[str]]:
    """Tensors of two files, those of one layer among them, and those of the layer that a module has parameters for."""
    stored: dict[str, tuple[Header, TensorEntry]] = {}
    for file in ("a", "b"):
        sizes = draw(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 30_000)), max_size=12))
        begins = list(accumulate(sizes, initial=0))
        header = Header(
            path=Path(file),
            size_bytes=0,
            mtime_ns=0,
            header_sha256="",
            data_start=draw(st.integers(8, 9000)),
            tensors={},
        )
        for number, (begin, end) in enumerate(pairwise(begins)):
            entry = TensorEntry(dtype="U8", shape=(end - begin,), data_offsets=(begin, end))
            stored[f"{file}{number}"] = header, entry
    layer = [name for name in stored if draw(st.booleans())]
    return stored, layer, [name for name in layer if draw(st.integers(0, 3))]


@given(case=stored_layers(), data=st.data())
@settings(max_examples=200)
def test_a_layer_in_blocks_fits_the_slot_that_is_planned_and_shows_each_byte_once(
    case: tuple[Stored, list[str], list[str]], data: st.DataObject
) -> None:
    """What is transformed, here to twice as many bytes or half, lies apart behind what is read."""
    stored, layer, own = case
    changed = {
        name: data.draw(st.sampled_from([stored[name][1].nbytes // 2, 2 * stored[name][1].nbytes]))
        for name in (data.draw(st.lists(st.sampled_from(layer), unique=True)) if layer else ())
        if stored[name][1].nbytes > 1
    }
    wanted = {
        name: TensorEntry(dtype="U8", shape=(changed[name],), data_offsets=(0, changed[name]))
        if name in changed
        else entry
        for name, (_, entry) in stored.items()
    }
    packed = pack(wanted, own, changed)
    ranges = extents(packed, stored)
    filed = as_stored(packed, stored, ranges)
    assert filed is not None
    size = LayerSize(
        layers=(0, 1),
        layer_bytes=sum(stored[name][1].nbytes for name in layer),
        packed_bytes=sum(packed_bytes(wanted[name].nbytes) for name in layer),
        transformed_bytes=sum(stored[name][1].nbytes for name in changed),
    )
    as_they_are = [name for name in layer if name not in changed]
    assert filed.nbytes <= read_slot_bytes(size, count_extents(as_they_are, stored))
    at = max((-(-(read.at + read.nbytes) // READ_ALIGNMENT) * READ_ALIGNMENT for read in ranges), default=0)
    for span in (span for span in filed.spans if span.name in changed):
        assert (span.begin, span.end - span.begin) == (at, changed[span.name])
        at += packed_bytes(changed[span.name])
    for read, following in pairwise(ranges):
        assert read.at + read.nbytes <= following.at
    for read in ranges:
        assert read.at % READ_ALIGNMENT == read.offset % READ_ALIGNMENT == 0
    for span in (span for span in filed.spans if span.end > span.begin and span.name not in changed):
        header, entry = stored[span.name]
        offset = header.data_start + entry.data_offsets[0]
        (within,) = (
            read
            for read in ranges
            if read.path == header.path and read.offset <= offset < offset + entry.nbytes <= read.offset + read.nbytes
        )
        assert (span.begin, span.end - span.begin) == (within.at + offset - within.offset, entry.nbytes)


def count_extents(names: list[str], stored: Stored) -> int:
    """Contiguous ranges, as the inventory counts them."""
    spans = sorted((str(header.path), *entry.data_offsets) for header, entry in map(stored.__getitem__, names))
    spans = [span for span in spans if span[1] < span[2]]
    return bool(spans) + sum(one[0] != other[0] or one[2] != other[1] for one, other in pairwise(spans))


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9))).map(
    lambda found: merged((start, start + count) for start, count in found)
)


@given(pages=SPANS, held=SPANS)
def test_pages_without_those_that_are_held(pages: list[Pages], held: list[Pages]) -> None:
    def members(spans: list[Pages]) -> list[int]:
        return [page for start, stop in spans for page in range(start, stop)]

    assert members(without(pages, held)) == sorted(set(members(pages)) - set(members(held)))
