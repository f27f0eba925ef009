// SPDX-License-Identifier: Apache-2.0
// Detects objects in images, videos, cameras and streams. Draws them, and writes them as JSON and as YOLO
// labels.
#include <algorithm>
#include <cstdlib>
#include <set>
#include <sstream>

#include "base/device.hpp"
#include "base/flags.hpp"
#include "base/memory.hpp"
#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "base/threads.hpp"
#include "checkpoint/load.hpp"
#include "data/frames.hpp"
#include "data/pictures.hpp"
#include "data/source.hpp"
#include "evaluate.hpp"
#include "run/log.hpp"

using namespace yolox;

struct Config : Flags {
  std::string source = flag(source, "Input", "source", "", "SOURCE",
                            "image, folder of images, video, camera index (0), URL (rtsp://..., http://...), "
                            "or shapes = built-in scenes");
  std::string weights =
      flag(weights, "Input", "weights", "", "FILE",
           "checkpoint (ours or official), or name of a model that weights/get has downloaded");
  int64_t max_images = flag(max_images, "Input", "max-images", int64_t{0}, "N",
                            "stop after N images or video frames; 0 = off", at_least(0));
  std::string save = flag(save, "Output", "save", "runs/demo", "DIR", "folder of the drawn images or video");
  std::string json = flag(json, "Output", "json", "", "FILE",
                          "write boxes as JSON: x, y, width and height in pixels, class, score");
  bool txt = flag(txt, "Output", "txt", false, "", "write YOLO labels to DIR/labels/NAME.txt");
  bool show =
      flag(show, "Output", "show", false, "", "show results in a window; space: pause, q or Esc: quit");
  std::string model = flag(model, "Inference", "model", "", "NAME", model_names() + " [from the checkpoint]");
  std::string size =
      flag(size, "Inference", "size", "", "N|HxW", "input size in pixels [from the checkpoint or the model]");
  double conf = flag(conf, "Inference", "conf", 0.3, "P", "minimum score of a detection", between(0, 1));
  double nms = flag(nms, "Inference", "nms", 0.45, "IOU", "NMS IoU threshold", between(1e-6, 1));
  std::string preproc = flag(preproc, "Inference", "preproc", "auto", "auto|bgr|imagenet|legacy",
                             "pixel format: bgr = BGR 0..255; imagenet, legacy = RGB, mean/std of ImageNet, "
                             "as in YOLOX 0.1.0; auto = from the checkpoint");
  std::string device = flag(device, "Inference", "device", "auto", "auto|cpu|cuda[:N]", "device to run on");
};

// Returns the name of a drawn image. Its extension selects the format.
static std::string drawn_name(const std::string& name) {
  static const std::set<std::string> written = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"};
  return name + (has_extension(name, written) ? "" : ".jpg");
}

static std::string label_file(const fs::path& folder, const std::string& name) {
  return (folder / "labels" / (fs::path(name).stem().string() + ".txt")).string();
}

static void write_file(const std::string& path, const std::string& text) {
  check(replace_file(path, text), "cannot write ", path, "; is the disk full or the folder read-only?");
}

// Throws UsageError if an output would overwrite an input, or if two images have the same label file.
static void protect_sources(const FrameSource& source, const Config& config) {
  std::vector<std::string> inputs = source.files;
  inputs.insert(inputs.end(), {config.weights, config.source});
  protect_inputs("--json", config.json, inputs);
  const fs::path given = fs::absolute(config.source);
  protect_inputs("--save", config.save, {fs::is_directory(given) ? given : given.parent_path()});
  if (!config.txt || source.files.empty()) return;
  const fs::path labels = fs::path(yolo_label_file(source.files[0])).parent_path();
  protect_inputs("--txt", config.save + "/labels", {labels});
  std::set<std::string> written;
  for (const auto& file : source.files)
    usage_check(written.insert(label_file(config.save, file)).second, "--txt: ", file,
                " and another image have the same label file; rename the image");
}

// Returns the lines of a YOLO label file, one per box: class, centre x, centre y, width and height as
// fractions of the image. Boxes are clipped to the image.
static std::string yolo_lines(cv::Size size, const std::vector<ScoredBox>& found) {
  std::ostringstream lines;
  for (const auto& [d, score] : found)
    if (const auto b = clip_box(d.x1, d.y1, d.x2 - d.x1, d.y2 - d.y1, d.cls, size))
      lines << b->cls << " " << (b->x1 + b->x2) / 2 / size.width << " " << (b->y1 + b->y2) / 2 / size.height
            << " " << (b->x2 - b->x1) / size.width << " " << (b->y2 - b->y1) / size.height << "\n";
  return lines.str();
}

// Writes one image of the --json file:
//   {"image": "clip.mp4", "frame": 7, "second": 0.28, "width": 640, "height": 480, "boxes":
//    [{"class": 16, "name": "dog", "score": 0.93, "bbox": [132.1, 222.6, 178.2, 320.4]}, ...]}
static void write_found(JsonWriter& writer, const Frame& frame, bool video,
                        const std::vector<ScoredBox>& found, const std::vector<std::string>& names) {
  writer.StartObject();
  write_field(writer, "image", frame.source);
  if (video) {
    write_field(writer, "frame", frame.number);
    write_field(writer, "second", frame.second);
  }
  write_field(writer, "width", int64_t{frame.image.cols});
  write_field(writer, "height", int64_t{frame.image.rows});
  writer.Key("boxes");
  write_list(writer, found, [&](const ScoredBox& d) {
    write_field(writer, "class", int64_t{d.box.cls});
    write_field(writer, "name", names[d.box.cls]);
    write_field(writer, "score", d.score);
    write_bbox(writer, Detection{0, 0, d.box.x1, d.box.y1, d.box.x2 - d.box.x1, d.box.y2 - d.box.y1});
  });
  writer.EndObject();
}

// ---- detection

struct Detector {
  explicit Detector(const Config& config) : config(config) {
    fuse_batch_norms(*loaded.model);
    for (int c = int(names.size()); c < loaded.model->num_classes; ++c) names.push_back(concat("class ", c));
  }
  // Returns the detections in each frame, in pixels of the frame.
  std::vector<std::vector<ScoredBox>> detect(const std::vector<Frame>& frames);

  const Config& config;
  torch::Device device = parse_device(config.device);
  LoadedModel loaded = load_model(config.weights, config.model, config.preproc, device);
  ImageSize size = input_size(loaded.info, config.size);
  std::vector<std::string> names = class_names(loaded.info, loaded.model->num_classes);
};

std::vector<std::vector<ScoredBox>> Detector::detect(const std::vector<Frame>& frames) {
  const torch::InferenceMode inference;
  const auto n = int64_t(frames.size());
  const Tensor images = torch::empty({n, size.height, size.width, 3}, torch::kByte);
  std::vector<Scale> scales(frames.size());
  parallel_for(n, [&](int64_t i) {
    const auto boxed = letterbox(frames[i].image, {size.width, size.height});  // the same as in evaluation
    boxed.image.copyTo(cv::Mat(size.height, size.width, CV_8UC3, images[i].data_ptr()));
    scales[i] = boxed.scale;
  });
  const Tensor input = preprocess(images.to(device), loaded.info.legacy_preproc);
  const auto rows =
      postprocess(decode(loaded.model(input), size.height, size.width), config.conf, config.nms);
  std::vector<std::vector<ScoredBox>> found;
  for (int64_t i = 0; i < n; ++i) found.push_back(to_image_pixels(rows[i], scales[i]));
  return found;
}

// Returns a copy of the image with its detections.
static Image drawn(const Image& image, const std::vector<ScoredBox>& found,
                   const std::vector<std::string>& names) {
  Image copy = image.clone();
  std::vector<LabelledBox> boxes;
  for (const auto& [box, score] : found) boxes.push_back({box, names[box.cls] + formatted(" %.2f", score)});
  draw_boxes(copy, boxes);
  return copy;
}

// Processes the whole source. json: writer of --json, or null.
static void run(const Config& config, JsonWriter* json) {
  FrameSource source(config.source);
  protect_sources(source, config);
  Detector detector(config);
  const auto& names = detector.names;
  Log log("");  // to the terminal only
  log.line(detector.loaded.report);
  log.line(font_note(names));
  check(!config.show || std::getenv("DISPLAY") || std::getenv("WAYLAND_DISPLAY") ||
            std::getenv("QT_QPA_PLATFORM"),
        "--show: there is no display (DISPLAY is not set); leave --show out, and look at the results in "
        "--save");
  const fs::path folder = config.save;
  std::error_code error;
  fs::create_directories(config.txt ? folder / "labels" : folder, error);
  check(!error, "cannot create ", folder.string(), ": ", error.message(), "; give another --save");
  if (config.txt) {
    std::string lines;
    for (const std::string& name : names) lines += printable(name) + "\n";
    write_file(label_file(folder, "classes.txt"), lines);
  }
  VideoFile video(folder / source.stem, source.fps);
  const int64_t bs = source.live || config.show ? 1 : 8, limit = config.max_images;
  const int64_t all = source.count && limit ? std::min(limit, source.count) : std::max(limit, source.count);
  const auto counted = [&](int64_t n) {
    return concat(n, source.video ? " frame" : " image", n == 1 ? "" : "s");
  };
  const double began = now();
  int64_t done = 0;
  std::vector<int64_t> counts(names.size());  // boxes per class
  std::vector<std::string> unreadable;
  bool quit = false;
  while (!quit && !stop_signal) {
    // The frame count in the header of a video can be wrong, so a video is read until no frame follows.
    std::vector<Frame> frames = source.next(limit ? std::min(bs, limit - done) : bs);
    if (frames.empty()) break;
    done += int64_t(frames.size());
    for (const Frame& frame : frames)
      if (frame.image.empty()) unreadable.push_back(frame.error);
    std::erase_if(frames, [](const Frame& frame) { return frame.image.empty(); });
    if (frames.empty()) continue;
    const auto found = detector.detect(frames);
    std::vector<Image> pictures(frames.size());
    parallel_for(int64_t(frames.size()), [&](int64_t i) {
      pictures[i] = drawn(frames[i].image, found[i], names);
      const std::string file = (folder / drawn_name(frames[i].name)).string();
      check(source.video || save_image(file, pictures[i]), "cannot write ", file,
            "; is the disk full or the folder read-only?");
    });
    for (size_t i = 0; i < frames.size() && !quit; ++i) {
      const Frame& frame = frames[i];
      if (json) write_found(*json, frame, source.video, found[i], names);
      if (config.txt) write_file(label_file(folder, frame.name), yolo_lines(frame.image.size(), found[i]));
      if (source.video) video.add(pictures[i], source.live ? frame.second : 0);
      for (const ScoredBox& d : found[i]) ++counts[d.box.cls];
      if (config.show) quit = !show(pictures[i], source.video ? 1 : all == 1 ? 0 : 500);
    }
    const double rate = double(done) / (now() - began);
    log.progress(concat(all ? concat(done, "/") : "", counted(all ? all : done), "  ", rounded(rate),
                        " per second", all ? "  " + short_time(double(all - done) / rate) + " left" : ""),
                 false);
  }
  video.finish();

  const double seconds = now() - began;
  const int64_t used = done - int64_t(unreadable.size());
  if (!unreadable.empty()) log.line(concat("warning: ", counted(int64_t(unreadable.size())), " skipped:"));
  for (const std::string& line : unreadable) log.line("  " + line);
  check(used > 0 || quit || stop_signal, "--source ", config.source, ": no ",
        source.video ? "frame" : "image", " can be read");
  if (quit || stop_signal)
    log.line(concat("stopped after ", all ? concat(done, " of ") : "", counted(all ? all : done),
                    "; the results so far are kept"));
  log.line(concat(counted(used), " in ", rounded(seconds), " s, ", rounded(double(used) / seconds),
                  " per second; ", source.video ? video.file : "images in " + config.save));
  std::vector<std::string> classes;
  for (const size_t c : classes_by_count(counts))
    if (counts[c] > 0) classes.push_back(concat(counts[c], " ", names[c]));
  log.line("boxes   " + (classes.empty() ? "none" : listed(classes, classes.size())));
}

int main(int argc, char** argv) {
  const int code = run_program([&] {
    Config config;
    config.parse(argc, argv, "detects objects in images and videos", "--source photo.jpg --weights yolox-s");
    config.check_values();
    if (!config.size.empty() || config.was_given("size")) parse_size(config.size);
    keep_freed_memory();
    catch_signals();
    if (config.json.empty()) {
      run(config, nullptr);
    } else {
      write_json(config.json, [&](JsonWriter& writer) {
        writer.StartArray();
        run(config, &writer);
        writer.EndArray();
      });
    }
    check_stdout();
  });
  end_program(code == 0 && stop_signal ? 128 + stop_signal : code);
}
