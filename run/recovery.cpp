// SPDX-License-Identifier: Apache-2.0
#include "run/recovery.hpp"

#include "base/printable.hpp"
#include "checkpoint/pth.hpp"
#include "data.hpp"
#include "data/pictures.hpp"

namespace yolox {

std::string save_failed_step(const std::string& run, Training& t, const StepRecord& step, const Dataset& data,
                             int rank) {
  const std::string name = rank > 0 ? concat(run, "/nonfinite_rank", rank) : run + "/nonfinite";
  const auto& [index, batch, lr, size, use_l1, anomaly, dtr, numbers] = step;
  auto names = empty_list();
  for (const int64_t i : batch.indices) names.push_back(data.name_of(i));
  auto losses = empty_dict();
  losses.insert("total", numbers.total);
  for (const auto& v : numbers.values) losses.insert(v.name, v.value);
  auto file = empty_dict();
  file.insert("iteration", index);
  file.insert("lr", lr);
  file.insert("losses", losses);
  file.insert("height", int64_t{size.height});
  file.insert("width", int64_t{size.width});
  file.insert("use_l1", use_l1);
  file.insert("scale", t.scaler.scale.item<double>());
  file.insert("images", batch.images.cpu());
  file.insert("names", names);
  file.insert("boxes", batch.targets.boxes.cpu());
  file.insert("classes", batch.targets.classes.cpu());
  if (batch.targets.ignored.defined()) file.insert("ignored", batch.targets.ignored.cpu());
  file.insert("model", to_dict(state_dict(*t.model)));
  save_image(name + ".jpg", draw_batch(batch.images, labelled_boxes(batch.targets, data.classes),
                                       short_names(batch.indices, data)));
  try {
    write_pth(name + ".pth", file);
  } catch (const std::exception& e) {
    return concat("the batch and the weights could not be saved: ", e.what());
  }
  return concat("the batch and the weights are in ", name, ".pth and .jpg");
}

std::string Recovery::failure_reason(const StepRecord& step) {
  const std::string why = stop_reason(step.numbers, skipped);
  return step.anomaly.empty() ? why : step.anomaly;
}

void Recovery::roll_back(Training& t, const std::string& why, const StepRecord& step) {
  const std::string what = concat(why, " at step ", step.step, " (", to_string(step.numbers), ", lr ",
                                  step.lr, "; images ", image_names(step.batch, run.data.train), ")");
  const std::string saved = save_failed_step(run.folder, t, step, run.data.train, ranks.info.rank);
  check(run.config.keep_going && t.rollbacks < 3, what, "; ", saved,
        "; continue from the last checkpoint with --keep-going, or with a lower lr: ./train --resume ",
        shell_word(run.folder), " --lr ", run.config.lr / 2);
  run.log.line(concat("warning: ", what, "; ", saved));
  run.roll_back(t);
  ranks.check_same_settings({{"step", concat(t.iteration)}, {"lr factor", concat(t.lr_factor)}});
  ranks.broadcast(tensors_of(t));
  run.log.line(concat("warning: back to step ", t.iteration, " with ", t.lr_factor, " times the lr"));
  skipped = 0;
}

}  // namespace yolox
