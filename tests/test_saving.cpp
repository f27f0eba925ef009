// SPDX-License-Identifier: Apache-2.0
// Checkpoints of a run: save and load; the run folder.
#include "models.hpp"
#include "tensors.hpp"

#include "checkpoint/load.hpp"
#include "run/run.hpp"

using namespace yolox;

namespace {

// Returns the settings "bs=4 lr=0.5".
Settings settings_of(const std::string& text) {
  Settings all;
  for (const auto& word : split_list(text, ' '))
    all.emplace_back(word.substr(0, word.find('=')), word.substr(word.find('=') + 1));
  return all;
}
GenericDict texts(const Settings& settings) {
  auto dict = empty_dict();
  for (const auto& [name, value] : settings) dict.insert(name, value);
  return dict;
}
GenericDict file_of_step(int64_t step, const RunSettings& settings = {}, double weight = 1) {
  auto file = empty_dict(), train = empty_dict(), model = empty_dict();
  model.insert("weight", torch::full({3}, weight));
  train.insert("iteration", step);
  train.insert("flags", texts(settings.flags));
  train.insert("chosen", texts(settings.chosen));
  train.insert("data", std::string("8 images"));
  train.insert("model", model);
  file.insert("train", train);
  return file;
}
int64_t step_of(const std::string& path) {
  return read_pth(path).toGenericDict().at("train").toGenericDict().at("iteration").toInt();
}
// Returns the names and steps of the checkpoints of a run: "last.pth 4, last.bak.pth 3".
std::string checkpoints_in(const std::string& run) {
  std::string text;
  for (const auto& path : list_checkpoints(run))
    text +=
        concat(text.empty() ? "" : ", ", std::filesystem::path(path).filename().string(), " ", step_of(path));
  return text;
}
size_t files_in(const TempDir& dir) {
  return std::distance(std::filesystem::directory_iterator(dir.path), {});
}

Training small_training(bool fp16 = false, int64_t classes = 2) {
  torch::manual_seed(1);
  YOLOX model = make_model("yolox-nano", int(classes));
  return Training{model, YOLOX(nullptr), Optimizer("adam", parameter_groups(*model, 0), fp16),
                  GradScaler(fp16, torch::kCPU)};
}
Saver saver_of(const std::string& run, const WeightsInfo& info, int64_t per_epoch = 10) {
  return {run, info, {}, per_epoch, "80 images", true};
}
// Returns the notes for the log.
std::string load(Training& t, const c10::IValue& file, int64_t per_epoch = 10) {
  SavedRun saved{"", "x.pth", file, {}, 0, "80 images", {}};
  saver_of("", {}, per_epoch).load(t, saved);
  return listed(saved.notes);
}
WeightsInfo nano_info(const std::vector<std::string>& classes = {}) { return {"yolox-nano", classes}; }

}  // namespace

TEST_CASE("checkpoints: a damaged or nonfinite last.pth is reported, and last.bak.pth is used") {
  TempDir dir;
  const std::string run = dir.path.string(), last = dir / "last.pth", backup = dir / "last.bak.pth";
  CHECK_HAS(error_of([&] { newest_checkpoint(run); }), "has no checkpoint");
  write_pth(backup, file_of_step(20));
  CHECK(newest_checkpoint(run).step == 20);  // there is no last.pth
  write_pth(last, file_of_step(100));
  const SavedRun whole = newest_checkpoint(run);
  CHECK((whole.step == 100 && whole.data == "8 images" && whole.path == last && whole.notes.empty()));

  const std::string bytes = contents(last);
  write_pth(last, file_of_step(100, {}, HUGE_VAL));
  auto weights_only = empty_dict(), old = empty_dict();
  weights_only.insert("model", empty_dict());
  write_pth(dir / "weights", weights_only);
  old.insert("train", empty_dict());
  write_pth(dir / "old", old);
  for (const auto& [damaged, reason] :
       {std::pair(contents(last), "last.pth has weights that are not finite"),
        {contents(dir / "weights"), "last.pth is no checkpoint of a run; start a new run from its weights"},
        {contents(dir / "old"), "last.pth is no checkpoint of a run of this version; start a new run"},
        {bytes.substr(0, bytes.size() / 2), "last.pth: "},
        {"", "last.pth: "},
        {bytes.substr(0, bytes.size() - 1), "last.pth: "}}) {
    write_text(last, damaged);
    const SavedRun found = newest_checkpoint(run);
    CHECK((found.step == 20 && found.path == backup));
    REQUIRE(found.notes.size() == 1);
    CHECK_HAS(found.notes[0], reason);
    CHECK_HAS(found.notes[0], "; using " + backup);
  }
  write_text(backup, "torn");
  const std::string both = error_of([&] { newest_checkpoint(run); });
  CHECK_HAS(both, last + ": ");
  CHECK_HAS(both, "; " + backup + ": ");
}

TEST_CASE("saving: the last.pth before stays as last.bak.pth, which makes room on a full disk") {
  TempDir dir;
  const std::string run = dir.path.string();
  const auto file = [](int64_t step, int64_t size = 1 << 18) {
    auto whole = file_of_step(step);
    whole.at("train").toGenericDict().insert("big", torch::full({size}, double(step)));  // 1 MB
    return whole;
  };
  const auto large = file(9, 1 << 19);
  std::vector<GenericDict> files;
  for (int64_t step = 0; step < 6; ++step) files.push_back(file(step));
  const auto failed_check = [&] {
    for (int64_t step = 0; step < 5; ++step) save_last(run, files[step], /*back_up=*/step > 0);
    if (checkpoints_in(run) != "last.pth 4, last.bak.pth 3") return 1;
    // No backup can be made, as on a full disk without hard links.
    const std::string part = concat(run, "/last.bak.pth.tmp.", getpid());
    write_text(part + "/file");
    for (const bool must : {false, true}) {
      const std::string error = error_of([&] { save_last(run, files[5], /*back_up=*/true, must); });
      if (has(error, "No space left") == must) return 2;
      if (checkpoints_in(run) != (must ? "last.pth 5" : "last.pth 4, last.bak.pth 3")) return 3;
    }
    std::filesystem::remove_all(part);
    for (const bool must : {false, true}) {
      if (!has(error_of([&] { save_last(run, large, /*back_up=*/true, must); }), "No space left")) return 4;
      if (!has(checkpoints_in(run), "last.pth 5") || files_in(dir) != (must ? 1 : 2)) return 5;
    }
    // last.pth is damaged. The backup stays.
    std::filesystem::rename(run + "/last.pth", run + "/last.bak.pth");
    if (error_of([&] { save_last(run, large, /*back_up=*/false); }) == "") return 6;
    return checkpoints_in(run) == "last.bak.pth 5" ? 0 : 7;
  };
  const std::string end = in_child([&] {  // which mounts a small file system
    return mount_small_disk(run, "size=2500k") ? concat(failed_check()) : std::string("no right to mount");
  });
  if (end == "no right to mount")
    MESSAGE("not tested: ", end);
  else
    CHECK(end == "0");
}

TEST_CASE("checkpoints: the gradient scaler is restored; a run may be resumed with and without fp16") {
  Training t = small_training(true), same = small_training(true), fp16 = small_training(true),
           plain = small_training();
  t.scaler.scale.fill_(512);
  t.scaler.growth_tracker.fill_(7);
  load(same, saver_of("", nano_info()).checkpoint(t));
  CHECK(same.scaler.scale.item<double>() == 512);
  CHECK(same.scaler.growth_tracker.item<int64_t>() == 7);
  load(plain, saver_of("", nano_info()).checkpoint(t));
  CHECK(plain.scaler.scale.item<double>() == 1);
  load(fp16, saver_of("", nano_info()).checkpoint(plain));
  CHECK(fp16.scaler.scale.item<double>() == 65536);  // as in a new run
}

TEST_CASE("run: each run has its own folder; checkpoints without a step make room for a new run") {
  TempDir dir;
  const auto here = std::filesystem::current_path();
  std::filesystem::current_path(dir.path);
  CHECK(newest_run() == "");
  const auto created = [](const std::string& out) {
    Config config;
    config.out = out;
    config.model = "nano";
    config.data = "x";
    return create_run_folder(config);
  };
  CHECK(created("a/b") == "a/b");
  CHECK(has(error_of([&] { created("a/b"); }), "another training uses"));
  write_text("./file");
  CHECK(has(error_of([&] { created("file"); }), "cannot write to"));
  CHECK(created("") == "runs/nano-x");
  CHECK(created("") == "runs/nano-x-2");
  write_text("runs/nano-x/last.bak.pth");
  write_text("runs/nano-x-2/best.pth");
  CHECK(newest_run() == "runs/nano-x");  // the other run has no checkpoint
  write_text("runs/nano-x-2/last.pth");
  const auto written = std::filesystem::file_time_type::clock::now();
  std::filesystem::last_write_time("runs/nano-x/last.bak.pth", written - std::chrono::seconds(60));
  write_text("mine/last.pth");  // --out mine, or a folder of other files
  std::filesystem::last_write_time("mine/last.pth", written + std::chrono::hours(1));
  CHECK(newest_run() == "runs/nano-x-2");
  write_text("mine/.lock");
  CHECK(newest_run() == "mine");
  for (const int64_t step : {0, 1, -1}) {  // -1: the file of another program
    const std::string used = concat("used", step), last = used + "/last.pth";
    write_text(last, "x");
    for (const char* name : {"/last.pth", "/last.bak.pth"})
      if (step >= 0) write_pth(used + name, file_of_step(step));
    const std::string before = contents(last), error = error_of([&] { created(used); });
    CHECK(has(error, " already holds a run") == (step != 0));
    CHECK(contents(last) == (step == 0 ? "" : before));
  }
  std::filesystem::current_path(here);
}

TEST_CASE("weights: NaN and infinity are refused by name, before training and in a model to be used") {
  TempDir dir;
  Training t = small_training();
  t.model->named_parameters()["head.stems.1.conv.weight"].data().view(-1)[7] = std::nan("");
  t.model->named_buffers()["head.stems.2.bn.running_var"].view(-1)[0] = HUGE_VAL;
  write_pth(dir / "x.pth", to_dict(state_dict(*t.model)));
  YOLOX model = make_model("yolox-nano", 2);
  std::vector<std::string> notes;
  for (const std::string& error :
       {error_of([&] { load_pretrained(model, dir / "x.pth", nano_info(), notes); }),
        error_of([&] { load_model(dir / "x.pth", "", "auto", torch::kCPU); })})
    CHECK_HAS(error,
              "x.pth: 2 tensors contain NaN or infinity (head.stems.1.conv.weight, "
              "head.stems.2.bn.running_var)");
}

TEST_CASE("resuming: flags on the command line replace those of the run; what auto has chosen stays") {
  TempDir dir;
  const RunSettings settings{
      settings_of("bs=auto accum=3 lr=recipe optimizer=recipe multiscale=true procs=2 gpus=0 conf=0.01"),
      settings_of("bs=2 accum=2 lr=0.125 optimizer=adamw multiscale=false procs=0")};  // a session under srun
  write_pth(dir / "last.pth", file_of_step(3, settings));
  const auto resumed = [&](const std::string& words, bool same_command) {
    Config c;
    parse(c, split_list(words, ' '));
    const SavedRun saved = resume_settings(c, dir.path.string(), same_command);
    std::string text =
        concat(c.bs, " ", c.accum, " ", c.lr, " ", c.optimizer, " ", c.multiscale, " ", c.procs);
    for (const auto& note : saved.notes) text += "; " + note;
    return text;
  };
  CHECK(resumed("--conf 0.3", false) == "2 2 0.125 adamw 0 2; --conf 0.3 instead of the run's 0.01");
  CHECK(resumed("--bs auto --accum 3 --lr recipe --procs 2", true) == "2 2 0.125 adamw 0 2");
  CHECK(resumed("--bs auto", false) == "0 2 0.125 adamw 0 2; --bs auto instead of the run's 2");
  CHECK(resumed("--accum 1 --lr 0.5", true) ==
        "2 1 0.5 adamw 0 2; --accum 1 instead of the run's 2; --lr 0.5 instead of the run's 0.125");
  CHECK(resumed("--multiscale", true) == "2 2 0.125 adamw 1 2; --multiscale true instead of the run's false");
  CHECK(resumed("--optimizer adamw --gpus 1", false) ==
        "2 2 0.125 adamw 0 0; --gpus 1 instead of the run's 0");
  CHECK_HAS(error_of([&] { resumed("--optimizer sgd", true); }),
            "--optimizer sgd differs from the run's 'adamw'");
}

TEST_CASE("resuming: a run keeps its settings, also those that auto and the recipe have chosen") {
  TempDir dir;
  Config begun, resumed;
  parse(begun, {"--bs", "auto", "--weights", "x.pth", "--clip", "5"});
  begun.start = begun.values(kOfCall);
  fill_in(begun);
  begun.bs = 4;
  CHECK(begun.settings().chosen ==
        settings_of("bs=4 recipe=finetune optimizer=adamw schedule=flat-cosine weight-decay=0.05 "
                    "multiscale=false mosaic-prob=1 mixup-prob=1"));
  write_pth(dir / "last.pth", file_of_step(3, begun.settings()));
  CHECK(resume_settings(resumed, dir.path.string()).notes.empty());
  fill_in(resumed, /*resumed=*/true);
  CHECK(resumed.values() == begun.values());
  CHECK(resumed.settings() == begun.settings());
  RunSettings older = begun.settings();
  older.flags.insert(older.flags.end(), {{"keep", "1"}, {"repeat-rare", "0.5"}});
  write_pth(dir / "last.pth", file_of_step(3, older));
  Config now;
  CHECK(resume_settings(now, dir.path.string()).notes ==
        std::vector<std::string>{
            "warning: the run has 0.5 for it, but --repeat-rare is gone: --class-weights X weights rare "
            "classes in the loss"});
}

TEST_CASE("saving: a failed save is reported and the run continues; a failed last save is an error") {
  TempDir dir;
  Log log(dir / "log.txt");
  Training t = small_training();
  write_text(dir / "file");
  Saver saver = saver_of(dir / "file/gone", nano_info());
  saver.last_save_time = 0;
  for (const char* name : {"last.pth", "best.pth"}) {
    bool saved = true;
    quietly([&] { saved = saver.save(t, name, log); });
    CHECK_FALSE(saved);
    CHECK_HAS(contents(dir / "log.txt"), concat("warning: cannot write ", dir / "file/gone", "/", name));
  }
  CHECK(saver.last_step == -1);
  CHECK(saver.last_save_time > 0);  // the next try is not at the next step
  CHECK_HAS(error_of([&] { saver.save(t, "last.pth", log, /*must=*/true); }), "gone/last.pth");
  saver.run = dir / "deleted";  // is made again
  CHECK(saver.save(t, "last.pth", log));
}

TEST_CASE("saving: the resumed checkpoint is kept as the previous one; a damaged one is not kept") {
  TempDir dir;
  Log log(dir / "log.txt");
  Training t = small_training();
  const auto resume_and_save = [&](int64_t step) {
    Saver saver = saver_of(dir.path.string(), nano_info());
    SavedRun saved = step > 4 ? newest_checkpoint(saver.run) : SavedRun();
    if (saved) saver.load(t, saved);
    t.iteration = step;
    saver.save(t, "last.pth", log);
    return checkpoints_in(saver.run);
  };
  CHECK(resume_and_save(4) == "last.pth 4");
  for (int i = 0; i < 2; ++i) CHECK(resume_and_save(5) == "last.pth 5, last.bak.pth 4");
  write_text(dir / "last.pth", "torn");
  write_text(dir / "last.pth.tmp.123");  // of a process that was killed while it wrote
  CHECK(resume_and_save(6) == "last.pth 6, last.bak.pth 4");
  CHECK(files_in(dir) == 2);
}

TEST_CASE("checkpoints: weights of another model are not resumed from; the message suggests --model") {
  TempDir dir;
  Training three = small_training(false, 3), two = small_training(false, 2), other = small_training(false, 3);
  const auto file = saver_of("", nano_info({"a", "b", "c"})).checkpoint(three);
  CHECK_HAS(error_of([&] { load(two, file); }), "x.pth does not match this model");
  CHECK_HAS(error_of([&] { load(three, file, 11); }), "x.pth has 10 steps per epoch");

  write_pth(dir / "x.pth", file);
  const auto notes_of = [&](YOLOX model, WeightsInfo info) {
    std::vector<std::string> notes;
    load_pretrained(model, dir / "x.pth", info, notes);
    std::string all;
    for (const auto& note : notes) all += note + "\n";
    return all;
  };
  CHECK_FALSE(has(notes_of(three.model, nano_info({"a", "b", "c"})), "other names"));
  CHECK_HAS(notes_of(two.model, nano_info({"b", "y"})),
            concat("weights ", dir / "x.pth",
                   ": loaded 636 of 642 tensors\nof another shape: 6 (head.cls_preds.0.weight"));
  CHECK_HAS(notes_of(three.model, nano_info({"d", "e", "f"})), "the same number of classes with other names");
  // Rows of classes with the same name, without regard to case, are copied, also if the number is the same.
  const auto layer = [](YOLOX& model) {
    return model->named_parameters()["head.cls_preds.1.weight"].clone();
  };
  const Tensor rows = layer(three.model);
  CHECK_HAS(notes_of(other.model, nano_info({"C", "x", "a"})),
            "classes 2 of 3 start from the class layers of the weights, by name: C, a");
  CHECK(torch::equal(layer(other.model), torch::stack({rows[2], rows[1], rows[0]})));
  CHECK_HAS(error_of([&] { notes_of(three.model, {"yolox-tiny", {}}); }), "use --model yolox-nano");
}

TEST_CASE("checkpoints: all counts of a run and the random number generator are restored") {
  Training t = small_training();
  t.iteration = 31;
  t.ema_updates = 28;
  t.skipped = 3;
  t.epochs = 2;
  t.best = {0.5, 1};
  t.score = 0.25;
  const auto file = saver_of("", nano_info()).checkpoint(t);
  const Tensor next = torch::rand({3});
  Training resumed = small_training();
  torch::manual_seed(9);
  load(resumed, file);
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
  CHECK(has(load(changed, file), "the score of an evaluation is AP, and was AP75"));
  CHECK(changed.best.score == -1);
}
