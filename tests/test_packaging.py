"""What ships: one package at the top level, every folder of it, and nothing imported with it."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SHIPPED = ("executor", "models", "planner", "plans", "policies")


def settings() -> dict[str, list[str]]:
    """The table of setuptools."""
    document = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    table: dict[str, list[str]] = document["tool"]["setuptools"]
    return table


def test_every_folder_of_modules_is_listed() -> None:
    folders = {
        path.parent.relative_to(REPOSITORY)
        for folder in SHIPPED
        for path in REPOSITORY.glob(f"{folder}/**/__init__.py")
    }
    assert {path.parent.name for path in REPOSITORY.glob("*/__init__.py")} - {"tests", "benchmarks"} == set(SHIPPED)
    assert set(settings()["packages"]) == {"placewise", *(".".join(("placewise", *folder.parts)) for folder in folders)}


def test_every_init_file_but_the_face_is_a_docstring() -> None:
    for folder in SHIPPED:
        lines = (REPOSITORY / folder / "__init__.py").read_text().splitlines()
        assert len(lines) == 1
        assert lines[0].startswith('"""')


def test_inside_the_package_imports_are_relative() -> None:
    """A linter's ban cannot tell them apart in a checkout whose folder has the package's name."""
    files = [*REPOSITORY.glob("*.py"), *(path for folder in SHIPPED for path in REPOSITORY.glob(f"{folder}/**/*.py"))]
    absolute = re.compile(r"^\s*(?:from|import) placewise\b", re.MULTILINE)
    assert [str(path) for path in files if absolute.search(path.read_text())] == []


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys; import placewise; print(*(name for name in sys.modules if name.startswith('placewise')))"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(REPOSITORY / ".src")},
    )
    assert ran.stdout.split() == ["placewise"]


def test_the_face_gives_what_it_lists() -> None:
    import placewise

    assert {name for name in placewise.__all__ if callable(getattr(placewise, name))} == set(placewise.__all__)
    assert set(placewise.__all__) <= set(dir(placewise))
    with pytest.raises(AttributeError, match="module 'placewise' has no attribute 'nothing'"):
        getattr(placewise, "nothing")  # noqa: B009 - the type checkers know that it is not there


def test_a_wheel_holds_one_package_with_its_data(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, REPOSITORY],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"placewise", wheel.name.split("-py3")[0] + ".dist-info"}
    assert {"placewise/py.typed", "placewise/plans/schema.json", "placewise/policies/auto.json"} <= names
    assert not [name for name in names if name.startswith(("placewise/tests", "placewise/benchmarks"))]
