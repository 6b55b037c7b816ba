#!/bin/sh
# Everything that needs a GPU, in one command of at most nine minutes after its set-up: tests, kernels, steps.
#
#     bench/gpu.sh [--dry-run] [OUT]           OUT: bench/results/gpu
#
# Run from anywhere, on the tree as it lies. PYTHON: the Python to run. Without it, .venv is set up first with all that
# the parts need (.ci/setup test: the network, once), and where that fails .venv/bin/python or python3 runs what it can.
# OTHERS: more Pythons, with other versions of torch, whose check, graphs and kernels are tried as well (default: those
# of .venv-*/bin/python), which takes longer. A part that lacks a package, fails or runs out of its time is said at the
# end, and the exit code is not zero; the other parts run. Ends with a table, and with all that was written as one file,
# OUT.tar.gz.
set -u
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root" || exit 2

dry=no
if [ "${1:-}" = "--dry-run" ]; then dry=yes; shift; fi
case "${1:-}" in -*) echo "usage: bench/gpu.sh [--dry-run] [OUT]" >&2; exit 2 ;; esac
out=${1:-bench/results/gpu}
if [ -z "${PYTHON:-}" ]; then
    if [ "$dry" = no ] && ! sh .ci/setup test; then
        echo "== the set-up failed, for the reason above: parts that lack a package are left out" >&2
    fi
    PYTHON=python3
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
if [ -z "${OTHERS+set}" ]; then
    OTHERS=
    for other in .venv-*/bin/python; do
        if [ -x "$other" ]; then OTHERS="$OTHERS $other"; fi
    done
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
failed=0
total=0
table=

# Imports each name, and names on one line those that cannot be, with the reason.
imports='
import importlib, sys
for name in sys.argv[1:]:
    try: importlib.import_module(name)
    except Exception as error: print(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
'

# run NAME SECONDS WHAT MODULES PYTHON COMMAND...       WHAT it shows, for the table; MODULES that PYTHON must have
run() {
    name=$1 seconds=$2 what=$3 modules=$4 python=$5
    shift 5
    total=$((total + seconds))
    if [ "$dry" = yes ]; then
        echo "$name, at most $seconds s: $*"
        return
    fi
    echo "== $name"
    mkdir -p "$out"
    begun=$(date +%s)
    # shellcheck disable=SC2086  # a word each
    if ! "$python" -P -c "$imports" $modules >"$out/$name.log" 2>&1 || [ -s "$out/$name.log" ]; then
        cat "$out/$name.log"
        failed=$((failed + 1))
        row=$(printf '  %-20s %-46s %-17s %4s s  %s' "$name" "$what" "not set up" 0 "report $out/$name.log")
        table="$table
$row"
        return
    fi
    { timeout -k 5 "$seconds" "$@" 2>&1; echo $? >"$out/.code"; } | tee "$out/$name.log"
    code=$(cat "$out/.code")
    rm -f "$out/.code"
    took=$(($(date +%s) - begun))
    verdict=held report=
    if [ "$code" -ne 0 ]; then
        failed=$((failed + 1))
        verdict="exit code $code" report="report $out/$name.log"
        if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then verdict="no end in $seconds s"; fi
    fi
    row=$(printf '  %-20s %-46s %-17s %4s s  %s' "$name" "$what" "$verdict" "$took" "$report")
    table="$table
$row"
}

# tried PYTHON SUFFIX: what is wanted of every version of torch, the riskiest first
tried() {
    run "check$2" 80 "each kind of thing once, beside what it equals" \
        "torch triton" "$1" "$1" -P -m fsdp_compiled check --out "$out/check$2"
    # In a process of their own, to the first failure: one that breaks CUDA would fail all that follow.
    run "graphs$2" 120 "steps as CUDA graphs" "torch pytest" "$1" \
        "$1" -P -m pytest -q -x --tb=long -p no:cacheprovider tests/lower/test_cuda_graph_gpu.py \
        tests/passes/test_store_saved.py::test_on_a_gpu_numbers_are_the_same_and_memory_is_less
    run "kernel-tests$2" 80 "kernels against their references" "torch triton pytest hypothesis" "$1" \
        env KERNEL_EXAMPLES=5 "$1" -P -m pytest -q -m "gpu and not exhaustive" -p no:cacheprovider tests/kernels/test_kernels_gpu.py
}

tried "$PYTHON" ""
run kernels 60 "the kernels' share of a copy's bandwidth" "torch triton" "$PYTHON" \
    "$PYTHON" -m bench.gpu_kernels "$out/kernels.json"
run step-thin 60 "time of a step, many small operators" "torch matplotlib" "$PYTHON" \
    "$PYTHON" -m bench.gpu_step "$out" --preset thin
run step-gpt2 70 "time of a step, GPT-2 124M" "torch matplotlib transformers" "$PYTHON" \
    "$PYTHON" -m bench.gpu_step "$out" --preset gpt2 --rounds 5
run step-llama 70 "time of a step, Llama 1B" "torch matplotlib transformers" "$PYTHON" \
    "$PYTHON" -m bench.gpu_step "$out" --preset llama --rounds 3 --steps 5
number=1
for other in $OTHERS; do
    number=$((number + 1))
    tried "$other" "-$number"
done

if [ "$dry" = yes ]; then
    echo "$total s in all, at most"
    exit 0
fi
{
    "$PYTHON" -P -c 'import torch; print("torch", torch.__version__, torch.cuda.is_available() and torch.cuda.get_device_name())' \
        2>&1
    echo "  part                 shows                                          result"
    echo "${table#?}"
} | tee "$out/summary.txt"
tar -czf "$out.tar.gz" -C "$(dirname -- "$out")" "$(basename -- "$out")" && echo "all of it: $out.tar.gz"
if [ "$failed" -ne 0 ]; then
    echo "== $failed failed: please report them, with $out.tar.gz"
    exit 1
fi
echo "== all parts held"
