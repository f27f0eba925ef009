// SPDX-License-Identifier: Apache-2.0
#include "run/report.hpp"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <unordered_map>

#include "base/printable.hpp"
#include "base/program.hpp"
#include "coco_eval.hpp"
#include "data/coco_json.hpp"
#include "data/pictures.hpp"
#include "run/run.hpp"

namespace yolox {

// Returns the images with the most missed objects and false detections, worst first: -count, id. An object
// has at most one detection. The script sorts them again, at the score with the best F1.
static std::vector<std::pair<int64_t, int64_t>> worst_images(const Evaluation& e, size_t most) {
  constexpr double kScore = 0.3, kIou = 0.5;
  std::map<int64_t, std::vector<const CocoAnnotation*>> missed;  // by image, as the next
  std::map<int64_t, int64_t> mistakes;
  for (const CocoAnnotation& a : e.truth.annotations) missed[a.image_id].push_back(&a);
  for (const Detection& d : e.detections) {  // those of an image have the best score first
    if (d.score < kScore) continue;
    auto& objects = missed[d.image_id];
    const auto match = std::ranges::find_if(objects, [&](const CocoAnnotation* a) {
      return a->category_id == d.category_id && coco_iou(d, *a) >= kIou;
    });
    if (match == objects.end())
      ++mistakes[d.image_id];
    else if (!(*match)->crowd)
      objects.erase(match);
  }
  std::vector<std::pair<int64_t, int64_t>> errors;
  for (const CocoImage& image : e.truth.images) {
    const int64_t count =
        mistakes[image.id] + std::ranges::count(missed[image.id], false, &CocoAnnotation::crowd);
    if (count > 0) errors.emplace_back(-count, image.id);
  }
  std::ranges::sort(errors);
  errors.resize(std::min(most, errors.size()));
  return errors;
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
  const std::string python = python_with("matplotlib, numpy, pycocotools"),
                    script =
                        concat(" ", shell_word(YOLOX_SOURCE_DIR "/tools/report.py"), " ", shell_word(run));
  if (python.empty()) {
    const std::string own = YOLOX_SOURCE_DIR "/.venv/bin/python",
                      lacking = std::filesystem::exists(own) ? shell_word(own) : "python3";
    return concat("note: no report.html, because no Python has its modules; run: ", lacking,
                  " -m pip install matplotlib numpy pycocotools && ", lacking, script);
  }
  // A Ctrl-C ends the script too, which is in the same process group.
  const std::string output = run + "/report.txt", command = concat("timeout --foreground 120 ", python,
                                                                   script, " >", shell_word(output), " 2>&1");
  std::string problem;
  if (std::system(command.c_str()) != 0) {
    problem = "it failed, or took more than 120 s";
    std::ifstream file(output);
    for (std::string line; std::getline(file, line);)
      if (!line.empty()) problem = line;
  }
  std::error_code none;  // not read: there is no output if the command did not start
  std::filesystem::remove(output, none);
  return problem.empty() ? "" : concat("note: no report.html (", problem, "); run: ", python, script);
}

}  // namespace yolox
