// SPDX-License-Identifier: Apache-2.0
// What ./demo reads and writes: images, videos, cameras, streams and drawn scenes; the output video, and the
// window of --show.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>
#ifdef YOLOX_VIDEO
#include <opencv2/core/utils/logger.hpp>
#include <opencv2/highgui.hpp>
#include <opencv2/videoio.hpp>
#endif

#include "base/flags.hpp"
#include "base/program.hpp"
#include "base/text.hpp"
#include "base/threads.hpp"
#include "data/dataset.hpp"
#include "data/shapes.hpp"
#include "data/source.hpp"
#include "images/image.hpp"

namespace yolox {

// ---- input

// An image or a video frame.
struct Frame {
  std::string source;  // file, camera or stream
  std::string name;    // name of the output: "1.jpg"; of a video frame: "clip_000012.jpg"
  int64_t number = 0;  // index in the source; frames that were dropped count
  double second = 0;   // of a video frame: time since the first frame, in seconds
  Image image;         // empty if unreadable
  std::string error;   // why the image is unreadable
};

// An open --source.
class FrameSource {
 public:
  // Throws if `given` does not exist, cannot be opened or contains no image.
  explicit FrameSource(const std::string& given);
  // Returns up to n frames; none after the end.
  std::vector<Frame> next(int64_t n);

  std::vector<std::string> files;    // image files
  int64_t count = 0;                 // number of images or frames; 0: unknown
  bool video = false, live = false;  // live: camera or stream, whose frames arrive in real time
  double fps = 25;                   // frames per second
  std::string stem;                  // of a video: name of the output without extension

 private:
  void open_video();
  bool read_video(Frame& frame);
  Frame read_image(int64_t number) const;

  const std::string given;
  int64_t position = 0;  // number of the next frame
  double began = 0;      // time of the first frame of a camera or a stream
#ifdef YOLOX_VIDEO
  cv::VideoCapture capture;
#endif
};

inline FrameSource::FrameSource(const std::string& given) : given(given) {
  combination_check(!given.empty(),
                    "--source is needed: an image, a folder, a video, a camera (0), a URL, or shapes");
  // OpenCV would wait for a pipe, and read a device such as /dev/zero without end.
  const auto status = fs::status(given);
  check(!exists(status) || is_directory(status) || is_regular_file(status) || given.starts_with("/dev/video"),
        "--source ", given,
        " is a pipe or a device; give a file, a folder, a camera (0 or /dev/video0) or a URL");
  if (given == "shapes") {
    count = kShapesVal;
  } else if (is_directory(status)) {
    for (const fs::path& path : listing(given))
      if (has_extension(path, kImages) && !fs::is_directory(path)) files.push_back(path.string());
    std::ranges::sort(files, [](const std::string& a, const std::string& b) {  // 2.jpg before 10.jpg
      return ::strverscmp(a.c_str(), b.c_str()) < 0;
    });
    check(!files.empty(), "--source ", given, " contains no images (.jpg .jpeg .png .bmp .webp .tif .tiff)");
  } else if (has_extension(given, kImages) || (is_regular_file(status) && cv::haveImageReader(given))) {
    check(exists(status), "--source ", given, " does not exist");
    files = {given};
  } else {
    open_video();
  }
  if (!files.empty()) count = int64_t(files.size());
}

#ifdef YOLOX_VIDEO
inline void FrameSource::open_video() {
  cv::utils::logging::setLogLevel(cv::utils::logging::LOG_LEVEL_SILENT);  // the messages below say more
  setenv("OPENCV_FFMPEG_LOGLEVEL", "-8", /*overwrite=*/0);
  const bool number = given.find_first_not_of("0123456789") == std::string::npos && given.size() < 4;
  const bool url = given.find("://") != std::string::npos, device = number || given.starts_with("/dev/");
  check(device || url || fs::exists(given), "--source ", given, " does not exist");
  try {
    video = number ? capture.open(std::stoi(given)) : capture.open(given);
  } catch (const cv::Exception&) {}
  check(video, "--source ", given,
        device ? ": there is no such camera, or another program uses it; ls /dev/video* lists the cameras"
        : url  ? " cannot be opened; is the URL right, and is the stream running?"
               : " is neither an image nor a video that OpenCV can read");
  count = device ? 0 : int64_t(std::max(0.0, capture.get(cv::CAP_PROP_FRAME_COUNT)));
  live = count == 0 && !is_file(given);  // a stream in a file may not have its length
  const double rate = capture.get(cv::CAP_PROP_FPS);
  if (rate > 0 && rate <= 240) fps = rate;
  stem = number ? "camera" + given : fs::path(given.substr(0, given.find('?'))).stem().string();
  if (stem.empty()) stem = "stream";
}

inline bool FrameSource::read_video(Frame& frame) {
  cv::Mat image;
  // A frame of a camera that is there at once has waited while the last one was processed. It is dropped, so
  // that the results do not lag behind.
  for (int dropped = 0;; ++dropped) {
    const double asked = now();
    if (!capture.grab()) return false;
    ++position;
    if (!live || now() - asked > 0.5 / fps || dropped > fps) break;
  }
  if (!capture.retrieve(image) || image.empty()) return false;
  if (began == 0) began = now();
  frame = {given,        stem + formatted("_%06lld.jpg", static_cast<long long>(position - 1)),
           position - 1, live ? now() - began : double(position - 1) / fps,
           image,        ""};
  return true;
}
#else
inline void FrameSource::open_video() {
  fail("--source ", given,
       " is not an image, and this build cannot read videos, because OpenCV's videoio and ",
       "highgui were missing; install libopencv-dev and run ./setup.sh again");
}
inline bool FrameSource::read_video(Frame&) { return false; }
#endif

inline Frame FrameSource::read_image(int64_t number) const {
  const std::string file = files.empty() ? concat("shapes_", number + 1, ".png") : files[number];
  Frame frame{file, fs::path(file).filename().string(), number, 0, {}, ""};
  try {
    frame.image = files.empty() ? draw_shapes(0, 1, number).image : decode_image(read_bytes(file), file);
  } catch (const ImageError& e) {
    frame.error = e.what();
  }
  return frame;
}

inline std::vector<Frame> FrameSource::next(int64_t n) {
  std::vector<Frame> frames;
  if (video) {
    for (Frame frame; int64_t(frames.size()) < n && read_video(frame);) frames.push_back(frame);
    return frames;
  }
  frames.resize(size_t(std::min(n, count - position)));
  parallel_for(int64_t(frames.size()), [&](int64_t i) { frames[i] = read_image(position + i); });
  position += int64_t(frames.size());
  return frames;
}

// ---- output

#ifdef YOLOX_VIDEO
// Output video. The codec is H.264, or MJPEG, which OpenCV itself writes, if this OpenCV has no H.264.
class VideoFile {
 public:
  // path: without extension, because the codec selects .mp4 or .avi.
  VideoFile(const fs::path& path, double fps) : path(path.string()), fps(fps) {}

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
  std::string file;  // path with extension; empty before the first frame

 private:
  bool open(const char* codec, const char* extension) {
    file = path + extension;
    return writer.open(file, cv::VideoWriter::fourcc(codec[0], codec[1], codec[2], codec[3]), fps, size);
  }

  std::string path;
  double fps;
  cv::Size size;
  cv::VideoWriter writer;
  long long frames = 0;
};

// Shows an image in the window of --show for some milliseconds, 0: until a key is pressed. Returns false if
// the user has quit.
inline bool show(const Image& image, int milliseconds) {
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
#else
struct VideoFile {
  VideoFile(const fs::path&, double) {}
  void add(const Image&, double) {}
  void finish() {}
  std::string file;
};
inline bool show(const Image&, int) {
  fail(
      "--show: this build has no window, because OpenCV's highgui was missing; install libopencv-dev and "
      "run ",
      "./setup.sh again");
}
#endif

}  // namespace yolox
