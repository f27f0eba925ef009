#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up, builds and runs the tests: a few minutes for all.
#   ./test.sh                    all
#   ./test.sh quick              those that start no program: less than a minute
#   ./test.sh -tc='*simota*'     arguments go to doctest; -ltc lists the names, -h the arguments
set -uo pipefail
[ "${1:-}" != --help ] || { sed -n '3,/^set/s/^# \?//p' "$0"; exit; }
cd "$(dirname "$0")"
./setup.sh train eval demo export pack tests || exit 1
build=${YOLOX_BUILD:-build}
tests/install.sh "$build"
echo "== testing"
shared=${YOLOX_SHARED:-../shared}
missing=()
for part in fixtures data/weights data/coco_val2017_union data/coco_eval data/bccd data/odd_images; do
  [ -e "$shared/$part" ] || missing+=("$part")
done
[ ${#missing[@]} = 0 ] ||
  echo "missing reference data in $shared (or \$YOLOX_SHARED): ${missing[*]}; tests that compare with it are skipped"
case " $* " in
  *" -ltc "* | *" -lts "* | *" -lr "* | *" -c "* | *" -h "* | *" --list-"* | *" --count "*)
    exec "$build/tests" "$@" ;;
esac
scripts=(tests/includes.py "tests/promises.sh $build/tests")
if [ "${1:-}" = quick ]; then
  shift
  set -- -tse=programs "$@"
elif [ $# -gt 0 ]; then
  scripts=()
fi
exec tests/shards.sh "$build/tests" ${scripts[@]+"${scripts[@]}"} -- "$@"
