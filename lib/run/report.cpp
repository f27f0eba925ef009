// SPDX-License-Identifier: Apache-2.0
#include "run/report.hpp"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <unordered_map>

#include "base/printable.hpp"
#include "base/program.hpp"
#include "coco_eval.hpp"
#include "data/coco_json.hpp"
#include "data/pictures.hpp"
#include "run/run.hpp"

namespace yolox {

// Returns the images with the most errors, worst first: -errors, id. As an estimate, the errors are those in
// the number of detections of each class. The script counts them exactly, at the score with the best F1.
static std::vector<std::pair<int64_t, int64_t>> worst_images(const Evaluation& e, size_t most) {
  constexpr double kScore = 0.3;
  std::map<std::pair<int64_t, int64_t>, int64_t> surplus;  // of an image and class
  for (const Detection& d : e.detections) surplus[{d.image_id, d.category_id}] += d.score >= kScore;
  for (const CocoAnnotation& a : e.truth.annotations) surplus[{a.image_id, a.category_id}] -= !a.crowd;
  std::map<int64_t, int64_t> errors;
  for (const auto& [key, count] : surplus) errors[key.first] -= std::abs(count);
  std::vector<std::pair<int64_t, int64_t>> worst;
  for (const auto& [image, count] : errors) worst.emplace_back(count, image);
  std::ranges::sort(worst);
  worst.resize(std::min(most, worst.size()));
  return worst;
}

void write_evaluation(const std::string& folder, const std::string& heading, const Evaluation& e,
                      const Dataset& data) {
  namespace fs = std::filesystem;
  std::unordered_map<int64_t, size_t> record_of;
  for (size_t i = 0; i < data.records.size(); ++i) record_of[data.records[i].image_id] = i;
  const auto is_file = [&](size_t i) { return fs::exists(data.records[i].file); };
  CocoDataset truth = e.truth;
  truth.description = heading;
  truth.max_detections = e.result.max_detections;
  for (CocoImage& image : truth.images) {
    const size_t i = record_of.at(image.id);
    if (is_file(i)) image.file_name = fs::absolute(data.records[i].file).string();
    image.width = data.records[i].width;
    image.height = data.records[i].height;
  }
  write_detections(folder + "/val_detections.json", e.detections);
  write_coco(folder + "/val_truth.json", truth);
  constexpr size_t kMost = 24;
  constexpr double kSide = 480;
  const std::string pictures = folder + "/val_worst";
  fs::remove_all(pictures);  // those of an earlier evaluation
  for (const auto& [_, id] : worst_images(e, kMost)) {
    const size_t i = record_of.at(id);
    if (is_file(i)) continue;
    const cv::Size size = data.size(i);
    const double scale = std::min(1.0, kSide / std::max(size.width, size.height));
    fs::create_directories(pictures);
    save_image(concat(pictures, "/", id, ".jpg"), data.image_region(i, {{}, size}, scale).image);
  }
}

std::string write_report(const std::string& run, int signal) {
  if ((signal != 0 && signal != SIGINT) || std::getenv("YOLOX_NO_REPORT")) return "";
  const std::string own = YOLOX_SOURCE_DIR "/.venv/bin/python",
                    found = python_with("matplotlib, numpy, pycocotools"),
                    python = !found.empty()                 ? found
                             : std::filesystem::exists(own) ? shell_word(own)
                                                            : "python3",
                    command = concat(python, " ", shell_word(YOLOX_SOURCE_DIR "/tools/report.py"), " ",
                                     shell_word(run));
  if (found.empty())
    return concat("note: no report.html, because no Python has its modules; run: ", python,
                  " -m pip install matplotlib numpy pycocotools && ", command);
  // A Ctrl-C ends the script too, which is in the same process group.
  const bool written = std::system(("timeout --foreground 120 " + command + " >/dev/null 2>&1").c_str()) == 0;
  return written ? "" : "note: no report.html, because its script failed or took over 120 s; run: " + command;
}

}  // namespace yolox
