// SPDX-License-Identifier: Apache-2.0
// Limits the spinning of waiting OpenMP threads (GOMP_SPINCOUNT), unless the user has set a policy. By
// default they spin for so long that a step takes several times as long if data loader threads or another
// program need the cores. libgomp reads the variable only when it is loaded, so the program is started again.
// A deleted working folder ends the program, because MKL would end it without saying why. CMakeLists.txt adds
// this file to each program.
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

// Runs before the constructors of all libraries: those of torch take a fifth of a second, twice if the
// program started again in main(). The C library is not initialised yet.
[[maybe_unused]] static void limit_spinning(int, char** argv, char** environment) {
  char folder[4096], deleted[] = "error: the working folder was deleted; change to a folder that exists\n";
  if (!getcwd(folder, sizeof folder) && errno == ENOENT) _exit(write(2, deleted, sizeof deleted - 1) > 0);
  environ = environment;
  if (std::getenv("GOMP_SPINCOUNT") || std::getenv("OMP_WAIT_POLICY")) return;
  // Iterations, about half a millisecond. Waking a thread takes longer than that on virtual machines. A
  // longer wait would take the core of another training on the same machine.
  setenv("GOMP_SPINCOUNT", "10000", 1);
  char program[4096] = "";
  if (readlink("/proc/self/exe", program, sizeof program - 1) > 0)
    execve(program, argv, environ);  // on failure the program goes on, with the default spinning
}

#ifndef YOLOX_SANITIZED  // sanitizers are not initialised yet, either
[[gnu::section(".preinit_array"),
  gnu::used]] static void (*const limit_spinning_first)(int, char**, char**) = limit_spinning;
#endif
