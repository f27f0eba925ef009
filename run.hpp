// What a run leaves behind and shows: its folder, log, metrics and progress line; and the signals that end
// it.
#pragma once
#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "error.hpp"

namespace yolox {

// Seconds since some moment in the past.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Makes the folder of a new run: `wanted`, or runs/<name>, runs/<name>-2, ... when that is empty.
inline std::string make_run_folder(const std::string& wanted, const std::string& name) {
  namespace fs = std::filesystem;
  std::string folder = wanted.empty() ? "runs/" + name : wanted;
  if (wanted.empty())
    for (int i = 2; fs::exists(folder); ++i) folder = concat("runs/", name, "-", i);
  check(!fs::exists(fs::path(folder) / "last.pth"), folder, " already holds a run; go on with --resume ",
        folder, ", or give another --out");
  std::error_code error;
  fs::create_directories(folder, error);
  check(!error && access(folder.c_str(), W_OK) == 0, "cannot write to ", folder,
        error ? ": " + error.message() : "", "; give another --out");
  return folder;
}

// The newest run below runs/ that has a checkpoint; empty if there is none.
inline std::string newest_run() {
  namespace fs = std::filesystem;
  std::string newest;
  fs::file_time_type latest{};
  std::error_code ignored;
  for (const auto& run : fs::directory_iterator("runs", ignored)) {
    for (const auto& file : fs::directory_iterator(run.path(), ignored)) {
      const auto written = fs::last_write_time(file.path(), ignored);
      const bool whole = file.path().extension() == ".pth" && file.path().filename() != "nonfinite.pth";
      if (!whole || (!newest.empty() && written <= latest)) continue;
      newest = run.path().string(), latest = written;
    }
  }
  return newest;
}

// Of the source that this program was built from, as it is now; asked once.
inline const std::string& git_revision() {
  static const std::string revision = [] {
    std::string found;
    const char* ask =
        "git --no-optional-locks -C '" YOLOX_SOURCE_DIR "' describe --always --dirty 2>/dev/null";
    if (FILE* git = popen(ask, "r")) {
      for (int byte; (byte = std::fgetc(git)) > ' ';) found += char(byte);
      pclose(git);
    }
    return found.empty() ? "unknown" : found;
  }();
  return revision;
}

// ---- signals

// The signal that asked the run to end, 0: none. SIGHUP (the terminal is gone) and SIGPIPE (so is what it
// was piped to) do not.
inline volatile std::sig_atomic_t stop_signal = 0;

// From now on SIGTERM, SIGUSR1 (SLURM, spot machines) and SIGINT (Ctrl-C) only set stop_signal: the loop ends
// after its step. The next Ctrl-C ends the process at once.
inline void catch_signals() {
  struct sigaction action {};
  action.sa_flags = SA_RESTART;
  action.sa_handler = [](int signal) {
    if (signal == SIGINT && stop_signal) _exit(128 + SIGINT);
    stop_signal = signal;
  };
  for (const int signal : {SIGTERM, SIGUSR1, SIGINT}) sigaction(signal, &action, nullptr);
}
inline void ignore_hangup() {
  for (const int signal : {SIGHUP, SIGPIPE}) std::signal(signal, SIG_IGN);
}

// ---- what it says

// 5 characters or fewer: 1.2G, 640M
inline std::string short_bytes(double bytes) {
  char text[16];
  if (bytes >= 1e9)
    std::snprintf(text, sizeof text, "%.1fG", bytes / 1e9);
  else
    std::snprintf(text, sizeof text, "%.0fM", bytes / 1e6);
  return text;
}

// 6 characters or fewer: 42s, 12m30s, 3h05m, 4d07h
inline std::string short_time(double seconds) {
  char text[48];
  const auto s = static_cast<int>(std::max(0.0, std::min(seconds, 99.0 * 86400)));
  if (s < 60)
    std::snprintf(text, sizeof text, "%ds", s);
  else if (s < 3600)
    std::snprintf(text, sizeof text, "%dm%02ds", s / 60, s % 60);
  else if (s < 86400)
    std::snprintf(text, sizeof text, "%dh%02dm", s / 3600, s / 60 % 60);
  else
    std::snprintf(text, sizeof text, "%dd%02dh", s / 86400, s / 3600 % 24);
  return text;
}

// Prints to the terminal and to log.txt. In a terminal the progress line is rewritten in place.
struct Log {
  explicit Log(const std::string& path) : file(path, std::ios::app), tty(isatty(1)) {}

  void line(const std::string& text) {
    if (tty && in_place) std::cout << "\r\033[K";
    in_place = false;
    std::cout << text << std::endl;
    file.clear();  // a full disk may have room again
    file << text << std::endl;
  }
  // Replaces the progress line in a terminal. Elsewhere it is a line of its own, every 30 seconds at most, or
  // when `keep` says that it is worth one.
  void progress(const std::string& text, bool keep) {
    if (keep || (!tty && now() - last > 30)) {
      line(text);
      last = now();
    } else if (tty) {
      winsize window{};
      const size_t columns = ioctl(1, TIOCGWINSZ, &window) == 0 && window.ws_col > 1 ? window.ws_col - 1 : 79;
      std::cout << "\r\033[K" << text.substr(0, columns) << std::flush;
      in_place = true;
    }
  }

 private:
  std::ofstream file;
  bool tty, in_place = false;
  double last = now();
};

// metrics.csv: one row per call, columns as given; a value that is not known is left empty (NaN). The second
// column counts: rows beyond `from`, of steps that will be done again, are taken out.
struct Metrics {
  Metrics(const std::string& path, const std::vector<std::string>& columns, int64_t from) {
    std::string head, kept;
    for (const auto& column : columns) head += (head.empty() ? "" : ",") + column;
    std::ifstream old(path);
    for (std::string line; std::getline(old, line) && !old.eof();) {  // a last line without an end is torn
      const size_t comma = line.find(',');
      if (line != head && comma != std::string::npos && std::atoll(line.c_str() + comma + 1) <= from)
        kept += line + "\n";
    }
    old.close();
    if (!kept.empty()) {
      std::error_code ignored;
      std::ofstream(path + ".tmp") << head << "\n" << kept;
      std::filesystem::rename(path + ".tmp", path, ignored);
    }
    file.open(path, kept.empty() ? std::ios::trunc : std::ios::app);
    file.precision(9);
    if (kept.empty()) file << head << "\n" << std::flush;
  }
  void row(const std::vector<double>& values) {
    file.clear();
    for (size_t i = 0; i < values.size(); ++i) {
      if (i) file << ",";
      if (!std::isnan(values[i])) file << values[i];
    }
    file << std::endl;
  }

 private:
  std::ofstream file;
};

}  // namespace yolox
