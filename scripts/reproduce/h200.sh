#!/usr/bin/env bash
# Every measurement of one GPU that docs/measurements and docs/performance.md rest on, by stage:
#
#   OUT=runs/h200 scripts/reproduce/h200.sh tests cells profile ...
#
# Without words: all of them, in this order. Each stage ends by itself, writes its files to OUT, and
# prints little; the seconds beside the names are what it may take on an H200 with kernels to
# compile. A stage that fails does not stop the next. Afterwards copy the JSON files to
# benchmarks/results and run scripts/reproduce/performance.py and ablations.py --render.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-runs/h200}
PY=${PY:-python3}
BIG=benchmarks/shapes/L6E64
WIDE=benchmarks/shapes/L4E256
mkdir -p "$OUT"
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$PWD PYTHONUNBUFFERED=1

quiet() { # SECONDS NAME COMMAND...: the last lines, and the time
  local limit=$1 name=$2 begun=$SECONDS
  shift 2
  timeout -s INT -k 10 "$limit" "$@" >"$OUT/$name.log" 2>&1
  local code=$?
  tail -n "${LINES_SHOWN:-6}" "$OUT/$name.log" | cut -c1-180
  echo "== $name: exit code $code, $((SECONDS - begun)) s"
}

stage() {
  case $1 in
  tests) # 400
    quiet 500 tests "$PY" -m pytest -q -rf -m gpu -n "${WORKERS:-10}" -p no:cacheprovider \
      tests/kernels tests/engine tests/model
    ;;
  sanitize) # 400: reads and writes outside of tensors, each in an allocation of its own; small cases
    for file in ${OPS:-tests/kernels/test_*_kernel.py tests/kernels/test_router_route.py \
      tests/kernels/test_grouped_gemm_fused.py}; do
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 LINES_SHOWN=1 quiet "${SANITIZE:-390}" \
        "sanitize-$(basename "$file" .py)" compute-sanitizer --tool memcheck --error-exitcode 9 \
        "$PY" -m pytest -q -m gpu -p no:cacheprovider "$file" \
        -k "not inkling and not graph" &
    done
    wait
    ;;
  verify) # 500
    quiet 120 verify-tiny "$PY" -m suzuri verify tiny --random-weights --device cuda --fast
    quiet 400 verify-L6E64 "$PY" -m suzuri verify $BIG --random-weights --device cuda --fast
    ;;
  cells) # 200
    quiet 150 cells-L6E64 "$PY" -m suzuri bench serving $BIG --no-peers \
      --out "$OUT/serving-L6E64.json"
    quiet 150 cells-L4E256 "$PY" -m suzuri bench serving $WIDE --no-peers --repeats 3 \
      --requests 32 --out "$OUT/serving-L4E256.json"
    ;;
  profile) # 60
    LINES_SHOWN=90 quiet 90 profile "$PY" scripts/reproduce/step_profile.py $BIG decode:1x1024 \
      decode:64x1024 prefill:1x1024 prefill:1x8192 --out "$OUT/step-profile-h200.json"
    ;;
  gaps) # 40
    quiet 60 gaps "$PY" scripts/reproduce/step_gaps.py $BIG decode:1x1024 decode:64x1024 \
      prefill:1x1024 prefill:1x8192 --out "$OUT/step-gaps-h200.json" --plot "$OUT/step-gaps.png"
    ;;
  attention) # 40
    quiet 60 attention "$PY" scripts/reproduce/split_or_rows.py --out "$OUT/split-or-rows.json"
    ;;
  tune) # 150
    LINES_SHOWN=40 quiet 190 tune "$PY" scripts/reproduce/tune_moe.py "$OUT/tune-moe.json" \
      --seconds "${TUNE:-140}" --out "$OUT/tiles.json"
    ;;
  startup) # 110
    LINES_SHOWN=30 quiet 130 startup "$PY" -m suzuri bench startup $BIG --random-weights \
      --max-context 65536 --out "$OUT/startup-L6E64.json"
    ;;
  http) # 200
    LINES_SHOWN=40 quiet 230 http "$PY" scripts/reproduce/http_serving.py $BIG --rate-seconds 6 \
      --seconds 200 --out "$OUT/http-serving.json"
    ;;
  agents) # 70
    LINES_SHOWN=12 quiet 90 agents "$PY" -m suzuri bench serving $BIG --no-peers --cells agents:16 \
      --out "$OUT/agents-L6E64.json"
    ;;
  ablations) # 150
    LINES_SHOWN=30 quiet 170 ablations "$PY" scripts/reproduce/ablations.py $BIG --seconds 130 \
      --out "$OUT/ablations.json"
    ;;
  head) # 40
    LINES_SHOWN=12 quiet 60 head "$PY" scripts/reproduce/head.py --out "$OUT/head-h200.json"
    ;;
  long) # 300
    quiet 480 long "$PY" scripts/reproduce/long_context.py --state "$OUT/long-context.json"
    ;;
  rl) # 90
    quiet 150 rl "$PY" -m suzuri rl recipes/nano_arithmetic.py --device=cuda --steps=20 \
      "--run-dir=$OUT/rl"
    ;;
  *)
    echo "no stage $1; see the words in $0" >&2
    return 2
    ;;
  esac
}

all=(tests sanitize verify cells profile gaps attention tune startup http agents ablations head long rl)
for word in "${@:-${all[@]}}"; do stage "$word"; done
