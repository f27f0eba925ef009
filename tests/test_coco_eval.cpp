// SPDX-License-Identifier: Apache-2.0
#include "base/printable.hpp"
#include "coco_eval.hpp"
#include "common.hpp"

using namespace yolox;

// Returns a data set with image ids 1 to `images` and the given category ids, without annotations.
static CocoDataset dataset(int images, const std::vector<int64_t>& categories) {
  CocoDataset data;
  for (int i = 1; i <= images; ++i) data.images.push_back({i, std::to_string(i), 640, 480});
  for (const int64_t id : categories) data.categories.push_back({id, "class " + std::to_string(id)});
  return data;
}
static void add(CocoDataset& data, int64_t image, int64_t category, double x, double y, double w, double h) {
  data.annotations.push_back(
      {static_cast<int64_t>(data.annotations.size()) + 1, image, category, x, y, w, h, w * h, false});
}
static std::vector<double> twelve(const EvalResult& r) {
  std::vector<double> values;
  for (const CocoMetric& metric : coco_metrics) values.push_back(r.*metric.value);
  return values;
}

TEST_CASE("coco_eval: AP and AR of objects that are found, missed, found twice, crowds or of another size") {
  struct Row {
    const char* name;
    std::vector<CocoAnnotation> objects;
    std::vector<Detection> found;
    std::vector<std::pair<double EvalResult::*, double>> wanted;
  };
  const auto object = [](int64_t image, double x, double y, double w, double h, double area = 0,
                         bool crowd = false) {
    return CocoAnnotation{int64_t(1 + x), image, 1, x, y, w, h, area > 0 ? area : w * h, crowd};
  };
  const auto hit = [](double score, int64_t image = 1) { return Detection{image, 1, 10, 10, 50, 50, score}; };
  const auto miss = [](double score) { return Detection{1, 1, 300, 300, 50, 50, score}; };
  using E = EvalResult;
  const auto two = {object(1, 10, 10, 50, 50), object(2, 10, 10, 50, 50)};
  const auto of_ten = {object(1, 0, 0, 10, 10)}, small = {object(1, 0, 0, 32, 32)},
             segmented = {object(1, 0, 0, 32, 32, 1023)};
  const std::vector<Row> rows = {
      {"all are found",
       two,
       {hit(.9), hit(.8, 2)},
       {{&E::AP, 1}, {&E::APm, 1}, {&E::APs, -1}, {&E::APl, -1}, {&E::AR1, 1}}},
      // The precision is 1 up to recall 0.5, which is 51 of 101 points, then 0.
      {"one of two", two, {hit(.9)}, {{&E::AP, 51. / 101}, {&E::AR100, .5}}},
      {"behind a false positive", two, {miss(.95), hit(.9)}, {{&E::AP, 51. / 101 / 2}}},
      {"before a false positive", two, {miss(.85), hit(.9)}, {{&E::AP, 51. / 101}}},
      // The precision is 1/2, then 2/3. At a recall counts the maximum at that recall or above.
      {"both behind a false positive", two, {miss(.95), hit(.9), hit(.8, 2)}, {{&E::AP, 2. / 3}}},
      {"one of them twice", two, {hit(.9), hit(.8), hit(.7, 2)}, {{&E::AP50, (51 + 50 * 2. / 3) / 101}}},
      {"none", two, {}, {{&E::AP, 0}, {&E::AR100, 0}}},
      {"IoU .6", of_ten, {{1, 1, 0, 0, 10, 6, 1}}, {{&E::AP, .3}, {&E::AP50, 1}, {&E::AP75, 0}}},
      {"IoU .5", of_ten, {{1, 1, 0, 0, 10, 5, 1}}, {{&E::AP, .1}}},
      {"IoU .49, and an empty box",
       of_ten,
       {{1, 1, 0, 0, 10, 4.9, 1}, {1, 1, 5, 5, 0, 0, 1}},
       {{&E::AP50, 0}}},
      // IoU with a crowd is relative to the area of the detection.
      {"any number of detections match a crowd, and are ignored",
       {object(1, 0, 0, 100, 100, 0, true), object(1, 300, 300, 50, 50)},
       {{1, 1, 0, 0, 20, 20, .9}, {1, 1, 50, 50, 20, 20, .8}, miss(.7)},
       {{&E::AP, 1}, {&E::AR100, 1}}},
      {"an object is matched before a crowd that overlaps more",
       {object(1, 290, 290, 100, 100, 0, true), object(1, 300, 300, 50, 50)},
       {{1, 1, 300, 300, 50, 40, .7}},
       {{&E::AP50, 1}}},
      {"small and medium", small, {{1, 1, 0, 0, 32, 32, 1}}, {{&E::APs, 1}, {&E::APm, 1}, {&E::APl, -1}}},
      {"the segmentation is small", segmented, {{1, 1, 0, 0, 32, 32, 1}}, {{&E::APs, 1}, {&E::APm, -1}}},
      {"a large false positive does not count in the small range",
       segmented,
       {{1, 1, 0, 0, 32, 32, .8}, {1, 1, 100, 100, 200, 200, .9}},
       {{&E::AP, .5}, {&E::APs, 1}}},
      {"nor does a duplicate that is not small",
       {object(1, 0, 0, 32, 32, 1023), object(1, 200, 200, 20, 20)},
       {{1, 1, 0, 0, 32, 32, .9}, {1, 1, 0, 0, 32, 33, .8}, {1, 1, 200, 200, 20, 20, .7}},
       {{&E::AP50, (51 + 50 * 2. / 3) / 101}, {&E::APs, 1}}}};
  for (const Row& row : rows) {
    INFO(row.name);
    CocoDataset gt = dataset(2, {1, 2});
    gt.annotations = row.objects;
    const EvalResult r = coco_eval(gt, row.found);
    for (const auto& [metric, value] : row.wanted) CHECK(r.*metric == doctest::Approx(value));
    CHECK(r.per_class[0].ground_truths + r.per_class[0].crowds == int64_t(row.objects.size()));
    CHECK(r.per_class[0].crowds == row.objects[0].crowd);
    CHECK(r.per_class[0].detections == int64_t(row.found.size()));
    CHECK(r.per_class[1].AP == -1);  // no ground truth: excluded from the mean
    CHECK(r.per_class[1].precision[area_all][0][0] == -1);
    CHECK(r.per_class[1].recall[area_all][2][0] == -1);
  }
  for (const auto& [images, found] : {std::pair(3, std::vector<Detection>{}), {3, {hit(1)}}, {0, {}}})
    CHECK(twelve(coco_eval(dataset(images, {1}), found)) == std::vector<double>(12, -1));
}

TEST_CASE("coco_eval: 100 detections of a class count in an image, or another number; a note says where") {
  CocoDataset gt = dataset(2, {1, 2});
  std::vector<Detection> found;
  for (int i = 0; i < 150; ++i) {
    add(gt, 1, 1, 20 * i, 0, 10, 10);
    found.push_back({1, 1, 20. * i, 0, 10, 10, 1 - i / 1000.});
  }
  const std::vector<std::array<double, 3>> rows = {
      {100, 67. / 101, 100. / 150}, {149, 100. / 101, 149. / 150}, {150, 1, 1}, {5, 4. / 101, 5. / 150}};
  for (const auto& [max, ap, recall] : rows) {
    const EvalResult r = coco_eval(gt, found, 1, int(max));
    CHECK(r.AP == doctest::Approx(ap));
    CHECK(r.AR100 == doctest::Approx(recall));
    CHECK(r.AR1 == doctest::Approx(1. / 150));
  }
  CHECK(crowded_images_note(gt, 150) == "");
  CHECK_HAS(
      crowded_images_note(gt, 100),
      "note: 1 image has more than 100 objects of a class, up to 150, but at most 100 detections of a class "
      "count in an image, as in COCO; --max-dets 150 counts all");
  gt.annotations[0].crowd = true;  // is no object to find
  CHECK(crowded_images_note(gt, 149) == "");
}

TEST_CASE(
    "coco_eval: unknown ids are ignored as in pycocotools, and counted; other wrong input is an error") {
  CocoDataset gt = dataset(1, {3});
  add(gt, 1, 3, 0, 0, 40, 40);
  add(gt, 77, 3, 0, 0, 40, 40);  // no such image
  add(gt, 1, 99, 0, 0, 40, 40);  // no such category
  const EvalResult r = coco_eval(gt, {{1, 3, 0, 0, 40, 40, .5}, {1, 98, 0, 0, 40, 40, .9}});
  CHECK(r.AP == doctest::Approx(1));
  CHECK(r.unknown_annotations == 2);
  CHECK(r.unknown_detections == 1);
  std::ostringstream out;
  print_summary(out, r);
  CHECK(has(out.str(), "2 annotations of unknown images or categories"));
  CHECK(has(out.str(), "1 detections of categories"));
  gt.annotations[0].id = 0;  // pycocotools never finds it
  CHECK(coco_eval(gt, {{1, 3, 0, 0, 40, 40, .5}}).AP == doctest::Approx(1));
  const auto error = [](const CocoDataset& truth, const std::vector<Detection>& found) {
    return error_of([&] { coco_eval(truth, found); });
  };
  for (const auto& [found, part] :
       {std::pair(Detection{55, 1, 0, 0, 40, 40, .5}, "detections[0]: image_id 55"),
        {{1, 1, 0, 0, 40, 40, NAN}, "detections[0]: the score or the box is not finite"},
        {{1, 1, 0, INFINITY, 40, 40, 1}, "detections[0]"}})
    CHECK_HAS(error(gt, {found}), part);
  CHECK_HAS(error(dataset(1, {2, 1}), {}), "sort the categories");
}

TEST_CASE("coco_eval: the summary is that of pycocotools, and the table has 80 columns") {
  CocoDataset gt = dataset(1, {1, 2});
  gt.categories[1].name = std::string(24, 'n') + "\n\xC3\xA9 and more";
  add(gt, 1, 1, 0, 0, 40, 40);
  const EvalResult r = coco_eval(gt, {{1, 1, 0, 0, 40, 40, .5}});
  std::ostringstream out;
  print_summary(out, r);
  CHECK(out.str().starts_with(
      " Average Precision  (AP) @[ IoU=0.50:0.95 | area=   all | maxDets=100 ] = 1.000\n"));
  CHECK(has(out.str(), " Average Recall     (AR) @[ IoU=0.50:0.95 | area= small | maxDets=100 ] = -1.000\n"));
  std::stringstream lines;
  print_per_class(lines, r);
  std::vector<std::string> rows;
  for (std::string line; std::getline(lines, line);) rows.push_back(line);
  REQUIRE(rows.size() == 3);
  for (const std::string& row : rows) CHECK(count_characters(row) == 80);
  CHECK(rows[1].starts_with("class 1 "));
  CHECK(rows[2].starts_with(std::string(24, 'n') + "\\x0a\xC3\xA9 "));  // truncated to 29 characters
  CHECK(rows[2].back() == '-');
}

// Reads a list of numbers from NN_expected.json. null becomes -1.
static std::vector<double> expected_list(const std::string& path, const std::string& key) {
  std::string text = contents(path);
  const size_t begin = text.find('[', text.find("\"" + key + "\"")) + 1;
  text = text.substr(begin, text.find(']', begin) - begin);
  std::replace(text.begin(), text.end(), ',', ' ');
  for (size_t at; (at = text.find("null")) != std::string::npos;) text.replace(at, 4, "-1");
  std::istringstream numbers(text);
  return {std::istream_iterator<double>(numbers), {}};
}

// Among them are ties of scores and of images in any order, images with hundreds of detections of a class,
// crowds, and areas that are not those of the boxes.
SHARED_TEST("coco_eval: equals pycocotools on the fixtures, with any number of threads") {
  for (int n = 0; n < 14; ++n) {
    const std::string name = shared("fixtures/coco/" + std::string(n < 10 ? "0" : "") + std::to_string(n));
    CAPTURE(name);
    const EvalResult r =
        coco_eval(read_coco(name + "_gt.json"), read_detections(name + "_dt.json"), /*threads=*/1 + n);
    const std::vector<double> stats = expected_list(name + "_expected.json", "stats");
    const std::vector<double> ids = expected_list(name + "_expected.json", "category_ids");
    const std::vector<double> ap = expected_list(name + "_expected.json", "per_class_ap");
    const std::vector<double> ar = expected_list(name + "_expected.json", "per_class_ar");
    REQUIRE(stats.size() == 12);
    REQUIRE(ap.size() == r.per_class.size());
    REQUIRE(ar.size() == r.per_class.size());
    for (size_t i = 0; i < 12; ++i) CHECK(std::abs(twelve(r)[i] - stats[i]) < 1e-9);
    for (size_t c = 0; c < r.per_class.size(); ++c) {
      CHECK(static_cast<double>(r.per_class[c].id) == ids[c]);
      CHECK(std::abs(r.per_class[c].AP - ap[c]) < 1e-9);
      CHECK(std::abs(r.per_class[c].AR100 - ar[c]) < 1e-9);
    }
  }
}
