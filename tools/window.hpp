// A window on the desktop that shows pictures one after another: q or Esc ends, space pauses.
#pragma once
#include <string>

#ifdef YOLOX_WINDOW
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <opencv2/highgui.hpp>
#endif

#include "base/error.hpp"
#include "images/image.hpp"
#include "run/log.hpp"

namespace yolox {

#ifdef YOLOX_WINDOW
class Window {
 public:
  // To be made before there are other threads. Throws where there is no display.
  explicit Window(const std::string& title) : title(title) {
    // Where there is no display Qt ends the process that asks; so another one asks first.
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
    check(status == 0, "--show: there is no display to show on (DISPLAY is ",
          std::getenv("DISPLAY") ? std::getenv("DISPLAY") : "not set",
          "); leave it out, the results go to --save");
  }

  // Shows a picture for `seconds`, until a key is pressed where they are negative. False: the user has ended
  // it, or a signal.
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
        "--show: this build has no window: OpenCV's highgui was not there; install libopencv-dev and run "
        "./setup.sh again");
  }
  bool show(const Image&, double) { return false; }
};
#endif

}  // namespace yolox
