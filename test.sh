#!/usr/bin/env bash
# Sets up, builds and runs all tests. Arguments go to doctest: ./test.sh -tc='*simota*'
set -uo pipefail
cd "$(dirname "$0")"
./setup.sh || exit 1
build=${YOLOX_BUILD:-build}
# Some tests look at what is written for TensorBoard with its own reader.
has_tensorboard() { "$1" -c 'import tensorboard.backend' >/dev/null 2>&1; }
venv=.venv/bin/python
if ! has_tensorboard "${YOLOX_PYTHON:-$venv}" && ! has_tensorboard $venv && ! has_tensorboard python3; then
  echo "== installing tensorboard into .venv"
  { [ -x $venv ] || python3 -m venv .venv; } >/dev/null 2>&1 &&
    $venv -m pip install -q --disable-pip-version-check --retries 1 tensorboard >/dev/null 2>&1 ||
    echo "tensorboard could not be installed; type: $venv -m pip install tensorboard"
  has_tensorboard $venv || echo "the tests that need it are skipped"
fi
# Others make two hosts out of network namespaces.
if ! PATH=$PATH:/usr/sbin command -v ip >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2; } >/dev/null 2>&1 || true
fi
echo "== testing"
[ -e "${YOLOX_SHARED:-../shared}/fixtures" ] ||
  echo "reference data (../shared or \$YOLOX_SHARED) is not here: tests that compare with it are skipped"
log=$(mktemp)
"$build/tests" --no-colors "$@" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
line=$(grep -E '^\[doctest\] test cases:' "$log" | tail -n 1)
rm -f "$log"
if [ -z "$line" ]; then  # the test program did not reach its end
  echo "the test program ended with status $status"
  echo "0 passed, 1 failed"
  exit 1
fi
sed -E 's/.*\| *([0-9]+) passed *\| *([0-9]+) failed *\| *([0-9]+) skipped.*/\1 passed, \2 failed, \3 skipped/' <<<"$line"
exit "$status"
