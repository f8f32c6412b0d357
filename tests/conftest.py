"""What holds for all tests: laws have no deadline, since shared machines stall now and then; no cache is the user's."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("placewise", deadline=None)
settings.load_profile("placewise")


@pytest.fixture(autouse=True)
def _no_cache_of_the_user(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration that somebody made on this machine must not decide what a test sees."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def _small_layers_are_read_ahead_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests' layers are small, so that otherwise nothing would ever be read ahead."""
    monkeypatch.setattr("placewise.executor.slots.SMALL_BYTES", 0)


@pytest.fixture
def no_grad() -> Iterator[None]:
    """As inference is run."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads that share out tiny products only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
