#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the cases of a test program in shards, several processes at a time. Each shard is a range of cases; the longest
# shards start first. Prints the output of cases that fail, the ten slowest cases, and as the last line
# "N passed, N failed, N skipped". A shard whose process dies counts as one failed case; the cases after it still run.
#   tests/shards.sh PROGRAM [SCRIPT...] -- [ARGUMENTS OF DOCTEST...]
# A SCRIPT is a command that counts as one more case.
#   YOLOX_TEST_JOBS=N  processes at a time; one more than cores if not given, because many cases wait for a timeout
set -uo pipefail

# Runs the cases FIRST to LAST (1 is the first case that the arguments select). WORK is the folder of the results.
run_shard() {  # WORK NUMBER FIRST LAST PROGRAM ARGUMENTS...
  local work=$1 number=$2 first=$3 last=$4 program=$5 start=$SECONDS status ended lines log=$1/log$2
  shift 5
  while [ "$first" -le "$last" ]; do
    lines=$work/$number.$first.results
    : >"$lines"
    YOLOX_TEST_RESULTS=$lines timeout -k 5 1200 "$program" --no-colors --no-version --first="$first" --last="$last" "$@" \
      >"$log.raw" 2>&1
    status=$?
    # Remove the lines that doctest prints at the end of each run.
    grep -vE '^\[doctest\]|^={50,}$' "$log.raw" | sed -e '/./,$!d' >>"$log"
    ended=$(grep -c '^end' "$lines")
    if [ "$(grep -c '^begin' "$lines")" -gt "$ended" ]; then  # the process died inside a case
      sed -n '$s/^begin/end\t0\tfailed/p' "$lines" >>"$lines"
      echo "the test program ended with status $status in: $(sed -n '$s/.*\t//p' "$lines")" >>"$log"
      ended=$((ended + 1))
    elif [ "$status" != 0 ] && ! grep -q $'^end\t[^\t]*\tfailed' "$lines"; then  # outside the cases
      printf 'end\t0\tfailed\tshard %s\tcases %s to %s: the process ended with status %s\n' "$number" "$first" "$last" "$status" >>"$lines"
      echo "the test program ended with status $status after $ended of the cases $first to $last" >>"$log"
      [ "$ended" != 0 ] || break
    fi
    first=$((first + ended))
  done
  flock "$work" cat "$log"
}

# Runs a script, which counts as one case.
run_script() {  # WORK COMMAND
  local start
  start=$(date +%s.%N)
  local word=passed
  eval "$2" >"$1/script" 2>&1 || { word=failed; cat "$1/script"; }
  printf 'end\t%s\t%s\tscript\t%s\n' "$(awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN {print b - a}')" $word "$2" >>"$1/scripts.results"
}

if [ "$1" = --shard ]; then
  run_shard "${@:2}"
  exit
fi

program=$1
shift
scripts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do scripts+=("$1"); shift; done
[ $# = 0 ] || shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/runs"
# One OpenMP thread per process, because the other shards use the other cores.
# Programs restart themselves with GOMP_SPINCOUNT, unless it is set.
export GOMP_SPINCOUNT=10000 OMP_NUM_THREADS=1 YOLOX_TEST_RUNS=$work/runs  # reference runs, shared by cases in several processes
times=$(dirname "$program")/test_seconds  # duration of the latest run of each case: SECONDS, FILE, NAME

# Prints "SUITE	FILE	NAME" of each case, in the order in which they run.
list() {
  "$program" -ltc -r=xml --no-colors "$@" | sed -nE 's/^ *<TestCase name="([^"]*)"( testsuite="([^"]*)")? filename="([^"]*)".*/\3\t\4\t\1/p' |
    sed -E 's,\t[^\t]*/([^\t/]*)\t,\t\1\t,; s/&quot;/"/g; s/&apos;/'"'"'/g; s/&lt;/</g; s/&gt;/>/g; s/&amp;/\&/g'
}
list "$@" >"$work/cases"
skipped=$(($(list --no-skip "$@" | grep -cv '^ranks	') - $(grep -cv '^ranks	' "$work/cases")))
touch "$times"
# Writes shards "SECONDS NUMBER FIRST LAST": consecutive cases of about 20 s in total. The duration of a case that never ran is estimated.
awk -F '\t' -v OFS=' ' '
  function flush() { if (n) print sum, ++shards, first, first + n - 1; first += n; n = 0; sum = 0 }
  FILENAME == ARGV[1] { known[$2 "\t" $3] = $1; next }
  FNR == 1 { first = 1 }
  { key = $2 "\t" $3; s = key in known ? known[key] : $2 ~ /ddp|edit|library/ ? 25 : $1 == "programs" ? 4 : 0.5
    if (n && sum + s > 20) flush()
    sum += s; ++n }
  END { flush() }' "$times" "$work/cases" | sort -rn >"$work/shards"

for script in ${scripts[@]+"${scripts[@]}"}; do run_script "$work" "$script"; done
cut -d ' ' -f 2- "$work/shards" | while read -r number first last; do
  printf '%s\0' "$work" "$number" "$first" "$last" "$program" "$@"
done | xargs -0 -r -P "${YOLOX_TEST_JOBS:-$(($(nproc) + 1))}" -n $((5 + $#)) "$0" --shard

cat "$work"/*.results 2>/dev/null | grep '^end' >"$work/results"
awk -F '\t' -v OFS='\t' '
  FILENAME == ARGV[1] { if ($4 != "script" && $3 == "passed") { now[$4 "\t" $5] = 1; print $2, $4, $5 } next }
  !($2 "\t" $3 in now)' "$work/results" "$times" >"$work/times" && mv "$work/times" "$times"
echo "== the slowest cases"
sort -t '	' -k 2 -rn "$work/results" | head -n 10 | awk -F '\t' '{printf "%6.1f s  %s\n", $2, $5}'
failed=$(grep -c $'^end\t[^\t]*\tfailed' "$work/results")
[ "$failed" = 0 ] || { echo "== failed"; sed -nE 's/^end\t[^\t]*\tfailed\t(.*)\t(.*)/\1: \2/p' "$work/results"; }
echo "$(grep -c $'^end\t[^\t]*\tpassed' "$work/results") passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
