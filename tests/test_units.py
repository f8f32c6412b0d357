import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from placewise.plans.errors import InputError
from placewise.plans.units import GIB, KIB, MIB, format_bytes, parse_bytes, parse_rate


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("17 b", 17),
        ("1KiB", KIB),
        ("512 MiB", 512 * MIB),
        ("12GiB", 12 * GIB),
        ("  12 gib\n", 12 * GIB),
        ("1TiB", 1024 * GIB),
        ("1kB", 1000),
        ("2MB", 2 * 10**6),
        ("1.5GB", 1_500_000_000),
        ("3TB", 3 * 10**12),
        ("0.5GiB", GIB // 2),
        ("12.9", 12),
        ("007", 7),
    ],
)
def test_sizes_as_people_write_them(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [("1.001kB", 1001), ("1.005MB", 1_005_000), ("1.1GiB", 1181116006), ("9007199254740993", 2**53 + 1)],
)
def test_no_byte_is_lost_to_floating_point(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "-1GiB",
        "+1",
        "1e9",
        "12 apples",
        "1GiB2",
        "1,5GB",
        "1.GB",
        ".5GB",
        "0x10",
        "nan",
        "inf",
        "\u0661GiB",
        "1" * 400 + ".5GB",
        "1" * 5000,
    ],
)
def test_anything_else_is_no_size(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_bytes(text)
    assert str(caught.value) == (
        f"'{text}' is not a size\nhint: write a number with a unit, such as 12GiB, 512MiB or 2GB"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (KIB + KIB // 2, "1.50 KiB"),
        (10 * KIB, "10.0 KiB"),
        (100 * KIB, "100 KiB"),
        (1023 * KIB, "1023 KiB"),
        (int(61.73 * GIB), "61.7 GiB"),
        (1117 * GIB, "1.09 TiB"),
        (5000 * 1024 * GIB, "5000 TiB"),
        (-1, "-1 B"),
        (-GIB, "-1.00 GiB"),
    ],
)
def test_three_figures_in_the_largest_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(MIB - 1, "1.00 MiB"), (GIB - 1, "1.00 GiB"), (10 * KIB - 1, "10.0 KiB"), (100 * KIB - 1, "100 KiB")],
)
def test_what_rounds_up_to_the_next_unit_is_written_in_it(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 1 << 60), st.sampled_from(["", "B", "KiB", "MiB", "GiB", "TiB"]))
def test_whole_sizes_are_exact(number: int, unit: str) -> None:
    factor = 1024 ** ["", "B", "KiB", "MiB", "GiB", "TiB"].index(unit) // (1024 if unit else 1)
    assert parse_bytes(f"{number}{unit}") == number * factor


@given(st.integers(0, 1 << 50))
@example(1111)
def test_what_is_written_is_read_back_to_half_a_hundredth(count: int) -> None:
    # A fraction of a byte is dropped: 1.08 KiB are 1105.92 bytes.
    assert count * 0.995 - 1 < parse_bytes(format_bytes(count)) <= count * 1.005


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("2.5GB/s", 2_500_000_000),
        ("3 GiB/s", 3 * GIB),
        ("900MiB", 900 * MIB),
        ("12 / s", 12),
        (" 1kB /s\n", 1000),
    ],
)
def test_rates_as_people_write_them(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["", "/s", "GB/s", "-1GB/s", "1GB/h", "1GB/S", "1GB/s/s", "1Gbit/s", "1GBps", "1 GB s"]
)
def test_anything_else_is_no_rate(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_rate(text)
    assert str(caught.value) == (
        f"'{text}' is not a rate\nhint: write a number with a unit, such as 2.5GB/s or 900MiB/s"
    )
