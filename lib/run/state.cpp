// SPDX-License-Identifier: Apache-2.0
#include "run/saving.hpp"

#include <cmath>
#include <iomanip>
#include <map>

#include "evaluate.hpp"
#include "models.hpp"

namespace yolox {

std::vector<Tensor> tensors_of(YOLOX& model) {
  std::vector<Tensor> all = model->parameters();
  for (const Tensor& b : model->buffers()) all.push_back(b);
  return all;
}

std::vector<Tensor> tensors_of(Training& t) {
  std::vector<Tensor> all = tensors_of(t.model);
  if (!t.ema.is_empty())
    for (const Tensor& x : tensors_of(t.ema)) all.push_back(x);
  for (const Tensor& x : t.optimizer.state()) all.push_back(x);
  if (t.scaler.enabled) {
    all.push_back(t.scaler.scale);
    all.push_back(t.scaler.growth_tracker);
  }
  return all;
}

void move(YOLOX& model, torch::Device device, at::ScalarType type) {
  model->to(device);
  for (const Tensor& t : tensors_of(model))
    if (t.is_floating_point()) t.set_data(t.to(type));
  for (const auto& module : model->modules())
    if (auto* norm = module->as<torch::nn::BatchNorm2d>())
      norm->num_batches_tracked.set_data(norm->num_batches_tracked.cpu());
}

YOLOX copy_of(const YOLOX& model, torch::Device device) {
  YOLOX copy = make_model(model->name, model->num_classes);
  move(copy, device, model->parameters()[0].scalar_type());
  to_channels_last(*copy);
  load_state_dict(*copy, to_dict(state_dict(*model)), "the model");
  copy->eval();
  return copy;
}

// Returns the state of torch's random number generators, of the CPU and of the device. This training does not
// use them, because order and augmentation of images depend only on seed and step. A model with dropout
// would.
static c10::IValue random_state(torch::Device device) {
  auto states = empty_list();
  states.push_back(at::globalContext().defaultGenerator(torch::kCPU).get_state());
  if (device.is_cuda()) states.push_back(at::globalContext().defaultGenerator(device).get_state());
  return states;
}

static void set_random_state(const c10::IValue& state, torch::Device device) {
  const auto states = state.toListRef();
  at::Generator cpu = at::globalContext().defaultGenerator(torch::kCPU);
  cpu.set_state(states.at(0).toTensor());
  if (!device.is_cuda() || states.size() < 2) return;  // the run moved between devices
  at::Generator own = at::globalContext().defaultGenerator(device);
  own.set_state(states[1].toTensor());
}

static GenericDict to_dict(const Settings& settings) {
  auto dict = empty_dict();
  for (const auto& [name, value] : settings) dict.insert_or_assign(name, value);
  return dict;
}

GenericDict checkpoint(Training& t, const WeightsInfo& info, const RunSettings& settings, int64_t per_epoch,
                       int64_t images) {
  auto state = empty_dict(), top = empty_dict();
  state.insert("model",
               to_dict(state_dict(*t.model)));  // the trained weights; top-level "model" has the EMA
  state.insert("iteration", t.iteration);
  state.insert("ema_updates", t.ema_updates);
  state.insert("skipped", t.skipped);
  state.insert("score", score_of({}).name);  // what best_ap and curr_ap are
  state.insert("evals_without_gain", t.best.evals_without_gain);
  state.insert("epochs", t.epochs);
  state.insert("random", random_state(t.scaler.scale.device()));
  if (t.scaler.enabled) {
    state.insert("scale", t.scaler.scale.item<double>());
    state.insert("growth_tracker", t.scaler.growth_tracker.item<int64_t>());
  }
  state.insert("per_epoch", per_epoch);
  state.insert("images", images);
  state.insert("flags", to_dict(settings.flags));
  state.insert("chosen", to_dict(settings.chosen));
  top.insert("start_epoch", t.iteration / per_epoch);
  top.insert("model", to_dict(state_dict(*t.eval_model())));
  top.insert("optimizer", state_dict(t.optimizer));
  top.insert("best_ap", t.best.score);
  top.insert("curr_ap", t.score.value_or(std::nan("")));
  top.insert("yolox", to_dict(info));
  top.insert("train", state);
  return top;
}

RunSettings saved_settings(const c10::IValue& file, const std::string& path) {
  check(file.isGenericDict() && file.toGenericDict().contains("train"), path,
        " is not a checkpoint of a training run; use it with --weights");
  const auto state = file.toGenericDict().at("train").toGenericDict();
  check(!state.contains("tasks"), path,
        " is a checkpoint of ./multitask, which is gone; start a new run from one of its heads: ./train "
        "--weights head_NAME.pth");
  const auto read = [&](const char* key) {
    Settings all;
    for (const auto& e : state.at(key).toGenericDict())
      all.emplace_back(e.key().toStringRef(), e.value().toStringRef());
    return all;
  };
  if (!state.contains("settings")) return {read("flags"), read("chosen")};
  // Of an older version: one list, in which auto was overwritten.
  RunSettings old{read("settings"), {}};
  const std::map<std::string, std::string> flags(old.flags.begin(), old.flags.end());
  double lr_factor = state.contains("lr_factor") ? state.at("lr_factor").toDouble() : 1;  // of --keep-going
  if (!flags.count("recipe")) {  // the learning rate is that of one image
    old.chosen.emplace_back("recipe", "official");
    lr_factor *= std::stod(flags.at("bs"));
  }
  if (lr_factor != 1)
    old.chosen.emplace_back("lr", concat(std::setprecision(17), std::stod(flags.at("lr")) * lr_factor));
  return old;
}

std::string load_checkpoint(Training& t, const c10::IValue& file, int64_t per_epoch,
                            const std::string& path) {
  const auto top = file.toGenericDict();
  const auto state = top.at("train").toGenericDict();
  const auto load_all = [&](YOLOX& into, const c10::IValue& weights) {
    const auto report = load_state_dict(*into, weights.toGenericDict(), path);
    check(report.complete(), path, " does not match this model: ", to_string(report));
  };
  load_all(t.model, state.at("model"));
  if (!t.ema.is_empty()) load_all(t.ema, top.at("model"));
  load_state_dict(t.optimizer, top.at("optimizer").toGenericDict(), path);
  if (t.scaler.enabled && state.contains("scale")) {  // missing if the run had no --amp fp16 so far
    t.scaler.scale.fill_(state.at("scale").toDouble());
    t.scaler.growth_tracker.fill_(state.at("growth_tracker").toInt());
  }
  t.iteration = state.at("iteration").toInt();
  t.ema_updates = state.at("ema_updates").toInt();
  t.skipped = state.at("skipped").toInt();
  const char* waited = "evals_without_gain";
  t.best = {top.at("best_ap").toDouble(),
            state.at(state.contains(waited) ? waited : "stale").toInt()};  // the name in version 0.1.0
  const double ap = top.at("curr_ap").toDouble();  // official files have a number or NaN
  t.score = std::isnan(ap) ? std::nullopt : std::optional(ap);
  t.epochs = state.at("epochs").toInt();
  set_random_state(state.at("random"), t.scaler.scale.device());
  const int64_t of_run = state.contains("per_epoch") ? state.at("per_epoch").toInt() : per_epoch;
  usage_check(of_run == per_epoch, path, " has ", of_run, " steps per epoch, but this --bs and data have ",
              per_epoch,
              ", so the run cannot be resumed with them; leave --bs and --data out, or start a new run ",
              "from its weights: ./train --weights ", shell_word(path));
  const std::string now = score_of({}).name,
                    before = state.contains("score") ? state.at("score").toStringRef() : now;
  if (now == before) return "";
  t.best.score = -1;
  return concat("note: the score of an evaluation is ", now, ", and was ", before,
                " before; the next evaluation replaces best.pth");
}

}  // namespace yolox
