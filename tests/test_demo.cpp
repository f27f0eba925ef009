// SPDX-License-Identifier: Apache-2.0
// demo: its sources, its outputs, and how it ends.
#include "programs.hpp"

#include <rapidjson/document.h>
#include <sys/stat.h>

#include "data/frames.hpp"
#include "data/pictures.hpp"
#include "data/source.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

const std::string& official_weights() {
  static const std::string flags =
      " --weights '" + shared("data/weights/yolox_nano_coco_v011_rebuilt.pth") + "' ";
  return flags;
}

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
bool write_video(const std::string& path, int n, double fps = 10) {
  cv::VideoWriter video(path, cv::VideoWriter::fourcc('M', 'J', 'P', 'G'), fps, {256, 256});
  if (!video.isOpened()) MESSAGE("this OpenCV writes no videos: skipped");
  for (int i = 0; i < n && video.isOpened(); ++i) {
    cv::Mat frame;
    cv::resize(draw_shapes(0, 0, i).image, frame, {256, 256});
    video.write(frame);
  }
  return video.isOpened();
}

// Returns the number of frames that can be decoded from a video.
int frames_in(const std::string& path) {
  cv::VideoCapture video(path);
  int n = 0;
  for (cv::Mat frame; video.read(frame);) ++n;
  return n;
}

std::vector<std::string> files_in(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& e : fs::recursive_directory_iterator(folder))
    if (e.is_regular_file()) files.push_back(fs::relative(e.path(), folder).string());
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

SHARED_PROGRAM_TEST(
    "demo: detections equal those of eval, with batches of 1 and 8, in --json and --txt, sorted by file "
    "name") {
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
  succeed(dir, "eval",
          "--data part.json --conf 0.3 --nms 0.45 --bs 8 --fuse --save-dt dt.json --report ''" +
              official_weights());
  const std::string printed =
      succeed(dir, "demo", "--source photos --bs 8 --json 8.json --txt --save out" + official_weights());
  CHECK(has(
      succeed(dir, "demo", "--source photos --bs 1 --json 1.json --no-draw --save none" + official_weights()),
      "photos/p10.jpg: "));
  CHECK_FALSE(fs::exists(dir / "none"));
  const auto eight = json_of(dir / "8.json"), one = json_of(dir / "1.json");
  REQUIRE(eight.Size() == 11);
  REQUIRE(one.Size() == 11);
  std::vector<std::array<double, 6>> wanted[11];
  for (const Detection& d : read_detections(dir / "dt.json"))
    for (size_t i = 0; i < 11; ++i)
      if (part.images[i].id == d.image_id)
        for (size_t c = 0; c < part.categories.size(); ++c)
          if (part.categories[c].id == d.category_id)
            wanted[i].push_back({double(c), d.score, d.x, d.y, d.w, d.h});
  int64_t all = 0;
  for (unsigned i = 0; i < 11; ++i) {
    CAPTURE(i);
    CHECK(eight[i]["image"].GetString() == concat("photos/p", i, ".jpg"));
    CHECK(eight[i]["width"].GetInt() == part.images[i].width);
    CHECK(eight[i]["height"].GetInt() == part.images[i].height);
    const auto here = boxes_of(eight[i]), single = boxes_of(one[i]);
    REQUIRE(here.size() == wanted[i].size());
    REQUIRE(single.size() == here.size());
    const auto lines = lines_of(contents(dir / concat("out/labels/p", i, ".txt")));
    size_t shown = 0;
    for (size_t k = 0; k < here.size(); ++k) {
      for (size_t v = 0; v < 6; ++v) {
        CHECK(here[k][v] == doctest::Approx(wanted[i][k][v]).epsilon(1e-9));
        CHECK(std::abs(here[k][v] - single[k][v]) < 0.02);
      }
      CHECK(eight[i]["boxes"][unsigned(k)]["name"].GetString() == part.categories[size_t(here[k][0])].name);
      REQUIRE(shown < lines.size());
      std::istringstream line(lines[shown++]);
      double c, cx, cy, w, h;
      REQUIRE(bool(line >> c >> cx >> cy >> w >> h));
      const double x1 = std::clamp(here[k][2], 0.0, double(part.images[i].width)),
                   x2 = std::clamp(here[k][2] + here[k][4], 0.0, double(part.images[i].width));
      CHECK(c == here[k][0]);
      CHECK(cx * part.images[i].width == doctest::Approx((x1 + x2) / 2).epsilon(1e-4));
      CHECK(w * part.images[i].width == doctest::Approx(x2 - x1).epsilon(1e-4));
      ++all;
    }
  }
  CHECK(all > 30);
  CHECK(has(printed, concat("boxes   ", all, ": ")));
  CHECK(has(printed, "11 images in "));
  size_t at = 0;  // position in the output; the images are in natural order
  for (const char* name : {"p0.jpg:", "p1.jpg:", "p2.jpg:", "p9.jpg:", "p10.jpg:"}) {
    const size_t found = printed.find(name, at);
    CHECK_MESSAGE(found != std::string::npos, name);
    at = std::min(found, printed.size());
  }
}

PROGRAM_TEST(
    "demo: nested folders, patterns and lists are sources; unreadable images are counted and listed") {
  const TempDir& dir = trained().dir;
  write_scenes(dir / "tree/a", 2);
  fs::create_directories(dir / "tree/b");
  fs::copy(dir / "tree/a/train/shapes_1.png", dir / "tree/b/shapes_1.png");
  write_text(dir / "tree/b/bad.jpg", "no image");
  const std::string demo = "--weights a/last.pth --conf 0.5 ";
  check_refusal(dir, "demo", demo + "--source tree", 1, "--recursive");
  const std::string deep = succeed(dir, "demo", demo + "--source tree --recursive --save deep");
  CHECK(has(deep, "warning: 1 image skipped:\n  tree/b/bad.jpg"));
  CHECK(has(deep, "3 images in "));
  const std::vector<std::string> all = {"a/train/shapes_1.png", "a/train/shapes_2.png", "b/shapes_1.png"};
  CHECK(files_in(dir / "deep") == all);
  // The results of the previous run are not read as a source.
  succeed(dir, "demo", demo + "--source tree --recursive --save tree/out");
  CHECK(has(succeed(dir, "demo", demo + "--source tree --recursive --save tree/out"), "3 images in "));
  CHECK(has(succeed(dir, "demo", demo + "--source 'tree/a/train/*_2.png' --save pattern"), "1 image in "));
  CHECK(files_in(dir / "pattern") == std::vector<std::string>{"shapes_2.png"});
  CHECK(has(succeed(dir, "demo", demo + "--source pattern --save ."), "1 image in "));
  write_text(dir / "tree/list.txt",
             "a/train/shapes_1.png\ntree/b/shapes_1.png\r\n\nnowhere.png\n./tree/b/shapes_1.png\n");
  const std::string listed = succeed(dir, "demo", demo + "--source tree/list.txt --save list");
  CHECK(has(listed, "nowhere.png cannot be opened"));
  CHECK(has(listed, "2 images in "));
  write_text(dir / "tree/none.txt", "nowhere.png\n");
  check_refusal(dir, "demo", demo + "--source tree/none.txt", 1,
                "error: --source tree/none.txt: no image can be read");
  // Two images with the same stem would share a label file.
  fs::copy(dir / "tree/b/shapes_1.png", dir / "tree/b/shapes_1.bmp");
  check_refusal(dir, "demo", demo + "--source tree/b --txt --save twice", 2,
                "would be shapes_1.txt, which is that of another image");
  // Their crops have different names.
  succeed(dir, "demo", demo + "--source tree/b --crop --no-draw --conf 0 --save stems");
  std::map<std::string, int> crops;
  for (const std::string& file : files_in(dir / "stems"))
    ++crops[has(file, "shapes_1.png_") ? "png" : has(file, "shapes_1.bmp_") ? "bmp" : "other"];
  CHECK(crops["png"] > 0);
  CHECK(crops["bmp"] == crops["png"]);
  // The class names are beside the labels.
  succeed(dir, "demo", demo + "--source tree/a/train --txt --no-draw --save labelled");
  CHECK(has(contents(dir / "labelled/labels/classes.txt"), shapes_classes()[0] + "\n"));
  write_text(dir / "labelled/labels/classes.txt", "cat\ndog\n");
  check_refusal(dir, "demo", demo + "--source tree/a/train --txt --no-draw --save labelled", 2,
                "labelled/labels/classes.txt has other classes than the model");
  CHECK(contents(dir / "labelled/labels/classes.txt") == "cat\ndog\n");
  // Labels are where the trainer looks for them: with the subfolders of the source, and for any image format.
  fs::create_directories(dir / "set/images/train");
  fs::copy(dir / "tree/a/train/shapes_2.png", dir / "set/images/train/photo.jfif");
  succeed(dir, "demo", demo + "--source set --recursive --txt --no-draw --save two");
  CHECK(files_in(dir / "two") == std::vector<std::string>{"labels/classes.txt", "labels/train/photo.txt"});
  succeed(dir, "demo", demo + "--source set/images --recursive --txt --save set/out");
  CHECK(files_in(dir / "set/out") ==
        std::vector<std::string>{"labels/classes.txt", "labels/train/photo.txt", "train/photo.jfif.jpg"});
  fs::copy(dir / "tree/b/shapes_1.png", dir / "tree/a/train/classes.png");
  check_refusal(dir, "demo", demo + "--source tree/a/train --txt --save other", 2, "or of the class names");
}

PROGRAM_TEST("demo: the result of a video is a video with the same frames") {
  const TempDir& dir = trained().dir;
  if (!write_video(dir / "clip.avi", 11)) return;
  const std::string printed = succeed(
      dir, "demo", "--source clip.avi --weights a/last.pth --conf 0 --bs 4 --txt --json v.json --save v");
  CHECK(has(printed, "11 frames in "));
  const std::string out = fs::exists(dir / "v/clip.mp4") ? dir / "v/clip.mp4" : dir / "v/clip.avi";
  CHECK(has(printed, fs::path(out).filename().string()));
  cv::VideoCapture video(out);
  CHECK(video.get(cv::CAP_PROP_FPS) == doctest::Approx(10));
  CHECK(frames_in(out) == 11);
  if (write_video(dir / "slow.avi", 3, 0.5)) {
    succeed(dir, "demo", "--source slow.avi --weights a/last.pth --no-draw --json slow.json");
    CHECK(json_of(dir / "slow.json")[2]["second"].GetDouble() == doctest::Approx(4));
  }
  const auto json = json_of(dir / "v.json");
  REQUIRE(json.Size() == 11);
  for (unsigned i = 0; i < 11; ++i) {
    CHECK(json[i]["frame"].GetInt() == int(i));
    CHECK(json[i]["second"].GetDouble() == doctest::Approx(0.1 * i));
    CHECK(fs::exists(dir / concat("v/labels/clip_0000", i < 10 ? "0" : "", i, ".txt")));
    // The boxes of a frame are those of the same frame saved as an image.
    if (i != 7) continue;
    fs::create_directories(dir / "seventh");
    cv::VideoCapture source(dir / "clip.avi");
    cv::Mat frame;
    for (unsigned k = 0; k <= i; ++k) source.read(frame);
    cv::imwrite(dir / "seventh/f.png", frame);
    succeed(
        dir, "demo",
        "--source seventh --weights a/last.pth --conf 0 --bs 4 --no-draw --json seventh.json --save none");
    const auto still = json_of(dir / "seventh.json");
    const auto here = boxes_of(json[i]), there = boxes_of(still[0]);
    CHECK(here.size() > 0);
    CHECK(std::abs(double(here.size()) - double(there.size())) <= 2);
    CHECK(here[0][1] == doctest::Approx(there[0][1]).epsilon(1e-3));
  }
  CHECK(has(succeed(dir, "demo", "--source clip.avi --weights a/last.pth --max-images 3 --save v3"),
            "3 frames in "));
  // A stream in a file does not say how many frames it has. All of them are read.
  cv::VideoWriter stream(dir / "stream.h264", cv::VideoWriter::fourcc('H', '2', '6', '4'), 10, {64, 48});
  if (stream.isOpened()) {
    for (int i = 0; i < 200; ++i) stream.write(cv::Mat(48, 64, CV_8UC3, cv::Scalar::all(i)));
    stream.release();
    CHECK(has(succeed(dir, "demo", "--source stream.h264 --weights a/last.pth --save stream"), "200 frames"));
  }
  // The source is never overwritten.
  fs::create_directories(dir / "same");
  fs::copy(out, dir / ("same/clip" + fs::path(out).extension().string()));
  const std::string before = contents(out);
  check_refusal(
      dir, "demo",
      "--source same/clip" + fs::path(out).extension().string() + " --weights a/last.pth --save same", 2,
      "would overwrite the source same/clip");
  CHECK(contents(dir / ("same/clip" + fs::path(out).extension().string())) == before);
}

PROGRAM_TEST("demo: after Ctrl-C the images, the JSON and the video are complete up to that point") {
  const TempDir& dir = trained().dir;
  fs::create_directories(dir / "many");
  for (int i = 0; i < 600; ++i)
    fs::create_hard_link(dir / "data/train/shapes_1.png", dir / concat("many/", i, ".png"));
  {
    Process p(dir, "demo", "--source many --weights a/last.pth --conf 0.5 --json many.json --save stopped");
    REQUIRE(p.until([&] { return fs::exists(dir / "stopped/20.png"); }));
    kill(p.pid, SIGINT);
    CHECK(p.wait() == 128 + SIGINT);
    const size_t done = json_of(dir / "many.json").Size();
    CHECK(done >= 20);
    CHECK(done < 600);
    CHECK(files_in(dir / "stopped").size() == done);
    CHECK(has(contents(p.out), concat("stopped after ", done, " of 600 images")));
    CHECK(contents(p.err) == "");
  }
  if (!write_video(dir / "long.avi", 300)) return;
  Process p(dir, "demo", "--source long.avi --weights a/last.pth --conf 0.5 --json long.json --save cut");
  REQUIRE(p.until([&] { return fs::exists(dir / "cut") && !fs::is_empty(dir / "cut"); }));
  kill(p.pid, SIGINT);
  CHECK(p.wait() == 128 + SIGINT);
  const std::string out = fs::exists(dir / "cut/long.mp4") ? dir / "cut/long.mp4" : dir / "cut/long.avi";
  const int frames = frames_in(out);
  CHECK(frames > 0);
  CHECK(frames < 300);
  CHECK(frames == int(json_of(dir / "long.json").Size()));
}

PROGRAM_TEST("demo: cyclic links, pipes and overlong names neither end nor block the run") {
  const TempDir& dir = trained().dir;
  write_scenes(dir / "round", 2);
  fs::create_directory_symlink("..", dir / "round/train/up");
  fs::create_directory_symlink("train", dir / "round/again");
  fs::create_directory_symlink("self", dir / "round/self");
  REQUIRE(mkfifo((dir / "round/pipe.jpg").c_str(), 0600) == 0);
  fs::copy(dir / "round/train/shapes_1.png", dir / "round/photo");
  const std::string demo = "timeout 60 $YOLOX_PROGRAMS/demo --weights a/last.pth --source ";
  const Outcome round = shell(dir, demo + "round --recursive --save round_out");
  CHECK_MESSAGE(round.code == 0, round.err);
  CHECK(has(round.out, "2 images in "));
  CHECK(has(round.out, "round/pipe.jpg is not a regular file"));
  write_text(dir / "round/list.txt", std::string(6000, 'a') + "\ntrain/shapes_1.png\n");
  const Outcome list = shell(dir, demo + "round/list.txt --save round_list");
  CHECK_MESSAGE(list.code == 0, list.err);
  CHECK(has(list.out, "1 image skipped"));
  // A pipe or a device as the source itself.
  REQUIRE(mkfifo((dir / "round/clip").c_str(), 0600) == 0);
  REQUIRE(mkfifo((dir / "round/pipe.txt").c_str(), 0600) == 0);
  fs::create_symlink("/dev/zero", dir / "round/zero.txt");
  for (const std::string source :
       {"round/clip", "round/pipe.txt", "round/pipe.jpg", "round/zero.txt", "/dev/zero"}) {
    const Outcome o = shell(dir, demo + source);
    CHECK_MESSAGE(o.code == 1, source);
    CHECK_MESSAGE(has(o.err, "--source " + source + " is a pipe or a device"), o.err);
    CHECK(lines_of(o.err).size() == 1);
  }
  write_text(dir / "round/huge.txt", "");
  fs::resize_file(dir / "round/huge.txt", 2000000000);  // takes no disk space
  const Outcome huge = shell(dir, demo + "round/huge.txt");
  CHECK(huge.code == 1);
  CHECK_MESSAGE(has(huge.err, "round/huge.txt: cannot be read (larger than 1.0G)"), huge.err);
  fs::create_directory(dir / "round/folder.jpg");
  const Outcome folder = shell(dir, demo + "round/folder.jpg");
  CHECK_MESSAGE(has(folder.err, "--source round/folder.jpg contains no images"), folder.err);
  const Outcome name = shell(dir, demo + std::string(6000, 'a'));
  CHECK(name.code == 1);
  CHECK(has(name.err, "aaa: File name too long; check the path"));
  // The result of an image without an extension is a JPEG.
  const Outcome photo = shell(dir, demo + "round/photo --save round_photo");
  CHECK_MESSAGE(photo.code == 0, photo.err);
  CHECK(fs::exists(dir / "round_photo/photo.jpg"));
}

PROGRAM_TEST(
    "demo: --json is valid UTF-8 for any file name, and never overwrites an input; a line break in a name is "
    "escaped") {
  const TempDir& dir = trained().dir;
  fs::create_directories(dir / "named");
  fs::copy(dir / "data/train/shapes_1.png", dir / "named/a\xFF\xC3\xA4\xED\xA0\x80.png");
  succeed(dir, "demo", "--weights a/last.pth --source named --no-draw --json named.json");
  CHECK(has(contents(dir / "named.json"), "named/a\uFFFD\u00E4\uFFFD\uFFFD\uFFFD.png"));
  fs::create_directories(dir / "line");
  fs::copy(dir / "data/train/shapes_1.png", dir / "line/a\nb.png");
  const std::string printed = succeed(dir, "demo", "--weights a/last.pth --source line --no-draw --conf 1");
  CHECK_MESSAGE(has(printed, "line/a\\x0ab.png: no detections\n"), printed);
  fs::copy(dir / "a/last.pth", dir / "mine.pth");
  write_text(dir / "named/list.txt", (dir / "data/train/shapes_1.png") + "\n");
  for (const std::string over : {"mine.pth", "named/list.txt"}) {
    const std::string before = contents(dir / over);
    check_refusal(dir, "demo", "--weights mine.pth --source named/list.txt --no-draw --json named/../" + over,
                  2, "--json would overwrite " + over);
    CHECK(contents(dir / over) == before);
  }
}

PROGRAM_TEST(
    "demo: if an image or video cannot be written, --json is written and the previous video is kept") {
  const TempDir& dir = trained().dir;
  fs::create_directories(dir / "limit/shapes_2.png");  // a folder with the name of a result
  check_refusal(dir, "demo",
                "--weights a/last.pth --source data/train --bs 1 --workers 1 --json limit.json --save limit",
                1, "cannot write limit/shapes_2.png");
  REQUIRE(fs::exists(dir / "limit.json"));
  CHECK(json_of(dir / "limit.json").Size() >= 2);
  if (!write_video(dir / "full.avi", 60)) return;
  succeed(dir, "demo", "--weights a/last.pth --source full.avi --max-images 2 --save full");
  const std::string out = fs::exists(dir / "full/full.mp4") ? dir / "full/full.mp4" : dir / "full/full.avi";
  const std::string before = contents(out);
  const Outcome full = shell(
      dir,
      "bash -c 'ulimit -f 8; exec $YOLOX_PROGRAMS/demo --weights a/last.pth --source full.avi --save full'");
  CHECK(full.code == 1);
  CHECK_MESSAGE(has(full.err, "cannot write full/full"), full.err);
  CHECK_MESSAGE(lines_of(full.err).size() == 1, full.err);
  CHECK(contents(out) == before);
  CHECK(files_in(dir / "full").size() == 1);
}

PROGRAM_TEST("demo: a missing camera, address, file or display is an error of one line") {
  const TempDir& dir = trained().dir;
  write_text(dir / "words.mp4", "no video");
  for (const auto& [flags, named] :
       {std::pair<std::string, std::string>{"--source 99", "--source 99: there is no such camera"},
        {"--source http://127.0.0.1:9/x", "--source http://127.0.0.1:9/x cannot be opened"},
        {"--source words.mp4", "words.mp4 is neither an image nor a video"},
        {"--source data/train --show", "--show: there is no display"},
        {"--source data/train --workers 0", "--workers"},
        {"--source data/train --json data/train/shapes_1.png", "would overwrite the source"}}) {
    const Outcome o =
        shell(dir, "env -u DISPLAY -u WAYLAND_DISPLAY $YOLOX_PROGRAMS/demo --weights a/last.pth " + flags);
    CHECK_MESSAGE(o.code != 0, o.out);
    CHECK_MESSAGE(has(o.err, named), o.err);
    CHECK_MESSAGE(lines_of(o.err).size() == 1, o.err);
  }
  check_refusal(dir, "demo", "--weights a/last.pth --source nowhere.mp4", 1, "nowhere.mp4 does not exist");
  // Qt has a platform that needs no display.
  if (write_video(dir / "shown.avi", 3)) {
    const Outcome o = shell(dir,
                            "QT_QPA_PLATFORM=offscreen $YOLOX_PROGRAMS/demo --weights a/last.pth --source "
                            "shown.avi --show --save shown");
    if (has(o.err, "no display"))
      MESSAGE("this OpenCV has no Qt: --show is not tried");
    else
      CHECK_MESSAGE(has(o.out, "3 frames in "), o.out << o.err);
  }
}

TEST_CASE("demo: class names come from the checkpoint; without them, 80 classes have the names of COCO") {
  WeightsInfo info;
  CHECK(class_names(info, 3).empty());
  CHECK(class_names(info, 80).size() == 80);
  CHECK(class_names(info, 80)[16] == "dog");
  info.classes = {"a", "b", "c"};
  CHECK(class_names(info, 3) == info.classes);
  // Each class has a fixed colour that differs from the next one. The label is legible on it.
  for (int c = 0; c < 80; ++c) {
    const cv::Scalar colour = class_colour(c), next = class_colour(c + 1);
    CHECK(cv::norm(colour, next) > 60);
    Image canvas({400, 200}, 128);
    draw_boxes(canvas, {{{50, 100, 350, 180, c}, "dog 0.93"}}, LabelStyle::all);
    const auto luma = [](const cv::Scalar& v) { return 0.114 * v[0] + 0.587 * v[1] + 0.299 * v[2]; };
    double most = 0;
    const cv::Mat label = canvas(cv::Rect(52, 88, 40, 9));
    for (int y = 0; y < label.rows; ++y)
      for (int x = 0; x < label.cols; ++x) {
        const auto v = label.at<cv::Vec3b>(y, x);
        most = std::max(most, std::abs(luma({double(v[0]), double(v[1]), double(v[2])}) - luma(colour)));
      }
    CHECK_MESSAGE(most > 90, c);
  }
}

PROGRAM_TEST(
    "demo: --classes selects classes, --crop writes each detection, --txt keeps the labels of a source") {
  const TempDir& dir = trained().dir;
  TempDir out;
  const std::string demo =
      concat("--weights a/last.pth --source data/train --conf 0.0001 --max-images 2 --no-draw --json ",
             out / "b.json", " --save ", out / "o ");
  succeed(dir, "demo", demo + "--classes star,0 --crop");
  const auto found = json_of(out / "b.json");
  size_t boxes = 0;
  std::set<std::string> names;
  for (const auto& image : found.GetArray())
    for (const auto& box : image["boxes"].GetArray()) {
      names.insert(box["name"].GetString());
      const auto b = box["bbox"].GetArray();
      boxes += b[0].GetDouble() < image["width"].GetDouble() &&
               b[1].GetDouble() < image["height"].GetDouble() && b[0].GetDouble() + b[2].GetDouble() > 0 &&
               b[1].GetDouble() + b[3].GetDouble() > 0;
    }
  CHECK(names.count("star") == 1);
  for (const auto& name : names) CHECK((name == "star" || name == shapes_classes()[0]));
  const auto files = files_in(out / "o");
  CHECK(files.size() == boxes);
  CHECK(boxes > 2);
  for (const auto& file : files) {
    CHECK_MESSAGE((has(file, "crops/star/") || has(file, "crops/" + shapes_classes()[0] + "/")), file);
    CHECK_FALSE(cv::imread(out / ("o/" + file)).empty());
  }
  CHECK(has(run(dir, "demo", demo + "--classes stars").err,
            "--classes stars: the model has no such class; it has "));

  fs::create_directories(out / "set/images");
  fs::create_directories(out / "set/labels");
  fs::copy(dir / "data/train/shapes_1.png", out / "set/images/x.png");
  write_text(out / "set/labels/x.txt", "0 0.5 0.5 0.1 0.1\n");
  check_refusal(
      dir, "demo",
      concat("--weights a/last.pth --no-draw --txt --source ", out / "set/images", " --save ", out / "set"),
      2, "--txt would overwrite");
  CHECK(contents(out / "set/labels/x.txt") == "0 0.5 0.5 0.1 0.1\n");
}
