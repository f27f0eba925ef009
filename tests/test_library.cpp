// SPDX-License-Identifier: Apache-2.0
// The model in other projects: find_package(), add_subdirectory(), the release archive.
#include "programs.hpp"

#include "checkpoint/load.hpp"

using namespace yolox;
using namespace yolox::test;

// Writes a project with the program in the section "The model in your own program" of the README, which links
// yolox::yolox, and with the line that finds it.
static void write_project(const TempDir& dir, const std::string& find) {
  const std::string readme = contents(YOLOX_SOURCE_DIR "/README.md"), begin = "```cpp\n";
  const size_t from = readme.find(begin) + begin.size();
  write_text(dir / "detect.cpp", readme.substr(from, readme.find("```", from) - from));
  write_text(dir / "CMakeLists.txt",
             concat("cmake_minimum_required(VERSION 3.25)\nproject(other CXX)\n", find,
                    "\nadd_executable(detect detect.cpp)\n"
                    "target_link_libraries(detect PRIVATE yolox::yolox)\n"));
}

PROGRAM_TEST(
    "library: the program of the README builds with find_package(yolox) and prints the boxes of demo") {
  TempDir dir;
  write_project(dir, "find_package(yolox REQUIRED)");
  const Outcome built = shell(
      dir, "cmake -S . -B b -Dyolox_DIR='" YOLOX_BINARY_DIR "' >log 2>&1 && cmake --build b >>log 2>&1");
  REQUIRE_MESSAGE(built.code == 0, contents(dir / "log"));
  write_scenes(dir / "data", 1);
  const fs::path image = fs::directory_iterator(dir / "data/train")->path();
  torch::manual_seed(0);
  YOLOX model = make_model("yolox-nano", 3);
  for (auto* preds : {&model->head->as<YOLOXHead>()->cls_preds, &model->head->as<YOLOXHead>()->obj_preds})
    for (const auto& pred : **preds) pred->as<nn::Conv2d>()->bias.data().fill_(3);  // high scores
  auto file = empty_dict();
  file.insert("model", to_dict(state_dict(*model)));
  file.insert("yolox", to_dict(WeightsInfo{"yolox-nano", {"one", "two", "three"}, 96, 128, false}));
  write_pth(dir / "w.pth", file);
  const Outcome o = shell(dir, concat("b/detect w.pth '", image.string(), "'"));
  REQUIRE_MESSAGE(o.code == 0, o.err);
  const auto lines = lines_of(o.out);
  succeed(dir, "demo",
          concat("--weights w.pth --conf 0.3 --nms 0.45 --txt --save s --source '", image.string(), "'"));
  // demo clips boxes to the image, and leaves out those without area.
  const auto drawn = lines_of(contents(dir / ("s/labels/" + image.stem().string() + ".txt")));
  CHECK(drawn.size() > 10);
  CHECK((drawn.size() <= lines.size() && drawn.size() > lines.size() / 2));
  CHECK(has(lines[0], " at "));
}

PROGRAM_TEST("library: add_subdirectory() adds yolox::yolox and neither programs nor tests") {
  TempDir dir;
  write_project(dir, "add_subdirectory(" YOLOX_SOURCE_DIR " yolox EXCLUDE_FROM_ALL)");
  const Outcome o = shell(dir, "cmake -S . -B b >log 2>&1 && cmake --build b --target help");
  REQUIRE_MESSAGE(o.code == 0, contents(dir / "log"));
  CHECK(has(o.out, "detect"));
  CHECK(has(o.out, "yolox_data"));
  for (const char* target : {"train", "tests", "demo"})
    CHECK_FALSE(has(o.out, concat("\n... ", target, "\n")));
}

PROGRAM_TEST("setup: the driver and the oldest card decide which LibTorch is installed") {
  TempDir dir;
  // Runs the part of setup.sh that decides, with a driver that names these cards.
  const auto choice = [&](const std::string& driver, const std::string& cards) {
    write_text(dir / "nvidia-smi", concat("#!/bin/sh\ncase $1 in\n*driver*) echo ", driver,
                                          " ;;\n*) printf '", cards, "' ;;\nesac\n"));
    const Outcome o = shell(dir, R"sh(unset YOLOX_DRIVER YOLOX_CARD
      chmod +x nvidia-smi && PATH=$PWD:$PATH bash -euc '
      eval "$(sed -n "/^query()/,/^esac/p" ")sh" YOLOX_SOURCE_DIR R"sh(/setup.sh")"
      echo "$torch $cuda ${index[1]-}"')sh");
    return o.code == 0 ? o.out : o.err;
  };
  for (const auto& [driver, cards, wanted] :
       {std::tuple("580.65.06", "9.0\\n9.0\\n", "2.15.0 ON \n"),
        {"580.65.06", "12.0\\n", "2.15.0 ON \n"},
        {"580.65.06", "8.6\\n7.0\\n", "2.10.0 ON \n"},
        {"580.65.06", "6.1\\n10.0\\n", "2.10.0 ON https://download.pytorch.org/whl/cu126\n"},
        {"580.65.06", "3.5\\n", "2.15.0 OFF \n"},
        {"550.54", "[N/A]\\n", "2.10.0 ON \n"},
        {"470.82", "8.0\\n", "2.15.0 OFF \n"}})
    CHECK(choice(driver, cards) == wanted);
}

PROGRAM_TEST(
    "release: the programs of the archive train and evaluate on a system that has only glibc and a shell" *
    doctest::skip(geteuid() != 0)) {
  DataDir dir(8);
  const Outcome o = shell(dir, "'" YOLOX_SOURCE_DIR "/tests/clean_system.sh' '" YOLOX_BINARY_DIR "' .");
  if (has(o.err, "mknod") || has(o.err, "unshare")) {
    MESSAGE("skipped: no device files or namespaces here: " << o.err);
    return;
  }
  REQUIRE_MESSAGE(o.code == 0, o.out << o.err);
  CHECK(has(o.out, "AP50"));
}
