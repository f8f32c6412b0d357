"""Rates that are stated, of a machine that is not here."""

from ...plans.calibration import Calibration, ComputeRate, DiskRate, LinkRate, ReadMode
from ...plans.errors import InputError
from ...plans.units import MIB
from ...policies.admission import CPU

GIVEN = "given"


def given_calibration(
    *,
    disk_bytes_per_s: float | None = None,
    link_bytes_per_s: float | None = None,
    device: str | None = None,
    flops_per_s: float | None = None,
) -> Calibration:
    """Rates of a machine that is not here. What is not given stays unknown.

    Args:
        disk_bytes_per_s: cold reads, taken as direct ones of 4 MiB, four at a time. Page faults stay unknown.
        link_bytes_per_s: copies to `device`, from pageable, pinned and mapped memory alike.
        device: the accelerator; the link needs it.
        flops_per_s: matrix products on `device`, or on the CPU without one; for F32, BF16 and F16 alike.

    Raises:
        InputError: a rate is not above zero, or there is a link without a device.
    """
    for name, rate in (("disk", disk_bytes_per_s), ("link", link_bytes_per_s), ("compute", flops_per_s)):
        if rate is not None and not 0 < rate < float("inf"):
            raise InputError(f"the {name} rate {rate:g} is not a number above zero", hint="leave out what is not known")
    if link_bytes_per_s is not None and device in (None, CPU):
        raise InputError("a link rate needs the accelerator that the link leads to", hint="name it, such as cuda:0")
    disk = disk_bytes_per_s
    disks = () if disk is None else (DiskRate(mode=ReadMode.direct, chunk_bytes=4 * MIB, depth=4, bytes_per_s=disk),)
    links = () if link_bytes_per_s is None or device is None else _given_links(device, link_bytes_per_s)
    compute = () if flops_per_s is None else _given_products(device or CPU, flops_per_s)
    return Calibration(measured_at=GIVEN, fingerprint=GIVEN, given=True, disks=disks, links=links, compute=compute)


def _given_links(device: str, rate: float) -> tuple[LinkRate, ...]:
    return tuple(
        LinkRate(device=device, source=source, bytes_per_s=rate) for source in ("pageable", "pinned", "mapped")
    )


def _given_products(device: str, rate: float) -> tuple[ComputeRate, ...]:
    return tuple(ComputeRate(device=device, dtype=dtype, flops_per_s=rate) for dtype in ("F32", "BF16", "F16"))
