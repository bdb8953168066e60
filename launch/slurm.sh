#!/usr/bin/env bash
# A training on several machines under Slurm; submit it from the checkout:
#
#   sbatch launch/slurm.sh DATASET NAME [--set train.steps=2000 ...]
#
# One launcher per machine, one process per card. Five minutes before its time is over, and when Slurm
# wants the machines back, the run saves and the job is queued again; it then goes on by itself.
# The checkout, the dataset, runs/ and the environment that `python` is in lie where all machines see them.
#SBATCH --job-name=lora-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
set -euo pipefail

if [ $# -lt 2 ]; then
  echo "usage: sbatch $0 DATASET NAME [more arguments of lora-train]" >&2
  exit 2
fi
dataset=$1 name=$2
shift 2
runs=${RUNS:-runs}
run=$runs/$name

# `--resume` without a run is refused, and without `--resume` a second run NAME-002 would begin.
resume=()
rmdir "$run" 2>/dev/null || true # made, and killed before anything was in it
if [ -e "$run" ]; then resume=(--resume); fi
rm -f "$run/control/stop"

stopping=
trap 'stopping=1' USR1 TERM

# Waits for the training. A stop is asked for by a file, not a signal: a launcher that gets a signal
# gives its processes 30 seconds and then kills them.
attend() {
  local asked=
  while kill -0 "$1" 2>/dev/null; do
    if [ -n "$stopping" ] && [ -z "$asked" ] && [ -d "$run" ]; then
      mkdir -p "$run/control" && touch "$run/control/stop"
      asked=1
    fi
    sleep 0.5 &
    wait $! || true # a signal ends the waiting
  done
  wait "$1"
}

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MAIN_HOST=${hosts[0]}
export MAIN_PORT=$((20000 + SLURM_JOB_ID % 20000))
export PROCESSES=$((SLURM_JOB_NUM_NODES * SLURM_GPUS_ON_NODE))

# shellcheck disable=SC2016 # expanded by each task: only there is SLURM_NODEID known
srun --kill-on-bad-exit=1 bash -c '
  exec accelerate launch --config_file launch/two-machines.yaml \
    --num_machines "$SLURM_JOB_NUM_NODES" --num_processes "$PROCESSES" --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$MAIN_HOST" --main_process_port "$MAIN_PORT" -m lora_trainer "$@"
' task "$dataset" --name "$name" --output "$runs" "$@" "${resume[@]}" &
code=0
attend $! || code=$?

if [ "$code" != 0 ] && [ -n "$stopping" ]; then
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
