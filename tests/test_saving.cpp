// The files of a run: what it saves, finds again and goes back to; its folder.
#include "tensors.hpp"

#include <sys/resource.h>

#include <csignal>
#include <map>

#include "saving.hpp"

using namespace yolox;

namespace {

GenericDict a_file(int64_t step) {
  auto file = empty_dict(), train = empty_dict(), model = empty_dict();
  model.insert("weight", torch::ones({3}));
  train.insert("iteration", step), train.insert("settings", empty_dict()), train.insert("images", int64_t{8});
  train.insert("model", model);
  file.insert("train", train);
  return file;
}
int64_t step_of(const c10::IValue& file) {
  return file.toGenericDict().at("train").toGenericDict().at("iteration").toInt();
}
std::vector<std::string> names_in(const TempDir& dir) {
  std::vector<std::string> names;
  for (const auto& path : checkpoints_of(dir.path.string()))
    names.push_back(std::filesystem::path(path).filename().string());
  return names;
}
using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("c1 checkpoints: the newest that is whole is taken, what is torn is said") {
  TempDir dir;
  std::vector<std::string> notes;
  CHECK(has(error_of([&] { newest_checkpoint(dir.path.string(), notes); }), "has no checkpoint"));
  int64_t before = -1;
  for (const int64_t step : {9, 20, 100}) {
    save_last(dir.path.string(), a_file(step), step, before, 2);
    before = step;
  }
  CHECK(names_in(dir) == Names{"last.pth", "step_20.pth", "step_9.pth"});
  CHECK(step_of(newest_checkpoint(dir.path.string(), notes).file) == 100);
  CHECK(notes.empty());
  const std::string whole = contents(dir / "last.pth");
  for (const std::string& torn :
       {whole.substr(0, whole.size() / 2), std::string(), whole.substr(0, whole.size() - 1)}) {
    notes.clear();
    write_text(dir / "last.pth", torn);
    const SavedRun found = newest_checkpoint(dir.path.string(), notes);
    CHECK(step_of(found.file) == 20);
    CHECK(found.path == dir / "step_20.pth");
    REQUIRE(notes.size() == 1);
    CHECK(has(notes[0], "last.pth"));
  }
  std::filesystem::remove(dir / "last.pth");  // killed between two names
  CHECK(step_of(newest_checkpoint(dir.path.string(), notes).file) == 20);
  write_text(dir / "step_20.pth", "torn"), write_text(dir / "step_9.pth", "torn");
  CHECK(has(error_of([&] { newest_checkpoint(dir.path.string(), notes); }), "step_9.pth"));
}

TEST_CASE("checkpoints: --keep N of the older ones stay, none with 0; the same step is not kept twice") {
  TempDir dir;
  save_last(dir.path.string(), a_file(1), 1, -1, 1);
  save_last(dir.path.string(), a_file(1), 1, 1, 1);
  CHECK(names_in(dir) == Names{"last.pth"});
  save_last(dir.path.string(), a_file(2), 2, 1, 1);
  save_last(dir.path.string(), a_file(3), 3, 2, 1);
  CHECK(names_in(dir) == Names{"last.pth", "step_2.pth"});
  CHECK(step_of(read_pth(dir / "step_2.pth")) == 2);
  save_last(dir.path.string(), a_file(4), 4, 3, 0);
  CHECK(names_in(dir) == Names{"last.pth"});
  write_text(dir / "step_x.pth"), write_text(dir / "step_7.pth.bak"), write_text(dir / "best.pth");
  CHECK(names_in(dir) == Names{"last.pth"});
}

TEST_CASE("checkpoints: a run without a step makes room, a run with one does not; torn files go") {
  TempDir dir;
  forget_unstarted(dir.path.string());
  write_pth(dir / "last.pth", a_file(0));
  forget_unstarted(dir.path.string());
  CHECK_FALSE(std::filesystem::exists(dir / "last.pth"));
  write_pth(dir / "last.pth", a_file(1));
  forget_unstarted(dir.path.string());
  CHECK(std::filesystem::exists(dir / "last.pth"));
  write_text(dir / "last.pth", "foreign");
  forget_unstarted(dir.path.string());
  CHECK(contents(dir / "last.pth") == "foreign");
  write_text(dir / "last.pth.tmp.123"), write_text(dir / "best.pth.tmp.9"), write_text(dir / "notes.txt");
  remove_torn_files(dir.path.string());
  CHECK_FALSE(std::filesystem::exists(dir / "last.pth.tmp.123"));
  CHECK_FALSE(std::filesystem::exists(dir / "best.pth.tmp.9"));
  CHECK(std::filesystem::exists(dir / "notes.txt"));
}

TEST_CASE("c1 checkpoints: the state of torch's random numbers is put back") {
  torch::manual_seed(5);
  torch::rand({7});
  const auto state = random_state(torch::kCPU);
  const Tensor next = torch::rand({3});
  torch::manual_seed(6);
  set_random_state(state, torch::kCPU);
  CHECK(torch::equal(torch::rand({3}), next));
}

TEST_CASE("c1 checkpoints: one with weights that are not finite is none to go on from") {
  TempDir dir;
  std::vector<std::string> notes;
  save_last(dir.path.string(), a_file(5), 5, -1, 1);
  auto spoilt = a_file(6);
  spoilt.at("train").toGenericDict().at("model").toGenericDict().at("weight").toTensor()[1] = HUGE_VAL;
  save_last(dir.path.string(), spoilt, 6, 5, 1);
  const SavedRun found = newest_checkpoint(dir.path.string(), notes);
  CHECK(found.step == 5);
  CHECK(found.images == 8);
  REQUIRE(notes.size() == 1);
  CHECK(has(notes[0], "not finite"));
  CHECK(has(error_of([&] { newest_checkpoint(dir.path.string(), notes, 5); }), "step_5.pth is of step 5"));
}

TEST_CASE(
    "c1 g4 checkpoints: the scaler, the rates and the counts of a run come back; --keep-going goes back "
    "further if it must") {
  TempDir dir;
  const auto training = [](bool fp16) {
    torch::manual_seed(1);
    YOLOX model("yolox-nano", 2);
    return Training{model, YOLOX(nullptr), Optimizer("adam", parameter_groups(*model, 0), fp16),
                    GradScaler(fp16, torch::kCPU)};
  };
  Training t = training(true);
  Log log(dir / "log.txt");
  WeightsInfo info;
  info.model = "yolox-nano";
  Saver saver{dir.path.string(), info, {}, 10, 80, 3, true};
  t.iteration = 1, t.scaler.scale.fill_(512), t.scaler.growth_tracker.fill_(7);
  REQUIRE(saver.save(t, "last.pth", log));
  t.iteration = 2, t.scaler.scale.fill_(256);
  REQUIRE(saver.save(t, "last.pth", log));
  t.iteration = 9, t.scaler.scale.fill_(1);
  saver.go_back(t, log, [] {});
  CHECK(t.iteration == 2);
  CHECK(t.scaler.scale.item<double>() == 256);
  CHECK(t.scaler.growth_tracker.item<int64_t>() == 7);
  CHECK(t.lr_factor == 0.5);
  Training resumed = training(true);
  std::vector<std::string> notes;
  saver.load(resumed, newest_checkpoint(saver.run, notes));
  CHECK(resumed.lr_factor == 0.5);  // saved at once
  CHECK(resumed.returns == 1);
  // It fails again before it has saved anything.
  t.iteration = 7;
  saver.go_back(t, log, [] {});
  CHECK(t.iteration == 1);
  CHECK(t.scaler.scale.item<double>() == 512);
  CHECK(t.lr_factor == 0.25);
  CHECK(t.returns == 2);
  t.iteration = 5;
  saver.go_back(t, log, [] {});  // there is none before
  CHECK(t.iteration == 1);
  CHECK(t.lr_factor == 0.125);

  // A run without a scale goes on with fp16: its scaler begins as it does in a new run, and the other way.
  Training plain = training(false);
  plain.iteration = 20;
  REQUIRE(saver.save(plain, "last.pth", log));
  Training mixed = training(true);
  saver.load(mixed, newest_checkpoint(saver.run, notes));
  CHECK(mixed.iteration == 20);
  CHECK(mixed.scaler.scale.item<double>() == 65536);
  REQUIRE(saver.save(mixed, "last.pth", log));
  saver.load(plain, newest_checkpoint(saver.run, notes));
  CHECK(plain.scaler.scale.item<double>() == 1);
}

TEST_CASE("run: a folder of its own for each run, which one training at a time works in") {
  TempDir dir;
  CHECK(make_run_folder(dir / "a/b", "") == dir / "a/b");
  CHECK(std::filesystem::is_directory(dir / "a/b"));
  CHECK(has(error_of([&] { make_run_folder(dir / "a/b", ""); }), "another training works in"));
  for (const char* name : {"last.pth", "step_7.pth"}) {
    const std::string folder = dir / name + std::string(".d");
    std::filesystem::create_directory(folder);
    write_text(folder + "/" + name, "x");
    CHECK(has(error_of([&] { make_run_folder(folder, ""); }), folder + " already holds a run"));
  }
  write_text(dir / "file");
  CHECK(has(error_of([&] { make_run_folder(dir / "file", ""); }), "cannot write to"));
  const auto here = std::filesystem::current_path();
  std::filesystem::current_path(dir.path);
  CHECK(newest_run() == "");
  CHECK(make_run_folder("", "nano-x") == "runs/nano-x");
  CHECK(make_run_folder("", "nano-x") == "runs/nano-x-2");
  write_text("runs/nano-x/step_3.pth"), write_text("runs/nano-x-2/best.pth");
  CHECK(newest_run() == "runs/nano-x");  // the other one has nothing to go on from
  std::filesystem::current_path(here);
}
