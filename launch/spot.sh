#!/usr/bin/env bash
# Trains on a machine that may be taken away: starts the run or goes on with it, until it is finished.
#
#   launch/spot.sh launch/two-gpus.yaml DATASET NAME [--set train.steps=2000 ...]
#
# Start it again by the same line, here or on another machine that sees the same folders: at boot, say.
# Runs lie in $RUNS (else runs/), which must outlive the machine, and so must the dataset.
#
# 0: finished. 2, 3 or 5: trying again would end the same way (request, input, training stopped).
# 130 or 143: asked to stop, by a signal or through the run's control folder, and saved.
# 4: $TRIES launches in a row (else 3) saved nothing new.
set -euo pipefail

if [ $# -lt 3 ]; then
  echo "usage: $0 ACCELERATE_CONFIG DATASET NAME [more arguments of lora-train]" >&2
  exit 2
fi
config=$1 dataset=$2 name=$3
shift 3
runs=${RUNS:-runs}
run=$runs/$name
arguments=("$dataset" --name "$name" --output "$runs" "$@")

# What a launcher makes of exit codes is 1. The reason of an end stands in status.json.
status_code() {
  [ "$run/status.json" -nt "$started" ] || return 0 # not of this launch
  sed -n 's/^ *"exit_code": *\([0-9][0-9]*\).*/\1/p' "$run/status.json"
}

newest_state() {
  find "$run/states" -maxdepth 1 -name 'step-*' 2>/dev/null | sort | tail -n 1 || true # none yet
}

stopping=
trap 'stopping=1' TERM INT

# Waits for a launcher. A stop is asked for by a file, not a signal: a launcher that gets a signal gives
# its processes 30 seconds and then kills them.
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

# A request or an input that cannot be used is refused here, with its own exit code and in seconds.
python -m lora_trainer "${arguments[@]}" --dry-run >/dev/null

started=$(mktemp)
trap 'rm -f "$started"' EXIT
fruitless=0
while [ -z "$stopping" ]; do
  # `--resume` without a run is refused, and without `--resume` a second run NAME-002 would begin.
  resume=()
  rmdir "$run" 2>/dev/null || true # made, and killed before anything was in it
  if [ -e "$run" ]; then resume=(--resume); fi
  rm -f "$run/control/stop"
  touch "$started"
  before=$(newest_state)

  # In a session of its own, so that Ctrl-C reaches this script only.
  setsid accelerate launch --config_file "$config" -m lora_trainer "${arguments[@]}" "${resume[@]}" &
  code=0
  attend $! || code=$?

  ended=$(status_code)
  echo "spot: launch ended with code $code, the run with ${ended:-no word}" >&2
  if [ "$code" = 0 ]; then exit 0; fi
  case $ended in 2 | 3 | 5 | 130 | 143) exit "$ended" ;; esac
  if [ -n "$stopping" ]; then exit 143; fi
  if [ "$(newest_state)" = "$before" ]; then fruitless=$((fruitless + 1)); else fruitless=0; fi
  if [ "$fruitless" -ge "${TRIES:-3}" ]; then
    echo "spot: $fruitless launches in a row saved nothing new" >&2
    exit 4
  fi
  sleep "${PAUSE_S:-10}" &
  wait $! || true
done
exit 143
