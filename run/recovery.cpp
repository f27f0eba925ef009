#include "run/recovery.hpp"

namespace yolox {

std::string save_bad_step(const std::string& run, Training& t, const Batch& batch, const Dataset& data,
                          const StepNumbers& n, double lr, ImageSize size, bool use_l1, int rank) {
  const std::string name = rank > 0 ? concat(run, "/nonfinite_rank", rank) : run + "/nonfinite";
  auto file = empty_dict(), losses = empty_dict();
  auto names = empty_list();
  for (const int64_t i : batch.indices) names.push_back(data.name_of(i));
  losses.insert("total", n.total);
  for (const auto& [name, value] : n.terms) losses.insert(name, value);
  losses.insert("gradient_norm", n.norm);
  file.insert("iteration", t.iteration), file.insert("lr", lr), file.insert("losses", losses);
  file.insert("height", int64_t{size.height}), file.insert("width", int64_t{size.width});
  file.insert("use_l1", use_l1), file.insert("scale", t.scaler.scale.item<double>());
  file.insert("images", batch.images.cpu()), file.insert("names", names);
  file.insert("boxes", batch.targets.boxes.cpu()), file.insert("classes", batch.targets.classes.cpu());
  file.insert("model", to_dict(state_dict(*t.model)));
  save_picture(name + ".jpg", draw_batch(batch.images, drawn(batch.targets, data.classes)));
  try {
    write_pth(name + ".pth", file);
  } catch (const std::exception& e) {
    return concat("the batch and the weights could not be saved: ", e.what());
  }
  return concat("the batch and the weights are in ", name, ".pth and .jpg");
}

}  // namespace yolox
