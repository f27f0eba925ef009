# SPDX-License-Identifier: Apache-2.0
# Options of a build with the sanitizers of clang. tests/checks.sh uses them.
# vptr does not find the RTTI of torch's classes. null, alignment and object-size add a check to every member access,
# which takes most of the compile time; the address sanitizer finds two of these errors, too.
add_compile_options(-g1 -fsanitize=${YOLOX_SANITIZE} -fno-sanitize=vptr,null,alignment,object-size
                    -fno-sanitize-recover=undefined -fno-omit-frame-pointer
                    -fsanitize-ignorelist=${CMAKE_CURRENT_SOURCE_DIR}/tests/sanitizers/ignore.txt
                    -Wno-unknown-attributes)  # only g++ has __attribute__((optimize))
add_link_options(-fsanitize=${YOLOX_SANITIZE})
# Disables target_clones: its ifunc resolvers run before the sanitizer is initialised, and clang 14 defines them once
# per file.
add_compile_options("-Dtarget_clones(...)=")
# Sanitizers replace the allocator. Tests that need ours are skipped then.
add_compile_definitions(YOLOX_SANITIZED)
if(YOLOX_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()
