#!/bin/bash
# Runs the test suite under MPICH and Open MPI, each in a virtual environment inside this clone.
# Arguments go to pytest, with paths as seen from the clone: bash jobscripts/test.sh tests/unit -x
# PYTHON=... chooses the Python (3.10 or newer).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# Two environments, since both MPIs install bin/mpiexec.
ensure_environment .venv mpich,report,test
ensure_environment .venv-openmpi openmpi,report,test
# Tests that start ranks do so under the MPI of pytest's own environment and under this one.
export MPIHPO_TEST_OPENMPI_PYTHON="$clone/.venv-openmpi/bin/python"
export OMP_NUM_THREADS=1
cd "$clone"
exec .venv/bin/python -m pytest "$@"
