// SPDX-License-Identifier: Apache-2.0
// Runs the programs as users do: each in a process and a folder of its own.
#pragma once
#include "tensors.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <map>
#include <sstream>

#include "evaluate.hpp"
#include "formats.hpp"

namespace yolox::test {

struct Outcome {
  int code;
  std::string out, err;
};

inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// Runs a shell command in the folder, with one OpenMP thread, because small networks are fastest on one
// thread.
inline Outcome shell(const TempDir& dir, const std::string& command) {
  TempDir texts;
  const std::string whole = concat("cd '", dir.path.string(), "' && export OMP_NUM_THREADS=1 && ", command,
                                   " >'", texts / "out", "' 2>'", texts / "err", "' </dev/null");
  const int status = std::system(whole.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), contents(texts / "out"),
          contents(texts / "err")};
}
inline Outcome run(const TempDir& dir, const std::string& program, const std::string& arguments) {
  return shell(dir, "$YOLOX_PROGRAMS/" + program + " " + arguments);
}
// Runs a program that must succeed. Returns its stdout.
inline std::string succeed(const TempDir& dir, const std::string& program, const std::string& arguments) {
  const Outcome o = run(dir, program, arguments);
  REQUIRE_MESSAGE(o.code == 0, program << " " << arguments << "\n" << o.out << o.err);
  return o.out;
}
// Runs a program that must end with this exit code, and with the text on stderr.
inline void check_refusal(const TempDir& dir, const std::string& program, const std::string& arguments,
                          int code, const std::string& text) {
  const Outcome o = run(dir, program, arguments);
  CHECK_MESSAGE(o.code == code, program << " " << arguments << "\n" << o.out << o.err);
  CHECK_MESSAGE(has(o.err, text), program << " " << arguments << "\n" << o.err);
}

// Writes a COCO folder with the first `count` drawn scenes. Keeps the first `classes` classes and their
// boxes.
inline void write_scenes(const std::string& folder, int64_t count, size_t classes = 100) {
  const Dataset shapes = shapes_dataset(0, 0, count);
  CocoDataset coco = shapes.truth;
  coco.categories.resize(std::min(classes, coco.categories.size()));
  std::erase_if(coco.annotations,
                [&](const auto& a) { return a.category_id > int64_t(coco.categories.size()); });
  fs::create_directories(folder + "/annotations");
  fs::create_directories(folder + "/train");
  for (int64_t i = 0; i < count; ++i)
    cv::imwrite(folder + "/train/" + coco.images[i].file_name, read_image(shapes, i));
  write_coco(folder + "/annotations/instances_train.json", coco);
}

// Temporary folder with drawn scenes in data/.
struct DataDir : TempDir {
  explicit DataDir(int64_t images) { write_scenes(*this / "data", images); }
};

// Runs a program as run() does, with a limit of `kb` KiB on the size of each file. This simulates a full
// disk.
inline Outcome run_with_full_disk(const TempDir& dir, const std::string& program,
                                  const std::string& arguments, int kb = 2000) {
  return shell(dir, concat("trap '' XFSZ; ulimit -f ", kb, "; $YOLOX_PROGRAMS/", program, " ", arguments));
}

// Flags for a run of three epochs with four iterations each: mosaic in the first two epochs, L1 loss in the
// last one, another input size from iteration 10 on. The learning rate has more digits than streams print by
// default.
inline const std::string kTrain =
    "--data data --model yolox-nano --size 64 --bs 2 --epochs 3 --no-aug-epochs 1 --warmup-epochs 1 "
    "--lr 0.00123456789 --eval-interval 1 --conf 0 --nms 0.9 ";

// Fills a folder with what make() writes into it. Cases of several processes share what it writes: with
// $YOLOX_TEST_RUNS, the first process that asks for the name makes it, and the others copy it.
template <class Make>
void fill_from_reference(const TempDir& dir, const std::string& name, const Make& make) {
  const char* folder = std::getenv("YOLOX_TEST_RUNS");
  if (!folder) {
    make();
    return;
  }
  const std::string kept = concat(folder, "/", name), made = kept + " is complete";
  struct Lock {
    int fd;
    explicit Lock(const std::string& path) : fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
      REQUIRE(flock(fd, LOCK_EX) == 0);
    }
    ~Lock() { close(fd); }
  } lock(kept + ".lock");
  if (fs::exists(made)) {
    fs::copy(kept, dir.path, fs::copy_options::recursive);
  } else {
    make();
    fs::copy(dir.path, kept, fs::copy_options::recursive);
    write_text(made);
  }
}

// Folder with data and a finished run "a". Created once for all tests that read it.
struct Trained {
  TempDir dir;
  std::string printed;
  Trained() {
    fill_from_reference(dir, "trained", [&] {
      write_scenes(dir / "data", 8);
      write_text(dir / "printed", succeed(dir, "train", kTrain + "--out a"));
    });
    printed = contents(dir / "printed");
  }
};
inline const Trained& trained() {
  static const Trained made;
  return made;
}

// Returns the path of the first entry in which two checkpoints differ, "" if they are equal. Does not compare
// settings.
inline std::string difference(const c10::IValue& a, const c10::IValue& b, const std::string& where = "") {
  if (a.tagKind() != b.tagKind()) return where + ": another type";
  if (a.isTensor()) return torch::equal(a.toTensor(), b.toTensor()) ? "" : where;
  const auto same = [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); };
  if (a.isDouble()) return same(a.toDouble(), b.toDouble()) ? "" : where;
  if (a.isInt()) return a.toInt() == b.toInt() ? "" : where;
  if (a.isString()) return a.toStringRef() == b.toStringRef() ? "" : where;
  if (a.isList()) {
    const auto x = a.toListRef(), y = b.toListRef();
    if (x.size() != y.size()) return where + ": another length";
    for (size_t i = 0; i < x.size(); ++i)
      if (const auto d = difference(x[i], y[i], concat(where, "[", i, "]")); !d.empty()) return d;
  } else if (a.isGenericDict()) {
    const auto x = a.toGenericDict(), y = b.toGenericDict();
    if (x.size() != y.size()) return where + ": another size";
    for (const auto& e : x) {
      const std::string key = e.key().isString() ? e.key().toStringRef() : concat(e.key().toInt());
      if (key == "flags" || key == "chosen") continue;
      if (!y.contains(e.key())) return where + "." + key + ": missing";
      if (const auto d = difference(e.value(), y.at(e.key()), where + "." + key); !d.empty()) return d;
    }
  }
  return "";
}
inline std::string difference(const std::string& a, const std::string& b) {
  return difference(read_pth(a), read_pth(b));
}

// Returns the first number with this key in a JSON file.
inline double json_number(const std::string& path, const std::string& key) {
  const std::string text = contents(path), mark = "\"" + key + "\":";
  REQUIRE_MESSAGE(has(text, mark), path << " has no " << key);
  return std::stod(text.substr(text.find(mark) + mark.size()));
}

// Returns the rows of metrics.csv. Empty cells are NaN.
inline std::vector<std::vector<double>> metric_rows(const std::string& path) {
  std::vector<std::vector<double>> rows;
  for (const auto& line : lines_of(contents(path))) {
    if (line.rfind("epoch,", 0) == 0) continue;
    rows.emplace_back();
    std::istringstream in(line + ",");
    for (std::string cell; std::getline(in, cell, ',');)
      rows.back().push_back(cell.empty() ? std::nan("") : std::stod(cell));
  }
  return rows;
}
// Columns of metrics.csv.
constexpr int kEpoch = 0, kIteration = 1, kLoss = 2, kIou = 3, kObj = 4, kCls = 5, kL1 = 6, kPositives = 7;
constexpr int kSpeed = 9, kWaiting = 10, kAP = 12, kValLoss = 15, kDtr = 12, kAPWithDtr = 16;
// Returns the AP of the last evaluation of a run, -1 without an evaluation.
inline double last_ap(const TempDir& dir, const std::string& run, int column = kAP) {
  double last = -1;
  for (const auto& row : metric_rows(dir / (run + "/metrics.csv")))
    if (!std::isnan(row[column])) last = row[column];
  return last;
}

// Returns last.pth of a run.
inline c10::impl::GenericDict last_checkpoint(const TempDir& dir, const std::string& run_folder) {
  return read_pth(dir / (run_folder + "/last.pth")).toGenericDict();
}

// Returns the weights in last.pth of a run: the EMA if `averaged`, otherwise the trained weights.
inline c10::impl::GenericDict weights_of(const TempDir& dir, const std::string& run_folder,
                                         bool averaged = true) {
  const auto top = last_checkpoint(dir, run_folder);
  return (averaged ? top : top.at("train").toGenericDict()).at("model").toGenericDict();
}

// Returns the number of iterations done in last.pth of a run.
inline int64_t steps_of(const TempDir& dir, const std::string& run_folder = "r") {
  return last_checkpoint(dir, run_folder).at("train").toGenericDict().at("iteration").toInt();
}

// Returns the relative difference of two runs, the larger of two L2 ratios: parameters |a - b| / |b - start|,
// and batch norm statistics |a - b| / |b|.
inline double relative_difference(const TempDir& dir, const std::string& a, const std::string& b,
                                  const std::string& start) {
  const auto x = weights_of(dir, a, false), y = weights_of(dir, b, false), z = weights_of(dir, start, false);
  double relative_difference = 0, way = 0, statistics = 0, all = 0;
  for (const auto& e : x) {
    const Tensor v = e.value().toTensor(), w = y.at(e.key()).toTensor(), first = z.at(e.key()).toTensor();
    if (!v.is_floating_point()) continue;
    const bool of_norm = has(e.key().toStringRef(), "running_");
    (of_norm ? statistics : relative_difference) += (v - w).square().sum().item<double>();
    (of_norm ? all : way) += (of_norm ? w : w - first).square().sum().item<double>();
  }
  return std::max(std::sqrt(relative_difference / way), std::sqrt(statistics / all));
}

// A program that runs in the background.
struct Process {
  pid_t pid;
  std::string out, err;  // paths of the files with stdout and stderr

  struct Command {
    std::string text;
  };
  Process(const TempDir& dir, const std::string& program, const std::string& arguments)
      : Process(dir, Command{concat("$YOLOX_PROGRAMS/", program, " ", arguments)}) {}
  // Runs a shell command. name: of the output files.
  Process(const TempDir& dir, const Command& command, const std::string& name = "")
      : out(dir / (name + "out.txt")), err(dir / (name + "err.txt")) {
    const std::string whole = concat("cd '", dir.path.string(), "' && export OMP_NUM_THREADS=1 && exec ",
                                     command.text, " >", out, " 2>", err, " </dev/null");
    pid = fork();
    if (pid == 0) {
      execl("/bin/sh", "sh", "-c", whole.c_str(), nullptr);
      _exit(127);
    }
  }
  Process(const Process&) = delete;
  ~Process() {
    if (pid > 0) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
  }
  // Waits for the end of the process. Returns the exit code, or 128 + the number of the signal that ended it.
  int wait() {
    int status = 0;
    waitpid(std::exchange(pid, 0), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  bool ended() {
    siginfo_t info{};
    return waitid(P_PID, id_t(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid;
  }
  // Waits until the condition holds. Returns false if the program ends first, or after three minutes.
  template <class Condition>
  bool until(const Condition& condition) {
    for (int i = 0; i < 18000; ++i) {
      const bool over = ended();
      if (condition()) return true;
      if (over) return false;
      usleep(10000);
    }
    return false;
  }
  // Waits until it ends; false after three minutes.
  bool ends() {
    return until([&] { return ended(); });
  }
};

inline std::vector<pid_t> children_of(pid_t parent) {
  std::vector<pid_t> found;
  std::istringstream in(contents(concat("/proc/", parent, "/task/", parent, "/children")));
  for (pid_t pid; in >> pid;) found.push_back(pid);
  return found;
}

// Runs ./train. Returns the peak size of its address space in KiB, with several ranks that of the largest
// process. Deletes the run folder.
inline int64_t peak_address_space(const TempDir& dir, const std::string& arguments) {
  Process p(dir, "train", arguments + " --out measured");
  // The last reading of a process counts, because before exec() a child still shows the value of its parent.
  std::map<pid_t, int64_t> peaks;
  p.until([&] {
    auto all = children_of(p.pid);
    all.push_back(p.pid);
    for (const pid_t pid : all) {
      std::istringstream status(contents(concat("/proc/", pid, "/status")));
      for (std::string word; status >> word;)
        if (word == "VmPeak:") status >> peaks[pid];
    }
    return false;
  });
  CHECK(p.wait() == 0);
  fs::remove_all(dir / "measured");
  int64_t largest = 0;
  for (const auto& [pid, peak] : peaks) largest = std::max(largest, peak);
  return largest;
}

}  // namespace yolox::test
