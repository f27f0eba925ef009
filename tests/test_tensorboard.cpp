// SPDX-License-Identifier: Apache-2.0
#include "base/bytes.hpp"
#include "run/tensorboard.hpp"

#include <sys/resource.h>
#include <sys/wait.h>

#include <cstdio>
#include <limits>
#include <map>
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

// ---- a strict reader of event files

std::string take(std::string_view& in, uint64_t n) {
  check(n <= in.size(), "a field is cut off");
  const auto part = in.substr(0, n);
  in.remove_prefix(n);
  return std::string(part);
}
uint64_t take_varint(std::string_view& in) {
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    const auto byte = static_cast<unsigned char>(take(in, 1)[0]);
    value |= uint64_t(byte & 127) << shift;
    if (byte < 128) return value;
  }
  fail("a varint without end");
}

// Fields of a protobuf message by number. A varint is stored as decimal text, other types as their bytes.
using Message = std::multimap<int, std::string>;
Message message(std::string_view in) {
  Message fields;
  while (!in.empty()) {
    const uint64_t key = take_varint(in), type = key & 7;
    check(type == 0 || type == 1 || type == 2 || type == 5, "wire type ", type);
    fields.emplace(int(key >> 3), type == 0   ? std::to_string(int64_t(take_varint(in)))
                                  : type == 1 ? take(in, 8)
                                  : type == 5 ? take(in, 4)
                                              : take(in, take_varint(in)));
  }
  return fields;
}
std::string only(const Message& m, int number) {
  check(m.count(number) == 1, "field ", number, " is there ", m.count(number), " times");
  return m.find(number)->second;
}

// Returns the events of a file as text: "version brain.Event:2", "start 5", "7 train/loss=0.5 lr=1".
Strings events_in(const std::string& path) {
  const std::string all = contents(path);
  Strings lines;
  size_t at = 0;
  while (all.size() - at >= 12) {
    const auto length = pth::number<uint64_t>(all, at);
    if (all.size() - at < 16 + length) break;
    const std::string data = all.substr(at + 12, length);
    check(all.substr(at, 16 + length) == tensorboard::record(data), "a wrong record at ", at);
    at += 16 + length;

    const Message event = message(data);
    const auto time = pth::number<double>(only(event, 1));
    check(std::abs(time - unix_time()) < 600, "an event at ", time);
    check(event.size() == 3, "an event of ", event.size(), " fields");
    std::string line = only(event, 2);
    if (event.count(3)) {
      check(line == "0", "a version at step ", line);
      line = "version " + only(event, 3);
    } else if (event.count(7)) {
      check(message(only(event, 7)) == Message{{1, "1"}}, "a session that does not start");
      line = "start " + line;
    } else {
      for (const auto& [number, content] : message(only(event, 5))) {
        const Message value = message(content);
        check(number == 1 && value.size() == 2, "a summary of something else");
        line += concat(" ", only(value, 1), "=", pth::number<float>(only(value, 2)));
      }
    }
    lines.push_back(line);
  }
  check(at == all.size(), "a torn record at ", at);
  return lines;
}
Strings file_with(int64_t first_step, const Strings& more = {}) {
  Strings lines{"version brain.Event:2", concat("start ", first_step)};
  lines.insert(lines.end(), more.begin(), more.end());
  return lines;
}

// ---- a full disk

// Limits the size of files that this process writes. A write across the limit is partial, and a write at the
// limit fails.
struct FileLimit {
  rlimit old{};
  void (*handler)(int);
  explicit FileLimit(size_t bytes) : handler(signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &old);
    rlimit limit = old;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileLimit() {
    setrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, handler);
  }
};

// ---- TensorBoard's own reader

const std::string& python() {
  static const std::string found = python_with("tensorboard.backend");
  return found;
}

#define TENSORBOARD_TEST(name) TEST_CASE(name* doctest::skip(python().empty()))

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
  const std::string command = concat("'", python(), "' '", dir / "script.py", "' '", folder, "' >'",
                                     dir / "out", "' 2>'", dir / "err", "'");
  const int status = std::system(command.c_str());
  REQUIRE_MESSAGE(status == 0, contents(dir / "err"));
  return contents(dir / "out");
}

}  // namespace

TEST_CASE("events: CRC-32C equals the test vectors of RFC 3720") {
  using tensorboard::crc32c;
  std::string up(32, 0);
  for (int i = 0; i < 32; ++i) up[i] = char(i);
  CHECK(crc32c("") == 0);
  CHECK(crc32c("123456789") == 0xE3069283);
  CHECK(crc32c(std::string(32, '\0')) == 0x8A9136AA);
  CHECK(crc32c(std::string(32, '\xff')) == 0x62A8AB43);
  CHECK(crc32c(up) == 0x46DD794E);
  CHECK(crc32c(std::string(up.rbegin(), up.rend())) == 0x113FDB5C);
}

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

  CHECK(events_in(path) == file_with(0));
  events.scalars(1, {{"train/loss", 0.5}, {"lr", 1e-3}});
  CHECK(events_in(path) == file_with(0, {"1 train/loss=0.5 lr=0.001"}));
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  events.scalars(2, {{"train/loss", nan}, {"lr", 1}, {"AP", -nan}});
  events.scalars(3, {{"train/loss", nan}});
  events.scalars(4, {});
  events.scalars(int64_t(5) << 40, {{"train/loss", inf}, {std::string(300, 'n'), 0}});
  CHECK(events_in(path) ==
        file_with(0, {"1 train/loss=0.5 lr=0.001", "2 lr=1",
                      concat(int64_t(5) << 40, " train/loss=inf ", std::string(300, 'n'), "=0")}));
  CHECK(files(dir.path) == Strings{path});
}

TEST_CASE("events: a killed process loses no events") {
  const TempDir dir;
  const pid_t child = fork();
  if (child == 0) {
    Events events(dir.path.string(), 0);
    for (int i = 1; i <= 3; ++i) events.scalars(i, {{"a", i}});
    raise(SIGKILL);
  }
  waitpid(child, nullptr, 0);
  REQUIRE(files(dir.path).size() == 1);
  CHECK(events_in(files(dir.path).at(0)) == file_with(0, {"1 a=1", "2 a=2", "3 a=3"}));
}

TEST_CASE("events: the file of a later session sorts later, for any state of the clock") {
  const TempDir dir;
  for (int i = 0; i < 12; ++i) Events(dir.path.string(), i).scalars(i, {{"a", i}});  // within a second
  Strings paths = files(dir.path);
  REQUIRE(paths.size() == 12);
  for (int i = 0; i < 12; ++i) CHECK(events_in(paths[i]) == file_with(i, {concat(i, " a=", i)}));

  // Files of a machine whose clock is ahead, and of other programs.
  for (const char* name :
       {"events.out.tfevents.4000000000.elsewhere.7.0", "events.out.tfevents.99999999999.x",
        "events.out.tfevents.", "Events.out.tfevents.5000000000.x", "name_of_20_letters__6000000000"})
    write_text(dir / name);
  Events(dir.path.string(), 12);
  paths = files(dir.path);
  REQUIRE(paths.size() == 18);
  const auto ours = std::find_if(paths.begin(), paths.end(),
                                 [&](const std::string& path) { return has(path, "tfevents.4000000001."); });
  REQUIRE(ours != paths.end());
  CHECK(events_in(*ours) == file_with(12));
}

TEST_CASE("events: a record for which the disk has no room is lost as a whole; later ones are written") {
  const TempDir dir;
  const Events events(dir.path.string(), 0);
  const std::string path = files(dir.path).at(0);
  events.scalars(1, {{"a", 1}});
  {
    const FileLimit limit(contents(path).size() + 5);
    events.scalars(2, {{"a", 2}});
  }
  events.scalars(3, {{"a", 3}});
  CHECK(events_in(path) == file_with(0, {"1 a=1", "3 a=3"}));
}

TENSORBOARD_TEST("events: TensorBoard shows the values at their steps" * starts_programs) {
  const TempDir dir;
  Events events(dir.path.string(), 0);
  std::string loss, rate;
  for (int64_t i = 1; i <= int64_t(1) << 40; i *= 3) {
    events.scalars(i, {{"train/loss", 1. / double(i)}, {"lr", double(i)}, {"AP", std::nan("")}});
    char text[96];
    std::snprintf(text, sizeof text, " %lld %.9g\n", static_cast<long long>(i), float(1. / double(i)));
    loss += std::string("train/loss") + text;
    std::snprintf(text, sizeof text, " %lld %.9g\n", static_cast<long long>(i), float(i));
    rate += std::string("lr") + text;
  }
  CHECK(shown(dir.path.string()) == rate + loss);
}

TENSORBOARD_TEST(
    "events: TensorBoard drops events of a session after the step at which the next session starts" *
    starts_programs) {
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
