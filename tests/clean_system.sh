#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Packs a release archive and runs its programs on a clean system: a folder with the archive, glibc and a shell.
#   tests/clean_system.sh BUILD FOLDER       needs root; FOLDER: a folder with a data set "data" and nothing else
set -euo pipefail
source=$(cd "$(dirname "$0")/.." && pwd)
build=$1
cd "$2"
"$source/tools/release.sh" "$build" "$PWD"
mkdir -p root/bin root/tmp root/proc root/dev
mv data root/tmp/
tar -C root -xzf yolox-*.tar.gz
rm yolox-*.tar.gz
mv root/yolox-* root/yolox
shell=$(readlink -f /bin/sh)
tools=("$shell" "$(command -v readlink)" "$(command -v dirname)")
cp "${tools[@]}" root/bin/
ln -sf "$(basename "$shell")" root/bin/sh
libraries=$(ldd "${tools[@]}" | grep -oE '/[^ ]+\.so[^ ]*' | sort -u)
glibc=$(dirname "$(grep '/libc\.so' <<<"$libraries")")
for library in $libraries "$glibc"/lib{m,dl,rt,pthread,util,resolv}.so.*; do
  mkdir -p "root$(dirname "$library")"
  cp -L "$library" "root$library"
done
mknod -m 666 root/dev/null c 1 3
mknod -m 444 root/dev/urandom c 1 9
unshare -m sh -c 'mount -t proc proc root/proc && exec chroot root /bin/sh -c "
  export PATH=/bin && cd /tmp &&
  /yolox/train --data data --model yolox-nano --size 64 --bs 4 --epochs 1 --max-iters 2 --eval-interval 0 --procs 2 --out r &&
  /yolox/eval --data data --weights r/last.pth &&
  ! /yolox/demo --source shapes --weights yolox-m 2>error && read -r line <error &&
  case \$line in *\ /yolox/weights/yolox_m.pth\ is\ missing*) ;; *) echo \$line; exit 1 ;; esac"'
