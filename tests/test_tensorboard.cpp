// SPDX-License-Identifier: Apache-2.0
#include "run/log.hpp"

#include <unistd.h>

#include <sstream>

#include "common.hpp"

using namespace yolox;

namespace {

std::string bytes_of(const std::string& hex) {
  std::string out;
  std::istringstream in(hex);
  for (std::string two; in >> two;) out += char(std::stoi(two, nullptr, 16));
  return out;
}

}  // namespace

TEST_CASE("events: a file has a version, a session start and a record per call, correct byte for byte") {
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
  CHECK(event(1.5, 300, summary_field, summary({{"lr", 0.5}, {"AP", std::nan("")}, {"a/b", -1e9}})) ==
        bytes_of("25 00 00 00 00 00 00 00 ea bc 36 f3 09 00 00 00 00 00 00 f8 3f 10 ac 02 2a 17 "
                 "0a 09 0a 02 6c 72 15 00 00 00 3f 0a 0a 0a 03 61 2f 62 15 28 6b 6e ce 17 9d ca 50"));

  const TempDir dir;
  Events events(dir.path.string(), 300);
  events.scalars(300, {{"lr", std::nan("")}});  // no event
  events.scalars(300, {{"lr", 0.5}});
  // TensorBoard requires "tfevents". The rest of the name is that of SummaryWriter of torch and TensorFlow.
  const std::string path = std::filesystem::directory_iterator(dir.path)->path().string();
  CHECK(path.rfind(dir / "events.out.tfevents.", 0) == 0);
  CHECK(has(path, concat(".", getpid())));
  std::string expected, written = contents(path);
  for (const auto& [step, field, content] : {std::tuple(0, version_field, std::string("brain.Event:2")),
                                             {300, session_field, session_start},
                                             {300, summary_field, summary({{"lr", 0.5}})}}) {
    const size_t at = expected.size();
    expected += event(read_number<double>(written, at + 13), step, field, content);
  }
  CHECK(written == expected);
}
