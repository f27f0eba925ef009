// SPDX-License-Identifier: Apache-2.0
// demo: its sources, its outputs, and how it ends.
#include "programs.hpp"

#include <rapidjson/document.h>
#include <sys/stat.h>

#include <opencv2/videoio.hpp>

#include "data/shapes.hpp"
#include "data/source.hpp"
#include "ddp/launch.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

rapidjson::Document json_of(const std::string& path) {
  rapidjson::Document json;
  json.Parse(contents(path).c_str());
  REQUIRE_MESSAGE(!json.HasParseError(), path);
  REQUIRE(json.IsArray());
  return json;
}

// Returns the boxes of one image in the output of --json as class, score, x, y, w, h.
std::vector<std::array<double, 6>> boxes_of(const rapidjson::Value& image) {
  std::vector<std::array<double, 6>> boxes;
  for (const auto& b : image["boxes"].GetArray())
    boxes.push_back({b["class"].GetDouble(), b["score"].GetDouble(), b["bbox"][0].GetDouble(),
                     b["bbox"][1].GetDouble(), b["bbox"][2].GetDouble(), b["bbox"][3].GetDouble()});
  return boxes;
}

// Writes a video of n generated scenes at 10 frames per second. Returns false if OpenCV cannot write videos.
bool write_video(const std::string& path, int n) {
  cv::VideoWriter video(path, cv::VideoWriter::fourcc('M', 'J', 'P', 'G'), 10, {256, 256});
  if (!video.isOpened()) MESSAGE("this OpenCV writes no videos: skipped");
  for (int i = 0; i < n && video.isOpened(); ++i) {
    cv::Mat frame;
    cv::resize(draw_shapes(0, 0, i).image, frame, {256, 256});
    video.write(frame);
  }
  return video.isOpened();
}

}  // namespace

SHARED_PROGRAM_TEST("demo: detections equal those of eval, in --json and --txt, in natural order") {
  TempDir dir;
  CocoDataset part = read_coco(shared("data/coco_val2017_union/annotations/instances_val2017_union.json"));
  part.images.resize(11);
  fs::create_directories(dir / "photos");
  for (size_t i = 0; i < part.images.size(); ++i) {
    const std::string name = concat("p", i, ".jpg");  // natural order: p2 before p10
    fs::copy(shared("data/coco_val2017_union/val2017/" + part.images[i].file_name), dir / ("photos/" + name));
    part.images[i].file_name = dir / ("photos/" + name);
  }
  write_coco(dir / "part.json", part);
  const std::string weights = " --weights '" + shared("data/weights/yolox_nano_coco_v011_rebuilt.pth") + "'";
  succeed(dir, "eval", "--data part.json --conf 0.3 --nms 0.45 --bs 8 --fuse --save-dt dt.json" + weights);
  const std::string printed =
      succeed(dir, "demo", "--source photos --json 8.json --txt --save out" + weights);
  const auto eight = json_of(dir / "8.json");
  REQUIRE(eight.Size() == 11);
  std::vector<std::array<double, 6>> wanted[11];
  for (const Detection& d : read_detections(dir / "dt.json"))
    for (size_t i = 0; i < 11; ++i)
      for (size_t c = 0; c < part.categories.size(); ++c)
        if (part.images[i].id == d.image_id && part.categories[c].id == d.category_id)
          wanted[i].push_back({double(c), d.score, d.x, d.y, d.w, d.h});
  size_t all = 0;
  for (unsigned i = 0; i < 11; ++i) {
    CAPTURE(i);
    CHECK(eight[i]["image"].GetString() == concat("photos/p", i, ".jpg"));
    CHECK(eight[i]["width"].GetInt() == part.images[i].width);
    const auto here = boxes_of(eight[i]);
    const auto lines = lines_of(contents(dir / concat("out/labels/p", i, ".txt")));
    REQUIRE((here.size() == wanted[i].size() && lines.size() == here.size()));
    for (size_t k = 0; k < here.size(); ++k) {
      for (size_t v = 0; v < 6; ++v) CHECK(here[k][v] == doctest::Approx(wanted[i][k][v]).epsilon(1e-9));
      CHECK(eight[i]["boxes"][unsigned(k)]["name"].GetString() == part.categories[size_t(here[k][0])].name);
      double c, cx, cy, w, h;
      REQUIRE(bool(std::istringstream(lines[k]) >> c >> cx >> cy >> w >> h));
      const double width = part.images[i].width, x1 = std::clamp(here[k][2], 0.0, width),
                   x2 = std::clamp(here[k][2] + here[k][4], 0.0, width);
      CHECK(c == here[k][0]);
      CHECK(cx * width == doctest::Approx((x1 + x2) / 2).epsilon(1e-4));
      CHECK(w * width == doctest::Approx(x2 - x1).epsilon(1e-4));
    }
    all += here.size();
  }
  CHECK(all > 30);
  CHECK(has(printed, "11 images in "));
}

PROGRAM_TEST("demo: odd images are skipped and counted; --txt has class names, and nothing is overwritten") {
  const TempDir& dir = trained().dir;
  write_scenes(dir / "set", 2);
  write_text(dir / "set/train/bad.jpg", "no image");
  write_text(dir / "set/train/photo.HEIC");
  write_text(dir / "set/train/folder/note");
  REQUIRE(mkfifo((dir / "set/train/pipe.jpg").c_str(), 0600) == 0);
  fs::copy(dir / "set/train/shapes_1.png", dir / "set/train/photo.jfif");
  REQUIRE(cv::imwrite(dir / "set/train/deep.png", cv::Mat(48, 64, CV_16U, cv::Scalar(900))));
  const std::string demo = "--weights a/last.pth --conf 0.0001 --source set/train ";
  const std::string printed = succeed(dir, "demo", demo + "--txt --json b.json --save out");
  CHECK(has(printed, "warning: 2 images skipped:\n  set/train/bad.jpg"));
  CHECK(has(printed, "set/train/pipe.jpg is not a regular file"));
  CHECK_HAS(printed, "note: skipped in set/train: 1 .heic, 1 folder\n");
  CHECK_HAS(printed, "warning: set/train/deep.png uses few of its 16 bits");
  CHECK(has(printed, "4 images in "));
  using Entries = std::set<std::string>;
  CHECK(entries_of(dir / "out") ==
        Entries{"deep.png", "labels", "photo.jfif.jpg", "shapes_1.png", "shapes_2.png"});
  CHECK(entries_of(dir / "out/labels") ==
        Entries{"classes.txt", "deep.txt", "photo.txt", "shapes_1.txt", "shapes_2.txt"});
  const cv::Mat in = cv::imread(dir / "set/train/shapes_1.png"), drawn = cv::imread(dir / "out/shapes_1.png");
  REQUIRE(in.size() == drawn.size());
  CHECK(cv::norm(in, drawn, cv::NORM_INF) > 0);
  const std::string found = contents(dir / "b.json");
  CHECK(std::ranges::any_of(shapes_classes(), [&](const std::string& name) {
    return has(found, concat("\"name\":\"", name, "\""));
  }));
  fs::copy(dir / "set/train/shapes_1.png", dir / "set/train/shapes_1.bmp");
  fs::create_directories(dir / "mine/images");
  fs::copy(dir / "set/train/shapes_1.png", dir / "mine/images/x.png");
  write_text(dir / "mine/labels/x.txt", "0 0.5 0.5 0.1 0.1\n");
  for (const auto& [flags, text] :
       {std::pair("--save set/train", "--save would overwrite"),
        {"--source set/train/shapes_1.png --save set/train", "--save would overwrite"},
        {"--txt --save twice", "and another image have the same label file"},
        {"--json set/train/shapes_1.png", "--json would overwrite"},
        {"--source mine/images --txt --save mine", "--txt would overwrite"}})
    check_refusal(dir, "demo", demo + flags, 2, text);
}

PROGRAM_TEST("demo: an image of a web server is read as the file, also if its URL has no extension") {
  const TempDir& dir = trained().dir;
  fs::create_directory(dir / "www");
  fs::copy(dir / "data/train/shapes_1.png", dir / "www/a.png");
  int port = 0;
  close(listen_on_loopback(port));
  const std::string url = concat("http://127.0.0.1:", port), demo = "--weights a/last.pth --conf 0.001 ";
  Process server(dir, Process::Command{concat("python3 -m http.server --directory www ", port)}, "server");
  REQUIRE(server.until([&] { return shell(dir, "curl -sf " + url).code == 0; }));
  succeed(dir, "demo", demo + "--source data/train/shapes_1.png --json file.json --save file");
  succeed(dir, "demo", demo + "--source '" + url + "/a.png?size=1&x' --json url.json --save url");
  const auto of_file = json_of(dir / "file.json"), of_url = json_of(dir / "url.json");
  CHECK((boxes_of(of_file[0]) == boxes_of(of_url[0])));
  CHECK(entries_of(dir / "url") == std::set<std::string>{"a.png"});
  check_refusal(dir, "demo", demo + "--source " + url + "/none.jpg", 1, "no image can be read");
  fs::rename(dir / "www/a.png", dir / "www/snapshot");
  if (cv::VideoCapture(url + "/snapshot").isOpened())
    CHECK(has(succeed(dir, "demo", demo + "--source " + url + "/snapshot --save snapshot"), "1 frame in "));
}

PROGRAM_TEST("demo: the result of a video is a video with the same frames") {
  const TempDir& dir = trained().dir;
  if (!write_video(dir / "clip.avi", 11)) return;
  const std::string printed =
      succeed(dir, "demo", "--source clip.avi --weights a/last.pth --conf 0 --txt --json v.json --save v");
  CHECK(has(printed, "11 frames in "));
  const std::string extension = fs::exists(dir / "v/clip.mp4") ? ".mp4" : ".avi";
  CHECK(has(printed, "clip" + extension));
  cv::VideoCapture video(dir / ("v/clip" + extension));
  CHECK(video.get(cv::CAP_PROP_FPS) == doctest::Approx(10));
  int frames = 0;
  for (cv::Mat frame; video.read(frame);) ++frames;
  CHECK(frames == 11);
  const auto json = json_of(dir / "v.json");
  REQUIRE(json.Size() == 11);
  for (unsigned i = 0; i < 11; ++i) {
    CHECK(json[i]["frame"].GetInt() == int(i));
    CHECK(json[i]["second"].GetDouble() == doctest::Approx(0.1 * i));
    CHECK(fs::exists(dir / concat("v/labels/clip_0000", i < 10 ? "0" : "", i, ".txt")));
  }
  CHECK_HAS(succeed(dir, "demo", "--source clip.avi --weights a/last.pth --max-images 3 --save v3"),
            "3 frames in ");
  const Outcome full = shell(
      dir,
      "bash -c 'ulimit -f 8; exec $YOLOX_PROGRAMS/demo --weights a/last.pth --source clip.avi --save v'");
  CHECK_MESSAGE((full.code == 1 && has(full.err, "cannot write v/clip")), full.err);
}

PROGRAM_TEST("demo: after Ctrl-C the images and the JSON are complete up to that point") {
  const TempDir& dir = trained().dir;
  fs::create_directories(dir / "many");
  for (int i = 0; i < 600; ++i)
    fs::create_hard_link(dir / "data/train/shapes_1.png", dir / concat("many/", i, ".png"));
  Process p(dir, "demo", "--source many --weights a/last.pth --conf 0.5 --json many.json --save stopped");
  REQUIRE(p.until([&] { return fs::exists(dir / "stopped/20.png"); }));
  kill(p.pid, SIGINT);
  CHECK(p.wait() == 128 + SIGINT);
  const size_t done = json_of(dir / "many.json").Size();
  CHECK((done >= 20 && done < 600));
  CHECK(entries_of(dir / "stopped").size() == done);
  CHECK(has(contents(p.out), concat("stopped after ", done, " of 600 images")));
}

PROGRAM_TEST("demo: a source that cannot be read, and a missing display, are errors of one line") {
  const TempDir& dir = trained().dir;
  write_text(dir / "words.mp4", "no video");
  REQUIRE(mkfifo((dir / "clip").c_str(), 0600) == 0);
  fs::create_directory(dir / "folder.jpg");
  for (const auto& [flags, named] :
       {std::pair<std::string, std::string>{"--source 99", "--source 99: there is no such camera"},
        {"--source http://127.0.0.1:9/x", "--source http://127.0.0.1:9/x cannot be opened"},
        {"--source words.mp4", "words.mp4 is neither an image nor a video"},
        {"--source nowhere.mp4", "nowhere.mp4 does not exist"},
        {"--source clip", "--source clip is a pipe or a device"},
        {"--source /dev/zero", "--source /dev/zero is a pipe or a device"},
        {"--source folder.jpg", "--source folder.jpg contains no images"},
        {"--source data/train --show", "--show: there is no display"}}) {
    const std::string demo = "timeout 60 $YOLOX_PROGRAMS/demo --weights a/last.pth " + flags;
    const Outcome o = shell(dir, "env -u DISPLAY -u WAYLAND_DISPLAY " + demo);
    CHECK_MESSAGE((o.code == 1 || o.code == 2), o.out);
    CHECK_MESSAGE(has(o.err, named), o.err);
    CHECK_MESSAGE(lines_of(o.err).size() == 1, o.err);
  }
  if (!write_video(dir / "shown.avi", 3)) return;
  // Qt has a platform that needs no display.
  const Outcome o = shell(dir,
                          "QT_QPA_PLATFORM=offscreen $YOLOX_PROGRAMS/demo --weights a/last.pth --source "
                          "shown.avi --show --save shown");
  CHECK_MESSAGE(has(o.out, "3 frames in "), o.out << o.err);
}
