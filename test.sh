#!/usr/bin/env bash
# Sets up, builds and runs all tests. Arguments go to doctest: ./test.sh -tc='*simota*'
set -uo pipefail
cd "$(dirname "$0")"
./setup.sh || exit 1
build=${YOLOX_BUILD:-build}
# What only some tests need is installed, too. What failed once, as it does offline, is not tried again.
mkdir -p "$build/tried"
install() {  # NAME COMMAND...
  [ ! -e "$build/tried/$1" ] || return 1
  echo "== installing $1"
  touch "$build/tried/$1"
  "${@:2}" >/dev/null 2>&1 </dev/null
}
from_debian() {
  local quick="-qq -o Acquire::Retries=0 -o Acquire::http::Timeout=10 -o Acquire::https::Timeout=10"
  [ "$(id -u)" = 0 ] && command -v apt-get && apt-get $quick update &&
    DEBIAN_FRONTEND=noninteractive apt-get $quick install -y --no-install-recommends "$1"
}
# Programs that read what is written here: TensorBoard's own reader, ONNX Runtime.
venv=.venv/bin/python
from_pypi() {
  { [ -x $venv ] || python3 -m venv .venv; } &&
    $venv -m pip install -q --disable-pip-version-check --retries 0 --timeout 10 "$1"
}
while read -r package module; do
  found=
  for python in "${YOLOX_PYTHON:-$venv}" $venv python3; do
    if "$python" -c "import $module" >/dev/null 2>&1; then found=yes && break; fi
  done
  [ -n "$found" ] || install $package from_pypi $package ||
    echo "there is no $package: tests that need it are skipped; type: $venv -m pip install $package"
done <<END
tensorboard tensorboard.backend
onnxruntime onnxruntime
opencv-python-headless cv2
END
# Some tests make two hosts out of network namespaces, one looks at report.html with a browser.
has_any() { PATH=$PATH:/usr/sbin command -v "$@" >/dev/null; }
while read -r package programs; do
  has_any $programs || install $package from_debian $package ||
    echo "there is no $package: tests that need it are skipped; type: apt-get install $package"
done <<END
iproute2 ip
chromium chromium chromium-browser google-chrome
END
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
