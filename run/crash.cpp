// SPDX-License-Identifier: Apache-2.0
#include "run/crash.hpp"

#include <dlfcn.h>
#include <execinfo.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/program.hpp"
#include "ddp/rank_info.hpp"
#include "ddp/rendezvous.hpp"

namespace yolox {

void CrashFile::put(const char* text, size_t size) {
  while (size > 0) {
    const ssize_t n = write(fd, text, size);
    if (n > 0) {
      text += n;
      size -= size_t(n);
    } else if (n == 0 || errno != EINTR) {
      if (fd == 2) return;
      print_stderr("no room in ");
      fd = 2;
    }
  }
}

void CrashFile::put(uint64_t number, unsigned base) {
  char digits[24], *first = std::end(digits);
  do *--first = "0123456789abcdef"[number % base];
  while (number /= base);
  put(first, size_t(std::end(digits) - first));
}

void CrashFile::put_lines(const char* path, std::initializer_list<const char*> words) {
  char text[4097];
  const int from = open(path, O_RDONLY | O_CLOEXEC);
  text[std::max<ssize_t>(0, read(from, text, sizeof text - 1))] = 0;
  close(from);
  for (const char *line = text, *end; (end = std::strchr(line, '\n')); line = end + 1)
    for (const char* word : words)
      if (std::strncmp(line, word, std::strlen(word)) == 0) put(line, size_t(end + 1 - line));
}

void CrashFile::print_stderr(const char* what) {
  for (const char* part : {"\n", what, crash_state.path, "\n"})
    if (write(2, part, std::strlen(part)) < 0) return;
}

void put_context(CrashFile& out, const char* more) {
  const auto& step = crash_state.steps[crash_state.step];
  out.put("\nafter ");
  out.put(uint64_t(now() - crash_state.start));
  out.put(" s, in thread ");
  out.put(uint64_t(gettid()));
  out.put(" of process ");
  out.put(uint64_t(getpid()));
  out.put("\n");
  out.put(step.text, step.size);
  out.put("\n\n");
  out.put_lines("/proc/self/status", {"VmHWM:", "VmRSS:", "Threads:"});
  out.put_lines("/proc/meminfo", {"MemTotal:", "MemAvailable:"});
  out.put(more);
  out.put(*more ? "\n\n" : "\n");
  out.put(crash_state.fixed);
}

void put_stack(CrashFile& out, void* const* frames, int depth, bool in_handler) {
  out.put("\nstack: file+offset (addr2line -Cfie FILE OFFSET prints the source line), function\n");
  for (int i = 0; i < depth; ++i) {
    // A return address may belong to the next function, if the call was the last instruction (no return).
    const uintptr_t address = uintptr_t(frames[i]) - (in_handler && i == 0 ? 0 : 1);
    Dl_info info{};
    link_map* map = nullptr;
    dladdr1(reinterpret_cast<void*>(address), &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP);
    const uintptr_t offset = address - (map ? map->l_addr : 0);
    const char *file = map ? map->l_name : "?", *name = info.dli_sname ? info.dli_sname : "";
    // In this program, dladdr() does not find static functions and the split cold parts of functions.
    if (!*file) {
      file = crash_state.program;
      for (size_t k = 0; k < crash_state.function_count; ++k) {
        const auto& f = crash_state.functions[k];
        if ((f.st_info & 15) == STT_FUNC && offset - f.st_value < f.st_size)
          name = crash_state.names + f.st_name;
      }
    }
    char* plain = in_handler ? nullptr : abi::__cxa_demangle(name, nullptr, nullptr, nullptr);
    out.put(file);
    out.put("+0x");
    out.put(offset, 16);
    out.put(" ");
    out.put(plain ? plain : name);
    out.put("\n");
    std::free(plain);
  }
  out.put("\n");
}

bool claim_report() {
  int owner = 0;
  const int self = gettid();
  if (crash_state.writer.compare_exchange_strong(owner, self)) return true;
  for (int i = 0; i < 500 && owner != self && crash_state.writer == owner; ++i) poll(nullptr, 0, 10);
  return false;
}

void on_fatal_signal(int number, siginfo_t* info, void*) {
  if (claim_report()) {
    CrashFile out;
    out.put("==== ended by SIG");
    out.put(sigabbrev_np(number));
    if (info->si_code > 0) {
      out.put(" at address 0x");
      out.put(uintptr_t(info->si_addr), 16);
    } else {
      out.put(" from process ");
      out.put(uint64_t(info->si_pid));
    }
    put_context(out, "");
    void* frames[64];
    const int depth = backtrace(frames, 64);  // this function, the kernel's signal frame, the failed function
    put_stack(out, frames + 2, depth - 2, /*in_handler=*/true);
  }
  // The signal is blocked until this handler returns. Then the old handler gets the signal.
  sigaction(number, &crash_state.before[number], nullptr);
  raise(number);
}

void write_report(const std::type_info* type, const char* what, const Thrown* stack,
                  const char* more) noexcept {
  if (!crash_state.on || !claim_report()) return;
  CrashFile out;
  out.put("==== ended by ");
  if (type) {
    char* plain = abi::__cxa_demangle(type->name(), nullptr, nullptr, nullptr);
    out.put(plain ? plain : type->name());
    std::free(plain);
  } else {
    out.put("std::terminate() without an exception");
  }
  if (*what) out.put(": ");
  out.put(what);
  put_context(out, more);
  if (stack) {
    put_stack(out, stack->frames, stack->depth, /*in_handler=*/false);
  } else {
    if (type) out.put("\nThe stack of the throw is not known. The stack of the catch block:");
    void* frames[64];
    put_stack(out, frames, backtrace(frames, 64), /*in_handler=*/false);
  }
  crash_state.writer = 0;
}

static Thrown* find_thrown(const std::exception_ptr& error) {
  void* object;  // an exception_ptr holds only the address of the exception
  static_assert(sizeof error == sizeof object);
  std::memcpy(&object, &error, sizeof object);  // NOLINT(bugprone-undefined-memory-manipulation)
  auto& all = crash_state.thrown;
  auto* found = std::find_if(all, std::end(all), [&](const Thrown& t) { return t.object == object; });
  return found == std::end(all) ? nullptr : found;
}

void write_crash(const char* more) noexcept {
  const auto error = std::current_exception();
  if (!error) {
    write_report(nullptr, "", nullptr, more);
    return;
  }
  const Thrown* thrown = find_thrown(error);
  const std::type_info* type = abi::__cxa_current_exception_type();
  try {
    throw;
  } catch (const std::exception& e) {
    write_report(type, e.what(), thrown, more);
  } catch (...) {
    write_report(type, "", thrown, more);
  }
}

[[noreturn]] static void end_with(const std::exception& e) {
  print_error(e.what());
  _exit(is_lost_rank_error(e) ? kLostRank : 1);
}

void on_terminate() {
  const Thrown* first = nullptr;  // the exception that was on its way
  if (std::uncaught_exceptions() > 0)
    for (const Thrown& t : crash_state.thrown)
      if (t.object && t.thread == gettid() && (!first || t.number < first->number)) first = &t;
  void* object = first ? first->object.load() : nullptr;
  if (object && typeid(std::exception).__do_catch(first->type, &object, 1)) {  // a std::exception
    const auto& error = *static_cast<const std::exception*>(object);
    write_report(first->type, error.what(), first, "");
    end_with(error);
  }
  write_crash();
  try {
    if (std::current_exception()) throw;
  } catch (const std::exception& e) {
    if (is_local_error(e)) end_with(e);  // a destructor was the first to see that the GPU has failed
  } catch (...) {                        // not an error of the GPU
  }
  std::signal(SIGABRT, SIG_DFL);  // the report is written already
  __gnu_cxx::__verbose_terminate_handler();
}

void map_functions() {
  const int fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  struct stat s {};
  fstat(fd, &s);
  void* data = mmap(nullptr, size_t(s.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  close(fd);
  if (data == MAP_FAILED) return;
  const char* file = static_cast<const char*>(data);
  const auto* head = reinterpret_cast<const ElfW(Ehdr)*>(file);
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(file + head->e_shoff);
  for (int i = 0; i < head->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    crash_state.functions = reinterpret_cast<const ElfW(Sym)*>(file + sections[i].sh_offset);
    crash_state.function_count = sections[i].sh_size / sizeof(ElfW(Sym));
    crash_state.names = file + sections[sections[i].sh_link].sh_offset;
  }
}

void crash_step(const std::string& text) {
  CrashState& c = crash_state;
  if (c.writer) return;
  auto& next = c.steps[1 - c.step];
  next.size = std::min(text.size(), sizeof next.text);
  std::memcpy(next.text, text.data(), next.size);
  c.step = 1 - c.step;
}

void crash_context(const std::string& folder, const std::string& text, const std::string& name) {
  namespace fs = std::filesystem;
  CrashState& c = crash_state;
  std::error_code ignored;
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string command{std::istreambuf_iterator<char>(file), {}};
  std::replace(command.begin(), command.end(), '\0', ' ');
  utsname host{};
  uname(&host);
  char started[64];
  const std::time_t moment = std::time(nullptr);
  std::strftime(started, sizeof started, "%Y-%m-%d %H:%M:%S %z", std::localtime(&moment));
  const std::string fixed =
      concat(text, "\n\nstarted    ", started, "\ncommand    ", command, "\nfolder     ",
             fs::current_path(ignored).string(), "\nhost       ", host.nodename, ", ", host.sysname, " ",
             host.release, " ", host.machine, "\nsource     ", YOLOX_SOURCE_DIR, " at git revision ",
             git_revision(), "\ncompiler   C++ ", __VERSION__, "\n");
  c.fixed = strdup(fixed.c_str());
  c.path = strdup((fs::absolute(folder, ignored) / name).c_str());
  c.program = strdup(fs::read_symlink("/proc/self/exe", ignored).c_str());
  c.start = now();
  crash_step("before the first step");
  if (c.on.exchange(true)) return;
  map_functions();
  void* frame;
  backtrace(&frame, 1);  // loads libgcc now, because a signal handler must not load a library

  stack_t stack{};
  stack.ss_sp = c.stack;
  stack.ss_size = sizeof c.stack;
  sigaltstack(&stack, nullptr);
  struct sigaction action {};
  action.sa_sigaction = on_fatal_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigfillset(&action.sa_mask);  // a fatal signal inside the handler ends the process at once
  for (const int number : kFatalSignals) sigaction(number, &action, &c.before[number]);
  std::set_terminate(on_terminate);
}

void free_thrown(void* object) {
  for (auto& t : crash_state.thrown) {
    if (t.object != object) continue;
    const auto destroy = t.destroy;
    t.object = nullptr;
    if (destroy) destroy(object);
    return;
  }
}

void record_rethrow(std::exception_ptr* error) {
  static const auto real = reinterpret_cast<decltype(&record_rethrow)>(
      dlsym(RTLD_NEXT, "_ZSt17rethrow_exceptionNSt15__exception_ptr13exception_ptrE"));
  if (Thrown* thrown = find_thrown(*error)) thrown->thread = gettid();
  real(error);
  std::abort();  // never reached
}

void record_throw(void* object, std::type_info* type, void (*destroy)(void*)) {
  static const auto real = reinterpret_cast<decltype(&record_throw)>(dlsym(RTLD_NEXT, "__cxa_throw"));
  for (auto& t : crash_state.thrown) {
    void* none = nullptr;
    if (!crash_state.on || !t.object.compare_exchange_strong(none, object)) continue;
    t.type = type;
    t.destroy = destroy;
    t.number = ++crash_state.throws;
    t.thread = gettid();
    t.depth = backtrace(t.frames, int(std::size(t.frames)));
    real(object, type, free_thrown);
  }
  real(object, type, destroy);
  std::abort();  // never reached
}

}  // namespace yolox
