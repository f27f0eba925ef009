#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Packs the programs and all libraries that they need into yolox-REVISION-ARCH.tar.gz, for machines without compiler,
# LibTorch and OpenCV. The machine needs glibc as new as this machine's, and for a GPU its driver.
#   tools/release.sh [BUILD [DEST]]      BUILD: build folder [build]; DEST: folder of the archive [.]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build} dest=${2:-.}
name=yolox-$(cat VERSION)-$(git describe --always --dirty=+edits 2>/dev/null || echo unknown)-$(uname -m)
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir -p "$stage/$name/bin" "$stage/$name/lib" "$stage/$name/weights"
# glibc and the driver belong to the machine that runs the programs.
theirs='^(linux-vdso|ld-linux.*|libc|libm|libdl|librt|libpthread|libutil|libresolv|libcuda|libnvidia-.*)\.so'
for program in train eval demo export pack; do
  [ -e "$build/$program" ] || { echo "error: $build/$program is missing; run ./setup.sh"; exit 1; }
  strip -o "$stage/$name/bin/$program" "$build/$program"
  # A program finds its libraries and the official weights by these variables. The ranks that train starts inherit them.
  printf '#!/bin/sh\nhere=$(dirname "$(readlink -f "$0")")\nexport YOLOX_WEIGHTS_DIR="$here/weights"\nLD_LIBRARY_PATH=$here/lib:$LD_LIBRARY_PATH exec "$here/bin/%s" "$@"\n' \
    "$program" >"$stage/$name/$program"
  chmod +x "$stage/$name/$program"
  missing=$(ldd "$build/$program" | grep 'not found' || true)
  [ -z "$missing" ] || { echo "error: $build/$program needs libraries that this machine does not have:$missing"; exit 1; }
  ldd "$build/$program" | awk '$3 ~ "^/" {print $1, $3}'
done | sort -u | while read -r library path; do
  [[ $library =~ $theirs ]] || cp -L "$path" "$stage/$name/lib/$library"
done
cp LICENSE NOTICE README.md "$stage/$name/"
cp weights/get weights/SHA256SUMS "$stage/$name/weights/"
tar -C "$stage" -I 'gzip -3' -cf "$dest/$name.tar.gz" "$name"  # the default takes twice as long and saves 6 %
echo "$dest/$name.tar.gz: $(du -h "$dest/$name.tar.gz" | cut -f1)"
