"""The head of every report: date, machine, versions, commit and command."""

import os
import platform
import subprocess
from datetime import date
from importlib import metadata

import psutil
from placewise.plans.units import format_bytes


def print_header(title: str, command: str) -> None:
    """Print it as markdown."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "accelerate", "diffusers")
    )
    print(f"# {title}, {date.today().isoformat()}\n")
    print(f"{platform.machine()}, {os.cpu_count()} cores, {format_bytes(psutil.virtual_memory().total)}, ", end="")
    print(f"{platform.system()} {platform.release()}, Python {platform.python_version()},\n{versions};")
    print(f"commit {commit.stdout.strip() or 'unknown'}; `{command}`.\n")
