"""Makes the fixture ``mpi`` known to the tests of this folder."""

from __future__ import annotations

from tests.mpi_fixture import mpi as mpi
