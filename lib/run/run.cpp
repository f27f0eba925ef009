// SPDX-License-Identifier: Apache-2.0
#include "run/run.hpp"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "base/memory.hpp"
#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "base/program.hpp"
#include "base/threads.hpp"
#include "base/timeout.hpp"
#include "checkpoint/load.hpp"
#include "data/pictures.hpp"
#include "data/store.hpp"
#include "formats.hpp"
#include "models.hpp"
#include "run/report.hpp"

namespace yolox {

// ---- process, data, model and weights

torch::Device prepare_process(Config& config, const RankInfo& rank_info) {
  const torch::Device device = device_of(config, rank_info);
  if (device.is_cpu()) keep_freed_memory();
  const int share = std::max(1, usable_cores() / rank_info.sharing);
  if (!std::getenv("OMP_NUM_THREADS")) torch::set_num_threads(std::min(share, torch::get_num_threads()));
  if (config.amp == "auto") config.amp = default_precision(device);
  usage_check(config.amp != "tf32" || device.is_cuda(), "--amp tf32 needs a GPU; give --amp off");
  usage_check(!config.graph || device.is_cuda(), "--graph needs a GPU; give --no-graph");
  allow_tf32(config.amp == "tf32");
  config.loader_threads = loader_threads(config.workers, rank_info.sharing, device.is_cuda());
  if (config.deterministic) use_deterministic_algorithms();
  // With fp16, gradients overflow now and then. Anomaly mode must not report this as NaN.
  if (config.debug) torch::autograd::AnomalyMode::set_enabled(true, /*check_nan=*/config.amp != "fp16");
  return device;
}

bool cudnn_benchmark_pays(const Config& config, const Plan& plan) {
  // Measured on an H100 (bench/RESULTS.md): the benchmark takes about 7 seconds per input size of yolox-s,
  // and saves 0.01 to 0.02 ms per image.
  const double cost = 7.0 * (plan.sizes.max_decrease + plan.sizes.max_increase + 1),
               gain = 1e-5 * double(plan.iters * plan.batch_per_rank());
  // With --dtr, an algorithm that was chosen while more memory was free may not fit later.
  return gain > cost && !config.deterministic && dtr_bytes(config) == 0;
}

// Returns in what the CUDA kernels of bn_silu() differ from torch in float64: output, gradients and running
// statistics of a small tensor of each dtype. "" if each relative error is within the tolerance.
static std::string fused_norm_error(torch::Device device) try {
  const auto wave = torch::arange(2 * 40 * 24 * 24, torch::kDouble).sin().view({2, 40, 24, 24});
  for (const auto& [dtype, tolerance] :
       {std::pair(torch::kFloat, 1e-4), {torch::kHalf, 5e-3}, {torch::kBFloat16, 5e-2}}) {
    const auto values = (3 * wave + 2).to(dtype), gradient = wave.square().to(dtype);
    const auto results = [&](at::ScalarType type) {
      torch::nn::BatchNorm2d bn(40);
      bn->to(device, type == torch::kDouble ? torch::kDouble : torch::kFloat);
      const auto x = values.to(device, type).contiguous(torch::MemoryFormat::ChannelsLast).requires_grad_();
      const auto y = bn_silu(x, *bn);
      y.backward(gradient.to(device, type));
      return std::vector<torch::Tensor>{y.detach(),      x.grad(),         bn->weight.grad(),
                                        bn->bias.grad(), bn->running_mean, bn->running_var};
    };
    const auto fused = results(dtype), exact = results(torch::kDouble);
    for (size_t i = 0; i < exact.size(); ++i) {
      const auto error = ((fused[i] - exact[i]).norm() / exact[i].norm()).item<double>();
      if (!(error <= tolerance))  // also if it is NaN
        return concat("differ from torch by ", error, " in ", dtype, ", and ", tolerance,
                      " is the tolerance");
    }
  }
  return "";
} catch (const std::exception& e) {
  const std::string what = e.what();
  return "fail: " + what.substr(0, what.find('\n'));
}

std::string turn_on_fused_norm(torch::Device device, Ranks& ranks) {
  if (device.is_cpu()) return "";
  std::string why = "are missing, because nvcc was not found when this program was built";
  if (has_fused_norm()) {
    use_fused_norm(true);
    why = fused_norm_error(device);
  }
  const auto of_ranks = ranks.gather_texts(why);
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    if (of_ranks[rank].empty()) continue;
    use_fused_norm(false);
    return concat(
        "warning: batch norm and SiLU run as operations of torch, which is slower: the fused kernels ",
        of_ranks[rank], ranks.alone() ? "" : concat(" (rank ", rank, ")"));
  }
  return "";
}

Splits load_data(const Config& config, const std::string& data, const SavedRun& saved, torch::Device device,
                 Ranks& ranks) {
  std::error_code error;
  for (const auto& [flag, path] : {std::pair("data", data), {"images", config.images}})
    check(!saved || config.was_given(flag) || path.empty() || path == "shapes" ||
              path.find(',') != std::string::npos || std::filesystem::exists(path, error),
          "--", flag, " ", path, " of the run ", saved.run, " ", why_missing(path),
          "; it counts from the folder where the run was started: start there, or give --", flag, ", too");
  const std::filesystem::path beside = absolute_folder(saved                ? saved.run
                                                       : config.out.empty() ? "runs/x"
                                                                            : config.out);
  Splits splits = ranks.run_first_on_one_rank_per_machine([&] {
    const std::string keep = (beside.parent_path() / ".checks").string();
    return load_splits({data, config.split, config.val_fraction, config.images, uint64_t(config.seed), keep});
  });
  for (Dataset* d : {&splits.train, &splits.val}) {
    d->strict = config.strict;
    check_strict(*d);
  }
  const auto images = std::ssize(splits.train.records);
  check(ranks.info.world <= images, "there are ", ranks.info.world, " ranks and only ", images,
        " images; give fewer ranks");
  ranks.check_same_settings(
      common_settings(config, splits.train, splits.val.records.size(), saved.step, device));
  return splits;
}

void cache_images(Dataset& data, const Config& config, ImageSize size, Ranks& ranks, Log& log) {
  if (config.cache == "none") return;
  log.line(concat("cache   ", config.cache, ": decoding the images"));
  const auto progress = [&](size_t done, size_t of) { log.progress(concat(done, "/", of), done == of); };
  const auto cache = std::make_shared<ImageCache>(data, cv::Size(size.width, size.height));
  const int threads = config.loader_threads * ranks.info.sharing;  // the other ranks of the machine wait
  std::string place;
  if (config.cache == "disk") {
    place = ranks.run_first_on_one_rank_per_machine(
        [&] { return cache->open_on_disk(cache_folder(), data, threads, progress); });
  } else {
    const int first = ranks.first_of_machine();
    const bool decodes = ranks.info.rank == first;
    const auto paths = ranks.gather_texts(decodes ? cache->create_in_memory(data, threads, progress) : "");
    if (!decodes) cache->open_memory(paths[first]);
    place = "memory, for this run (runs share --cache disk)";
  }
  use_cache(data, cache);
  log.line(concat("cache   ", short_bytes(cache->bytes()), " in ", place));
}

void freeze_parts(torch::nn::Module& model, std::string& parts, const std::string& of_recipe) {
  if (parts == "recipe") parts = of_recipe;
  if (parts == "none") return;
  const std::string unknown = freeze(model, split_list(parts));
  usage_check(unknown.empty(), "--freeze ", unknown,
              ": no parameter name has this prefix; give stem, backbone, neck (of a model with YOLOPAFPN), "
              "or a prefix such as head.stems");
  usage_check(!trainable_parameters(model).empty(), "--freeze ", parts, " leaves nothing to train");
}

YOLOX new_model(Config& config, const SavedRun& saved, const Dataset& data, torch::Device device,
                WeightsInfo& info, std::vector<std::string>& notes) {
  info.model = config.model;
  const ImageSize base = base_size(config);
  torch::manual_seed(config.seed);
  YOLOX model = make_model(config.model, int(data.classes.size()));
  info.classes = data.classes;
  info.height = base.height;
  info.width = base.width;
  WeightsInfo of_file;
  std::string freeze_by_default = "none";
  if (saved) {
    of_file = weights_info(saved.file, saved.path);
    usage_check(of_file.classes == data.classes, saved.run, " was trained on other classes than those of ",
                data.name,
                " and cannot be resumed with them; start a new run from its weights: ./train --data ",
                shell_word(config.data), " --weights ", shell_word(saved.run + "/last.pth"));
  } else if (!config.weights.empty()) {
    const Pretrained pretrained = load_pretrained(model, config.weights, info, notes);
    of_file = pretrained.info;
    if (pretrained.has_stem) freeze_by_default = training_recipe(config).freeze;
  }
  info.legacy_preproc = config.preproc == "auto" ? of_file.legacy_preproc : config.preproc != "bgr";
  freeze_parts(*model, config.freeze, freeze_by_default);
  if (!saved && !config.weights.empty() && config.optimizer != "sgd") scale_filters(*model);
  move(model, device, config.amp == "fp64" ? torch::kDouble : torch::kFloat);
  to_channels_last(*model);
  return model;
}

Training new_training(const Config& config, YOLOX model, YOLOX ema, const WeightsInfo& info,
                      const Dataset& data, torch::Device device, bool casts_together) {
  const bool fp16 = config.amp == "fp16";
  Training t{model, ema, Optimizer(config.optimizer, parameter_groups(*model, config.weight_decay), fp16),
             GradScaler(fp16, device)};
  set_training_mode(*model);
  t.type = model->parameters()[0].scalar_type();
  t.amp = dtype_of(config.amp);
  t.legacy_preproc = info.legacy_preproc;
  t.sync_bn = config.sync_bn;
  if (config.class_weights != 0)
    t.class_weights =
        torch::tensor(class_weights(class_counts(data), config.class_weights), torch::kFloat).to(device);
  if (casts_together) t.cast_weights = cast_weights(*model, t.amp);
  if (!t.ema.is_empty()) t.averaged = ema_tensors(*t.ema, *model);
  return t;
}

// ---- run folder and log

// Returns the suffix of this rank's files (log, problems, crash report): "" for rank 0, "_rank3" for rank 3.
static std::string rank_suffix(const Ranks& ranks) {
  return ranks.first() ? "" : concat("_rank", ranks.info.rank);
}

Log open_log(const std::string& run, const Config& config, const SavedRun& saved, torch::Device device,
             Ranks& ranks) {
  Log log(concat(run, "/log", rank_suffix(ranks), ".txt"), /*quiet=*/!ranks.first());
  log.line(saved ? concat("resuming ", run, " at step ", saved.step) : "run " + run);
  crash_context(run, config_json(config, device, ranks.info.world),
                concat("crash", rank_suffix(ranks), ".txt"));
  return log;
}

bool resume_run(SavedRun& saved, Training& t, const Plan& plan, const std::string& resume, Saver& saver,
                Log& log) {
  saver.load(t, saved);
  saved.file = {};
  if (!is_complete(t, plan)) return true;
  const std::string over =
      concat(saved.run, " is complete: ", t.iteration, " of ", plan.iters, " steps are done, the last ",
             t.best.evals_without_gain, " evaluations without a better ", score_of({}).name,
             "; to continue, increase --epochs, --max-iters or --patience (0 = off)");
  usage_check(resume == "auto", over);
  log.line(over);
  return false;
}

void start_run(const std::string& run, const Config& config, const SavedRun& saved, const Splits& data,
               Training& t, const Plan& plan, torch::Device device, Ranks& ranks, Saver& saver,
               Progress& progress, Log& log) {
  const std::string settings = config_json(config, device, ranks.info.world);
  crash_context(run, settings, concat("crash", rank_suffix(ranks), ".txt"));
  if (saver.is_writer && !replace_file(run + "/config.json", settings))
    log.line(concat("warning: cannot write ", run, "/config.json"));
  log_plan(log, config, data, t.model, device, plan, ranks, saved.notes);
  progress.log_problems(data);
  if (t.iteration == 0 && ranks.first()) save_image(run + "/labels.jpg", draw_label_statistics(data.train));
  if (!saved) saver.save(t, "last.pth", log);  // so that the run can be resumed from the start
  ranks.barrier();                             // last.pth exists now
  catch_signals();
  start_timeout(config.timeout, ranks.name());
  made_progress("the start");
}

Agreement agree(Ranks& ranks, const Saver& saver, const UnreadSteps& unread) {
  const auto most = ranks.max({double(stop_signal), double(saver.due()), unread.step_seconds});
  return {int(most[0]), most[1] > 0, most[2]};
}

// ---- evaluation

EvalSettings eval_settings(const std::string& run, const Config& config, const WeightsInfo& info,
                           const Plan& plan, torch::Device device, Ranks& ranks) {
  EvalSettings s;
  s.size = {int(info.height), int(info.width)};
  s.conf = config.conf;
  s.nms = config.nms;
  s.max_detections = config.max_dets;
  s.batch = int(plan.batch_per_rank());
  s.workers = config.loader_threads;
  s.legacy = info.legacy_preproc;
  s.device = device;
  s.loss = validation_loss;
  if (ranks.first()) s.pictures = run + "/val_batch";
  if (ranks.alone()) return s;
  s.rank = ranks.info.rank;
  s.ranks = ranks.info.world;
  s.gather = [&ranks](const std::vector<double>& mine) { return ranks.gather(mine); };
  return s;
}

Evaluation evaluate(Training& t, const Dataset& data, EvalSettings& settings, Ranks& ranks, Log& log) {
  const std::string what = concat("evaluation after step ", t.iteration);
  crash_step(what);
  made_progress("the " + what);
  ranks.check_equal(tensors_of(t.eval_model()), concat("at step ", t.iteration));
  while (true) try {
      return evaluate(t.eval_model(), data, settings, [&](int64_t done, int64_t images) {
        made_progress("the " + what);
        log.progress(concat("  evaluated ", done, " of ", images, " images"), /*keep=*/false);
      });
    } catch (const std::exception& e) {
      if (!is_out_of_memory(e) || settings.batch == 1) throw;
      settings.batch /= 2;
      empty_cache(settings.device);
      log.line(
          concat("note: out of memory; the evaluation is repeated with a batch size of ", settings.batch));
    }
}

void save_evaluation(const std::string& run, const Training& t, const Evaluation& e, const Dataset& data,
                     Log& log) try {
  const std::string heading = concat("After step ", t.iteration, ", the best evaluation of the run, on ",
                                     e.images, " images of ", data.name);
  write_evaluation(run, heading, e, data);
} catch (const std::exception& error) {
  log.line(concat("warning: report.html will lack this evaluation: ", error.what()));
}

// ---- the end of a run

void report_failed_step(const std::string& run, Training& t, const Plan& plan, const StepFailed& failed,
                        const Batch& batch, int rank) {
  const StepRow& row = failed.row;
  const std::string name = rank > 0 ? concat(run, "/nonfinite_rank", rank) : run + "/nonfinite";
  const ImageSize size = plan.sizes.size_at(row.step);
  const std::vector<std::string> images = image_names(batch);
  auto names = empty_list();
  for (const std::string& image : images) names.push_back(image);
  auto losses = empty_dict();
  if (!row.numbers.values.empty()) losses.insert("total", row.numbers.total);
  for (const auto& v : row.numbers.values) losses.insert(v.name, v.value);
  auto file = empty_dict();
  file.insert("iteration", row.step);
  file.insert("lr", row.lr);
  file.insert("losses", losses);
  file.insert("height", int64_t{size.height});
  file.insert("width", int64_t{size.width});
  file.insert("use_l1", row.step >= plan.first_no_aug_iteration);
  file.insert("scale", t.scaler.scale.item<double>());
  file.insert("images", batch.images.cpu());
  file.insert("names", names);
  file.insert("boxes", batch.targets.boxes.cpu());
  file.insert("classes", batch.targets.classes.cpu());
  if (batch.targets.ignored.defined()) file.insert("ignored", batch.targets.ignored.cpu());
  file.insert("model", to_dict(state_dict(*t.model)));
  save_image(name + ".jpg", draw_truth(batch));
  std::string saved = concat("the batch and the weights are in ", name, ".pth and .jpg");
  try {
    write_pth(name + ".pth", file);
  } catch (const std::exception& e) {
    saved = concat("the batch and the weights could not be saved: ", e.what());
  }
  const std::string terms = to_string(row.numbers);
  fail(failed.what(), " at step ", row.step, " (", terms, terms.empty() ? "lr " : ", lr ", row.lr,
       "; images ", listed(images, 64), "); ", saved,
       "; continue from the last checkpoint with a lower lr: ./train --resume ", shell_word(run), " --lr ",
       plan.schedule.lr / 2);
}

}  // namespace yolox
