// SPDX-License-Identifier: Apache-2.0
// tools/report.py: the page of a run, its numbers, and its start at the end of a training.
#include "data/shapes.hpp"
#include "programs.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

// Returns a Python that can write a page. Without one, a case says so and is passed.
std::string python() {
  const std::string found = cached_python_with("matplotlib, numpy, pycocotools");
  if (found.empty()) MESSAGE("skipped: no Python with matplotlib and pycocotools (set PYTHON)");
  return found;
}

// Returns the HTML of a number above its name.
std::string tile(double value, const std::string& name) {
  return concat("<b>", formatted("%.3f", value), "</b><span>", name, "</span>");
}

}  // namespace

PROGRAM_TEST("report: train writes a page with its AP, charts, classes, settings and worst images") {
  if (python().empty()) return;
  TempDir dir;
  const Outcome o = shell(dir, concat("env -u YOLOX_NO_REPORT PYTHON=", python(),
                                      " $YOLOX_PROGRAMS/train --data shapes --model yolox-nano --size 64 "
                                      "--bs 4 --epochs 1 --max-iters 4 --eval-interval 1 --out a"));
  REQUIRE_MESSAGE(o.code == 0, o.out << o.err);
  CHECK_FALSE(has(o.out, "report.html"));
  const std::string page = contents(dir / "a/report.html");
  CHECK(has(page, "After step 4, the best evaluation of the run, on 200 images of shapes (val)"));
  for (const char* name : {"last AP", "AP"}) CHECK_MESSAGE(has(page, tile(last_ap(dir, "a"), name)), name);
  for (const char* title :
       {"Loss", "AP on the evaluation images", "Learning rate", "Gradient norm", "Precision over recall",
        "F1 by score threshold", "Cost of each error type in AP50", "AP by size", "Confusion matrix"})
    CHECK_MESSAGE(has(page, concat("<h3>", title, "</h3>")), title);
  for (const auto& name : shapes_classes()) CHECK_MESSAGE(has(page, "<th>" + name + "</th>"), name);
  CHECK(has(page, "<dt>bs</dt><dd>4</dd>"));
  CHECK(count_of(page, "href='data:image/jpeg;base64,") == 24);  // drawn images are no files: val_worst/
  CHECK(count_of(page, "src='data:image/jpeg;base64,") == 3);
  for (const char* foreign : {"<script", "<link", "@import", "url(http", "src='http", "href='http"})
    CHECK_MESSAGE(!has(page, foreign), foreign);

  fs::create_directory(dir / "e");
  succeed(dir, "eval", "--data shapes --json ap.json --save-dt e --weights a/best.pth");
  CHECK(shell(dir, concat(python(), " " YOLOX_SOURCE_DIR "/tools/report.py e")).code == 0);
  CHECK_HAS(contents(dir / "e/report.html"), tile(json_number(dir / "ap.json", "AP"), "AP"));

  // A failure is a line of the log.
  const Outcome without = shell(dir,
                                "env -u YOLOX_NO_REPORT PYTHON=no/python $YOLOX_PROGRAMS/train --resume a "
                                "--max-iters 5 --eval-interval 0");
  CHECK(without.code == 0);
  CHECK_MESSAGE(has(without.out, "no report.html, because no Python has its modules; run: "), without.out);
}

PROGRAM_TEST("report: errors of any detections: kinds as in TIDE, confusion, names escaped, hard negatives") {
  if (python().empty()) return;
  TempDir dir;
  CocoDataset t;
  t.categories = {{1, "<b>cat"}, {2, "dog"}};
  t.images = {{1, "a.jpg", 640, 480}, {2, "empty.jpg", 640, 480}};
  t.description = "pets";
  t.max_detections = 150;  // of eval --max-dets
  const auto object = [&](int64_t cls, double x, double y, double w, double h, bool crowd = false) {
    t.annotations.push_back({int64_t(t.annotations.size()), 1, cls, x, y, w, h, w * h, crowd});
  };
  object(1, 0, 0, 100, 100);      // a true positive and a duplicate
  object(1, 200, 0, 100, 100);    // localisation error, the box is too small
  object(2, 0, 200, 100, 100);    // wrong class, detected as a cat
  object(2, 200, 200, 100, 100);  // wrong class and localisation
  object(2, 400, 200, 100, 100);  // missed
  object(1, 400, 0, 200, 100, /*crowd=*/true);
  write_coco(dir / "t.json", t);
  const std::vector<Detection> found = {{1, 1, 0, 0, 100, 100, .95},   {1, 1, 5, 0, 100, 100, .9},
                                        {1, 1, 200, 0, 100, 45, .85},  {1, 1, 200, 0, 100, 30, .8},
                                        {1, 1, 0, 200, 100, 90, .75},  {1, 1, 200, 200, 100, 40, .7},
                                        {1, 2, 300, 400, 20, 20, .65}, {1, 1, 420, 10, 50, 50, .6},
                                        {1, 1, 0, 0, 100, 9, .55},     {2, 1, 0, 0, 100, 100, .4}};
  write_detections(dir / "d.json", found);
  const Outcome o = shell(
      dir, concat(python(), " " YOLOX_SOURCE_DIR
                            "/tools/report.py --truth t.json --detections d.json --hard-negatives n.json"));
  REQUIRE_MESSAGE(o.code == 0, o.err);
  const std::string page = contents(dir / "report.html");
  for (const char* count :
       {"class: 1<", "localisation: 2<", "both: 1<", "duplicate: 1<", "background: 3<", "missed: 2<"})
    CHECK_MESSAGE(has(page, concat("<th>", count)), count);
  CHECK(has(page, "150 detections of a class per image"));
  CHECK(has(page, "&lt;b&gt;cat"));
  CHECK_FALSE(has(page, "<b>cat"));
  CHECK(read_coco(dir / "n.json").images.at(0).file_name == "empty.jpg");
}

SHARED_PROGRAM_TEST("report: costs of errors equal those of tidecv") {
  if (python().empty()) return;
  TempDir dir;
  const std::string files = shared("data/coco_eval/gt.json") + "' '" + shared("data/coco_eval/dt.json");
  const Outcome o = shell(dir, concat(python(), " -c '", R"(
import json, sys
sys.path.insert(0, sys.argv[1])
import errors
e = errors.Errors(*(json.load(open(path)) for path in sys.argv[2:]))
print(*e.counts, *(100 * e.costs), errors.mean(e.ap[..., 0]))
)",
                                      "' '" YOLOX_SOURCE_DIR "/tools' '", files, "'"));
  REQUIRE_MESSAGE(o.code == 0, o.err);
  std::istringstream in(o.out);
  // Values of tidecv 1.0.1, whose mean was changed to exclude classes without truth. Its recall points are k
  // / 100; those of COCO are 0.01 * k, which differ by rounding for some k. The last one is the AP.
  for (const double want : {83., 1., 0., 1., 0., 97., 16.7428, 0.2474, 0., 0.0206, 0., 10.5071, 0.50458}) {
    double value = -1;
    in >> value;
    CHECK(std::abs(value - want) < 0.02);
  }
}
