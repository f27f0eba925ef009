// Several detection heads on one backbone and neck, each with classes of its own: an example of what a model
// of one's own takes. multitask.cpp trains it, one head a step in turn.
//
// Each head is a whole YOLOX whose backbone is that of all the others. So what takes a YOLOX takes a head:
// the gradient of a step, evaluate(), and a checkpoint that every program reads.
#pragma once
#include <torch/torch.h>

#include <string>
#include <vector>

#include "base/error.hpp"
#include "checkpoint/checkpoint.hpp"
#include "optim.hpp"
#include "run/state.hpp"
#include "yolox.hpp"

namespace yolox {

// What a head is for.
struct Task {
  std::string name;                  // of its files, and of its weights: head_NAME.cls_preds.0.weight
  std::vector<std::string> classes;  // position = class id
  bool operator==(const Task& other) const { return name == other.name && classes == other.classes; }
};

struct MultiTaskImpl : nn::Module {
  MultiTaskImpl(const std::string& model, const std::vector<Task>& tasks) : tasks(tasks) {
    for (const Task& task : tasks) {
      YOLOX detector(model, int(task.classes.size()));
      if (detectors.empty())
        register_module("backbone", detector->backbone);
      else
        detector->backbone = detector->replace_module("backbone", detectors[0]->backbone);
      register_module("head_" + task.name, detector->head);
      detectors.push_back(detector);
    }
  }

  const std::vector<Task> tasks;
  // One for each task. They are not registered, but what they are made of is, each part once.
  std::vector<YOLOX> detectors;
};
TORCH_MODULE(MultiTask);

// What the training changes. Steps are counted from 0 and go round the heads, so their number tells how often
// each has been trained.
struct MultiTaskTraining {
  MultiTask model, ema;
  Optimizer optimizer;
  int64_t iteration = 0;  // steps done
  int64_t ended = 0;      // the step at which an epoch last ended, with its evaluation

  int64_t heads() const { return int64_t(model->tasks.size()); }
  int64_t next_head() const { return iteration % heads(); }
  int64_t steps_of(int64_t head) const { return (iteration + heads() - 1 - head) / heads(); }

  // The step of next_head(), whose gradients are there, is made. The other heads have none, and neither the
  // optimizer nor the average touches them: no momentum, no decay, no statistics.
  void step(double lr, double decay) {
    const int64_t head = next_head();
    YOLOX &from = model->detectors[head], &to = ema->detectors[head];
    optimizer.step(lr);
    ema_update(*to->backbone, *from->backbone, ema_decay(decay, iteration + 1));
    ema_update(*to->head, *from->head, ema_decay(decay, steps_of(head) + 1));  // it is as young as its steps
    ++iteration;
  }

  // All that ranks have in common.
  std::vector<Tensor> tensors() {
    std::vector<Tensor> all = optimizer.state();
    for (auto* m : {&model, &ema})
      for (const auto& [_, tensor] : state_dict(**m)) all.push_back(tensor);
    return all;
  }
};

// Backbone, neck and one head, as a checkpoint of ./train has them: for ./eval, ./demo, ./export and
// ./train --weights. info: of the model; the classes become those of the head.
inline GenericDict head_checkpoint(MultiTask& model, int64_t head, WeightsInfo info) {
  info.classes = model->tasks[head].classes;
  auto top = empty_dict();
  top.insert("model", to_dict(state_dict(*model->detectors[head])));
  top.insert("yolox", to_dict(info));
  return top;
}

// What goes on exactly where it was left: laid out as that of ./train, so that what finds and reads those
// (saving.hpp) finds and reads this. images: in all data sets.
inline GenericDict checkpoint(MultiTaskTraining& t, const WeightsInfo& info, const Settings& settings,
                              int64_t images) {
  auto tasks = empty_dict(), flags = empty_dict(), state = empty_dict(), top = empty_dict();
  for (const Task& task : t.model->tasks) {
    auto classes = empty_list();
    for (const auto& name : task.classes) classes.push_back(name);
    tasks.insert(task.name, classes);
  }
  for (const auto& [name, value] : settings) flags.insert(name, value);
  state.insert("model", to_dict(state_dict(*t.model)));
  state.insert("iteration", t.iteration);
  state.insert("ended", t.ended);
  state.insert("images", images);
  state.insert("tasks", tasks);
  state.insert("settings", flags);
  top.insert("model", to_dict(state_dict(*t.ema)));
  top.insert("optimizer", state_dict(t.optimizer));
  top.insert("yolox", to_dict(info));
  top.insert("train", state);
  return top;
}

// Goes on from such a file. Throws where it is of other heads or classes.
inline void load_checkpoint(MultiTaskTraining& t, const c10::IValue& file, const std::string& path) {
  const auto top = file.toGenericDict(), state = top.at("train").toGenericDict();
  check(state.contains("tasks"), path, " is of ./train: go on with that, or start from it with --weights");
  std::vector<Task> tasks;
  for (const auto& e : state.at("tasks").toGenericDict()) {
    tasks.push_back({e.key().toStringRef(), {}});
    for (const auto& name : e.value().toListRef()) tasks.back().classes.push_back(name.toStringRef());
  }
  check(tasks == t.model->tasks, path, " has other heads or classes than --data; start from its files ",
        "head_NAME.pth with --weights");
  for (auto [model, weights] : {std::pair(t.model, state.at("model")), {t.ema, top.at("model")}}) {
    const auto report = load_state_dict(*model, weights.toGenericDict(), path);
    check(report.complete(), path, " does not hold this model: ", to_string(report));
  }
  load_state_dict(t.optimizer, top.at("optimizer").toGenericDict(), path);
  t.iteration = state.at("iteration").toInt();
  t.ended = state.at("ended").toInt();
}

}  // namespace yolox
