// SPDX-License-Identifier: Apache-2.0
// weights/get: downloads, resumes and checks files. Also the messages of programs about missing weights.
#include "programs.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

bool have_curl() { return std::system("command -v curl >/dev/null 2>&1") == 0; }

// weights/get in a temporary folder, with a file of 300 kB to download and its SHA-256.
struct Fetch {
  TempDir dir;
  std::string file, bytes, url;
  Fetch() : file(dir / "weights/yolox_nano.pth"), url("file://" + (dir / "server")) {
    for (uint32_t i = 0, x = 1; i < 300000; ++i) bytes += char((x = x * 1664525 + 1013904223) >> 24);
    write_text(dir / "server/yolox_nano.pth", bytes);
    write_text(dir / "weights/get");
    fs::copy_file(YOLOX_SOURCE_DIR "/weights/get", dir / "weights/get", fs::copy_options::overwrite_existing);
    REQUIRE(shell(dir, "(cd server && sha256sum yolox_nano.pth >../weights/SHA256SUMS)").code == 0);
  }
  Outcome get(const std::string& names = "yolox-nano") {
    return shell(dir, "YOLOX_WEIGHTS_URL=" + url + " weights/get " + names);
  }
};

}  // namespace

PROGRAM_TEST("weights: get checks what it downloads; an existing file is not changed, a wrong one not kept" *
             doctest::skip(!have_curl())) {
  Fetch p;
  const Outcome first = p.get();
  CHECK_MESSAGE(first.code == 0, first.err);
  CHECK(has(first.out, "300000 bytes, SHA-256 is right"));
  CHECK(contents(p.file) == p.bytes);
  CHECK_FALSE(fs::exists(p.file + ".part"));
  p.url = "http://127.0.0.1:9";  // no server is needed, and there is none
  CHECK(has(p.get().out, "exists, SHA-256 is right"));
  write_text(p.file, "mine");  // a file of that name that was trained here
  CHECK(has(p.get().err, "yolox_nano.pth is not the official file"));
  CHECK(contents(p.file) == "mine");
  fs::remove(p.file);
  CHECK(has(p.get().err, "cannot download http://127.0.0.1:9/yolox_nano.pth: no network, or the connection"));
  p.url = "file://" + (p.dir / "server");
  write_text(p.dir / "server/yolox_nano.pth", "a page of a proxy");
  const Outcome wrong = p.get();
  CHECK(wrong.code == 1);
  CHECK(has(wrong.err, "is not the official file"));
  CHECK_FALSE(fs::exists(p.file));
  CHECK(p.get("yolox.nano").code == 2);  // a name is not a regular expression
  CHECK(has(p.get("yolox-z").err, "'yolox-z' is not an official model"));
}

PROGRAM_TEST("weights: get resumes a partial download, which stays if the server does not have the file" *
             doctest::skip(!have_curl())) {
  Fetch p;
  for (const int had : {150000, 300000}) {
    fs::remove(p.file);
    write_text(p.file + ".part", p.bytes.substr(0, had));
    const Outcome o = p.get();
    CHECK_MESSAGE(o.code == 0, o.err);
    CHECK(contents(p.file) == p.bytes);
  }
  fs::remove(p.file);
  fs::remove(p.dir / "server/yolox_nano.pth");
  write_text(p.file + ".part", p.bytes.substr(0, 150000));
  CHECK(p.get().code == 1);
  CHECK(fs::file_size(p.file + ".part") == 150000);
}

TEST_CASE("weights: all six models have hashes; the message about missing weights names weights/get") {
  const std::string sums = contents(YOLOX_SOURCE_DIR "/weights/SHA256SUMS");
  CHECK(lines_of(sums).size() == 6);
  TempDir dir;
  for (const std::string name : {"yolox-nano", "yolox-tiny", "yolox-s", "yolox-m", "yolox-l", "yolox-x"}) {
    std::string file = name + ".pth";
    file[5] = '_';
    CHECK_MESSAGE(has(sums, "  " + file + "\n"), file);
    CHECK(has(error_of([&] { read_weights(dir / file); }), file + " is missing; weights/get " + name));
    if (fs::exists(YOLOX_SOURCE_DIR "/weights/" + file)) continue;
    CHECK(has(error_of([&] { read_weights(name); }), "weights/" + file + " is missing; weights/get " + name));
  }
  write_text(dir / "yolox_s.pth", "words");
  CHECK_FALSE(has(error_of([&] { read_weights(dir / "yolox_s.pth"); }), "weights/get"));
  CHECK(has(error_of([] { read_weights("yolox-z"); }),
            "--weights yolox-z is neither a file nor an official model (yolox-nano, yolox-tiny"));
}
