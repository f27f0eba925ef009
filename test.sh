#!/usr/bin/env bash
# Sets up, builds and runs all tests. Arguments go to doctest: ./test.sh -tc='*simota*'
set -uo pipefail
cd "$(dirname "$0")"
./setup.sh || exit 1
build=${YOLOX_BUILD:-build}
# Some tests look at what is written with the programs that it is for: TensorBoard's own reader, ONNX Runtime.
venv=.venv/bin/python
while read -r package module; do
  found=
  for python in "${YOLOX_PYTHON:-$venv}" $venv python3; do
    if "$python" -c "import $module" >/dev/null 2>&1; then found=yes && break; fi
  done
  [ -z "$found" ] || continue
  echo "== installing $package into .venv"
  { [ -x $venv ] || python3 -m venv .venv; } >/dev/null 2>&1 &&
    $venv -m pip install -q --disable-pip-version-check --retries 1 $package >/dev/null 2>&1 ||
    echo "$package could not be installed, the tests that need it are skipped; type: $venv -m pip install $package"
done <<END
tensorboard tensorboard.backend
onnxruntime onnxruntime
opencv-python-headless cv2
END
# Others make two hosts out of network namespaces.
if ! PATH=$PATH:/usr/sbin command -v ip >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2; } >/dev/null 2>&1 || true
fi
# One looks at report.html with a browser.
if ! command -v chromium chromium-browser google-chrome >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "== installing chromium"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 || true
  fi
  command -v chromium chromium-browser google-chrome >/dev/null ||
    echo "there is no chromium: the test that needs it is skipped"
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
