# SPDX-License-Identifier: Apache-2.0
# Targets of the tests and checks: tests, all_sources for clang-tidy, fuzzers.

# One source file that includes all headers and all files of the libraries, for clang-tidy, which takes as long for the
# headers of torch as for ours.
file(GLOB all CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.hpp ${CMAKE_CURRENT_SOURCE_DIR}/*/*.hpp
     ${CMAKE_CURRENT_SOURCE_DIR}/lib/*/*.hpp)
list(FILTER all EXCLUDE REGEX "/(tests|bench|build[^/]*)/")
foreach(file ${sources} ${data_sources})
  list(APPEND all ${CMAKE_CURRENT_SOURCE_DIR}/${file})
endforeach()
list(TRANSFORM all REPLACE "(.+)" "#include \"\\1\"\n")
list(JOIN all "" all)
file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/all.cpp CONTENT "${all}")
add_library(all_sources OBJECT EXCLUDE_FROM_ALL ${CMAKE_CURRENT_BINARY_DIR}/all.cpp)
target_link_libraries(all_sources PRIVATE yolox)
target_include_directories(all_sources SYSTEM PRIVATE $<TARGET_PROPERTY:yolox,INCLUDE_DIRECTORIES>
                           $<TARGET_PROPERTY:yolox_data,INCLUDE_DIRECTORIES>)
target_compile_definitions(all_sources PRIVATE $<TARGET_PROPERTY:yolox_data,COMPILE_DEFINITIONS>)

file(GLOB test_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/*.cpp)
if(without_demo)
  list(FILTER test_sources EXCLUDE REGEX "test_demo.cpp")
endif()
if(YOLOX_TEST_FILES)
  list(JOIN YOLOX_TEST_FILES "|" names)
  list(FILTER test_sources INCLUDE REGEX "/(main|test_(${names})).cpp")
endif()
add_executable(tests ${test_sources} ${start})
target_link_libraries(tests PRIVATE yolox)
if(NOT without_demo)
  target_link_libraries(tests PRIVATE opencv_videoio)
endif()
# Without optimisation, g++ compiles them in little more than half the time, but needs another precompiled header.
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_FLAGS_RELEASE)
  target_compile_options(tests PRIVATE -O0)
  target_precompile_headers(tests PRIVATE ${precompiled})
else()
  target_precompile_headers(tests REUSE_FROM yolox)
endif()
# As above. The other files keep the macros of their precompiled header.
set_source_files_properties(tests/test_bn_silu_cuda.cpp PROPERTIES COMPILE_OPTIONS -U_FORTIFY_SOURCE)
# With fast asserts, the tests compile faster, and an exception in an assert ends the test case.
target_compile_definitions(tests PRIVATE DOCTEST_CONFIG_SUPER_FAST_ASSERTS)
target_compile_definitions(tests PRIVATE YOLOX_BINARY_DIR="${CMAKE_CURRENT_BINARY_DIR}" YOLOX_TORCH_ROOT="${torch_root}")
# Few groups, because each takes ten seconds for torch. Files that need no torch do without its precompiled header.
function(tests_together group files)  # files: "NAME NAME" of tests/test_NAME.cpp
  string(REGEX REPLACE "([a-z_]+)" "tests/test_\\1.cpp" files "${files}")
  string(REPLACE " " ";" files "${files}")
  set_source_files_properties(${files} PROPERTIES UNITY_GROUP ${group} ${ARGN})
endfunction()
set_source_files_properties(tests/main.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
set_target_properties(tests PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
tests_together(data "augment cache coco_eval coco_json image shapes"
               SKIP_PRECOMPILE_HEADERS ON)
tests_together(model "augment_official bn_silu ddp dtr export gpu gpu_programs loss memory optim simota step \
step_graphs yolox")
tests_together(programs "checkpoint crash data demo edit evaluate flags formats library pictures profile programs \
progress recipe report saving surviving threads tools")

if(YOLOX_FUZZ)
  add_custom_target(fuzzers)
  foreach(name coco voc yolo)
    add_executable(fuzz_${name} EXCLUDE_FROM_ALL tests/fuzz/${name}.cpp)
    target_link_libraries(fuzz_${name} PRIVATE yolox_data)
    target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
    add_dependencies(fuzzers fuzz_${name})
  endforeach()
endif()
