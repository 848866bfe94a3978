#!/usr/bin/env bash
# Checks and times the decode kernels on the NVIDIA GPU that is here, in one call that stops itself at 330 seconds.
# A short table comes last; OUT (default runs/gpu_check) keeps it, with all figures as JSON. Needs jax with CUDA, flax
# and optax; compares with PyTorch where it is installed. `--rehearse` goes through it all on a CPU, tiny.
set -uo pipefail
cd "$(dirname "$0")/.."
export XLA_PYTHON_CLIENT_PREALLOCATE=false # PyTorch needs memory too
export PYTHONPATH=".:tests/kernels${PYTHONPATH:+:$PYTHONPATH}"
exec timeout --kill-after=5 335 "${PYTHON:-python3}" scripts/gpu_check.py --out "${OUT:-runs/gpu_check}" --seconds 330 "$@"
