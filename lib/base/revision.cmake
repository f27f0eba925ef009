# SPDX-License-Identifier: Apache-2.0
# Writes version and git revision of the sources to a C++ file. "+edits-HASH": the working tree differs from it. The build runs
# this script each time. The file stays as it is if the revision is the same, so that nothing is compiled again.
execute_process(COMMAND git --no-optional-locks -C ${SOURCE} describe --always --dirty=+edits
                OUTPUT_VARIABLE revision OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(revision MATCHES "edits$")
  execute_process(COMMAND git --no-optional-locks -C ${SOURCE} diff HEAD COMMAND git hash-object --stdin OUTPUT_VARIABLE edits ERROR_QUIET)
  string(SUBSTRING "${edits}" 0 7 edits)
  string(APPEND revision "-${edits}")
endif()
if(NOT revision)
  set(revision unknown)
endif()
file(STRINGS ${SOURCE}/VERSION version)
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#include \"base/program.hpp\"\n\nconst char* yolox::git_revision() { return \"${revision}\"; }\nconst char* yolox::version() { return \"${version}\"; }\n")
