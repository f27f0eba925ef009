// SPDX-License-Identifier: Apache-2.0
#include "evaluate.hpp"

#include "base/new_file.hpp"
#include "checkpoint/load.hpp"
#include "loss.hpp"
#include "models.hpp"
#include "tensors.hpp"

using namespace yolox;
using torch::Tensor;

TEST_CASE("evaluate: evaluation restores the mode of the model and does not change its statistics") {
  const Dataset data = shapes_dataset(0, 1, 3);
  torch::manual_seed(0);
  YOLOX model = make_model("yolox-nano", int(data.classes.size()));
  EvalSettings settings;
  settings.size = {64, 64};
  for (const bool training : {true, false}) {
    model->train(training);
    const Tensor before = model->buffers()[0].clone();
    const auto e = evaluate(model, data, settings);
    CHECK(e.images == 3);
    CHECK(model->is_training() == training);
    CHECK(torch::equal(before, model->buffers()[0]));
  }
}

TEST_CASE("evaluate: the validation loss does not depend on the batch size, also with images of background") {
  Dataset data = shapes_dataset(0, 1, 6);
  for (const int k : {1, 3, 4}) data.records[k].boxes.clear();
  torch::manual_seed(0);
  YOLOX model = make_model("yolox-nano", int(data.classes.size()));
  EvalSettings settings;
  settings.size = {64, 64};
  settings.loss = validation_loss;
  settings.batch = 6;
  const double whole = evaluate(model, data, settings).loss;
  settings.batch = 1;
  CHECK(evaluate(model, data, settings).loss == doctest::Approx(whole).epsilon(1e-5));
}

TEST_CASE("evaluate: detections have the coordinates of the original image; non-finite boxes are left out") {
  const float inf = std::numeric_limits<float>::infinity();
  const Tensor rows = torch::tensor({{10.f, 20.f, 30.f, 60.f, 0.5f, 0.5f, 1.f},
                                     {0.f, 0.f, inf, 5.f, 1.f, 1.f, 0.f},
                                     {-inf, 0.f, inf, 5.f, 1.f, 1.f, 0.f}});
  const auto found = to_image_pixels(rows, {0.5, 2});
  REQUIRE(found.size() == 1);
  const auto& [b, score] = found[0];
  CHECK(std::array{b.x1, b.y1, b.x2, b.y2, score, 1.0 * b.cls} == std::array{20., 10., 60., 30., 0.25, 1.});
}

TEST_CASE("evaluate: the model and the number of classes are detected from the weights") {
  for (const std::string name : {"yolox-nano", "yolox-tiny", "yolox-s"}) {
    YOLOX model = make_model(name, 3);
    const auto weights = to_dict(state_dict(*model));
    CHECK(detect_model(weights) == name);
    CHECK(detect_model(weights, "yolox-x") == name);  // a hint that does not fit the weights is ignored
    CHECK(num_classes_of(weights) == 3);
  }
  CHECK(detect_model(empty_dict()) == "");
  CHECK(detect_model(empty_dict(), "yolox-s") == "");
  CHECK(num_classes_of(empty_dict()) == 0);
  auto hollow = empty_dict();  // a tensor without elements may have any size, however small the file
  hollow.insert("head.cls_preds.0.weight", torch::empty({1 << 30, 0, 1, 1}));
  CHECK(num_classes_of(hollow) == 0);
}

TEST_CASE("evaluate: ids above 2^53 stay as they are when ranks gather their detections") {
  const int64_t id = (int64_t{1} << 60) + 1;
  Evaluation e;
  e.detections = {{id, 1, 0, 0, 2, 2, 0.5}};
  e.unreadable = {id + 1};
  e.loss_sums = {1, 2, 3, 4};
  EvalSettings settings;
  settings.gather = [](const std::vector<double>& mine) { return std::vector{mine, mine}; };
  gather_evaluation(e, settings);
  REQUIRE(e.detections.size() == 2);
  CHECK(e.detections[0].image_id == id);
  CHECK(e.unreadable == std::unordered_set<int64_t>{id + 1});
  CHECK(e.loss_sums == std::array<double, 4>{2, 4, 6, 8});
}
