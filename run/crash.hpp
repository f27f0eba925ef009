// crash.txt in the run folder: what ended a run, a fatal signal or an exception. It has the step with its
// images, memory, all settings and versions, and the stack: of an exception that of its throw. Each end adds
// a report, the newest last.
//
//   crash_context(run, settings);                              // once the run folder is there
//   crash_step("step 120 (epoch 3), images: a.jpg, b.jpg");    // each step
//   catch (...) { write_crash("GPU memory 3.1G of 16G"); throw; }
//
// Nothing is left by SIGKILL, as from the kernel when memory runs out, nor by a stack overflow in a thread
// other than the one that called crash_context(): a signal stack belongs to one thread.
#pragma once
#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <string>
#include <typeinfo>

#include "run/log.hpp"

namespace yolox {

inline constexpr int kFatalSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

// An exception, from its throw to its destruction.
struct Thrown {
  std::atomic<void*> object;  // null: the place is free
  void (*destroy)(void*);
  int depth;
  void* frames[48];
};

// What a report is made of, ready before it is needed: a signal handler may not allocate. Never destroyed, as
// exit() can crash too.
struct CrashState {
  std::atomic<bool> on;
  std::atomic<int> writer;  // thread that writes a report; 0: none
  std::atomic<int> step;    // the one of `steps` that is whole
  struct {
    size_t size;
    char text[16384];
  } steps[2];
  const char *path, *program, *fixed;
  double start;
  const ElfW(Sym) * functions;  // of this program
  size_t function_count;
  const char* names;
  struct sigaction before[NSIG];
  Thrown thrown[64];
  alignas(16) char stack[1 << 16];
};
inline CrashState crash_state;

// The end of crash.txt; from where writing fails, stderr. Has only what a signal handler may call.
struct CrashFile {
  const int file = open(crash_state.path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  int fd = file < 0 ? 2 : file;

  CrashFile() { tell(file < 0 ? "cannot write " : "crash report: "); }
  CrashFile(const CrashFile&) = delete;
  ~CrashFile() {
    if (file >= 0) close(file);
  }
  void put(const char* text, size_t size);
  void put(const char* text) { put(text, std::strlen(text)); }
  void put(uint64_t number, unsigned base = 10);
  // The lines of a small file that begin with one of the words.
  void put_lines(const char* path, std::initializer_list<const char*> words);

 private:
  static void tell(const char* what);
};

// Everything but the stack, which a crash can have spoilt: it comes last.
void put_context(CrashFile& out, const char* more);

// One frame per line, innermost first. Names are demangled unless in a signal handler, where the first frame
// is the instruction that failed; all others are return addresses.
void put_stack(CrashFile& out, void* const* frames, int depth, bool in_handler);

// True: this thread is the one to write a report. Otherwise another is at it; gives it time to finish.
bool begin_report();

void on_fatal_signal(int number, siginfo_t* info, void*);

// Reports the exception that the catch block around it handles. `more`: lines to add, such as the memory of
// the GPU. Nothing before crash_context().
void write_crash(const char* more = "") noexcept;

void on_terminate();

// The functions of this program from its file, if it is not stripped.
void map_functions();

// What the run is at, 16384 bytes of it. For one thread, and takes less than a microsecond. A signal that
// comes meanwhile finds the text before this one; while a report is written none is replaced.
void crash_step(const std::string& text);

// From now on fatal signals and std::terminate() leave a report in the folder, with this text (settings,
// versions) and what is to be had without torch and OpenCV. From the main thread. A second
// call only changes folder and text.
void crash_context(const std::string& folder, const std::string& text, const std::string& name = "crash.txt");

void forget_thrown(void* object);

// Found before that of libstdc++ by the program and all its shared libraries: notes where each exception is
// thrown. Its place is taken until the exception is destroyed, so that no other one, of this thread or
// another or later at the same address, is mistaken for it. With no place free it goes without.
[[noreturn, gnu::used, gnu::visibility("default")]] void note_throw(
    void* object, std::type_info* type, void (*destroy)(void*)) __asm__("__cxa_throw");
void note_throw(void* object, std::type_info* type, void (*destroy)(void*));

}  // namespace yolox
