#!/bin/bash
# Installs mpihpo with an MPI of its own into .venv of this clone and runs the digits experiment on
# four ranks. Arguments go to `mpihpo run`: bash jobscripts/quickstart.sh --set search.trials=8
# PYTHON=... chooses the Python (3.10 or newer).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

ranks=4
ensure_environment .venv mpich,report
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(threads_per_rank "$ranks")}"
# All ranks start here, also inside a batch job, whose nodes mpiexec would use.
export HYDRA_LAUNCHER=fork HYDRA_RMK=user
# A folder of its own, since a run never goes over an earlier one.
output="$clone/runs/digits-$(date +%Y%m%d-%H%M%S)"
exec "$clone/.venv/bin/mpiexec" -n "$ranks" "$clone/.venv/bin/python" -m mpihpo run \
    "$clone/mpihpo/examples/digits.yaml" --output "$output" "$@"
