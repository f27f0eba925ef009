// SPDX-License-Identifier: Apache-2.0
#include "run/log.hpp"

#include <unistd.h>

#include <chrono>
#include <limits>
#include <sstream>

#include "common.hpp"

using namespace yolox;
namespace fs = std::filesystem;

namespace {

using Strings = std::vector<std::string>;

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string bytes_of(const std::string& hex) {
  std::string out;
  std::istringstream in(hex);
  for (std::string two; in >> two;) out += char(std::stoi(two, nullptr, 16));
  return out;
}

// Returns the paths of the files in a folder, in the order in which TensorBoard reads them.
Strings files(const std::string& folder) {
  Strings paths;
  for (const auto& entry : fs::directory_iterator(folder)) paths.push_back(entry.path().string());
  std::sort(paths.begin(), paths.end());
  return paths;
}

// Returns the contents of the events in a file, without their time, and checks their records.
Strings events_in(const std::string& path) {
  const std::string all = contents(path);
  Strings events;
  for (size_t at = 0; at < all.size();) {
    const auto length = read_number<uint64_t>(all, at);
    const std::string data = all.substr(at + 12, length);
    REQUIRE(all.substr(at, 16 + length) == tensorboard::record(data));
    REQUIRE(data[0] == '\x09');
    CHECK(std::abs(read_number<double>(data, 1) - unix_time()) < 600);
    events.push_back(data.substr(9));
    at += 16 + length;
  }
  return events;
}

std::string event_of(int64_t step, int number, const std::string& content) {
  const std::string record = tensorboard::event(0, step, number, content);
  return record.substr(12 + 9, record.size() - 12 - 9 - 4);  // without time, length and checksums
}
std::string scalars_of(int64_t step, const std::vector<std::pair<std::string, double>>& values) {
  return event_of(step, tensorboard::summary_field, tensorboard::summary(values));
}
// Returns the events of a file whose session starts at `first_step`.
Strings file_with(int64_t first_step, const Strings& more = {}) {
  Strings events{event_of(0, tensorboard::version_field, "brain.Event:2"),
                 event_of(first_step, tensorboard::session_field, tensorboard::session_start)};
  events.insert(events.end(), more.begin(), more.end());
  return events;
}

// ---- TensorBoard's own reader

const std::string& python() {
  static const std::string found = cached_python_with("tensorboard.backend");
  return found;
}

// Prints "tag step value" for all values that TensorBoard shows of folder argv[1]. Reads them with the class
// for scripts and with the class of its server, and checks that both agree.
const char* const script = R"(import sys
from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
from tensorboard.util import tensor_util

folder = sys.argv[1]
old = event_accumulator.EventAccumulator(folder, size_guidance={"scalars": 0})
new = plugin_event_accumulator.EventAccumulator(folder, size_guidance={"tensors": 0})

a = [(tag, e.step, e.value) for tag in sorted(old.Reload().Tags()["scalars"]) for e in old.Scalars(tag)]
b = [(tag, e.step, float(tensor_util.make_ndarray(e.tensor_proto)))
     for tag in sorted(new.Reload().Tags()["tensors"]) for e in new.Tensors(tag)]
assert a == b, (a, b)
assert new.file_version is None or new.file_version == 2
for tag, step, value in a:
    print(tag, step, "%.9g" % value)
)";

std::string shown(const std::string& folder) {
  const TempDir dir;
  write_text(dir / "script.py", script);
  const std::string command = concat(python(), " '", dir / "script.py", "' '", folder, "' >'", dir / "out",
                                     "' 2>'", dir / "err", "'");
  const int status = std::system(command.c_str());
  REQUIRE_MESSAGE(status == 0, contents(dir / "err"));
  return contents(dir / "out");
}

}  // namespace

TEST_CASE("events: each kind of event is correct byte for byte") {
  using namespace tensorboard;
  // The first record is the one of TensorFlow (quoted in tensorboard/data/server/tf_record.rs), which has no
  // step. The checksums are those of masked_crc32c in tensorboard/compat/tensorflow_stub.
  const std::string version = bytes_of("09 00 00 80 38 99 d6 d7 41 1a 0d") + "brain.Event:2";
  CHECK(record(version) ==
        bytes_of("18 00 00 00 00 00 00 00 a3 7f 4b 22") + version + bytes_of("12 4b 36 ab"));
  CHECK(event(1.5, 0, version_field, "brain.Event:2") ==
        bytes_of("1a 00 00 00 00 00 00 00 12 9b d8 2d 09 00 00 00 00 00 00 f8 3f 10 00 1a 0d") +
            "brain.Event:2" + bytes_of("d3 dc 53 1e"));
  CHECK(event(1.5, 300, session_field, session_start) ==
        bytes_of("10 00 00 00 00 00 00 00 95 fb fe 18 09 00 00 00 00 00 00 f8 3f 10 ac 02 3a 02 08 01 "
                 "71 3b 78 8a"));
  CHECK(event(1.5, 300, summary_field, summary({{"lr", 0.5}, {"a/b", -1e9}})) ==
        bytes_of("25 00 00 00 00 00 00 00 ea bc 36 f3 09 00 00 00 00 00 00 f8 3f 10 ac 02 2a 17 "
                 "0a 09 0a 02 6c 72 15 00 00 00 3f 0a 0a 0a 03 61 2f 62 15 28 6b 6e ce 17 9d ca 50"));
}

TEST_CASE("events: a file has a version, a session start and a record per call; NaN is omitted") {
  const TempDir dir;
  Events events(dir.path.string(), 0);
  REQUIRE(files(dir.path).size() == 1);
  const std::string path = files(dir.path).at(0);
  // TensorBoard requires "tfevents". The rest of the name is that of SummaryWriter of torch and TensorFlow.
  char host[256] = "";
  gethostname(host, sizeof host);
  const std::string start = dir / "events.out.tfevents.", end = concat(".", host, ".", getpid());
  REQUIRE(path.size() == start.size() + 10 + end.size());
  CHECK(path.substr(0, start.size()) == start);
  CHECK(std::abs(std::stod(path.substr(start.size())) - unix_time()) < 600);
  CHECK(path.substr(start.size() + 10) == end);

  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  events.scalars(1, {{"train/loss", 0.5}, {"lr", 1e-3}});
  events.scalars(2, {{"train/loss", nan}, {"lr", 1}, {"AP", -nan}});
  events.scalars(3, {{"train/loss", nan}});
  events.scalars(4, {});
  events.scalars(int64_t(5) << 40, {{"train/loss", inf}, {std::string(300, 'n'), 0}});
  CHECK(events_in(path) ==
        file_with(0, {scalars_of(1, {{"train/loss", 0.5}, {"lr", 1e-3}}), scalars_of(2, {{"lr", 1}}),
                      scalars_of(int64_t(5) << 40, {{"train/loss", inf}, {std::string(300, 'n'), 0}})}));
  CHECK(files(dir.path) == Strings{path});
}

PROGRAM_TEST("events: TensorBoard drops events of a session after the step at which the next session starts" *
             doctest::skip(python().empty())) {
  const TempDir dir;
  const auto session = [&](int first, int last, int value) {
    Events events(dir.path.string(), first);
    for (int i = first; i <= last; ++i) {
      events.scalars(i, {{"loss", value}});
      if (i % 4 == 0) events.scalars(i, {{"AP", value}});
    }
  };
  session(0, 8, 1);
  CHECK(has(shown(dir.path.string()), "loss 8 1\n"));
  session(6, 7, 2);
  CHECK(shown(dir.path.string()) ==
        "AP 0 1\nAP 4 1\n"
        "loss 0 1\nloss 1 1\nloss 2 1\nloss 3 1\nloss 4 1\nloss 5 1\nloss 6 2\nloss 7 2\n");
  session(3, 3, 3);
  CHECK(shown(dir.path.string()) == "AP 0 1\nloss 0 1\nloss 1 1\nloss 2 1\nloss 3 3\n");
  session(4, 4, 4);
  CHECK(shown(dir.path.string()) == "AP 0 1\nAP 4 4\nloss 0 1\nloss 1 1\nloss 2 1\nloss 3 3\nloss 4 4\n");
  session(0, 0, 5);
  CHECK(shown(dir.path.string()) == "AP 0 5\nloss 0 5\n");
}
