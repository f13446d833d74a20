"""Every row of the table of faults, under each MPI; ``python -m tests.faults`` prints it."""

from __future__ import annotations

import pytest

from tests.faults.rows import Measured, Row
from tests.faults.running import Player
from tests.faults.table import ROWS
from tests.launch import Mpi


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.group}: {row.name}")
def test_fault(player: Player, measured: list[Measured], mpi: Mpi, row: Row) -> None:
    if mpi.name not in row.mpis:
        pytest.skip(f"not under {mpi.name}: the fault needs {' or '.join(row.mpis)}")
    measured.append(player.play(row, mpi))


def test_rows_have_names_of_their_own() -> None:
    names = [(row.group, row.name) for row in ROWS]
    assert len(set(names)) == len(names)
