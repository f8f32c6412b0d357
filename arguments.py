"""What the command line takes: sizes, rates, and the options that say what to plan, for which machine, and how.

Nothing heavy is imported here, so that help is quick; `options` gives them their meaning.
"""

from collections.abc import Callable
from pathlib import Path

import click

from .plans.errors import InputError
from .plans.units import parse_bytes, parse_rate

PATH = click.Path(path_type=Path)


class Figure(click.ParamType[int]):
    """A number with its unit, such as `12GiB` or `2.5GB/s`; anything else is a usage error.

    Args:
        name: what the help calls it.
        parse: reads the text, and raises InputError for what it is not.
    """

    def __init__(self, name: str, parse: Callable[[str], int]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the figure; click hands defaults over as numbers."""
        if isinstance(value, int):
            return value
        try:
            return self._parse(value)
        except InputError as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)


_SIZE, _RATE = Figure("size", parse_bytes), Figure("rate", parse_rate)

_OPTIONS = (
    click.option("--policy", default="auto", show_default=True, help="A preset, or a policy's JSON file."),
    click.option("--reserve", type=_SIZE, help="Host memory to keep free, instead of the policy's."),
    click.option(
        "--override",
        multiple=True,
        metavar="PART:KEY=VALUE,...",
        help="Such as transformer.blocks:home=mapped or vae:compute_device=cpu.",
    ),
    click.option(
        "--transform",
        "transforms",
        multiple=True,
        metavar="COMPONENT:TENSOR=KIND",
        help="Such as transformer:blocks.*.qkv.weight=deinterleave:48:3, ...=transpose or ...=cast:BF16.",
    ),
    click.option(
        "--machine",
        "facts",
        type=PATH,
        multiple=True,
        help="Facts of another machine, from `facts --json`; `plan` takes several, or a folder of them.",
    ),
    click.option("--host-memory", type=_SIZE, help="Available host memory of a machine that is not here."),
    click.option("--device-memory", type=_SIZE, help="Free memory of an accelerator that is not here."),
    click.option("--device", help="Its name  [default: cuda:0]; sim:0 is simulated, cpu means none."),
    click.option("--disk", "disk_rate", type=_RATE, help="Cold read rate of a disk that is not here: 2GB/s."),
    click.option("--link", "link_rate", type=_RATE, help="Copy rate to an accelerator that is not here: 12GB/s."),
    click.option("--steps", type=click.IntRange(0), help="Sampling steps of a request."),
    click.option("--tokens", type=click.IntRange(1), help="Tokens that a request generates."),
    click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Batch size of a request."),
    click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Processes on this host."),
    click.option("--height", type=click.IntRange(1), help="Height in pixels."),
    click.option("--width", type=click.IntRange(1), help="Width in pixels."),
    click.option("--frames", type=click.IntRange(1), help="Frames of video."),
    click.option("--passes", multiple=True, metavar="COMPONENT=N", help="Forwards per request."),
    click.option("--activations", multiple=True, metavar="COMPONENT=SIZE", help="Peak activation memory of a pass."),
    click.option("--trace", is_flag=True, help="Trace activations and FLOPs; takes seconds, and imports torch."),
)


def planning_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say what to plan, for which machine, and how."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
