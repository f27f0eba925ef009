// SPDX-License-Identifier: Apache-2.0
// Crash reports. crash.txt in the run folder describes the fatal signal or the exception that ended a run:
// the step with its images, memory, all settings and versions, and the stack. For an exception this is the
// stack of the throw. Each crash appends a report.
//
//   crash_context(run, settings);                              // as soon as the run folder exists
//   crash_step("step 120 (epoch 3), images: a.jpg, b.jpg");    // each step
//   catch (...) { write_crash("GPU memory 3.1G of 16G"); throw; }
//
// There is no report after SIGKILL, which the kernel sends when memory runs out, nor after a stack overflow
// in a thread other than the one that called crash_context(), because only this thread has an alternate
// signal stack.
#pragma once
#include <cxxabi.h>
#include <fcntl.h>
#include <link.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <string>
#include <typeinfo>

namespace yolox {

inline constexpr int kFatalSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

// A live exception and the stack of its throw.
struct Thrown {
  std::atomic<void*> object;  // address of the exception; null: this entry is free
  std::type_info* type;
  void (*destroy)(void*);
  int64_t number;  // counts the throws of this process
  pid_t thread;
  int depth;
  void* frames[48];
};

// Data for a report, prepared in advance because a signal handler must not allocate. The object is never
// destroyed, because exit() can crash too.
struct CrashState {
  std::atomic<bool> on;
  std::atomic<int> writer;  // ID of the thread that writes a report; 0: none
  std::atomic<int> step;    // index of the entry of `steps` that is complete
  struct {
    size_t size;
    char text[16384];
  } steps[2];
  const char *path, *program, *fixed;
  double start;
  const ElfW(Sym) * functions;  // symbol table of this program
  size_t function_count;
  const char* names;
  struct sigaction before[NSIG];
  Thrown thrown[64];
  std::atomic<int64_t> throws;
  alignas(16) char stack[1 << 16];
};
inline CrashState crash_state;

// Appends to crash.txt. Writes to stderr after a write error. All members are async-signal-safe.
struct CrashFile {
  const int file = open(crash_state.path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  int fd = file < 0 ? 2 : file;

  CrashFile() { print_stderr(file < 0 ? "cannot write " : "crash report: "); }
  CrashFile(const CrashFile&) = delete;
  ~CrashFile() {
    if (file >= 0) close(file);
  }
  void put(const char* text, size_t size);
  void put(const char* text) { put(text, std::strlen(text)); }
  void put(uint64_t number, unsigned base = 10);
  // Copies the lines of a small file that begin with one of the words.
  void put_lines(const char* path, std::initializer_list<const char*> words);

 private:
  static void print_stderr(const char* what);
};

// Writes everything but the stack. The stack is written last, because printing a damaged stack may crash.
void put_context(CrashFile& out, const char* more);

// Writes one frame per line, innermost first. Names are demangled, except in a signal handler. In a signal
// handler, the first frame is the address of the failed instruction. All other frames are return addresses.
void put_stack(CrashFile& out, void* const* frames, int depth, bool in_handler);

// Returns true if this thread must write the report. Otherwise another thread is writing one, and the
// function waits for it up to 5 s. Returns false at once if this thread crashed while it wrote a report.
bool claim_report();

// Signal handler of the fatal signals. Writes a report and raises the signal again with its old handler.
void on_fatal_signal(int number, siginfo_t* info, void*);

// Writes a report about the exception that the enclosing catch block handles. more: additional lines, such as
// the memory of the GPU. Does nothing before crash_context().
void write_crash(const char* more = "") noexcept;

// Writes a report about an exception. type: of the exception; null: there is none. what: its message. stack:
// of the throw; null: not known.
void write_report(const std::type_info* type, const char* what, const Thrown* stack,
                  const char* more) noexcept;

// Handler of std::terminate(). Writes a report. After a failed kernel every call of CUDA throws, also in
// destructors, which ends the process. The report and the one line on stderr are then about the first
// exception, and the exit code is that of run_rank(): kLostRank if another rank ended, else 1.
void on_terminate();

// Maps the symbol table of this program into memory, if it is not stripped.
void map_functions();

// Sets the description of the current step, cut to 16384 bytes. Takes less than a microsecond. Only one
// thread may call it. A signal handler always sees a complete text. While a report is written, the text does
// not change.
void crash_step(const std::string& text);

// Installs the handlers of fatal signals and std::terminate(), which then write reports to folder/name. A
// report contains `text` (settings, versions), the command line and the host. Call it from the main thread. A
// second call only changes folder, name and text.
void crash_context(const std::string& folder, const std::string& text, const std::string& name = "crash.txt");

// Frees the entry of an exception in CrashState::thrown and destroys the exception.
void free_thrown(void* object);

// Sets the thread of the entry of an exception in CrashState::thrown to this thread, and throws the exception
// again. Replaces std::rethrow_exception(), because autograd catches exceptions of its threads and throws
// them again in the thread that called backward().
#ifndef YOLOX_SANITIZED
[[noreturn, gnu::used, gnu::visibility("default")]] void record_rethrow(std::exception_ptr* error) __asm__(
    "_ZSt17rethrow_exceptionNSt15__exception_ptr13exception_ptrE");
#endif
[[noreturn]] void record_rethrow(std::exception_ptr* error);

// Replaces __cxa_throw() of libstdc++ for the program and all its shared libraries, because the dynamic
// linker finds this definition first. Records the stack of each throw in CrashState::thrown. The entry is in
// use until the exception is destroyed, so that a later exception at the same address is not mistaken for
// this one. If no entry is free, the stack is not recorded.
#ifndef YOLOX_SANITIZED
[[noreturn, gnu::used, gnu::visibility("default")]] void record_throw(
    void* object, std::type_info* type, void (*destroy)(void*)) __asm__("__cxa_throw");
#endif
[[noreturn]] void record_throw(void* object, std::type_info* type, void (*destroy)(void*));

}  // namespace yolox
