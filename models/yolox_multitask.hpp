// SPDX-License-Identifier: Apache-2.0
// Model with several detection heads on one backbone and neck: an example of a model of your own. Each head
// has its own classes. multitask.cpp trains it.
//
// Each head is a complete YOLOX that shares the backbone of the first head. Therefore every function for a
// YOLOX also accepts a head: evaluate() and the checkpoint functions.
#pragma once
#include <torch/torch.h>

#include <string>
#include <vector>

#include "base/error.hpp"
#include "checkpoint/checkpoint.hpp"
#include "models.hpp"
#include "optim.hpp"
#include "run/state.hpp"

namespace yolox {

// Name and classes of a head.
struct Task {
  std::string name;                  // in file names and parameter names: head_NAME.cls_preds.0.weight
  std::vector<std::string> classes;  // position = class id
  bool operator==(const Task& other) const { return name == other.name && classes == other.classes; }
};

// Module with the parameters "backbone.*", which all heads share, and "head_NAME.*" of each task.
struct MultiTaskImpl : nn::Module {
  MultiTaskImpl(const std::string& model, const std::vector<Task>& tasks) : tasks(tasks) {
    for (const Task& task : tasks) {
      YOLOX detector = make_model(model, int(task.classes.size()));
      if (detectors.empty())
        register_module("backbone", detector->backbone);
      else
        detector->backbone = detector->replace_module("backbone", detectors[0]->backbone);
      register_module("head_" + task.name, detector->head);
      detectors.push_back(detector);
    }
  }

  const std::vector<Task> tasks;
  // One per task. The detectors themselves are not registered as submodules. Their backbone is registered
  // once, and the head of each.
  std::vector<YOLOX> detectors;
};
TORCH_MODULE(MultiTask);

// Training state. Iteration i trains head i % heads(), so `iteration` determines how often each head has been
// trained.
struct MultiTaskTraining {
  MultiTask model, ema;
  Optimizer optimizer;
  int64_t iteration = 0;     // iterations done
  int64_t evaluated_at = 0;  // iteration of the last end_of_epoch() of multitask.cpp

  int64_t heads() const { return int64_t(model->tasks.size()); }
  int64_t next_head() const { return iteration % heads(); }
  int64_t steps_of(int64_t head) const { return (iteration + heads() - 1 - head) / heads(); }

  // Updates weights and EMA of the backbone and of next_head() from their gradients. The other heads have no
  // gradients, so the optimizer skips them: no momentum, no weight decay. Their EMA and their batch norm
  // statistics do not change.
  void step(double lr, const EmaSchedule& ema_schedule) {
    const int64_t head = next_head();
    YOLOX &from = model->detectors[head], &to = ema->detectors[head];
    optimizer.step(lr);
    ema_update(ema_tensors(*to->backbone, *from->backbone), ema_decay(ema_schedule, iteration + 1));
    ema_update(ema_tensors(*to->head, *from->head),
               ema_decay(ema_schedule, steps_of(head) + 1));  // EMA warm-up per head
    ++iteration;
  }

  // Returns all tensors that must be equal on all ranks.
  std::vector<Tensor> tensors() {
    std::vector<Tensor> all = optimizer.state();
    for (auto* m : {&model, &ema})
      for (const auto& [_, tensor] : state_dict(**m)) all.push_back(tensor);
    return all;
  }
};

// Returns a checkpoint of backbone, neck and one head in the format of ./train, which every program reads.
// The classes in `info` are replaced by the classes of the head.
inline GenericDict head_checkpoint(MultiTask& model, int64_t head, WeightsInfo info) {
  info.classes = model->tasks[head].classes;
  auto top = empty_dict();
  top.insert("model", to_dict(state_dict(*model->detectors[head])));
  top.insert("yolox", to_dict(info));
  return top;
}

// Returns the complete training state as a checkpoint, from which a run resumes exactly. The layout is that
// of ./train, so that the functions of saving.hpp find and read these files too. images: total over all data
// sets.
inline GenericDict checkpoint(MultiTaskTraining& t, const WeightsInfo& info, const Settings& settings,
                              int64_t images, int64_t per_epoch) {
  auto tasks = empty_dict(), flags = empty_dict(), state = empty_dict(), top = empty_dict();
  for (const Task& task : t.model->tasks) {
    auto classes = empty_list();
    for (const auto& name : task.classes) classes.push_back(name);
    tasks.insert(task.name, classes);
  }
  for (const auto& [name, value] : settings) flags.insert(name, value);
  state.insert("model", to_dict(state_dict(*t.model)));
  state.insert("iteration", t.iteration);
  state.insert("ended", t.evaluated_at);
  state.insert("images", images);
  state.insert("per_epoch", per_epoch);
  state.insert("tasks", tasks);
  state.insert("settings", flags);
  top.insert("model", to_dict(state_dict(*t.ema)));
  top.insert("optimizer", state_dict(t.optimizer));
  top.insert("yolox", to_dict(info));
  top.insert("train", state);
  return top;
}

// Restores the training state from a checkpoint. Throws if its heads or classes differ from those of the
// model.
inline void load_checkpoint(MultiTaskTraining& t, const c10::IValue& file, const std::string& path) {
  const auto top = file.toGenericDict(), state = top.at("train").toGenericDict();
  check(state.contains("tasks"), path,
        " is a checkpoint of ./train; resume it with ./train, or give it as --weights");
  std::vector<Task> tasks;
  for (const auto& e : state.at("tasks").toGenericDict()) {
    tasks.push_back({e.key().toStringRef(), {}});
    for (const auto& name : e.value().toListRef()) tasks.back().classes.push_back(name.toStringRef());
  }
  check(tasks == t.model->tasks, path,
        " has other heads or classes than --data; to start from its weights, give one of its ",
        "head_NAME.pth as --weights");
  for (auto [model, weights] : {std::pair(t.model, state.at("model")), {t.ema, top.at("model")}}) {
    const auto report = load_state_dict(*model, weights.toGenericDict(), path);
    check(report.complete(), path, " does not match this model: ", to_string(report));
  }
  load_state_dict(t.optimizer, top.at("optimizer").toGenericDict(), path);
  t.iteration = state.at("iteration").toInt();
  t.evaluated_at = state.at("ended").toInt();
}

}  // namespace yolox
