// SPDX-License-Identifier: Apache-2.0
// Checkpoints of a run: save and load; the run folder.
#include "models.hpp"
#include "tensors.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <thread>

#include "run/run.hpp"
#include "run/saving.hpp"
#include "run/setup.hpp"

using namespace yolox;

namespace {

GenericDict file_of_step(int64_t step) {
  auto file = empty_dict(), train = empty_dict(), model = empty_dict();
  model.insert("weight", torch::ones({3}));
  train.insert("iteration", step);
  train.insert("settings", empty_dict());
  train.insert("images", int64_t{8});
  train.insert("model", model);
  file.insert("train", train);
  return file;
}
int64_t step_of(const c10::IValue& file) {
  return file.toGenericDict().at("train").toGenericDict().at("iteration").toInt();
}
std::vector<std::string> names_in(const TempDir& dir) {
  std::vector<std::string> names;
  for (const auto& path : list_checkpoints(dir.path.string()))
    names.push_back(std::filesystem::path(path).filename().string());
  return names;
}
using Names = std::vector<std::string>;

// Calls body() in a child process that has mounted a small file system at `folder`, and checks that it
// returns 0.
template <class Body>
void on_small_disk(const std::string& folder, const std::string& size, const Body& body) {
  const pid_t child = fork();
  if (child == 0) _exit(mount_small_disk(folder, size) ? body() : 77);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77)
    MESSAGE("not tested: no right to mount a small file system");
  else
    CHECK(WEXITSTATUS(status) == 0);
}

Training small_training(bool fp16 = false, int64_t classes = 2) {
  torch::manual_seed(1);
  YOLOX model = make_model("yolox-nano", int(classes));
  return Training{model, YOLOX(nullptr), Optimizer("adam", parameter_groups(*model, 0), fp16),
                  GradScaler(fp16, torch::kCPU)};
}
WeightsInfo nano_info(const std::vector<std::string>& classes = {}) {
  WeightsInfo info;
  info.model = "yolox-nano";
  info.classes = classes;
  return info;
}

}  // namespace

TEST_CASE("checkpoints: the newest valid one is loaded; damaged ones are reported") {
  TempDir dir;
  CHECK(has(error_of([&] { newest_checkpoint(dir.path.string()); }), "has no checkpoint"));
  int64_t before = -1;
  for (const int64_t step : {9, 20, 100}) {
    save_last(dir.path.string(), file_of_step(step), step, before, 2);
    before = step;
  }
  CHECK(names_in(dir) == Names{"last.pth", "step_20.pth", "step_9.pth"});
  CHECK(step_of(newest_checkpoint(dir.path.string()).file) == 100);
  CHECK(newest_checkpoint(dir.path.string()).notes.empty());
  const std::string whole = contents(dir / "last.pth");
  for (const std::string& torn :
       {whole.substr(0, whole.size() / 2), std::string(), whole.substr(0, whole.size() - 1)}) {
    write_text(dir / "last.pth", torn);
    const SavedRun found = newest_checkpoint(dir.path.string());
    CHECK(step_of(found.file) == 20);
    CHECK(found.path == dir / "step_20.pth");
    REQUIRE(found.notes.size() == 1);
    CHECK(has(found.notes[0], "last.pth"));
  }
  std::filesystem::remove(dir / "last.pth");  // killed between two renames
  CHECK(step_of(newest_checkpoint(dir.path.string()).file) == 20);
  write_text(dir / "step_20.pth", "torn");
  write_text(dir / "step_9.pth", "torn");
  CHECK(has(error_of([&] { newest_checkpoint(dir.path.string()); }), "step_9.pth"));
}

TEST_CASE("checkpoints: --keep N keeps N older ones, 0 none; the same step is not kept twice") {
  TempDir dir;
  const auto save = [&](int64_t step, int64_t before, int64_t keep) {
    save_last(dir.path.string(), file_of_step(step), step, before, keep);
    return names_in(dir);
  };
  save(1, -1, 1);
  CHECK(save(1, 1, 1) == Names{"last.pth"});
  save(2, 1, 1);
  CHECK(save(3, 2, 1) == Names{"last.pth", "step_2.pth"});
  CHECK(step_of(read_pth(dir / "step_2.pth")) == 2);
  for (const char* other : {"step_x.pth", "step_7.pth.bak", "best.pth"}) write_text(dir / other);
  CHECK(save(4, 3, 0) == Names{"last.pth"});
  write_text(dir / "step_4.pth", "of a step that is done again");
  save(6, 4, 3);
  CHECK(step_of(read_pth(dir / "step_4.pth")) == 4);
}

TEST_CASE("checkpoints: on a full disk older ones make room, oldest first; the new one is saved") {
  TempDir dir;
  const std::string run = dir.path.string();
  std::vector<GenericDict> files;
  for (int64_t step = 0; step < 5; ++step) {
    files.push_back(file_of_step(step));
    files.back().at("train").toGenericDict().insert("big", torch::full({1 << 18}, double(step)));  // 1 MB
  }
  on_small_disk(run, "size=3500k", [&] {
    const std::string error = error_of([&] {
      for (int64_t step = 0; step < 5; ++step) save_last(run, files[step], step, step - 1, 3);
    });
    if (error != "") std::cerr << error << std::endl;
    if (error != "" || names_in(dir) != Names{"last.pth", "step_3.pth", "step_2.pth"}) return 1;
    if (step_of(read_pth(dir / "last.pth")) != 4 || step_of(read_pth(dir / "step_3.pth")) != 3) return 2;
    // Nothing is left that could make room.
    write_text(dir / "step_2.pth", "x");
    write_text(dir / "other", std::string(400000, 'x'));
    std::error_code ignored;
    std::filesystem::remove(dir / "step_3.pth", ignored);
    write_text(dir / "more", std::string(1500000, 'x'));
    if (!has(error_of([&] { save_last(run, files[0], 9, -1, 3); }), "No space left")) return 3;
    return step_of(read_pth(dir / "last.pth")) == 4 ? 0 : 4;
  });
}

TEST_CASE("checkpoints: that of a run without a step is removed, and temporary files are; others stay") {
  TempDir dir;
  write_pth(dir / "last.pth", file_of_step(0));
  remove_unstarted_checkpoint(dir.path.string());
  CHECK_FALSE(std::filesystem::exists(dir / "last.pth"));
  write_pth(dir / "last.pth", file_of_step(1));
  remove_unstarted_checkpoint(dir.path.string());
  CHECK(std::filesystem::exists(dir / "last.pth"));
  write_text(dir / "last.pth", "foreign");
  remove_unstarted_checkpoint(dir.path.string());
  CHECK(contents(dir / "last.pth") == "foreign");
  write_text(dir / "last.pth.tmp.123");
  remove_temporary_files(dir.path.string());
  CHECK_FALSE(std::filesystem::exists(dir / "last.pth.tmp.123"));
  CHECK(std::filesystem::exists(dir / "last.pth"));
}

TEST_CASE("checkpoints: one with nonfinite weights is not resumed from") {
  TempDir dir;
  save_last(dir.path.string(), file_of_step(5), 5, -1, 1);
  auto spoilt = file_of_step(6);
  spoilt.at("train").toGenericDict().at("model").toGenericDict().at("weight").toTensor()[1] = HUGE_VAL;
  save_last(dir.path.string(), spoilt, 6, 5, 1);
  const SavedRun found = newest_checkpoint(dir.path.string());
  CHECK(found.step == 5);
  CHECK(found.images == 8);
  REQUIRE(found.notes.size() == 1);
  CHECK(has(found.notes[0], "not finite"));
}

TEST_CASE("checkpoints: the gradient scaler is restored; a run may be resumed with and without fp16") {
  TempDir dir;
  Log log(dir / "log.txt");
  Saver saver{dir.path.string(), nano_info(), {}, 10, 80, 3, true};
  const auto pass_on = [&](Training& from, Training& to) {
    REQUIRE(saver.save(from, "last.pth", log));
    saver.load(to, newest_checkpoint(saver.run));
  };
  Training t = small_training(true), resumed = small_training(true);
  t.scaler.scale.fill_(512);
  t.scaler.growth_tracker.fill_(7);
  pass_on(t, resumed);
  CHECK(resumed.scaler.scale.item<double>() == 512);
  CHECK(resumed.scaler.growth_tracker.item<int64_t>() == 7);
  // The scaler of a run without fp16 starts as in a new run.
  Training plain = small_training(false), mixed = small_training(true);
  plain.iteration = 20;
  pass_on(plain, mixed);
  CHECK(mixed.iteration == 20);
  CHECK(mixed.scaler.scale.item<double>() == 65536);
  pass_on(mixed, plain);
  CHECK(plain.scaler.scale.item<double>() == 1);
}

TEST_CASE("run: each run has its own folder, which only one training at a time can use") {
  TempDir dir;
  const auto here = std::filesystem::current_path();
  std::filesystem::current_path(dir.path);
  CHECK(newest_run() == "");
  CHECK(create_run_folder("a/b", "") == "a/b");
  CHECK(has(error_of([&] { create_run_folder("a/b", ""); }), "another training uses"));
  write_text("used/step_7.pth", "x");
  CHECK_HAS(error_of([&] { create_run_folder("used", ""); }), "used already holds a run");
  write_text("./file");
  CHECK(has(error_of([&] { create_run_folder("file", ""); }), "cannot write to"));
  std::filesystem::remove_all("used");
  CHECK(create_run_folder("", "nano-x") == "runs/nano-x");
  CHECK(create_run_folder("", "nano-x") == "runs/nano-x-2");
  write_text("runs/nano-x/step_3.pth");
  write_text("runs/nano-x-2/best.pth");
  CHECK(newest_run() == "runs/nano-x");  // the other run has no checkpoint
  write_text("runs/nano-x-2/last.pth");
  const auto written = std::filesystem::file_time_type::clock::now();
  std::filesystem::last_write_time("runs/nano-x/step_3.pth", written - std::chrono::seconds(60));
  write_text("mine/last.pth");  // --out mine, or a folder of other files
  std::filesystem::last_write_time("mine/last.pth", written + std::chrono::hours(1));
  CHECK(newest_run() == "runs/nano-x-2");
  write_text("mine/.lock");
  CHECK(newest_run() == "mine");
  std::filesystem::current_path(here);
}

TEST_CASE("resuming: the folder is locked first; a checkpoint that was saved meanwhile is the one resumed") {
  TempDir dir;
  const std::string run = dir.path.string();
  Ranks& ranks = *new Ranks(RankInfo(), torch::kCPU, 60);
  save_last(run, file_of_step(3), 3, -1, 1);
  SavedRun saved = newest_checkpoint(run);
  saved.notes = {"a note"};
  save_last(run, file_of_step(4), 4, 3, 1);  // by the training that is just ending
  lock_resumed_run(saved, ranks);
  CHECK(saved.step == 4);
  CHECK(step_of(saved.file) == 4);
  CHECK(saved.notes == std::vector<std::string>{"a note"});
  CHECK(has(error_of([&] { lock_resumed_run(saved, ranks); }), "another training uses " + run));

  TempDir other;
  save_last(other.path.string(), file_of_step(3), 3, -1, 1);
  saved = newest_checkpoint(other.path.string());
  auto changed = file_of_step(4);
  auto settings = empty_dict();
  settings.insert("bs", "4");
  changed.at("train").toGenericDict().insert_or_assign("settings", settings);
  save_last(other.path.string(), changed, 4, 3, 1);
  CHECK(has(error_of([&] { lock_resumed_run(saved, ranks); }), "with other settings"));
  SavedRun none;
  lock_resumed_run(none, ranks);
  CHECK_FALSE(none);
  ranks.shutdown();
}

TEST_CASE("weights: NaN and infinity are refused by name, before training and in a model to be used") {
  TempDir dir;
  for (const double value : {std::nan(""), HUGE_VAL}) {
    Training t = small_training();
    t.model->named_parameters()["head.stems.1.conv.weight"].data().view(-1)[7] = value;
    t.model->named_buffers()["head.stems.2.bn.running_var"].view(-1)[0] = value;
    auto file = empty_dict();
    file.insert("model", to_dict(state_dict(*t.model)));
    write_pth(dir / "x.pth", file);
    YOLOX model = make_model("yolox-nano", 2);
    std::vector<std::string> notes;
    for (const std::string& error :
         {error_of([&] { load_pretrained(model, dir / "x.pth", nano_info(), notes); }),
          error_of([&] { load_model(dir / "x.pth", "", "auto", torch::kCPU); })})
      CHECK_HAS(error,
                "x.pth: 2 tensors contain NaN or infinity (head.stems.1.conv.weight, "
                "head.stems.2.bn.running_var)");
  }
}

TEST_CASE("run: a folder or a pipe with the name of a checkpoint is refused at the start") {
  for (const char* name : {"last.pth", "best.pth"}) {
    TempDir dir;
    std::filesystem::create_directory(dir / name);
    CHECK(has(error_of([&] { create_run_folder(dir.path.string(), ""); }), "is not a regular file"));
    std::filesystem::remove(dir / name);
    REQUIRE(mkfifo((dir / name).c_str(), 0600) == 0);
    CHECK(has(error_of([&] { create_run_folder(dir.path.string(), ""); }), "is not a regular file"));
  }
}

TEST_CASE("run: programs that a run starts do not inherit its lock") {
  TempDir dir;
  lock_run_folder(dir.path.string());
  int locks = 0;
  std::error_code gone;
  for (const auto& fd : std::filesystem::directory_iterator("/proc/self/fd")) {
    if (std::filesystem::read_symlink(fd.path(), gone) != dir / ".lock") continue;
    ++locks;
    CHECK(fcntl(std::stoi(fd.path().filename().string()), F_GETFD) == FD_CLOEXEC);
  }
  CHECK(locks == 1);
}

TEST_CASE("checkpoints: a file with weights only is not resumed from; the message suggests --weights") {
  TempDir dir;
  auto weights = empty_dict();
  weights.insert("model", empty_dict());
  write_pth(dir / "last.pth", weights);
  CHECK(has(error_of([&] { newest_checkpoint(dir.path.string()); }),
            "last.pth is not a checkpoint of a training run; use it with --weights"));
  auto state = empty_dict();
  state.insert("tasks", empty_dict());
  weights.insert("train", state);  // of an older version
  write_pth(dir / "last.pth", weights);
  CHECK(has(error_of([&] { newest_checkpoint(dir.path.string()); }),
            "last.pth is a checkpoint of ./multitask"));
}

TEST_CASE("resuming: flags on the command line override the settings of the run; differences are reported") {
  TempDir dir;
  auto file = file_of_step(3);
  auto settings = empty_dict();
  for (const auto& [name, value] : {std::pair("bs", "4"),
                                    {"seed", "5"},
                                    {"lr", "0.5"},
                                    {"recipe", "official"},
                                    {"model", "yolox-nano"},
                                    {"mosaic-scale-lo", "0.5"},  // that of the nano
                                    {"mosaic-scale-hi", "2"},
                                    {"shear", "2"},
                                    {"min-lr-ratio", "0.1"}})
    settings.insert(name, std::string(value));
  auto state = file.at("train").toGenericDict();
  state.insert_or_assign("settings", settings);
  state.insert("lr_factor", 0.25);  // --keep-going of an older version went back twice
  write_pth(dir / "last.pth", file);
  Config flags;
  parse(flags, {"--bs", "4", "--seed", "6"});
  const SavedRun resumed = resume_settings(flags, dir.path.string());
  CHECK(resumed.step == 3);
  CHECK(flags.bs == 4);
  CHECK(flags.seed == 6);
  CHECK(flags.lr == 0.125);
  CHECK(resumed.notes ==
        std::vector<std::string>{
            "--seed 6 instead of the run's 5",
            "warning: the run has 2 for it, but --mosaic-scale-hi is gone: edit the recipes in models.hpp",
            "warning: the run has 0.1 for it, but --min-lr-ratio is gone: edit Schedule::min_ratio in "
            "optim.hpp"});
}

TEST_CASE("saving: a failed save is reported and the run continues; the last save is repeated") {
  TempDir dir;
  Log log(dir / "log.txt");
  Training t = small_training();
  t.iteration = 4;
  Saver saver{dir / "gone", nano_info(), {}, 10, 80, 3, true};
  saver.last_save_time = 0;
  for (const char* name : {"last.pth", "best.pth"}) {
    bool saved = true;
    quietly([&] { saved = saver.save(t, name, log); });
    CHECK_FALSE(saved);
    CHECK(has(contents(dir / "log.txt"), concat("gone/", name)));
    CHECK(has(contents(dir / "log.txt"), "warning: "));
  }
  CHECK(saver.last_step == -1);
  CHECK(saver.last_save_time > 0);  // the next try is not at the next step
  std::thread room([&] {
    usleep(300000);
    std::filesystem::create_directory(dir / "gone");
  });
  const std::string error = error_of([&] { saver.save(t, "last.pth", log, /*must=*/true); });
  room.join();
  CHECK(error == "");
  CHECK(saver.last_step == 4);
  CHECK(step_of(read_pth(dir / "gone/last.pth")) == 4);
}

TEST_CASE("saving: the resumed checkpoint is kept as the previous one; a damaged one is not kept") {
  TempDir dir;
  Log log(dir / "log.txt");
  Training t = small_training();
  Saver saver{dir.path.string(), nano_info(), {}, 10, 80, 3, true};
  t.iteration = 4;
  saver.save(t, "last.pth", log);
  Saver resumed{dir.path.string(), nano_info(), {}, 10, 80, 3, true};
  resumed.load(t, newest_checkpoint(resumed.run));
  t.iteration = 5;
  resumed.save(t, "last.pth", log);
  CHECK(names_in(dir) == Names{"last.pth", "step_4.pth"});
  write_text(dir / "last.pth", "torn");
  resumed.load(t, newest_checkpoint(resumed.run));
  CHECK(t.iteration == 4);
  t.iteration = 6;
  resumed.save(t, "last.pth", log);
  CHECK(names_in(dir) == Names{"last.pth", "step_4.pth"});
  CHECK(step_of(read_pth(dir / "step_4.pth")) == 4);
}

TEST_CASE("saving: a failed step is saved with its batch, settings, losses and weights") {
  TempDir dir;
  Training t = small_training();
  t.iteration = 41;
  Batch batch;
  batch.images = torch::full({1, 64, 96, 3}, 7, torch::kByte);
  batch.targets = {torch::tensor({{{20.f, 30.f, 16.f, 24.f}}}), torch::ones({1, 1}, torch::kLong), {1}};
  batch.indices = {2};
  const Dataset data = shapes_dataset(0, 0, 4);
  batch.data = &data;
  StepMetrics n{1, {}};
  for (const char* name : {"iou", "obj", "cls", "l1", "grad_norm"})
    n.values.push_back({name, Losses::Kind::kTerm, 2.0 + double(n.values.size())});
  Plan plan{};
  plan.schedule = {0.5, 100, 0, 0, 0, 1};
  plan.sizes = {{128, 192}};
  CHECK(has(save_failed_step(dir.path.string(), t, plan, {41, {}, n}, batch), "are in "));
  const auto file = read_pth(dir / "nonfinite.pth").toGenericDict();
  CHECK(file.at("iteration").toInt() == 41);
  CHECK(file.at("lr").toDouble() == 0.5);
  CHECK(file.at("height").toInt() == 128);
  CHECK(file.at("width").toInt() == 192);
  CHECK(file.at("use_l1").toBool());
  CHECK(file.at("scale").toDouble() == 1);
  CHECK(torch::equal(file.at("images").toTensor(), batch.images));
  CHECK(torch::equal(file.at("boxes").toTensor(), batch.targets.boxes));
  CHECK(torch::equal(file.at("classes").toTensor(), batch.targets.classes));
  CHECK(file.at("names").toListRef()[0].toStringRef() == data.name_of(2));
  const auto losses = file.at("losses").toGenericDict();
  double want = 1;
  for (const char* name : {"total", "iou", "obj", "cls", "l1", "grad_norm"})
    CHECK(losses.at(name).toDouble() == want++);
  // If the file cannot be written, the message says so.
  CHECK(has(save_failed_step(dir / "gone", t, plan, {41, {}, n}, batch), "could not be saved"));
}

TEST_CASE("checkpoints: weights of another model are not resumed from; the message suggests --model") {
  TempDir dir;
  Training three = small_training(false, 3), two = small_training(false, 2);
  const auto file = checkpoint(three, nano_info({"a", "b", "c"}), {}, 10, 80);
  CHECK(has(error_of([&] { load_checkpoint(two, file, 10, "x.pth"); }), "x.pth does not match this model"));
  CHECK(has(error_of([&] { load_checkpoint(three, file, 11, "x.pth"); }), "x.pth has 10 steps per epoch"));

  write_pth(dir / "x.pth", file);
  const auto notes_of = [&](YOLOX model, const std::vector<std::string>& classes) {
    std::vector<std::string> notes;
    load_pretrained(model, dir / "x.pth", nano_info(classes), notes);
    std::string all;
    for (const auto& note : notes) all += note + "\n";
    return all;
  };
  CHECK_FALSE(has(notes_of(three.model, {"a", "b", "c"}), "other names"));
  CHECK(has(notes_of(two.model, {"b", "y"}),
            "weights 636 of 642 tensors of " + (dir / "x.pth") +
                "; the class layers start fresh, but for classes that the weights know (3 -> 2 classes)"));
  CHECK(has(notes_of(three.model, {"d", "e", "f"}), "the same number of classes with other names"));
  CHECK_FALSE(has(notes_of(two.model, {"d", "e"}), "other names"));  // the note on the class head suffices
  // Rows of classes with the same name, without regard to case, are copied, also if the number is the same.
  const auto layer = [](YOLOX& model) {
    return model->named_parameters()["head.cls_preds.1.weight"].clone();
  };
  Training other = small_training(false, 3);
  const Tensor initial = layer(other.model), rows = layer(three.model);
  CHECK(has(notes_of(other.model, {"C", "x", "a"}),
            "classes 2 of 3 start from the class layers of the weights, by name: C, a"));
  CHECK(torch::equal(layer(other.model), torch::stack({rows[2], initial[1], rows[0]})));
  std::vector<std::string> notes;
  WeightsInfo tiny;
  tiny.model = "yolox-tiny";
  CHECK(has(error_of([&] { load_pretrained(three.model, dir / "x.pth", tiny, notes); }),
            "use --model yolox-nano"));
}

TEST_CASE("checkpoints: all counts of a run and the random number generator are restored") {
  Training t = small_training();
  t.iteration = 31;
  t.ema_updates = 28;
  t.skipped = 3;
  t.epochs = 2;
  t.best = {0.5, 1};
  t.score = 0.25;
  const auto file = checkpoint(t, nano_info(), {}, 10, 80);
  const Tensor next = torch::rand({3});
  Training resumed = small_training();
  torch::manual_seed(9);
  load_checkpoint(resumed, file, 10, "x.pth");
  CHECK(torch::equal(torch::rand({3}), next));
  for (const auto count :
       {&Training::iteration, &Training::ema_updates, &Training::skipped, &Training::epochs})
    CHECK(resumed.*count == t.*count);
  CHECK(resumed.score == t.score);
  CHECK(resumed.best.score == 0.5);
  CHECK(resumed.best.evals_without_gain == 1);

  // Scores of another kind cannot be compared.
  file.at("train").toGenericDict().insert_or_assign("score", "AP75");
  Training changed = small_training();
  CHECK(has(load_checkpoint(changed, file, 10, "x.pth"), "the score of an evaluation is AP, and was AP75"));
  CHECK(changed.best.score == -1);

  // A checkpoint of version 0.1.0 has another name.
  auto state = file.at("train").toGenericDict();
  CHECK(state.erase("score") == 1);
  state.insert("stale", state.at("evals_without_gain"));
  CHECK(state.erase("evals_without_gain") == 1);
  Training old = small_training();
  load_checkpoint(old, file, 10, "x.pth");
  CHECK(old.best.score == 0.5);
  CHECK(old.best.evals_without_gain == 1);
}
