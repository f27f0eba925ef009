// SPDX-License-Identifier: Apache-2.0
// tools/ contains the programs besides training and evaluation: demo (detection in images and videos), export
// (ONNX and TorchScript files), check (a report on a data set) and pack (a data set as one LMDB file). This
// file is ./demo.
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <iomanip>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/device.hpp"
#include "base/flags.hpp"
#include "base/limit_spinning.hpp"
#include "base/printable.hpp"
#include "base/threads.hpp"
#include "data/frames.hpp"
#include "data/pictures.hpp"
#include "data/source.hpp"
#include "evaluate.hpp"
#include "images/font.hpp"
#include "run/log.hpp"

using namespace yolox;

struct Config : Flags {
  std::string source = flag(source, "Input", "source", "", "SOURCE",
                            "image, folder, pattern ('a/*.jpg'), list of images (.txt), video, camera index "
                            "(0), URL (rtsp://..., http://...), or shapes = built-in scenes");
  bool recursive = flag(recursive, "Input", "recursive", false, "", "read the subfolders of the folder too");
  std::string weights =
      flag(weights, "Input", "weights", "", "FILE",
           "checkpoint (ours or official), or name of a model that weights/get has downloaded");
  int64_t max_images = flag(max_images, "Input", "max-images", int64_t{0}, "N",
                            "stop after N images or video frames; 0 = off", at_least(0));
  std::string save = flag(save, "Output", "save", "runs/demo", "DIR", "output folder");
  bool draw = flag(draw, "Output", "draw", true, "", "do not write images and videos");
  std::string json = flag(json, "Output", "json", "", "FILE",
                          "write boxes as JSON: x, y, width and height in pixels, class, score");
  bool txt = flag(txt, "Output", "txt", false, "", "write YOLO labels to DIR/labels/NAME.txt");
  bool crop = flag(crop, "Output", "crop", false, "", "write each detection to DIR/crops/CLASS/NAME_I.jpg");
  bool show =
      flag(show, "Output", "show", false, "", "show results in a window; space: pause, q or Esc: quit");
  std::string model = flag(model, "Inference", "model", "", "NAME", model_names() + " [from the checkpoint]");
  std::string size =
      flag(size, "Inference", "size", "", "N|HxW", "input size in pixels [from the checkpoint or the model]");
  std::string classes = flag(classes, "Inference", "classes", "", "NAME,...",
                             "only these classes, by name or number from 0 [all]");
  double conf = flag(conf, "Inference", "conf", 0.3, "P", "minimum score of a detection", between(0, 1));
  double nms = flag(nms, "Inference", "nms", 0.45, "IOU", "NMS IoU threshold", between(1e-6, 1));
  int bs = flag_auto(bs, "Inference", "bs", 0, "N|auto",
                     "batch size; auto = 1 for a camera, a stream or --show, otherwise 8", at_least(0));
  int workers = flag_auto(workers, "Inference", "workers", 0, "N|auto",
                          "threads that read images, and as many that draw and write; auto = cores, up to 16",
                          between(0, 256));
  std::string preproc = flag(preproc, "Inference", "preproc", "auto", "auto|bgr|imagenet|legacy",
                             "pixel format: bgr = BGR 0..255; imagenet, legacy = RGB, mean/std of ImageNet, "
                             "as in YOLOX 0.1.0; auto = from the checkpoint");
  std::string device = flag(device, "Inference", "device", "auto", "auto|cpu|cuda[:N]", "device to run on");
};

static void check_config(const Config& config) {
  config.check_values();
  if (!config.size.empty() || config.was_given("size")) parse_size(config.size);
}

static void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  check(!error, "cannot create ", folder.string(), ": ", error.message(), "; give another --save");
}

// Returns the classes of --classes, empty for all. Throws UsageError if one is unknown.
static std::set<int> wanted_classes(const std::string& text, const std::vector<std::string>& names) {
  std::set<int> wanted;
  for (const std::string& word : split_list(text)) {
    const auto name = std::find(names.begin(), names.end(), word);
    char* end;
    const long number = std::strtol(word.c_str(), &end, 10);
    const bool is_number = *end == 0 && number >= 0 && number < long(names.size());
    usage_check(name != names.end() || is_number, "--classes ", word,
                ": the model has no such class; it has ", listed(names, 80));
    wanted.insert(name != names.end() ? int(name - names.begin()) : int(number));
  }
  return wanted;
}

// Clips the box of a detection to the image.
static Box clipped(const Box& b, cv::Size image) {
  const auto in = [](double v, int side) { return std::clamp(v, 0.0, double(side)); };
  return {in(b.x1, image.width), in(b.y1, image.height), in(b.x2, image.width), in(b.y2, image.height),
          b.cls};
}

// The part of an image that shows a detection, and the path of its file.
struct Crop {
  fs::path path;
  Image image;
};

// Returns copies of the detected parts. stem: beginning of their names.
static std::vector<Crop> crops_of(const fs::path& folder, const std::string& stem, const Image& image,
                                  const std::vector<ScoredBox>& found,
                                  const std::vector<std::string>& names) {
  std::vector<Crop> crops;
  for (size_t i = 0; i < found.size(); ++i) {
    const Box b = clipped(found[i].box, image.size());
    if (!has_area(b)) continue;
    const cv::Rect part({int(std::floor(b.x1)), int(std::floor(b.y1))},
                        cv::Point(int(std::ceil(b.x2)), int(std::ceil(b.y2))));
    std::string of_class = names[b.cls];
    std::replace(of_class.begin(), of_class.end(), '/', '_');  // names are untrusted
    if (of_class.find_first_not_of('.') == std::string::npos) of_class = concat("class ", b.cls);
    const fs::path path = folder / "crops" / of_class / stem;
    crops.push_back({concat(path.string(), "_", i, ".jpg"), Image(image(part).clone())});
  }
  return crops;
}

static void draw_found(Image& image, const std::vector<ScoredBox>& found,
                       const std::vector<std::string>& names) {
  std::vector<LabelledBox> boxes;
  for (const ScoredBox& d : found)
    boxes.push_back({d.box, concat(names[d.box.cls], " ", std::fixed, std::setprecision(2), d.score)});
  draw_boxes(image, boxes, LabelStyle::all);
}

// Writes one image of the --json file:
//         {"image": "clip.mp4", "frame": 7, "second": 0.28, "width": 640, "height": 480, "boxes":
//          [{"class": 16, "name": "dog", "score": 0.93, "bbox": [132.1, 222.6, 178.2, 320.4]}, ...]}
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

// Returns the lines of a YOLO label file, one per box: class, centre x, centre y, width and height as
// fractions of the image. Boxes are clipped to the image.
static std::string yolo_lines(cv::Size size, const std::vector<ScoredBox>& found) {
  std::ostringstream lines;
  for (const ScoredBox& d : found) {
    const Box b = clipped(d.box, size);
    if (has_area(b))
      lines << b.cls << " " << (b.x1 + b.x2) / 2 / size.width << " " << (b.y1 + b.y2) / 2 / size.height << " "
            << (b.x2 - b.x1) / size.width << " " << (b.y2 - b.y1) / size.height << "\n";
  }
  return lines.str();
}

// Returns the path of a label file in the folder "labels", without extension: the part of the name below
// "images".
static fs::path label_stem(const std::string& name) {
  const size_t images = ("/" + name).rfind("/images/");
  return fs::path(images == name.npos ? name : name.substr(images + 7)).replace_extension();
}

// Throws UsageError if an output file would overwrite an input, or if two images have the same label file.
static void protect_sources(const FrameSource& source, const Config& config) {
  protect_inputs("--json", config.json, {config.weights, config.source});
  struct stat s;
  std::set<std::pair<dev_t, ino_t>> inputs;
  const auto add = [&](const std::string& file) {
    if (::stat(file.c_str(), &s) == 0) inputs.insert({s.st_dev, s.st_ino});
  };
  for (const auto& file : source.files) {
    add(file);
    if (config.txt) add(yolo_label_file(file));
  }
  const auto protect = [&](const char* flag, const fs::path& result) {
    usage_check(::stat(result.c_str(), &s) != 0 || !inputs.count({s.st_dev, s.st_ino}), flag,
                " would overwrite the source ", result.string(), "; choose another output folder or file");
  };
  if (!config.json.empty()) protect("--json", config.json);
  const fs::path folder = config.save;
  std::set<fs::path> labels = {"classes"};  // the file with the class names
  for (const auto& name : source.names) {
    if (config.draw) protect("--save", folder / drawn_name(name));
    if (!config.txt) continue;
    const fs::path stem = label_stem(name);
    protect("--txt", folder / "labels" / (stem.string() + ".txt"));
    usage_check(labels.insert(stem).second, "--txt: the label file of ", name, " would be ", stem.string(),
                ".txt, which is that of another image, or of the class names; rename the image");
  }
  if (config.draw && source.video)
    for (const char* end : {".mp4", ".avi"}) protect("--save", folder / (source.stem + end));
}

// One run of ./demo. Loader threads read and letterbox images, the calling thread runs the network and NMS,
// and writer threads draw and save.
class Demo {
 public:
  explicit Demo(const Config& config);
  void run();

 private:
  Item load(int64_t position, Image& canvas);
  void run_with_json();
  void detect(JsonWriter* json);
  // Runs a task on a thread of its own: after the last one if it is a frame of a video. Rethrows the error of
  // an earlier task.
  void write_later(std::function<void()> task);
  void output(Frame& frame, const std::vector<ScoredBox>& found, JsonWriter* json);
  void print_progress();
  void print_end(double seconds);
  std::string counted(int64_t n) const {
    return concat(n, source.video ? " frame" : " image", n == 1 ? "" : "s");
  }

  const Config& config;
  const fs::path folder = config.save;
  std::optional<Window> window;
  FrameSource source;
  torch::Device device = torch::kCPU;
  LoadedModel loaded;
  ImageSize size;
  std::vector<std::string> names;   // class names
  std::set<int> wanted;             // --classes; empty: all
  std::set<fs::path> shared_stems;  // names without extension that several images have
  int64_t all = 0;                  // number of images to process; 0: unknown
  Log log{""};                      // to the terminal only

  std::mutex mutex;
  std::map<int64_t, Frame> frames;  // original images by position, kept until their boxes are known
  std::optional<VideoFile> video;

  double began = 0;
  int64_t done = 0;
  bool user_quit = false;         // the user has quit in the window
  bool json_consistent = true;    // false while an image is being written to the JSON file
  std::map<int, int64_t> counts;  // boxes per class
  std::vector<std::string> unreadable;
  size_t most_writing = 1;
  std::deque<std::shared_future<void>> writing;  // the oldest first; last, because it uses the other members
};

Demo::Demo(const Config& given) : config(given) {
  if (config.show) window.emplace("yolox");  // before other threads start, because Window forks
  catch_signals();
  source = open_source(config.source, config.recursive, config.save);
  protect_sources(source, config);
  all = source.count && config.max_images ? std::min(config.max_images, source.count)
                                          : std::max(config.max_images, source.count);
  device = parse_device(config.device);
  loaded = load_model(config.weights, config.model, config.preproc, device);
  if (!loaded.report.empty()) log.line(loaded.report);
  fuse_batch_norms(*loaded.model);
  size = input_size(loaded.info, config.size);
  std::set<fs::path> stems;
  for (const std::string& name : source.names)
    if (const fs::path stem = fs::path(name).replace_extension(); !stems.insert(stem).second)
      shared_stems.insert(stem);
  names = class_names(loaded.info, loaded.model->num_classes);
  for (int c = int(names.size()); c < loaded.model->num_classes; ++c) names.push_back(concat("class ", c));
  wanted = wanted_classes(config.classes, names);
  if (const auto note = config.draw || config.show ? font_note(names) : ""; !note.empty()) log.line(note);
  if (config.draw || config.txt || config.crop) make_folder(folder);
  if (config.txt) {
    make_folder(folder / "labels");
    std::string lines;
    for (const std::string& name : names) lines += printable(name) + "\n";
    const std::string list = (folder / "labels/classes.txt").string();
    std::string there;
    const bool known = read_all(list, there).empty();
    std::erase(there, '\r');
    usage_check(
        !known || there == lines || there + "\n" == lines, "--txt: ", list,
        " has other classes than the model, and labels beside it would change; choose another --save");
    check(replace_file(list, lines), "cannot write ", list, "; check permissions and disk space");
  }
  video.emplace((folder / source.stem).string(), source.fps);
}

void Demo::run() {
  began = now();
  if (config.json.empty())
    detect(nullptr);
  else
    run_with_json();
  print_end(now() - began);
}

// Runs detection and writes --json. After an error the JSON file is closed, so that the results so far are
// kept, and the error is thrown again. An error within the entry of an image discards the file.
void Demo::run_with_json() {
  std::exception_ptr failed;
  write_json(config.json, [&](JsonWriter& writer) {
    writer.StartArray();
    try {
      detect(&writer);
    } catch (...) {
      if (!json_consistent) throw;
      failed = std::current_exception();
    }
    writer.EndArray();
  });
  if (failed) std::rethrow_exception(failed);
}

// Reads the image at `position` and letterboxes it into `canvas`, which becomes grey if the image cannot be
// read. Returns an empty Item after the end of the source. Called by the loader threads.
Item Demo::load(int64_t position, Image& canvas) {
  Frame frame;
  if (!source.read(position, frame)) return {};
  Scale scale{1, 1};
  if (frame.image.empty()) {
    canvas.setTo(cv::Scalar::all(border_grey));
  } else {
    const auto boxed = letterbox(frame.image, canvas.size());  // the same as in evaluation
    boxed.image.copyTo(canvas);
    scale = boxed.scale;
  }
  const std::lock_guard lock(mutex);
  frames.emplace(position, std::move(frame));
  return {{}, position, scale};
}

// Runs detection batch by batch, until the source ends, the user quits or a signal arrives.
void Demo::detect(JsonWriter* json) {
  const bool one_by_one = source.live || config.show;
  const int bs = config.bs ? config.bs : one_by_one ? 1 : 8;
  // The frame count in the header of a video can be wrong, so a video is read until no frame follows.
  const int64_t end = !source.video       ? all
                      : config.max_images ? config.max_images
                                          : std::numeric_limits<int64_t>::max();
  const int threads = config.workers > 0 ? config.workers : std::min(usable_cores(), 16);
  Loader loader([&](int64_t position, Image& canvas) { return load(position, canvas); }, 0, end, bs,
                {size.width, size.height}, source.video ? 1 : threads, device.is_cuda(), 0,
                /*ahead=*/one_by_one ? 1 : 2);
  DeviceLoader batches(loader, device);
  most_writing = size_t(threads);
  const torch::InferenceMode inference;
  for (bool more = true; more && !user_quit && !stop_signal && !batches.done();) {
    const Batch batch = batches.next();
    int64_t n = 0;
    while (n < int64_t(batch.indices.size()) && batch.indices[n] >= 0) ++n;
    more = n == int64_t(batch.indices.size());  // an incomplete batch is the last one
    if (n == 0) break;
    const Tensor input = preprocess(batch.images.slice(0, 0, n), loaded.info.legacy_preproc);
    const auto rows =
        postprocess(decode(loaded.model(input), size.height, size.width), config.conf, config.nms);
    for (int64_t i = 0; i < n && !user_quit; ++i) {
      std::unique_lock lock(mutex);
      Frame frame = std::move(frames.extract(batch.indices[i]).mapped());
      lock.unlock();
      ++done;
      if (frame.image.empty()) {
        unreadable.push_back(frame.error);
        continue;
      }
      auto found = to_image_pixels(rows[i], batch.scales[i]);
      std::erase_if(found, [&](const ScoredBox& d) { return !wanted.empty() && !wanted.count(d.box.cls); });
      output(frame, found, json);
    }
    print_progress();
  }
  for (const auto& written : writing) written.get();
  video->finish();
}

void Demo::write_later(std::function<void()> task) {
  if (writing.size() == most_writing) {
    writing.front().get();
    writing.pop_front();
  }
  const bool waits = source.video && !writing.empty();
  auto run = [before = waits ? writing.back() : std::shared_future<void>(),
              task = std::move(task)]() mutable {
    if (before.valid()) std::exchange(before, {}).get();
    std::exchange(task, nullptr)();  // its images are freed at the end of this line
  };
  try {
    writing.push_back(std::async(std::launch::async, std::move(run)));
  } catch (const std::system_error& e) {
    fail("cannot start a thread (", e.what(), "); give fewer --workers");
  }
}

// Writes the detections of one image to --json and --txt, shows the image, and queues it for drawing and
// saving.
void Demo::output(Frame& frame, const std::vector<ScoredBox>& found, JsonWriter* json) {
  const fs::path result = folder / drawn_name(frame.name);
  if (json) {
    json_consistent = false;
    write_found(*json, frame, source.video, found, names);
    json_consistent = true;
  }
  if (config.txt) {
    const fs::path labels = folder / "labels" / (label_stem(frame.name).string() + ".txt");
    make_folder(labels.parent_path());
    check(replace_file(labels.string(), yolo_lines(frame.image.size(), found)), "cannot write ",
          labels.string(), "; is the disk full or the folder read-only?");
  }
  std::map<std::string, int64_t> here;
  for (const ScoredBox& d : found) {
    ++here[names[d.box.cls]];
    ++counts[d.box.cls];
  }
  if (!source.video && all <= 20) {
    std::vector<std::string> objects;
    for (const auto& [name, n] : here) objects.push_back(concat(n, " ", name));
    log.line(printable(concat(config.draw ? result.string() : frame.source, ": ",
                              here.empty() ? "no detections" : listed(objects, objects.size()))));
  }
  const auto write = [this](const fs::path& path, const Image& image) {
    make_folder(path.parent_path());
    check(save_image(path.string(), image), "cannot write ", path.string(),
          "; is the disk full or the folder read-only?");
  };
  if (config.crop && !found.empty()) {
    fs::path stem = fs::path(frame.name).replace_extension();
    if (shared_stems.count(stem)) stem = frame.name;
    write_later([write, crops = crops_of(folder, stem.string(), frame.image, found, names)] {
      for (const Crop& crop : crops) write(crop.path, crop.image);
    });
  }
  if (window) {
    draw_found(frame.image, found, names);
    user_quit = !window->show(frame.image, source.video ? 0 : all == 1 ? -1 : 0.5);
  }
  if (!config.draw) return;
  write_later([this, write, frame, found, result]() mutable {
    if (!window) draw_found(frame.image, found, names);
    if (source.video) return video->add(frame.image, source.live ? frame.second : -1);
    write(result, frame.image);
  });
}

void Demo::print_progress() {
  if (all <= 20 && !source.video) return;
  const double rate = double(done) / (now() - began);
  log.progress(concat(all ? concat(done, "/") : "", counted(all ? all : done), "  ", rounded(rate),
                      " per second", all ? "  " + short_time(double(all - done) / rate) + " left" : ""),
               false);
}

void Demo::print_end(double seconds) {
  if (!unreadable.empty()) log.line(concat("warning: ", counted(int64_t(unreadable.size())), " skipped:"));
  for (size_t i = 0; i < std::min<size_t>(unreadable.size(), 20); ++i) log.line("  " + unreadable[i]);
  if (unreadable.size() > 20) log.line(concat("  and ", unreadable.size() - 20, " more"));
  const int64_t used = done - int64_t(unreadable.size());
  check(used > 0 || user_quit || stop_signal, "--source ", config.source, ": ",
        source.video ? "no frame can be read" : "no image can be read");
  if (user_quit || stop_signal)
    log.line(concat("stopped after ", all ? concat(done, " of ") : "", counted(all ? all : done),
                    "; the results so far are kept"));
  else if (double(done) < 0.95 * double(all))
    log.line(concat("warning: ", config.source, " ends after ", done, " of ", counted(all),
                    "; is the file damaged?"));
  if (!video->note.empty()) log.line(video->note);
  log.line(concat(counted(used), " in ", rounded(seconds), " s, ", rounded(double(used) / seconds),
                  " per second",
                  !config.draw   ? ""
                  : source.video ? "; " + video->file
                                 : "; images in " + config.save));
  std::vector<std::pair<int64_t, int>> order;
  int64_t boxes = 0;
  for (const auto& [c, n] : counts) {
    order.emplace_back(-n, c);
    boxes += n;
  }
  std::sort(order.begin(), order.end());
  std::string line = concat("boxes   ", boxes);
  for (const auto& [n, c] : order)
    line += concat(n == order[0].first && c == order[0].second ? ": " : ", ", -n, " ", names[c]);
  log.line(line);
}

int main(int argc, char** argv) {
  const int code = run_program([&] {
    Config config;
    config.parse(argc, argv, "detects objects in images and videos", "--source photo.jpg --weights yolox-s");
    check_config(config);
    keep_freed_memory();
    Demo(config).run();
    check_stdout();
  });
  end_program(code == 0 && stop_signal ? 128 + stop_signal : code);
}
