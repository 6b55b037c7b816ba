#!/bin/sh
# Everything that needs a GPU, in one command of at most nine minutes: tests, kernels, steps. No network.
#
#     bench/gpu.sh [--dry-run] [OUT]           OUT: bench/results/gpu
#
# Run from anywhere; uses PYTHON (default: .venv/bin/python, or python3) on the tree as it lies. A part that fails or
# runs out of its time is said at the end, and the exit code is not zero; the other parts run.
set -u
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root" || exit 2

dry=no
if [ "${1:-}" = "--dry-run" ]; then dry=yes; shift; fi
case "${1:-}" in -*) echo "usage: bench/gpu.sh [--dry-run] [OUT]" >&2; exit 2 ;; esac
out=${1:-bench/results/gpu}
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
failed=
total=0

# run NAME SECONDS COMMAND...
run() {
    name=$1 seconds=$2
    shift 2
    total=$((total + seconds))
    if [ "$dry" = yes ]; then
        echo "$name, at most $seconds s: $*"
        return
    fi
    echo "== $name"
    mkdir -p "$out"
    { timeout -k 5 "$seconds" "$@" 2>&1; echo $? >"$out/.code"; } | tee "$out/$name.log"
    code=$(cat "$out/.code")
    rm -f "$out/.code"
    if [ "$code" -ne 0 ]; then
        reason="exit code $code"
        if [ "$code" -eq 124 ]; then reason="no end after $seconds s"; fi
        failed="$failed
  $name: $reason (see $out/$name.log)"
    fi
}

run tests 130 "$PYTHON" -P -m pytest -q -m gpu -p no:cacheprovider tests
run step-thin 90 "$PYTHON" -P bench/gpu_step.py "$out" --preset thin
run step-gpt2 110 "$PYTHON" -P bench/gpu_step.py "$out" --preset gpt2
run kernels 80 "$PYTHON" -P bench/kernels.py "$out/kernels.json"
run step-llama 120 "$PYTHON" -P bench/gpu_step.py "$out" --preset llama --rounds 5 --steps 5

if [ "$dry" = yes ]; then
    echo "$total s in all, at most"
elif [ -n "$failed" ]; then
    echo "== failed:$failed"
    exit 1
else
    echo "== all parts passed; results in $out"
fi
