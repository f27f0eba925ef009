// SPDX-License-Identifier: Apache-2.0
// Pictures: labels, boxes, text beyond ASCII, and the sheets of a run.
#include "data/pictures.hpp"

#include "tensors.hpp"

using namespace yolox;

namespace {

cv::Mat drawn(const std::string& text) {
  cv::Mat image(40, 240, CV_8UC3, cv::Scalar::all(0));
  draw_text(image, text, {4, 4}, 24, cv::Scalar::all(255));
  return image;
}
int ink(const cv::Mat& image) { return cv::countNonZero(image.reshape(1)); }

}  // namespace

TEST_CASE("pictures: a label is above its box, within the image and legible; ignored regions have none") {
  const auto label_of = [](const Box& box) {
    cv::Mat plain(400, 400, CV_8UC3, cv::Scalar::all(128)), with = plain.clone(), differs;
    draw_boxes(plain, {{box, ""}});
    draw_boxes(with, {{box, "cat"}});
    cv::absdiff(plain, with, differs);
    cv::cvtColor(differs, differs, cv::COLOR_BGR2GRAY);
    return cv::boundingRect(differs);
  };
  CHECK(label_of({100, 200, 150, 240, 0}).br().y <= 201);
  CHECK(label_of({100, 200, 150, 240, 0}).y > 180);
  for (const Box& box : {Box{-5, -5, 20, 20, 0}, {390, 200, 400, 210, 0}, {-1e9, -1e9, 1e9, 1e9, 0}})
    CHECK(label_of(box).width > 15);  // an untrained network predicts boxes like the last one
  const auto luma = [](const cv::Scalar& v) { return 0.114 * v[0] + 0.587 * v[1] + 0.299 * v[2]; };
  for (int c = 0; c < 80; ++c) {
    CHECK(cv::norm(class_colour(c), class_colour(c + 1)) > 60);
    Image canvas({400, 200}, 128);
    draw_boxes(canvas, {{{50, 100, 350, 180, c}, "dog 0.93"}});
    double most = 0;
    for (const cv::Vec3b& v : cv::Mat_<cv::Vec3b>(canvas(cv::Rect(52, 88, 40, 9)).clone()))
      most = std::max(most, std::abs(luma(cv::Vec3d(v)) - luma(class_colour(c))));
    CHECK_MESSAGE(most > 90, c);
  }
  cv::Mat image(100, 100, CV_8UC3, cv::Scalar::all(0));
  draw_boxes(image, {{{20, 30, 80, 90, kIgnoredRegion}, ""}});
  CHECK(image.at<cv::Vec3b>(30, 50) == cv::Vec3b::all(255));
  CHECK(ink(image(cv::Rect(22, 32, 57, 57))) == 0);
}

TEST_CASE("pictures: names beyond ASCII are drawn, or a note says why not; text is cut at the border") {
  CHECK(font_note({"cat", "dog"}) == "");
  for (const std::string name : {"größe", "кошка", "猫"}) {
    CHECK(ink(drawn(name)) > 50);
    if (font_note({name}).empty())
      CHECK(cv::norm(drawn(name), drawn("?"), cv::NORM_INF) > 0);
    else
      MESSAGE(font_note({name}));
  }
  CHECK(cv::norm(drawn("a\x1b"), drawn("a\\x1b"), cv::NORM_INF) == 0);
  cv::Mat image(100, 100, CV_8UC3, cv::Scalar::all(0)), part = image(cv::Rect(30, 30, 40, 20));
  draw_text(part, std::string(200, 'w'), {-9, -5}, 24, cv::Scalar::all(255));
  CHECK(ink(part) > 0);
  CHECK(ink(image) == ink(part));
}

TEST_CASE("pictures: truth is on the left, predictions on the right, each with its title") {
  const Dataset data = shapes_dataset(0, 1, 3);
  Batch batch{torch::full({3, 400, 400, 3}, 128, torch::kByte), {}, {{{}, 0}, {{}, 1}, {{}, -1}}, &data};
  const auto drawn_with = [&](const std::vector<Box>& boxes, double score) {
    for (Item& item : batch.items) item.boxes = boxes;
    return draw_comparison(batch, {3, {{{250, 250, 350, 350, 0}, score}}});
  };
  const Image empty = drawn_with({}, 0.24);
  CHECK((empty.cols == 4 * 404 - 4 && empty.rows > 800));  // two pairs in a row
  const auto changed = [&](const Image& with) {
    cv::Mat differs;
    cv::absdiff(with, empty, differs);
    cv::cvtColor(differs, differs, cv::COLOR_BGR2GRAY);
    return cv::boundingRect(differs).x;
  };
  CHECK(std::abs(changed(drawn_with({{50, 50, 150, 150, 0}}, 0.24)) - 50) <= 2);
  CHECK(std::abs(changed(drawn_with({}, 0.25)) - (250 + 404)) <= 2);
  for (const int x : {0, 404, 808, 1212})  // the title bar has letters over every image
    CHECK_MESSAGE(ink(cv::Mat(empty(cv::Rect(x, 0, 200, 16))) > 150) > 0, x);
  const Image unreadable = draw_truth(batch);
  batch.items[2].index = 2;
  CHECK(cv::norm(unreadable, draw_truth(batch), cv::NORM_INF) > 0);  // the titles are names of images
  // Small images are enlarged, so that text is legible.
  batch.images = torch::full({3, 64, 64, 3}, 9, torch::kByte);
  CHECK(draw_truth(batch).cols >= 3 * 320);
  batch.images = torch::full({3, 416, 416, 3}, 9, torch::kByte);
  CHECK(draw_truth(batch).cols == 3 * 420 - 4);
}

TEST_CASE("pictures: the truth is labelled with class names, the smallest box first") {
  const auto labelled = labelled_boxes(
      std::vector<Box>{{2, 2, 30, 40, kIgnoredRegion}, {3, 3, 50, 50, 0}, {1, 1, 9, 9, 1}}, {"a", "b"});
  REQUIRE(labelled.size() == 3);
  CHECK((labelled[0].text == "b" && labelled[1].text.empty() && labelled[2].text == "a"));
  CHECK(labelled[1].box.cls == kIgnoredRegion);
  CHECK(labelled[1].box.x2 == 30);
}
