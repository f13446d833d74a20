#!/bin/bash
#PBS -N mpihpo
#PBS -A ACCOUNT
#PBS -q QUEUE
#PBS -l walltime=02:00:00
#PBS -l select=4:ncpus=64:mpiprocs=4:ngpus=4
#PBS -l place=scatter:excl
#PBS -j oe
set -eo pipefail
cd "$PBS_O_WORKDIR"

module load python openmpi cuda
# shellcheck source=/dev/null
source "$HOME/venv-mpihpo/bin/activate"

# ncpus over mpiprocs.
export OMP_NUM_THREADS=16
# The fast network, for what NCCL and gloo set up over sockets.
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

output="${MPIHPO_OUTPUT:-runs/$PBS_JOBID}"
resume=()
if [[ -e "$output/journal.jsonl" ]]; then resume=(--resume); fi
# PBS sends no signal before the walltime is over: mpihpo's own limit, two minutes shorter, stands in.
# The node file has one line per rank.
mpiexec -n "$(wc -l <"$PBS_NODEFILE")" python -m mpihpo run experiment.yaml \
    --output "$output" "${resume[@]}" --set limits.time=118m
