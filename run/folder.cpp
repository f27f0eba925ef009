// SPDX-License-Identifier: Apache-2.0
#include "run/folder.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <system_error>

#include "base/error.hpp"
#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "checkpoint/pth.hpp"
#include "run/state.hpp"

namespace yolox {

std::vector<std::string> list_checkpoints(const std::string& run) {
  namespace fs = std::filesystem;
  std::vector<std::pair<int64_t, std::string>> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(run, ignored)) {
    const std::string name = entry.path().filename().string();
    int64_t step = 0;
    int end = 0;
    if (name == "last.pth")
      found.emplace_back(std::numeric_limits<int64_t>::max(), entry.path().string());
    else if (std::sscanf(name.c_str(), "step_%ld.pth%n", &step, &end) == 1 && size_t(end) == name.size())
      found.emplace_back(step, entry.path().string());
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<std::string> paths;
  for (const auto& [_, path] : found) paths.push_back(path);
  return paths;
}

std::string newest_run() {
  namespace fs = std::filesystem;
  std::string newest;
  fs::file_time_type latest{};
  std::error_code ignored;
  const auto look_at = [&](const std::string& run) {
    for (const auto& path : list_checkpoints(run)) {
      const auto written = fs::last_write_time(path, ignored);
      if (newest.empty() || written > latest) {
        newest = run;
        latest = written;
      }
    }
  };
  for (const auto& run : fs::directory_iterator("runs", ignored)) look_at(run.path().string());
  for (const auto& folder : fs::directory_iterator(".", ignored))
    if (fs::exists(folder.path() / ".lock", ignored)) look_at(folder.path().filename().string());
  return newest;
}

std::string run_folder_of(const std::string& text) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (fs::is_directory(text, ignored)) return text;
  if (text == "newest" || text == "last") return newest_run();
  const fs::path path = text;
  usage_check(path.filename() == "last.pth" || !fs::is_regular_file(path, ignored),
              "--resume continues the newest checkpoint of a run; give its folder or last.pth. To start a "
              "new run from ",
              text, ", give it to --weights");
  return path.filename() == "last.pth" ? (path.has_parent_path() ? path.parent_path().string() : ".") : text;
}

void remove_unstarted_checkpoint(const std::string& run) {
  const std::filesystem::path last = std::filesystem::path(run) / "last.pth";
  std::error_code ignored;
  if (!std::filesystem::exists(last, ignored)) return;
  try {
    const auto file = read_pth(last.string());
    saved_settings(file, last.string());
    if (file.toGenericDict().at("train").toGenericDict().at("iteration").toInt() == 0)
      std::filesystem::remove(last, ignored);
  } catch (const std::exception&) {  // another program has written last.pth; it stays
  }
}

void remove_temporary_files(const std::string& run) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(run, ignored))
    if (entry.path().filename().string().find(".tmp.") != std::string::npos)
      std::filesystem::remove(entry.path(), ignored);
}

void lock_run_folder(const std::string& run) {
  for (const char* name : {"last.pth", "best.pth"}) {
    const std::string path = run + "/" + name;
    check(!is_irregular_file(path), path,
          " is not a regular file, so no checkpoint can be saved there; remove it, or give another --out");
  }
  // Stays open, and so locked, until this process ends.
  const int fd = open((run + "/.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  check(fd < 0 || flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK, "another training uses ", run,
        "; wait until it ends, or give another --out");
}

std::string create_run_folder(const std::string& wanted, const std::string& name) {
  namespace fs = std::filesystem;
  std::string folder = wanted;
  std::error_code error;
  if (wanted.empty()) {
    fs::create_directories("runs", error);
    folder = "runs/" + name;
    for (int i = 2; !fs::create_directory(folder, error) && !error; ++i)
      folder = concat("runs/", name, "-", i);
  } else {
    fs::create_directories(wanted, error);
  }
  check(!error && access(folder.c_str(), W_OK) == 0, "cannot write to ", folder,
        error ? ": " + error.message() : "", "; give another --out");
  lock_run_folder(folder);
  remove_unstarted_checkpoint(folder);
  check(list_checkpoints(folder).empty(), folder, " already holds a run; resume it with --resume ",
        shell_word(folder), ", or give another --out");
  return folder;
}

}  // namespace yolox
