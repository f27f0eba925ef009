// SPDX-License-Identifier: Apache-2.0
// Image sources of ./demo: image files, videos, cameras, streams and drawn scenes. Also the writer of the
// output video, and the window of --show.
#pragma once
#include <glob.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <opencv2/core/utils/logger.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>
#ifdef YOLOX_VIDEO
#include <opencv2/videoio.hpp>
#endif
#ifdef YOLOX_WINDOW
#include <opencv2/highgui.hpp>
#endif

#include "base/error.hpp"
#include "base/flags.hpp"
#include "base/program.hpp"
#include "data/dataset.hpp"
#include "data/shapes.hpp"
#include "data/source.hpp"
#include "images/image.hpp"

namespace yolox {

// An image or a video frame, and its origin.
struct Frame {
  std::string source;  // file, camera or stream
  std::string name;    // path below the source folder: "cats/1.jpg"; of a video frame: "clip_000012.jpg"
  int64_t number = 0;  // index in the source; dropped frames count
  double second = 0;   // of a video frame: time since the first frame, in seconds
  Image image;         // empty if unreadable
  std::string error;   // why the image is unreadable
};

// An open --source.
struct FrameSource {
  std::vector<std::string> files;       // input files, which must not be overwritten
  std::vector<std::string> names = {};  // as Frame::name
  int64_t count = 0;                    // number of images or frames; 0: unknown
  bool video = false;                   // video file, camera or stream
  bool live = false;                    // camera or stream: frames arrive in real time
  double fps = 0;                       // frames per second
  std::string stem = {};                // of a video: name of the output without extension
  // Reads the image at `position`. Returns false after the last one. Images can be read from several threads.
  // The frames of a video must be read by one thread, in order.
  std::function<bool(int64_t position, Frame& frame)> read = {};
};

// ---- images

// Returns the images in a folder in natural order of their names ("2.jpg" before "10.jpg"). Skips hidden
// files and folders, and the subfolder `without`, which can contain results of another run.
inline std::vector<std::string> images_of_folder(const std::string& folder, bool recursive,
                                                 const std::string& without) {
  std::vector<std::string> files;
  if (recursive)
    files = files_under(folder, kImages);
  else
    for (const fs::path& path : listing(folder))
      if (has_extension(path, kImages) && !fs::is_directory(path)) files.push_back(path.string());
  const auto is_below = [](const std::string& path, const std::string& folder) {
    const auto plain = [](const fs::path& p) { return (fs::current_path() / p).lexically_normal(); };
    const fs::path first = *plain(path).lexically_relative(plain(folder)).begin();
    return first != ".." && first != ".";
  };
  if (is_below(without, folder))
    std::erase_if(files, [&](const std::string& file) { return is_below(file, without); });
  std::sort(files.begin(), files.end(), [](const std::string& a, const std::string& b) {
    return ::strverscmp(a.c_str(), b.c_str()) < 0;
  });
  return files;
}

// Returns the image paths in a text file, one per line, each once. A path that does not exist relative to the
// working directory is taken relative to the folder of the list, if it exists there. Throws if the file is no
// text or larger than kMaxTextFile.
inline std::vector<std::string> images_of_list(const std::string& list) {
  std::vector<std::string> files;
  std::set<fs::path> known;
  std::istringstream in(read_text(list));
  for (std::string line; std::getline(in, line);) {
    while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back()))) line.pop_back();
    if (line.empty()) continue;
    const fs::path beside = fs::path(list).parent_path() / line;
    std::error_code ignored;
    const fs::path file = !fs::exists(line, ignored) && fs::exists(beside, ignored) ? beside : fs::path(line);
    if (known.insert(fs::absolute(file).lexically_normal()).second) files.push_back(file.string());
  }
  return files;
}

// Returns the path of a drawn image in the output folder. Its extension selects the format.
inline std::string drawn_name(const std::string& name) {
  static const std::set<std::string> written = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"};
  return name + (has_extension(name, written) ? "" : ".jpg");
}

// Returns a source of image files. Their names are the paths relative to `folder`; if it is empty, to the
// deepest folder that contains all files.
inline FrameSource image_source(const std::vector<std::string>& files, fs::path folder) {
  std::vector<fs::path> whole;
  for (const auto& file : files) whole.push_back(fs::absolute(file).lexically_normal());
  folder = folder.empty() ? whole[0].parent_path() : fs::absolute(folder).lexically_normal();
  for (const fs::path& file : whole)
    while (std::mismatch(folder.begin(), folder.end(), file.begin(), file.end()).first != folder.end())
      folder = folder.parent_path();
  FrameSource source{files};
  for (const fs::path& file : whole) source.names.push_back(file.lexically_relative(folder).string());
  source.count = int64_t(files.size());
  source.read = [files, names = source.names](int64_t i, Frame& frame) {
    if (i >= int64_t(files.size())) return false;
    frame.source = files[i];
    frame.name = names[i];
    frame.number = i;
    try {
      frame.image = decode_image(read_bytes(files[i]), files[i]);
    } catch (const ImageError& e) {
      frame.error = e.what();
    }
    return true;
  };
  return source;
}

// ---- videos

#ifdef YOLOX_VIDEO
// Newest frame of a camera or a stream. A thread grabs every frame. Frames that arrive while the detector is
// busy are dropped, so that the detector does not lag behind.
class LiveVideo {
 public:
  explicit LiveVideo(cv::VideoCapture opened)
      : video(std::move(opened)), grabber([this] {
          for (cv::Mat frame; !stop && video.read(frame) && !frame.empty(); frame = cv::Mat()) {
            const std::lock_guard lock(mutex);
            if (number < 0) began = now();
            newest = frame;
            second = now() - began;
            ++number;
            new_frame.notify_all();
          }
          stop = true;
        }) {}
  ~LiveVideo() {
    stop = true;
    grabber.join();
  }
  // Waits for a frame newer than the last one returned. Returns false after the end of the stream and after a
  // signal.
  bool read(Frame& frame) {
    std::unique_lock lock(mutex);
    while (number == returned) {
      if (stop || stop_signal) return false;
      new_frame.wait_for(lock, std::chrono::milliseconds(50));
    }
    frame.image = newest;
    frame.number = returned = number;
    frame.second = second;
    return true;
  }

 private:
  cv::VideoCapture video;
  std::mutex mutex;
  std::condition_variable new_frame;
  cv::Mat newest;
  int64_t number = -1, returned = -1;
  double began = 0, second = 0;
  std::atomic<bool> stop{false};
  std::thread grabber;
};

// Opens `given`: a video file, a camera index, a device or a URL. Throws if it cannot be opened.
inline FrameSource video_source(const std::string& given) {
  cv::utils::logging::setLogLevel(cv::utils::logging::LOG_LEVEL_SILENT);  // the messages below say more
  setenv("OPENCV_FFMPEG_LOGLEVEL", "-8", /*overwrite=*/0);
  const bool number = given.find_first_not_of("0123456789") == std::string::npos && given.size() < 4;
  const bool device = number || given.rfind("/dev/", 0) == 0;
  cv::VideoCapture video;
  try {
    if (number)
      video.open(std::stoi(given));
    else
      video.open(given);
  } catch (const cv::Exception&) {}  // isOpened() is false then
  check(video.isOpened(), "--source ", given,
        number ? ": there is no such camera, or another program uses it; ls /dev/video* lists the cameras"
        : given.find("://") != std::string::npos
            ? " cannot be opened; is the URL right, and is the stream running?"
        : device ? " cannot be opened; is the device a camera, and does another program use it?"
                 : " is neither an image nor a video that OpenCV can read");
  FrameSource source{{given}};
  source.video = true;
  source.count = device ? 0 : int64_t(std::max(0.0, video.get(cv::CAP_PROP_FRAME_COUNT)));
  source.live = source.count == 0 && !is_file(given);  // a stream in a file may not have its length
  source.fps = video.get(cv::CAP_PROP_FPS);
  const bool known = source.live ? source.fps >= 1 : source.fps > 0;
  if (!known || source.fps > 240) source.fps = 25;
  source.stem = number ? "camera" + given : fs::path(given.substr(0, given.find('?'))).stem().string();
  if (source.stem.empty()) source.stem = "stream";
  const auto named = [given, stem = source.stem](Frame& frame) {
    frame.source = given;
    frame.name = stem + formatted("_%06lld.jpg", static_cast<long long>(frame.number));
    return true;
  };
  if (source.live) {
    auto live = std::make_shared<LiveVideo>(std::move(video));
    source.read = [=](int64_t, Frame& frame) { return live->read(frame) && named(frame); };
    return source;
  }
  auto reading = std::make_shared<cv::VideoCapture>(std::move(video));
  source.read = [=, fps = source.fps](int64_t position, Frame& frame) {
    cv::Mat image;
    if (!reading->read(image) || image.empty()) return false;
    frame.image = image;
    frame.number = position;
    frame.second = double(position) / fps;
    return named(frame);
  };
  return source;
}

// Output video, written frame by frame. The codec is H.264, or MJPEG, which OpenCV itself writes, if this
// OpenCV has no H.264. The file has a temporary name until finish().
class VideoFile {
 public:
  // `path` has no extension, because the codec selects .mp4 or .avi.
  VideoFile(std::string path, double fps) : path(std::move(path)), fps(fps) {}
  VideoFile(const VideoFile&) = delete;
  ~VideoFile() {  // after an error, so that the frames so far can be played
    try {
      finish();
    } catch (const std::exception&) {}
  }

  // Appends a frame. If `second` is negative, the frame follows the last one. Otherwise `second` is the time
  // of the frame since the start, and the frame is repeated to fill the time up to it.
  void add(const Image& frame, double second) {
    if (!writer.isOpened()) start(frame.size());
    Image fitting = frame;
    if (frame.size() != size) cv::resize(frame, fitting, size);  // the frame size of a stream can change
    const int64_t until =
        second < 0 ? frames + 1 : std::max(frames + 1, int64_t(std::lround(second * fps)) + 1);
    for (; frames < until; ++frames) writer.write(fitting);
  }
  // Closes the file and gives it its name. Throws if the file has fewer frames than were written, because the
  // codec does not report a full disk.
  void finish() {
    if (!writer.isOpened()) return;
    writer.release();
    const auto held = int64_t(cv::VideoCapture(part).get(cv::CAP_PROP_FRAME_COUNT));
    const bool kept = held >= frames && ::rename(part.c_str(), file.c_str()) == 0;
    if (!kept) ::unlink(part.c_str());
    check(kept, "cannot write ", file, ": ", std::clamp<int64_t>(held, 0, frames), " of ", frames,
          " frames were written; is the disk full? An older file of this name is unchanged");
  }
  std::string file;  // path with extension; empty before the first frame
  std::string note;  // for the log, if the codec is not H.264; otherwise empty

 private:
  void start(cv::Size of) {
    size = of;
    if (opened("avc1", ".mp4")) return;
    check(opened("MJPG", ".avi"), "cannot write ", path, ".mp4; is the folder writable?");
    note = concat("note: this OpenCV cannot write H.264; ", file, " is MJPEG, which browsers do not play");
  }
  bool opened(const char* codec, const char* end) {
    file = path + end;
    part = concat(path, ".tmp.", getpid(), end);
    if (writer.open(part, cv::VideoWriter::fourcc(codec[0], codec[1], codec[2], codec[3]), fps, size))
      return true;
    ::unlink(part.c_str());
    return false;
  }

  std::string path, part;
  double fps;
  cv::Size size;
  cv::VideoWriter writer;
  int64_t frames = 0;
};
#else
inline FrameSource video_source(const std::string& given) {
  fail("--source ", given,
       " is not an image, and this build cannot read videos, because OpenCV's videoio was missing; install "
       "libopencv-dev and run ./setup.sh again");
}
struct VideoFile {
  VideoFile(const std::string&, double) {}
  void add(const Image&, double) {}
  void finish() {}
  std::string file, note;
};
#endif

// Opens the source `given`, a value of --source. results: the output folder, which is skipped inside a source
// folder. Throws if `given` does not exist or contains no image.
inline FrameSource open_source(const std::string& given, bool recursive, const std::string& results) {
  combination_check(!given.empty(),
                    "--source is needed: an image, a folder, a video, a camera (0), a URL, or shapes");
  if (given == "shapes") {
    FrameSource source;
    source.count = kShapesVal;
    for (int64_t i = 1; i <= source.count; ++i) source.names.push_back(concat("shapes_", i, ".png"));
    source.read = [names = source.names](int64_t i, Frame& frame) {
      if (i >= int64_t(names.size())) return false;
      frame.source = frame.name = names[i];
      frame.number = i;
      frame.image = draw_shapes(0, 1, i).image;
      return true;
    };
    return source;
  }
  // OpenCV would wait for a pipe, and read a device such as /dev/zero without end.
  const bool is_camera = fs::path(given).lexically_normal().string().rfind("/dev/video", 0) == 0;
  const auto status = fs::status(given);
  check(!exists(status) || is_directory(status) || is_regular_file(status) || is_camera, "--source ", given,
        " is a pipe or a device; give a file, a folder, a camera (0 or /dev/video0) or a URL");
  std::vector<std::string> files;
  if (is_directory(status)) {
    files = images_of_folder(given, recursive, results);
    check(!files.empty(), "--source ", given, " contains no images (.jpg .jpeg .png .bmp .webp .tif .tiff)",
          recursive ? "" : "; --recursive reads its subfolders too");
  } else if (!fs::exists(given) && given.find_first_of("*?[") != std::string::npos &&
             given.find("://") == std::string::npos) {
    glob_t found{};
    ::glob(given.c_str(), 0, nullptr, &found);
    for (size_t i = 0; i < found.gl_pathc; ++i)
      if (has_extension(found.gl_pathv[i], kImages)) files.push_back(found.gl_pathv[i]);
    ::globfree(&found);
    check(!files.empty(), "--source ", given, ": no image matches this pattern");
  } else if (fs::path(given).extension() == ".txt" && fs::is_regular_file(given)) {
    files = images_of_list(given);
    check(!files.empty(), "--source ", given, " lists no images; write one path per line");
  } else if (has_extension(given, kImages) || (fs::is_regular_file(given) && cv::haveImageReader(given))) {
    check(fs::exists(given), "--source ", given, " does not exist");
    files = {given};
  } else {
    const bool camera = given.find_first_not_of("0123456789") == std::string::npos;
    check(camera || given.find("://") != std::string::npos || fs::exists(given), "--source ", given,
          " does not exist");
    return video_source(given);
  }
  return image_source(files, is_directory(status) ? given : "");
}

// ---- the window of --show

#ifdef YOLOX_WINDOW
// Shows images one after another. q or Esc quits, space pauses.
class Window {
 public:
  // Checks that a display exists; show() opens the window. Throws if there is no display. Must be called
  // before other threads start, because the constructor forks.
  explicit Window(const std::string& title) : title(title) {
    // Qt ends the process if there is no display. Therefore a child process tries first.
    const pid_t probe = fork();
    if (probe == 0) {
      if (!freopen("/dev/null", "w", stderr)) _exit(1);
      try {
        cv::namedWindow(title);
        _exit(0);
      } catch (...) {
        _exit(1);
      }
    }
    int status = 1;
    if (probe > 0) waitpid(probe, &status, 0);
    check(status == 0, "--show: there is no display (DISPLAY is ",
          std::getenv("DISPLAY") ? std::getenv("DISPLAY") : "not set",
          "); leave --show out, and look at the results in --save");
  }

  // Shows an image for `seconds`, or until a key is pressed if `seconds` is negative. Returns false if the
  // user has quit, and after a signal.
  bool show(const Image& image, double seconds) {
    if (!open) {
      cv::namedWindow(title, cv::WINDOW_NORMAL | cv::WINDOW_KEEPRATIO);
      const double fit = std::min({1.0, 1280.0 / image.cols, 800.0 / image.rows});
      cv::resizeWindow(title, std::max(64, int(fit * image.cols)), std::max(64, int(fit * image.rows)));
      open = true;
    }
    cv::imshow(title, image);
    const double until = now() + seconds;
    for (bool paused = seconds < 0; !stop_signal;) {
      const double left = until - now();
      const int key = cv::waitKey(paused ? 50 : std::clamp(int(1000 * left), 1, 50)) & 255;
      if (key == 'q' || key == 27 || cv::getWindowProperty(title, cv::WND_PROP_VISIBLE) < 1) return false;
      if (key != 255 && seconds < 0) return true;
      if (key == ' ') paused = !paused;
      if (!paused && now() >= until) return true;
    }
    return false;
  }

 private:
  std::string title;
  bool open = false;
};
#else
class Window {
 public:
  explicit Window(const std::string&) {
    fail(
        "--show: this build has no window, because OpenCV's highgui was missing; install libopencv-dev and "
        "run ./setup.sh again");
  }
  bool show(const Image&, double) { return false; }
};
#endif

}  // namespace yolox
