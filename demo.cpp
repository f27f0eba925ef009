// SPDX-License-Identifier: Apache-2.0
// Detects objects in images, videos, cameras and streams. Draws them, and writes them as JSON and as YOLO
// labels.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <opencv2/core/utils/logger.hpp>
#include <opencv2/highgui.hpp>
#include <opencv2/videoio.hpp>
#include <set>
#include <sstream>

#include "base/device.hpp"
#include "base/memory.hpp"
#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "base/threads.hpp"
#include "checkpoint/load.hpp"
#include "data/pictures.hpp"
#include "data/shapes.hpp"
#include "data/source.hpp"
#include "evaluate.hpp"
#include "run/log.hpp"

using namespace yolox;

struct Config : ModelFlags {
  std::string source = flag(source, "Input", "source", "", "SOURCE",
                            "image, folder of images, video, camera index (0), URL (rtsp://..., http://...), "
                            "or shapes = built-in scenes");
  int64_t max_images = flag(max_images, "Input", "max-images", int64_t{0}, "N",
                            "stop after N images or video frames; 0 = off", at_least(0));
  std::string save = flag(save, "Output", "save", "runs/demo", "DIR", "folder of the drawn images or video");
  std::string json = flag(json, "Output", "json", "", "FILE",
                          "write boxes as JSON: x, y, width and height in pixels, class, score");
  bool txt = flag(txt, "Output", "txt", false, "", "write YOLO labels to DIR/labels/NAME.txt");
  bool show =
      flag(show, "Output", "show", false, "", "show results in a window; space: pause, q or Esc: quit");
  double conf = flag(conf, "Inference", "conf", 0.3, "P", "minimum score of a detection", between(0, 1));
  double nms = flag(nms, "Inference", "nms", 0.45, "IOU", "NMS IoU threshold", between(1e-6, 1));
  std::string device = flag(device, "Inference", "device", "auto", "auto|cpu|cuda[:N]", "device to run on");
};

// ---- input

// An image or a video frame.
struct Frame {
  std::string source;      // file, camera or stream
  std::string name;        // name of the output: "1.jpg"; of a video frame: "clip_000012.jpg"
  int64_t number = 0;      // index in the source; frames that were dropped count
  double second = 0;       // of a video frame: time since the first frame, in seconds
  Image image = {};        // empty if unreadable
  std::string error = {};  // why the image is unreadable
  bool narrow = false;     // true: 16 bits with few values, see DeepRange
};

static bool is_url(const std::string& source) { return source.find("://") != std::string::npos; }

// Returns a URL without the query: "http://host/a.jpg?x=1" -> "http://host/a.jpg". A path stays as it is.
static std::string without_query(const std::string& source) {
  return is_url(source) ? source.substr(0, source.find_first_of("?#")) : source;
}

// Returns the bytes of an image at a URL, through curl or wget, as weights/get does. Throws ImageError.
static std::string download(const std::string& url) {
  const std::string word = shell_word(url);
  FILE* pipe = popen(
      concat("if command -v curl >/dev/null; then curl -gfsSL ", word, "; else wget -qO- ", word, "; fi 2>&1")
          .c_str(),
      "re");
  std::string bytes;
  char buffer[1 << 14];
  for (size_t n; pipe && (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) bytes.append(buffer, n);
  if (!pipe || pclose(pipe) != 0) throw ImageError(concat(url, " cannot be downloaded: ", trimmed(bytes)));
  return bytes;
}

static Frame read_frame(const std::string& file, int64_t number, bool drawn) {
  Frame frame{file, fs::path(without_query(file)).filename().string(), number};
  try {
    const std::string bytes = drawn ? "" : is_url(file) ? download(file) : read_bytes(file);
    frame.narrow = deep_range(bytes, file).is_narrow();
    frame.image = drawn ? draw_shapes(0, 1, number).image : decode_image(bytes, file);
  } catch (const ImageError& e) {
    frame.error = e.what();
  }
  return frame;
}

// An open --source.
struct FrameSource {
  const std::string given;           // --source
  std::vector<std::string> files;    // image files or URLs of images; empty for a video
  std::string skipped_note;          // says which entries of a folder are no images
  int64_t count = 0;                 // number of images or frames; 0: unknown
  int64_t position = 0;              // number of the next frame
  bool video = false, live = false;  // live: camera or stream, whose frames arrive in real time
  double fps = 25;                   // frames per second
  std::string stem;                  // of a video: name of the output without extension
  double began = 0;                  // time of the first frame of a camera or a stream
  cv::VideoCapture capture;

  // Throws if `given` does not exist, cannot be opened or contains no image.
  explicit FrameSource(const std::string& source) : given(source) {
    combination_check(!given.empty(),
                      "--source is needed: an image, a folder, a video, a camera (0), a URL, or shapes");
    // OpenCV would wait for a pipe, and read a device such as /dev/zero without end.
    const auto status = fs::status(given);
    check(
        !exists(status) || is_directory(status) || is_regular_file(status) || given.starts_with("/dev/video"),
        "--source ", given,
        " is a pipe or a device; give a file, a folder, a camera (0 or /dev/video0) or a URL");
    if (given == "shapes")
      for (int i = 1; i <= kShapesVal; ++i) files.push_back(concat("shapes_", i, ".png"));
    else if (is_directory(status))
      list_folder();
    else if (has_extension(without_query(given), kImages) || (is_file(given) && cv::haveImageReader(given)))
      files = {given};
    else
      open_video();
    check(files.empty() || given != files[0] || is_url(given) || exists(status), "--source ", given, " ",
          why_missing(given));
    if (!video) count = int64_t(files.size());
  }

  void list_folder() {
    std::error_code error;
    fs::directory_iterator(given, error);
    check(!error, "--source ", given, " cannot be read: ", error.message());
    std::map<std::string, int64_t> others;
    for (const fs::path& path : listing(given)) {
      const bool folder = is_folder(path);
      if (!folder && has_extension(path, kImages))
        files.push_back(path.string());
      else
        ++others[folder                 ? "folder"
                 : path.has_extension() ? lower(path.extension().string())
                                        : "no extension"];
    }
    for (const auto& [kind, n] : others)
      skipped_note += concat(skipped_note.empty() ? "note: skipped in " + given + ": " : ", ", n, " ", kind);
    std::ranges::sort(files, [](const std::string& a, const std::string& b) {  // 2.jpg before 10.jpg
      return ::strverscmp(a.c_str(), b.c_str()) < 0;
    });
    check(!files.empty(), "--source ", given, " contains no images (.jpg .jpeg .png .bmp .webp .tif .tiff)",
          others.count("folder") ? "; give one of its folders" : "");
  }

  void open_video() {
    cv::utils::logging::setLogLevel(cv::utils::logging::LOG_LEVEL_SILENT);  // the messages below say more
    setenv("OPENCV_FFMPEG_LOGLEVEL", "-8", /*overwrite=*/0);
    const bool number = given.find_first_not_of("0123456789") == std::string::npos && given.size() < 4;
    const bool device = number || given.starts_with("/dev/");
    check(device || is_url(given) || is_file(given), "--source ", given, " ", why_missing(given));
    try {
      video = number ? capture.open(std::stoi(given)) : capture.open(given);
    } catch (const cv::Exception&) {}
    check(video, "--source ", given,
          device ? ": there is no such camera, or another program uses it; ls /dev/video* lists the cameras"
          : is_url(given) ? " cannot be opened; is the URL right, and is the stream running?"
                          : " is neither an image nor a video that OpenCV can read");
    count = device ? 0 : int64_t(std::max(0.0, capture.get(cv::CAP_PROP_FRAME_COUNT)));
    live = count == 0 && !is_file(given);  // a stream in a file may not have its length
    const double rate = capture.get(cv::CAP_PROP_FPS);
    if (rate > 0 && rate <= 240) fps = rate;
    stem = number ? "camera" + given : fs::path(without_query(given)).stem().string();
    if (stem.empty()) stem = "stream";
  }

  // Returns up to n frames; none after the end.
  std::vector<Frame> next(int64_t n) {
    std::vector<Frame> frames;
    if (video) {
      for (Frame frame; int64_t(frames.size()) < n && read_video(frame);) frames.push_back(frame);
      return frames;
    }
    frames.resize(size_t(std::min(n, count - position)));
    parallel_for(int64_t(frames.size()), [&](int64_t i) {
      frames[i] = read_frame(files[position + i], position + i, given == "shapes");
    });
    position += int64_t(frames.size());
    return frames;
  }

  bool read_video(Frame& frame) {
    cv::Mat image;
    // A frame of a camera that is there at once has waited while the last one was processed. It is dropped,
    // so that the results do not lag behind. The first frame is kept, because a URL of an image has no other.
    for (int dropped = 0;; ++dropped) {
      const double asked = now();
      if (!capture.grab()) return false;
      ++position;
      if (!live || position == 1 || now() - asked > 0.5 / fps || dropped > fps) break;
    }
    if (!capture.retrieve(image) || image.empty()) return false;
    if (began == 0) began = now();
    const int64_t n = position - 1;
    frame = {given, stem + formatted("_%06lld.jpg", static_cast<long long>(n)), n,
             live ? now() - began : double(n) / fps, image};
    return true;
  }
};

// Output video. The codec is H.264, or MJPEG, which OpenCV itself writes, if this OpenCV has no H.264.
struct VideoFile {
  std::string path;  // without extension, because the codec selects .mp4 or .avi
  double fps;
  std::string file = {};  // path with extension; empty before the first frame

  // Appends a frame, and repeats it until `second`, its time since the first frame.
  void add(const Image& frame, double second) {
    if (!writer.isOpened()) {
      size = frame.size();
      check(open("avc1", ".mp4") || open("MJPG", ".avi"), "cannot write ", path,
            ".mp4; is the folder writable?");
    }
    Image fitting = frame;
    if (frame.size() != size) cv::resize(frame, fitting, size);  // the frame size of a stream can change
    for (const int64_t end = std::max(frames, std::llround(second * fps)) + 1; frames < end; ++frames)
      writer.write(fitting);
  }

  // Closes the file. Throws if frames are missing, because the codec does not report a full disk.
  void finish() {
    if (!writer.isOpened()) return;
    writer.release();
    const auto written = int64_t(cv::VideoCapture(file).get(cv::CAP_PROP_FRAME_COUNT));
    check(written >= frames, "cannot write ", file, ": ", written, " of ", frames,
          " frames were written; is the disk full?");
  }

  bool open(const char* codec, const char* extension) {
    file = path + extension;
    return writer.open(file, cv::VideoWriter::fourcc(codec[0], codec[1], codec[2], codec[3]), fps, size);
  }

  cv::Size size = {};
  cv::VideoWriter writer = {};
  long long frames = 0;
};

// Shows an image in the window of --show for some milliseconds, 0: until a key is pressed. Returns false if
// the user has quit.
static bool show(const Image& image, int milliseconds) {
  static bool open = false;
  if (open && cv::getWindowProperty("yolox", cv::WND_PROP_VISIBLE) < 1) return false;
  open = true;
  cv::namedWindow("yolox", cv::WINDOW_NORMAL | cv::WINDOW_KEEPRATIO);
  cv::imshow("yolox", image);
  int key = milliseconds > 0 ? cv::waitKey(milliseconds) : ' ';
  if (key == ' ')  // paused
    do key = cv::waitKey(50);
    while (key < 0 && !stop_signal && cv::getWindowProperty("yolox", cv::WND_PROP_VISIBLE) >= 1);
  return key != 'q' && key != 27;
}

// ---- output

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
  inputs.insert(inputs.end(), {find_weights_file(config.weights), config.source});
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

// Returns the detections in each frame, in pixels of the frame.
static std::vector<std::vector<ScoredBox>> detect(const std::vector<Frame>& frames, LoadedModel& loaded,
                                                  ImageSize size, const Config& config) {
  const torch::InferenceMode inference;
  const auto n = int64_t(frames.size());
  const Tensor images = torch::empty({n, size.height, size.width, 3}, torch::kByte);
  std::vector<Scale> scales(frames.size());
  parallel_for(n, [&](int64_t i) {
    const auto boxed = letterbox(frames[i].image, {size.width, size.height});  // the same as in evaluation
    boxed.image.copyTo(cv::Mat(size.height, size.width, CV_8UC3, images[i].data_ptr()));
    scales[i] = boxed.scale;
  });
  const torch::Device device = loaded.model->parameters()[0].device();
  const Tensor input = preprocess(images.to(device), loaded.info.legacy_preproc);
  const auto rows =
      postprocess(decode(loaded.model(input), size.height, size.width), config.conf, config.nms);
  std::vector<std::vector<ScoredBox>> found;
  for (int64_t i = 0; i < n; ++i) found.push_back(to_image_pixels(rows[i], scales[i]));
  return found;
}

// Processes the whole source. json: writer of --json.
static void run(const Config& config, JsonWriter& json) {
  FrameSource source(config.source);
  protect_sources(source, config);
  check(!config.show || std::getenv("DISPLAY") || std::getenv("WAYLAND_DISPLAY") ||
            std::getenv("QT_QPA_PLATFORM"),
        "--show: there is no display (DISPLAY is not set); leave --show out, and look at the results in "
        "--save");
  LoadedModel loaded = load_model(config.weights, config.model, config.preproc, parse_device(config.device));
  fuse_batch_norms(*loaded.model);
  const ImageSize size = input_size(loaded.info, config.size);
  std::vector<std::string> names = class_names(loaded.info, loaded.model->num_classes);
  for (int c = int(names.size()); c < loaded.model->num_classes; ++c) names.push_back(concat("class ", c));
  Log log("");  // to the terminal only
  log.line(loaded.report);
  log.line(font_note(names));
  log.line(source.skipped_note);
  const fs::path folder = config.save;
  std::error_code error;
  fs::create_directories(config.txt ? folder / "labels" : folder, error);
  check(!error, "cannot create ", folder.string(), ": ", error.message(), "; give another --save");
  if (config.txt) {
    std::string lines;
    for (const std::string& name : names) lines += printable(name) + "\n";
    write_file(label_file(folder, "classes.txt"), lines);
  }
  VideoFile video{(folder / source.stem).string(), source.fps};
  const int64_t bs = source.live || config.show ? 1 : 8, limit = config.max_images;
  const int64_t all = source.count && limit ? std::min(limit, source.count) : std::max(limit, source.count);
  const auto counted = [&](int64_t n) {
    return concat(n, source.video ? " frame" : " image", n == 1 ? "" : "s");
  };
  const double began = now();
  int64_t done = 0;
  std::vector<int64_t> counts(names.size());  // boxes per class
  std::vector<std::string> unreadable;
  bool quit = false, noted = false;
  while (!quit && !stop_signal) {
    // The frame count in the header of a video can be wrong, so a video is read until no frame follows.
    std::vector<Frame> frames = source.next(limit ? std::min(bs, limit - done) : bs);
    if (frames.empty()) break;
    done += int64_t(frames.size());
    for (const Frame& frame : frames) {
      if (frame.image.empty()) unreadable.push_back(frame.error);
      if (frame.narrow && !std::exchange(noted, true))
        log.line(
            concat("warning: ", frame.source, " uses few of its 16 bits; convert such images to 8 bits"));
    }
    std::erase_if(frames, [](const Frame& frame) { return frame.image.empty(); });
    if (frames.empty()) continue;
    const auto found = detect(frames, loaded, size, config);
    std::vector<Image> pictures(frames.size());
    parallel_for(int64_t(frames.size()), [&](int64_t i) {
      pictures[i] = frames[i].image.clone();
      draw_boxes(pictures[i], labelled_boxes(found[i], names));
      const std::string file = (folder / drawn_name(frames[i].name)).string();
      check(source.video || save_image(file, pictures[i]), "cannot write ", file,
            "; is the disk full or the folder read-only?");
    });
    for (size_t i = 0; i < frames.size() && !quit; ++i) {
      const Frame& frame = frames[i];
      write_found(json, frame, source.video, found[i], names);
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
  const int64_t used = done - int64_t(unreadable.size()), dropped = source.video ? source.position - done : 0;
  if (!unreadable.empty()) log.line(concat("warning: ", counted(int64_t(unreadable.size())), " skipped:"));
  for (const std::string& line : unreadable) log.line("  " + line);
  check(used > 0 || quit || stop_signal, "--source ", config.source, ": no ",
        source.video ? "frame" : "image", " can be read");
  if (quit || stop_signal)
    log.line(concat("stopped after ", all ? concat(done, " of ") : "", counted(all ? all : done),
                    "; the results so far are kept"));
  log.line(concat(counted(used), " in ", rounded(seconds), " s, ", rounded(double(used) / seconds),
                  " per second; ", dropped > 0 ? counted(dropped) + " skipped to keep up; " : "",
                  source.video ? video.file : "images in " + config.save));
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
    keep_freed_memory();
    catch_signals();
    write_json(config.json.empty() ? "/dev/null" : config.json, [&](JsonWriter& json) {
      json.StartArray();
      run(config, json);
      json.EndArray();
    });
    check_stdout();
  });
  end_program(code == 0 && stop_signal ? 128 + stop_signal : code);
}
