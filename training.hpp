// What a training changes as it goes, and how a checkpoint holds it.
#pragma once
#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "checkpoint.hpp"
#include "optim.hpp"
#include "yolox.hpp"

namespace yolox {

struct Training {
  YOLOX model, ema{nullptr};  // ema: empty when there is none
  Optimizer optimizer;
  GradScaler scaler;
  int64_t iteration = 0;    // steps done
  int64_t ema_updates = 0;  // fewer than the steps by those that were skipped
  int64_t skipped = 0;      // steps with gradients that overflowed
  double best_ap = -1;
  int64_t stale = 0;  // evaluations since the best

  // What is evaluated and saved as the result.
  YOLOX& judged() { return ema.is_empty() ? model : ema; }
};

// A copy of a model with tensors of its own.
inline YOLOX copy_of(const YOLOX& model, const std::string& name, torch::Device device) {
  YOLOX copy(name, model->num_classes);
  copy->to(device);
  channels_last(*copy);
  load_state_dict(*copy, to_dict(state_dict(*model)), "the model");
  copy->eval();
  return copy;
}

using Settings = std::vector<std::pair<std::string, std::string>>;  // flag, value

// A checkpoint: official YOLOX finds model, optimizer, start_epoch, best_ap and curr_ap; what the weights
// need is under "yolox", and what only resuming needs under "train".
inline GenericDict checkpoint(Training& t, const WeightsInfo& info, const Settings& settings,
                              int64_t per_epoch, double ap) {
  auto flags = empty_dict(), state = empty_dict(), top = empty_dict();
  for (const auto& [name, value] : settings) flags.insert(name, value);
  state.insert("model",
               to_dict(state_dict(*t.model)));  // the weights themselves: "model" on top holds their average
  state.insert("iteration", t.iteration), state.insert("ema_updates", t.ema_updates);
  state.insert("skipped", t.skipped), state.insert("stale", t.stale);
  state.insert("scale", t.scaler.scale.item<double>());
  state.insert("growth_tracker", t.scaler.growth_tracker.item<int64_t>());
  state.insert("per_epoch", per_epoch);
  state.insert("settings", flags);
  top.insert("start_epoch", t.iteration / per_epoch);
  top.insert("model", to_dict(state_dict(*t.judged())));
  top.insert("optimizer", state_dict(t.optimizer));
  top.insert("best_ap", t.best_ap), top.insert("curr_ap", ap);
  top.insert("yolox", to_dict(info)), top.insert("train", state);
  return top;
}

// The settings in a checkpoint. Throws when the file is not one of a training.
inline Settings saved_settings(const c10::IValue& file, const std::string& path) {
  check(file.isGenericDict() && file.toGenericDict().contains("train"), path,
        " holds no state of a training; start from it with --weights");
  Settings settings;
  for (const auto& e : file.toGenericDict().at("train").toGenericDict().at("settings").toGenericDict())
    settings.emplace_back(e.key().toStringRef(), e.value().toStringRef());
  return settings;
}

// Goes on from such a file. Throws when it is of another model, or counts its epochs in other steps.
inline void load_checkpoint(Training& t, const c10::IValue& file, int64_t per_epoch,
                            const std::string& path) {
  const auto top = file.toGenericDict();
  const auto state = top.at("train").toGenericDict();
  const auto load_all = [&](YOLOX& into, const c10::IValue& weights) {
    const auto report = load_state_dict(*into, weights.toGenericDict(), path);
    check(report.complete(), path, " does not hold this model: ", to_string(report));
  };
  load_all(t.model, state.at("model"));
  if (!t.ema.is_empty()) load_all(t.ema, top.at("model"));
  load_state_dict(t.optimizer, top.at("optimizer").toGenericDict(), path);
  t.scaler.scale.fill_(state.at("scale").toDouble());
  t.scaler.growth_tracker.fill_(state.at("growth_tracker").toInt());
  t.iteration = state.at("iteration").toInt(), t.ema_updates = state.at("ema_updates").toInt();
  t.skipped = state.at("skipped").toInt(), t.stale = state.at("stale").toInt();
  t.best_ap = top.at("best_ap").toDouble();
  check(state.at("per_epoch").toInt() == per_epoch, path, " has ", state.at("per_epoch").toInt(),
        " steps an epoch; with this --bs and data there are ", per_epoch,
        ": keep them, or start from it with --weights");
}

}  // namespace yolox
