#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Packs gpu-check, bench/gpu.py and the programs of a build folder, so that they run on a GPU machine that has Python's torch of the
# same version, but neither OpenCV nor a compiler.
#   YOLOX_BUILD=build-bundle YOLOX_DRIVER=580 YOLOX_CMAKE_ARGS=-DYOLOX_VIDEO=OFF ./setup.sh tests train eval demo export
#   (and bench_train_step bench_dtr bench_loader bench_bn_silu for the benchmarks)
#   tests/bundle.sh build-bundle DEST [PROGRAM...]     all programs, or the given ones
#   DEST/gpu-check                      # on the GPU machine
#   DEST/gpu.py --programs DEST
# Build without videos and windows (YOLOX_VIDEO=OFF): their libraries are three times as large as all others.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '3,11s/^# \?//p' "$0"; exit 2; }
build=$1 dest=$2
rm -rf "$dest"
mkdir -p "$dest/lib"
cp "$(dirname "$0")/../gpu-check" "$(dirname "$0")/../bench/gpu.py" "$dest/"
torch=$(sed -n 's/^TORCH_CMAKE:[^=]*=//p' "$build/CMakeCache.txt")
grep -oE '[0-9]+\.[0-9]+\.[0-9]+' "$torch/TorchConfigVersion.cmake" | head -n 1 | tr -d '\n' >"$dest/torch-version"
# A CUDA build also needs the major version of CUDA that it links, as in libcudart.so.13.
sed -n 's/^ *NEEDED *libcudart\.so\.\([0-9]*\).*/ CUDA \1/p' <(objdump -p "$build/train") >>"$dest/torch-version"

# Libraries that every Linux has, or that come with torch.
theirs='^(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|ld-linux[^/]*)\.so|^lib(torch|c10|gomp|cud|nccl|cupti)'
# OpenCV links GDAL and GDCM, 150 MB with their dependencies, and calls them for geographic and medical images only.
# libzip calls libcrypto (5 MB) for encrypted files only. An empty library with the functions that they name takes the
# place of each.
empty_library() {  # NAME USER
  local version
  version=$(objdump -p "$2" | awk -v name="$1:" '/required from/ {mine = $3 == name; next} mine && NF == 4 {print $4; exit}')
  nm -D --undefined-only "$2" | awk '$2 ~ /^(GDAL|OGR|OSR|CPL|VSI|_Z.*(GDAL|gdcm))|@OPENSSL/ {
      sub(/@.*/, "", $2)
      printf ".globl %s\n.type %s, @function\n%s:\n  xor %%eax, %%eax\n  ret\n", $2, $2, $2 }' |
    gcc -shared -fPIC -x assembler - -Wl,-z,noexecstack -Wl,-soname,"$1" -o "$dest/lib/$1" \
      ${version:+-Wl,--version-script=<(echo "$version { *; };")}
}
add_libraries() {  # FILE PROGRAM: the libraries of FILE, which PROGRAM loads
  local name path
  for name in $(objdump -p "$1" | awk '/NEEDED/ {print $2}'); do
    [ ! -e "$dest/lib/$name" ] && ! [[ $name =~ $theirs ]] || continue
    case $name in libgdal* | libgdcm* | libcrypto.*) empty_library "$name" "$1"; continue ;; esac
    path=$(ldd "$2" | awk -v name="$name" '$1 == name {print $3}')
    cp -L "$path" "$dest/lib/$name"
    add_libraries "$path" "$2"
  done
}
[ $# -gt 2 ] || set -- "$@" tests train eval demo export bench_train_step bench_dtr bench_loader bench_bn_silu
for program in "${@:3}"; do
  [[ $program != bench_* || -e $build/$program ]] || continue
  strip -o "$dest/$program" "$build/$program"
  add_libraries "$build/$program" "$build/$program"
done
du -sh "$dest"
