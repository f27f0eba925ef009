// SPDX-License-Identifier: Apache-2.0
// Window of demo --show. Shows images one after another. q or Esc quits, space pauses.
#pragma once
#include <string>

#ifdef YOLOX_WINDOW
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <opencv2/highgui.hpp>
#endif

#include "base/error.hpp"
#include "base/program.hpp"
#include "images/image.hpp"

namespace yolox {

#ifdef YOLOX_WINDOW
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
