"""One player for all rows, since rows share jobs; and what they measured, at the end."""

from __future__ import annotations

import pytest

from tests.faults.printing import row_line, summary
from tests.faults.rows import Measured
from tests.faults.running import Player
from tests.mpi_fixture import mpi as mpi

_MEASURED = pytest.StashKey[list[Measured]]()


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> list[Measured]:
    """Of all rows that were played."""
    return request.config.stash.setdefault(_MEASURED, [])


@pytest.fixture(scope="session")
def player(tmp_path_factory: pytest.TempPathFactory) -> Player:
    return Player(tmp_path_factory.mktemp("faults"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    measured = terminalreporter.config.stash.get(_MEASURED, [])
    if measured:
        terminalreporter.section("faults")
        for each in measured:
            terminalreporter.write_line(row_line(each))
        terminalreporter.write_line(summary(measured))
