"""What every test shares: one thread for each library, the length of long runs, and the path of the real model."""

import os
from pathlib import Path

import pytest

# Before numpy or torch are imported: several test processes at once must not each take every core.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--scenarios", type=int, default=20, help="of each case of the engine property")


@pytest.fixture(scope="session")
def num_scenarios(pytestconfig: pytest.Config) -> int:
    return pytestconfig.getoption("scenarios")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, in the user's cache; fetched by the first test run on a machine."""
    from paceline.checkpoint.fetch import resolve_model
    from paceline.config import DEFAULT_MODEL, read_environment

    environment = read_environment()
    return resolve_model(DEFAULT_MODEL, cache=environment.cache, offline=environment.offline)
