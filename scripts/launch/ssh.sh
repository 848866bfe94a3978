#!/usr/bin/env bash
# Train on machines that ssh reaches without a password, one process a machine:
#
#     scripts/launch/ssh.sh node1,node2,node3 gva_350m [--train.steps 50 ...]
#
# Start it in a folder that all machines see under the same path: the run's folder is made there. Ctrl-C, SIGTERM, or
# the end of this machine's connection stop the run, saved; the same command goes on. docs/launch_ssh.md says more.
set -uo pipefail

if [ $# -lt 2 ]; then
  echo "usage: $0 HOST,HOST,... CONFIG [OPTIONS of gva train]" >&2
  exit 2
fi
IFS=, read -r -a hosts <<< "$1"
shift
GVA="${GVA:-gva}"                                       # for example "uv run gva"
MAX_RESTARTS="${MAX_RESTARTS:-3}"
coordinator="${COORDINATOR:-${hosts[0]}:${PORT:-29417}}"
cache="${GVA_JAX_CACHE:-$PWD/cache}"                    # corpora and compiled programs, seen by all machines

held="$(mktemp -d)"
mkfifo "$held/open"
trap 'rm -rf "$held"' EXIT

# What runs on machine $1. ssh passes no signals on, so the far end stops when its standard input ends.
far() {
  local index=$1
  shift
  printf 'cd %q && exec 3<&0 || exit 2; ' "$PWD"
  printf 'env GVA_JAX_COORDINATOR=%q GVA_JAX_NUM_PROCESSES=%q GVA_JAX_PROCESS_ID=%q GVA_JAX_CACHE=%q ' \
    "$coordinator" "${#hosts[@]}" "$index" "$cache"
  printf '%s train' "$GVA"
  printf ' %q' "$@"
  printf ' 3<&- & run=$!; { while read -r line; do :; done; kill -TERM $run; } <&3 >/dev/null 2>&1 & stop=$!; '
  printf 'wait $run; code=$?; kill $stop 2>/dev/null; exit $code'
}

# Starts all, waits for all; the first code that is not 0.
launch() {
  local index pid code found=0 pids=()
  exec 9<> "$held/open"
  for index in "${!hosts[@]}"; do
    ssh -o BatchMode=yes "${hosts[index]}" "$(far "$index" "$@")" < "$held/open" 9>&- &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do
    while true; do
      wait "$pid"
      code=$?
      kill -0 "$pid" 2>/dev/null || break               # a trap only interrupts the waiting
    done
    [ "$found" != 0 ] || found=$code
  done
  return "$found"
}

stopped=0
trap 'stopped=1; exec 9>&-' INT TERM HUP
for ((restarts = 0; ; restarts++)); do
  launch "$@"
  code=$?
  [ "$stopped" = 0 ] && [ "$code" != 0 ] && [ "$code" != 2 ] && [ "$restarts" -lt "$MAX_RESTARTS" ] || break
  echo "ended with $code; started again, to go on from the last checkpoint" >&2
done
exit "$code"
