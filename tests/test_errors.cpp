// SPDX-License-Identifier: Apache-2.0
#include "metrics/errors.hpp"

#include "coco_eval.hpp"
#include "common.hpp"

using namespace yolox;

namespace {

// Returns a data set with image ids 1 to `images` and classes with ids 1, 2, ..., without annotations.
CocoDataset scene(int images, const std::vector<std::string>& classes) {
  CocoDataset data;
  for (int i = 1; i <= images; ++i) data.images.push_back({i, std::to_string(i), 640, 480});
  for (const auto& name : classes) data.categories.push_back({int64_t(data.categories.size()) + 1, name});
  return data;
}
void add_truth(CocoDataset& data, int64_t image, int64_t cls, double x, double y, double w, double h,
               bool crowd = false) {
  data.annotations.push_back({int64_t(data.annotations.size()) + 1, image, cls, x, y, w, h, w * h, crowd});
}

// Random numbers from a linear congruential generator.
struct Random {
  uint64_t state = 1;
  double operator()() {  // in [0, 1)
    state = state * 6364136223846793005u + 1442695040888963407u;
    return double(state >> 40) / double(1 << 24);
  }
};
struct Case {
  CocoDataset truths;
  std::vector<Detection> found;
};
Case random_case(uint64_t seed, int images, int classes) {
  Random r{seed};
  Case made{scene(images, std::vector<std::string>(classes, "c")), {}};
  for (int i = 1; i <= images; ++i) {
    for (int n = int(7 * r()); n > 0; --n) {
      const double x = 400 * r(), y = 300 * r(), w = 10 + 190 * r(), h = 10 + 140 * r();
      const int c = 1 + int(classes * r());
      add_truth(made.truths, i, c, x, y, w, h, r() < 0.05);
      for (int k = int(4 * r()); k > 0; --k) {
        const double off = r() < 0.5 ? 0.1 : 0.6;
        const auto jitter = [&] { return off * (r() - 0.5); };
        made.found.push_back({i, r() < 0.7 ? c : 1 + int(classes * r()), x + jitter() * w, y + jitter() * h,
                              w * (1 + jitter()), h * (1 + jitter()), r()});
      }
    }
    for (int n = int(4 * r()); n > 0; --n)
      made.found.push_back(
          {i, 1 + int(classes * r()), 400 * r(), 300 * r(), 10 + 190 * r(), 10 + 140 * r(), 0.8 * r()});
  }
  return made;
}

}  // namespace

TEST_CASE("errors: each detection is classified, and missed objects are found") {
  CocoDataset t = scene(1, {"cat", "dog"});
  add_truth(t, 1, 1, 0, 0, 100, 100);       // 0: a true positive and a duplicate
  add_truth(t, 1, 1, 200, 0, 100, 100);     // 1: localisation error, the box is too small
  add_truth(t, 1, 2, 0, 200, 100, 100);     // 2: wrong class, detected as a cat
  add_truth(t, 1, 2, 200, 200, 100, 100);   // 3: wrong class and localisation
  add_truth(t, 1, 2, 400, 200, 100, 100);   // 4: missed
  add_truth(t, 1, 1, 400, 0, 200, 100, 1);  // 5: a crowd
  const std::vector<Detection> found = {
      {1, 1, 0, 0, 100, 100, .95},   {1, 1, 5, 0, 100, 100, .9},   {1, 1, 200, 0, 100, 45, .85},
      {1, 1, 200, 0, 100, 30, .8},   {1, 1, 0, 200, 100, 90, .75}, {1, 1, 200, 200, 100, 40, .7},
      {1, 2, 300, 400, 20, 20, .65}, {1, 1, 420, 10, 50, 50, .6},  {1, 1, 0, 0, 100, 9, .55}};
  const ClassifiedImage judged = classify_errors(t, found)[0];
  const std::vector<ErrorKind> want = {kTruePositive, kDuplicate,  kLocalisation, kLocalisation, kWrongClass,
                                       kBoth,         kBackground, kIgnored,      kBackground};
  REQUIRE(judged.found.size() == want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    INFO(i);
    CHECK(std::string(error_kind_names[judged.found[i].kind]) == error_kind_names[want[i]]);
  }
  CHECK(judged.found[2].fixes_truth);  // the detection with the higher score
  CHECK_FALSE(judged.found[3].fixes_truth);
  CHECK(judged.found[4].fixes_truth);
  for (size_t i = 0; i < judged.truths.size(); ++i) CHECK(judged.truths[i].missed == (i == 3 || i == 4));
  CHECK_FALSE(judged.truths[5].counts);

  const ErrorAnalysis all = analyse_errors(t, found);
  CHECK(all.count == std::array<int64_t, error_kinds>{1, 2, 1, 1, 2, 2});
}

TEST_CASE("errors: the cost of a kind is the increase of AP50 when its errors are fixed") {
  // One of two objects is a true positive, the other a localisation error. The precision is 1 up to recall
  // 0.5, which is 51 of 101 points.
  CocoDataset t = scene(2, {"cat", "dog"});
  add_truth(t, 1, 1, 0, 0, 100, 100);
  add_truth(t, 2, 1, 0, 0, 100, 100);
  std::vector<Detection> found = {{1, 1, 0, 0, 100, 100, .9}, {2, 1, 0, 0, 100, 40, .8}};
  const auto costs = [&] {
    const ErrorAnalysis analysis = analyse_errors(t, found);
    CHECK(analysis.AP50 == doctest::Approx(coco_eval(t, found).AP50));
    return analysis.cost;
  };
  const auto only = [&](ErrorKind kind, double cost) {
    const auto c = costs();
    for (int k = 0; k < error_kinds; ++k) {
      INFO(error_kind_names[k]);
      CHECK(c[k] == doctest::Approx(k == kind ? cost : 0));
    }
  };
  only(kLocalisation, 50. / 101);
  found[1] = {2, 2, 0, 0, 100, 90, .8};  // a dog; because the truth has no dogs, this costs no precision
  only(kWrongClass, 50. / 101);
  found.pop_back();
  only(kMissed, 50. / 101);
  found.push_back({2, 1, 0, 0, 100, 100, .8});
  found.push_back({1, 1, 300, 300, 50, 50, .85});  // between the two in score: precision 1, 1/2, 2/3
  only(kBackground, 50. / 101 / 3);
  found.back() = {1, 1, 3, 0, 100, 100, .85};
  only(kDuplicate, 50. / 101 / 3);
  found.back().score = .1;  // lower score than both
  only(kDuplicate, 0);
}

TEST_CASE(
    "errors: AP50 equals COCO's, costs are positive, and confusion rows sum to the objects of each class") {
  for (const uint64_t seed : {1, 2, 3}) {
    const Case c = random_case(seed, 40, 4);
    const EvalResult r = coco_eval(c.truths, c.found);
    const ErrorAnalysis analysis = analyse_errors(c.truths, c.found);
    CHECK(analysis.AP50 == doctest::Approx(r.AP50).epsilon(1e-12));
    for (int k = 0; k < error_kinds; ++k) CHECK(analysis.cost[k] > 0);
    // The recall at score 0 equals COCO's at IoU 0.5.
    double recall = 0;
    for (const auto& of_class : r.per_class) recall += of_class.recall[area_all][2][0] / 4;
    CHECK(analysis.recall[0] == doctest::Approx(recall));
    CHECK(analysis.recall[100] <= analysis.recall[0]);

    std::vector<int64_t> rows(5);
    for (const auto& [pair, n] : analysis.confusion) rows[pair.first] += n;
    for (int k = 0; k < 4; ++k) {
      CHECK(rows[k] == r.per_class[k].ground_truths);
      CHECK(rows[k] == analysis.classes[k].truths);
      const auto right = analysis.confusion.find({k, k});
      CHECK(double(right->second) / double(rows[k]) == doctest::Approx(analysis.classes[k].recall));
    }
  }
}

SHARED_TEST("errors: costs equal those of tidecv") {
  const CocoDataset t = read_coco(shared("data/coco_eval/gt.json"));
  const auto found = read_detections(shared("data/coco_eval/dt.json"));
  const ErrorAnalysis analysis = analyse_errors(t, found);
  CHECK(analysis.count == std::array<int64_t, error_kinds>{83, 1, 0, 1, 0, 97});
  // Values of tidecv 1.0.1, whose mean was changed to exclude classes without truth. Its recall points are k
  // / 100; those of COCO are 0.01 * k, which differ by rounding for some k.
  const double want[] = {16.7428, 0.2474, 0, 0.0206, 0, 10.5071};
  for (int k = 0; k < error_kinds; ++k) CHECK(std::abs(100 * analysis.cost[k] - want[k]) < 0.02);
}

TEST_CASE("errors: costs equal those of tidecv where there are crowds") {
  // A quarter of the objects become crowds of four times their area.
  Case c = random_case(11, 60, 4);
  for (CocoAnnotation& a : c.truths.annotations) {
    a.crowd = a.id % 4 == 0;
    if (!a.crowd) continue;
    a.w *= 2;
    a.h *= 2;
    a.area *= 4;
  }
  const ErrorAnalysis analysis = analyse_errors(c.truths, c.found);
  CHECK(100 * analysis.AP50 == doctest::Approx(24.1442).epsilon(1e-5));
  // Values of tidecv 1.0.1 for these boxes, crowds by add_ignore_region(). Its counts also have the ignored
  // detections that no correction would make right, see docs/report.md.
  const double want[] = {6.2288, 15.9834, 1.0172, 1.1645, 3.3285, 11.8492};
  for (int k = 0; k < error_kinds; ++k) {
    INFO(error_kind_names[k]);
    CHECK(std::abs(100 * analysis.cost[k] - want[k]) < 1e-4);
  }
  CHECK(analysis.count == std::array<int64_t, error_kinds>{33, 39, 28, 40, 83, 48});
}

TEST_CASE(
    "errors: an ignored detection that is near an object is right if it were drawn better, as in tidecv") {
  // The detection lies in the crowd, and has IoU 0.36 with the object beside it.
  CocoDataset t = scene(1, {"cat", "dog"});
  add_truth(t, 1, 1, 0, 0, 100, 100);
  add_truth(t, 1, 1, 0, 0, 60, 60, /*crowd=*/true);
  std::vector<Detection> found = {{1, 1, 0, 0, 60, 60, .9}};
  ErrorAnalysis analysis = analyse_errors(t, found);
  CHECK(analysis.AP50 == 0);
  CHECK(analysis.cost == std::array<double, error_kinds>{0, 1, 0, 0, 0, 0});
  CHECK(analysis.count == std::array<int64_t, error_kinds>{0, 1, 0, 0, 0, 0});
  // It is neither a false positive nor an error of an image.
  CHECK(analysis.precision[0] == -1);
  const ClassifiedImage image = classify_errors(t, found)[0];
  CHECK(image.found[0].kind == kIgnored);
  CHECK(image.found[0].fix == kLocalisation);
  // Far from the object, it does not count, and the object is missed.
  found[0] = {1, 1, 0, 0, 20, 20, .9};
  analysis = analyse_errors(t, found);
  CHECK(analysis.cost[kLocalisation] == 0);
  CHECK(analysis.count == std::array<int64_t, error_kinds>{0, 0, 0, 0, 0, 1});
  // The object is a dog: the class is the error.
  t.annotations[0].category_id = 2;
  found[0] = {1, 1, 0, 0, 80, 80, .9};
  analysis = analyse_errors(t, found);
  CHECK(analysis.count == std::array<int64_t, error_kinds>{1, 0, 0, 0, 0, 0});
  CHECK(analysis.cost[kWrongClass] == 1);
}

TEST_CASE("errors: precision, recall and F1 by score, and the score with the best F1") {
  CocoDataset t = scene(4, {"cat"});
  for (int i = 1; i <= 4; ++i) add_truth(t, i, 1, 0, 0, 100, 100);
  const std::vector<Detection> found = {{1, 1, 0, 0, 100, 100, .905},
                                        {2, 1, 0, 0, 100, 100, .605},
                                        {3, 1, 0, 0, 100, 100, .505},
                                        {4, 1, 300, 0, 50, 50, .305}};
  const ErrorAnalysis analysis = analyse_errors(t, found);
  CHECK(analysis.precision[91] == -1);
  CHECK(analysis.recall[91] == 0);
  CHECK(analysis.precision[60] == 1);
  CHECK(analysis.recall[60] == 0.5);
  CHECK(analysis.f1[60] == doctest::Approx(2. / 3));
  CHECK(analysis.precision[30] == 0.75);
  CHECK(analysis.recall[30] == 0.75);
  CHECK(analysis.working_score == doctest::Approx(.40));  // the middle of the best scores, .31 to .50
  CHECK(analysis.classes[0].precision == 1);
  CHECK(analysis.classes[0].recall == 0.75);
  CHECK(analysis.classes[0].f1 == doctest::Approx(6. / 7));
}

TEST_CASE("errors: a score of two digits counts at its own threshold and not at the next") {
  CocoDataset t = scene(1, {"cat"});
  add_truth(t, 1, 1, 0, 0, 100, 100);
  for (int s = 0; s < score_steps; ++s) {
    const double score = std::stod(concat(s / 100, ".", s / 10 % 10, s % 10));
    const ErrorAnalysis analysis = analyse_errors(t, {{1, 1, 0, 0, 100, 100, score}});
    CAPTURE(score);
    CHECK(analysis.recall[s] == 1);
    if (s + 1 < score_steps) CHECK(analysis.recall[s + 1] == 0);
  }
  // F1 is best only at 0.35, where the false positive with score 0.34 is excluded.
  const ErrorAnalysis best = analyse_errors(t, {{1, 1, 0, 0, 100, 100, .35}, {1, 1, 300, 0, 50, 50, .34}});
  CHECK(best.confusion == std::map<std::pair<int, int>, int64_t>{{{0, 0}, 1}});
}

TEST_CASE("errors: the confusion matrix at the working score") {
  CocoDataset t = scene(1, {"cat", "dog"});
  add_truth(t, 1, 1, 0, 0, 100, 100);
  add_truth(t, 1, 1, 200, 0, 100, 100);
  add_truth(t, 1, 2, 400, 0, 100, 100);
  add_truth(t, 1, 2, 0, 200, 100, 100);
  const ErrorAnalysis analysis =
      analyse_errors(t, {{1, 1, 0, 0, 100, 100, .9},
                         {1, 2, 0, 0, 100, 99, .89},  // the cat is already matched, so this matches no object
                         {1, 2, 200, 0, 100, 80, .88},
                         {1, 2, 400, 0, 100, 100, .87},
                         {1, 2, 0, 200, 100, 100, .1},
                         {1, 1, 300, 300, 50, 50, .09},
                         {1, 1, 400, 300, 50, 50, .08},
                         {1, 1, 500, 300, 50, 50, .07},
                         {1, 2, 300, 400, 50, 50, .06}});
  CHECK(analysis.working_score <= .1);
  const std::map<std::pair<int, int>, int64_t> want = {{{0, 0}, 1}, {{0, 1}, 1}, {{1, 1}, 2}, {{2, 1}, 1}};
  CHECK(analysis.confusion == want);
}

TEST_CASE("errors: the worst images are sorted by errors, without images that have none") {
  CocoDataset t = scene(40, {"cat"});
  std::vector<Detection> found;
  for (int i = 1; i <= 40; ++i) {
    for (int n = 0; n < i; ++n) {  // image i misses i - 1 of its i objects
      add_truth(t, i, 1, 15. * n, 0, 10, 10);
      if (n == 0) found.push_back({i, 1, 0, 0, 10, 10, .9});
    }
  }
  const ErrorAnalysis analysis = analyse_errors(t, found);
  REQUIRE(analysis.worst.size() == 25);
  for (int k = 0; k < 25; ++k) {
    CHECK(analysis.worst[k].id == 40 - k);
    CHECK(analysis.worst[k].cost == 39 - k);
    CHECK(analysis.worst[k].boxes.size() == size_t(40 - k));
  }
  CHECK(analysis.worst[0].boxes[0].kind == kTruePositive);
  CHECK(analysis.worst[0].boxes[1].kind == kMissed);
  t.annotations.resize(3);
  t.images.resize(2);
  found.resize(2);
  const auto few = analyse_errors(t, found).worst;
  REQUIRE(few.size() == 1);
  CHECK(few[0].id == 2);
}

TEST_CASE("errors: results without classes, without truth and without detections") {
  CHECK(analyse_errors({}, {}).AP50 == -1);
  CocoDataset t = scene(2, {"cat", "dog"});
  const ErrorAnalysis none = analyse_errors(t, {{1, 1, 0, 0, 5, 5, .9}});
  CHECK(none.AP50 == -1);
  CHECK(none.f1[0] == -1);
  CHECK(none.classes[0].precision == -1);
  CHECK(none.cost == std::array<double, error_kinds>{});
  CHECK(none.worst.size() == 1);
  CHECK(voc_ap(t, {}).AP == -1);
  add_truth(t, 1, 1, 0, 0, 10, 10);
  const ErrorAnalysis missed = analyse_errors(t, {});
  CHECK(missed.AP50 == 0);
  CHECK(missed.working_score == 0.25);
  CHECK(missed.count[kMissed] == 1);
  CHECK(missed.confusion == std::map<std::pair<int, int>, int64_t>{{{0, 2}, 1}});
  CHECK(voc_ap(t, {}).AP == 0);
  // Detections of unknown images and classes are ignored.
  CHECK(analyse_errors(t, {{9, 1, 0, 0, 5, 5, .9}, {1, 9, 0, 0, 5, 5, .9}}).AP50 == 0);
}

TEST_CASE(
    "errors: AP of VOC: both end pixels count, only the nearest object can match, difficult objects are "
    "ignored") {
  CocoDataset t = scene(2, {"cat", "dog"});
  add_truth(t, 1, 1, 0, 0, 9, 9);  // 10 x 10 pixels
  add_truth(t, 2, 1, 0, 0, 99, 99);
  // The box has 5 x 10 of 100 pixels, which is IoU 0.5. Without the end pixels, 4 x 9 of 81 would be less.
  const std::vector<Detection> first = {{1, 1, 0, 0, 4, 9, .9}};
  VocResult r = voc_ap(t, first);
  CHECK(r.AP == 0.5);
  CHECK(r.AP11 == doctest::Approx(6. / 11));
  CHECK(r.per_class[1].AP == -1);
  CHECK(coco_eval(t, first).AP50 == 0);

  // Both detections overlap the first object most. In COCO the second detection matches the other object.
  t = scene(1, {"cat"});
  add_truth(t, 1, 1, 0, 0, 99, 99);
  add_truth(t, 1, 1, 20, 0, 99, 99);
  const std::vector<Detection> both = {{1, 1, 0, 0, 99, 99, .9}, {1, 1, 9, 0, 99, 99, .8}};
  CHECK(voc_ap(t, both).AP == 0.5);
  CHECK(coco_eval(t, both).AP50 == doctest::Approx(1));
  t.annotations[1].crowd = true;  // a difficult object
  CHECK(voc_ap(t, both).AP == 1);
  t.annotations[0].crowd = true;
  t.annotations[1].crowd = false;
  CHECK(voc_ap(t, {{1, 1, 0, 0, 99, 99, .9}, {1, 1, 20, 0, 99, 99, .8}}).AP == 1);
}

SHARED_TEST("errors: AP of VOC equals an independent computation in Python") {
  const VocResult r =
      voc_ap(read_coco(shared("data/coco_eval/gt.json")), read_detections(shared("data/coco_eval/dt.json")));
  CHECK(r.AP == doctest::Approx(0.6974111753961).epsilon(1e-10));
  CHECK(r.AP11 == doctest::Approx(0.6891883761536).epsilon(1e-10));
}

TEST_CASE("errors: text and JSON contain all values") {
  const Case c = random_case(4, 20, 3);
  const ErrorAnalysis analysis = analyse_errors(c.truths, c.found);
  std::ostringstream out;
  print_error_analysis(out, analysis);
  for (int k = 0; k < error_kinds; ++k) CHECK(has(out.str(), error_kind_names[k]));
  std::ostringstream table;
  VocResult voc = voc_ap(c.truths, c.found);
  voc.per_class[0].name = "\u4eba\x1b[2J\n";
  print_voc(table, voc);
  CHECK(has(table.str(), "\n\u4eba\\x1b[2J\\x0a" + std::string(17, ' ')));
  CHECK(has(table.str(), "mean"));
  TempDir dir;
  write_eval_json(dir / "e.json", coco_eval(c.truths, c.found), [&](JsonWriter& writer) {
    write_error_analysis(writer, analysis);
    write_voc(writer, voc_ap(c.truths, c.found));
  });
  const std::string json = contents(dir / "e.json");
  for (const char* key : {"\"error_analysis\":", "\"localisation\":{\"AP50\":", "\"F1_by_score\":[",
                          "\"confusion\":[", "\"voc\":{\"AP\":", "\"AP11\":"})
    CHECK_MESSAGE(has(json, key), key);
}

TEST_CASE("errors: a box too large for the area ranges of COCO is ignored, as in COCO") {
  CocoDataset t = scene(1, {"cat"});
  add_truth(t, 1, 1, 0, 0, 100, 100);
  const std::vector<Detection> found{{1, 1, 0, 0, 2e8, 2e8, 0.9}, {1, 1, 0, 0, 100, 100, 0.5}};
  const ErrorAnalysis analysis = analyse_errors(t, found);
  CHECK(analysis.AP50 == doctest::Approx(coco_eval(t, found).AP50));
  CHECK(analysis.AP50 == doctest::Approx(1));
  for (const double cost : analysis.cost) CHECK(cost == 0);
}
