// Draws what a model finds into images.
#include <iomanip>
#include <iostream>

#include "evaluate.hpp"
#include "flags.hpp"
#include "pictures.hpp"

using namespace yolox;

struct Config : Flags {
  std::string source =
      flag(source, "What", "source", "", "PATH|shapes", "image, folder of images, or the built-in shapes");
  std::string weights =
      flag(weights, "What", "weights", "", "FILE", "checkpoint, ours or official, or an ONNX file");
  std::string save = flag(save, "What", "save", "runs/demo", "DIR", "folder for the drawn images");
  int max_images = flag(max_images, "What", "max-images", 0, "N", "stop after so many; 0: all");
  std::string model =
      flag(model, "How", "model", "", "NAME", model_names() + "; read from the checkpoint when left out");
  std::string size =
      flag(size, "How", "size", "", "N|HxW", "input size; the checkpoint's or the model's when left out");
  double conf = flag(conf, "How", "conf", 0.3, "P", "lowest score of a box that is drawn");
  double nms = flag(nms, "How", "nms", 0.45, "IOU", "overlap above which the weaker box of a class goes");
  std::string preproc = flag(preproc, "How", "preproc", "auto", "auto|bgr|legacy",
                             "pixels: as the checkpoint says, BGR 0..255, or YOLOX 0.1.0's RGB mean/std");
  std::string device = flag(device, "How", "device", "auto", "cpu|cuda", "where to run");
};

// Official checkpoints do not name their classes; with 80 of them they are those of COCO, in this order.
static const char* const kCocoNames[80] = {"person",        "bicycle",      "car",
                                           "motorcycle",    "airplane",     "bus",
                                           "train",         "truck",        "boat",
                                           "traffic light", "fire hydrant", "stop sign",
                                           "parking meter", "bench",        "bird",
                                           "cat",           "dog",          "horse",
                                           "sheep",         "cow",          "elephant",
                                           "bear",          "zebra",        "giraffe",
                                           "backpack",      "umbrella",     "handbag",
                                           "tie",           "suitcase",     "frisbee",
                                           "skis",          "snowboard",    "sports ball",
                                           "kite",          "baseball bat", "baseball glove",
                                           "skateboard",    "surfboard",    "tennis racket",
                                           "bottle",        "wine glass",   "cup",
                                           "fork",          "knife",        "spoon",
                                           "bowl",          "banana",       "apple",
                                           "sandwich",      "orange",       "broccoli",
                                           "carrot",        "hot dog",      "pizza",
                                           "donut",         "cake",         "chair",
                                           "couch",         "potted plant", "bed",
                                           "dining table",  "toilet",       "tv",
                                           "laptop",        "mouse",        "remote",
                                           "keyboard",      "cell phone",   "microwave",
                                           "oven",          "toaster",      "sink",
                                           "refrigerator",  "book",         "clock",
                                           "vase",          "scissors",     "teddy bear",
                                           "hair drier",    "toothbrush"};

static std::string class_name(const WeightsInfo& info, int cls, int classes) {
  if (!info.classes.empty()) return info.classes[cls];
  return classes == 80 ? kCocoNames[cls] : concat("class ", cls);
}

// The images to look at, as a data set without labels.
static Dataset find_images(const Config& config) {
  const std::string& source = config.source;
  usage_check(!source.empty(), "--source is needed: an image, a folder of images, or shapes");
  if (source == "shapes")
    return shapes_dataset(0, 1,
                          config.max_images ? std::min<int64_t>(config.max_images, kShapesVal) : kShapesVal);
  check(fs::exists(source), "--source ", source, " does not exist");
  Dataset data;
  if (!fs::is_directory(source))
    data.records.push_back({source, 0, 0, 0, {}});
  else
    for (const auto& entry : fs::directory_iterator(source)) {
      std::string end = entry.path().extension().string();
      std::transform(end.begin(), end.end(), end.begin(), ::tolower);
      for (const std::string known : {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})
        if (end == known) data.records.push_back({entry.path().string(), 0, 0, 0, {}});
    }
  check(!data.records.empty(), "--source ", source,
        " holds no images (.jpg .jpeg .png .bmp .webp .tif .tiff)");
  std::sort(data.records.begin(), data.records.end(),
            [](const auto& a, const auto& b) { return a.file < b.file; });
  if (config.max_images && data.records.size() > size_t(config.max_images))
    data.records.resize(config.max_images);
  return data;
}

static void run(int argc, char** argv) {
  Config config;
  config.parse(argc, argv, "draws what a model finds into images");
  usage_check(config.conf >= 0 && config.conf <= 1, "--conf must be in 0..1, got ", config.conf);
  usage_check(config.nms > 0 && config.nms <= 1, "--nms must be above 0 and at most 1, got ", config.nms);
  usage_check(config.max_images >= 0, "--max-images must be at least 0, got ", config.max_images);
  if (!config.size.empty()) parse_size(config.size);
  opencv_single_thread();
  const Dataset data = find_images(config);
  const auto device = parse_device(config.device);
  auto loaded = load_model(config.weights, config.model, config.preproc, device);
  const int classes = loaded.model->num_classes;
  const ImageSize size = input_size(loaded.info, config.size);
  std::error_code error;
  fs::create_directories(config.save, error);
  check(!error, "--save ", config.save, " cannot be made: ", error.message());

  const torch::InferenceMode inference;
  int64_t unreadable = 0;
  for (size_t i = 0; i < data.records.size(); ++i) {
    Image image;
    try {
      image = read_image(data, i);
    } catch (const std::exception& e) {
      std::cout << "warning: " << e.what() << ", skipped\n";
      ++unreadable;
      continue;
    }
    const fs::path name = data.records[i].file.empty() ? data.truth.images[i].file_name
                                                       : fs::path(data.records[i].file).filename().string();
    const std::string out = (fs::path(config.save) / name).string() + (name.has_extension() ? "" : ".png");
    check(!fs::exists(out) || data.records[i].file.empty() || !fs::equivalent(out, data.records[i].file),
          "--save ", config.save, " would overwrite the source ", out, "; give another folder");
    const auto boxed = letterbox(image, {size.width, size.height});  // as in evaluation
    const cv::Mat pixels = boxed.image.isContinuous() ? cv::Mat(boxed.image) : boxed.image.clone();
    const Tensor batch = torch::from_blob(pixels.data, {1, size.height, size.width, 3}, torch::kByte);
    const Tensor found =
        postprocess(decode(loaded.model(preprocess(batch.to(device), loaded.info.legacy_preproc)),
                           size.height, size.width),
                    config.conf, config.nms)[0];
    const auto rows = found.accessor<float, 2>();
    std::map<std::string, int> counts;
    for (int64_t k = rows.size(0) - 1; k >= 0; --k) {  // the best last, on top
      const int cls = int(rows[k][6]);
      const Box box{rows[k][0] / boxed.scale.x, rows[k][1] / boxed.scale.y, rows[k][2] / boxed.scale.x,
                    rows[k][3] / boxed.scale.y, cls};
      const std::string label = class_name(loaded.info, cls, classes);
      ++counts[label];
      draw_box(image, box, concat(label, " ", std::fixed, std::setprecision(2), rows[k][4] * rows[k][5]));
    }
    check(save_picture(out, image), "cannot write ", out, "; is the disk full or the folder read-only?");
    std::cout << out << ":";
    if (counts.empty()) std::cout << " nothing found";
    for (const auto& [label, count] : counts) std::cout << " " << count << " " << label;
    std::cout << "\n";
  }
  if (unreadable == int64_t(data.records.size())) fail("no image of ", config.source, " could be read");
}

int main(int argc, char** argv) {
  return run_program([&] { run(argc, argv); });
}
