// SPDX-License-Identifier: Apache-2.0
// Pictures: labels, boxes, text beyond ASCII, and the sheets of a run.
#include "data/pictures.hpp"

#include "images/font.hpp"
#include "tensors.hpp"

using namespace yolox;

namespace {

double part_of(const cv::Rect& of, const cv::Rect& in) {
  return of.area() > 0 ? double((of & in).area()) / of.area() : 0;
}
cv::Rect rect(const Box& b) { return {cv::Point(int(b.x1), int(b.y1)), cv::Point(int(b.x2), int(b.y2))}; }

// Returns n boxes of 6 to 120 pixels at random places of an image.
std::vector<LabelledBox> crowd_of_boxes(cv::Size size, int n, uint64_t seed) {
  cv::RNG random(seed);
  std::vector<LabelledBox> boxes;
  for (int i = 0; i < n; ++i) {
    const int w = random.uniform(6, 120), h = random.uniform(6, 120);
    const int x = random.uniform(0, size.width - w), y = random.uniform(0, size.height - h);
    boxes.push_back({{double(x), double(y), double(x + w), double(y + h), i % 7}, concat("class ", i % 7)});
  }
  return boxes;
}

cv::Mat drawn(const std::string& text, int em = 24) {
  cv::Mat image(40, 240, CV_8UC3, cv::Scalar::all(0));
  draw_text(image, text, {4, 4}, em, cv::Scalar::all(255));
  return image;
}
int ink(const cv::Mat& image) { return cv::countNonZero(image.reshape(1)); }
bool equal(const cv::Mat& a, const cv::Mat& b) { return cv::norm(a, b, cv::NORM_INF) == 0; }

}  // namespace

TEST_CASE("pictures: labels hide no small object and no other label; they stay within the image") {
  const cv::Size size(416, 320);
  for (const uint64_t seed : {1, 2, 3, 4, 5}) {
    const auto boxes = crowd_of_boxes(size, 25, seed);
    const auto placed = place_labels(size, boxes, LabelStyle::unobtrusive);
    size_t labels = 0;
    for (size_t i = 0; i < placed.size(); ++i) {
      const cv::Rect& place = placed[i].place;
      if (place.empty()) continue;
      ++labels;
      CHECK((place & cv::Rect({0, 0}, size)) == place);
      for (const auto& [box, _] : boxes) CHECK(part_of(rect(box), place) <= 0.2);
      for (size_t k = 0; k < i; ++k) CHECK(part_of(placed[k].place, place) <= 0.05);
    }
    CHECK(labels > 8);  // most boxes have one
    for (const auto& [place, em] : place_labels(size, boxes, LabelStyle::all)) {
      CHECK_FALSE(place.empty());
      CHECK((place & cv::Rect({0, 0}, size)) == place);
    }
  }
}

TEST_CASE(
    "pictures: a label is above its box, below it if there is another object above, inside a large box") {
  const cv::Size size(416, 416);
  const auto place_of_last = [&](const std::vector<Box>& boxes) {
    std::vector<LabelledBox> labelled;
    for (const Box& b : boxes) labelled.push_back({b, "cat"});
    return place_labels(size, labelled, LabelStyle::all).back().place;
  };
  const Box box{100, 200, 150, 240, 0}, above{100, 180, 150, 198, 1};
  CHECK(place_of_last({box}).br().y <= 200);
  CHECK(place_of_last({box}).x == 100);
  CHECK(place_of_last({above, box}).y >= 240);
  CHECK(part_of(place_of_last({{0, 0, 416, 416, 0}}), {0, 0, 416, 416}) == 1);
  // A tiny box at the border: beside it, in smaller letters.
  const auto tiny = place_labels(size, {{{0, 0, 8, 8, 0}, "cat"}}, LabelStyle::all)[0];
  CHECK(part_of({0, 0, 8, 8}, tiny.place) == 0);
  CHECK(tiny.em < place_labels(size, {{box, "cat"}, {{0, 0, 200, 200, 0}, "cat"}}, LabelStyle::all)[1].em);
}

TEST_CASE("pictures: ignored regions are hatched") {
  cv::Mat image(100, 100, CV_8UC3, cv::Scalar::all(0));
  draw_boxes(image, {{{20, 30, 80, 90, kIgnoredRegion}, ""}}, LabelStyle::all);
  const int inside = ink(image(cv::Rect(20, 30, 60, 60)));
  CHECK(inside > 600);
  CHECK(inside < 3 * 60 * 60 / 4);
  CHECK(ink(image) == inside);
  const Targets targets = make_targets({{{1, 1, 9, 9, 1}, {2, 2, 30, 40, kIgnoredRegion}}, {}});
  const auto boxes = labelled_boxes(targets, {"a", "b"});
  REQUIRE(boxes[0].size() == 2);
  CHECK(boxes[0][0].text == "b");
  CHECK(boxes[0][1].box.cls == kIgnoredRegion);
  CHECK(boxes[0][1].box.x2 == 30);
  CHECK(boxes[1].empty());
}

TEST_CASE("pictures: the pixels of a small object stay visible, and its box is drawn over labels") {
  // A white object of 10 pixels right above a large box, where the label of that box would be.
  cv::Mat image(400, 400, CV_8UC3, cv::Scalar::all(0));
  const cv::Rect object(105, 186, 10, 10);
  cv::rectangle(image, object, cv::Scalar::all(255), cv::FILLED);
  const std::vector<LabelledBox> boxes = {{{100, 200, 300, 390, 3}, "a long name of a class"},
                                          {{105, 186, 115, 196, 5}, "dot"}};
  draw_boxes(image, boxes, LabelStyle::all);
  CHECK(ink(255 - image(cv::Rect(106, 187, 8, 8))) == 0);  // its line is one pixel wide
  CHECK(cv::norm(image.at<cv::Vec3b>(186, 105), cv::Vec3b(255, 255, 255), cv::NORM_INF) > 50);
  // Many labels in little space: the corner of each box has the colour of a box.
  cv::Mat full(200, 200, CV_8UC3, cv::Scalar::all(0));
  std::vector<LabelledBox> crowd;
  for (int i = 0; i < 12; ++i)
    crowd.push_back({{20. + 12 * i, 60. + 6 * i, 50. + 12 * i, 90. + 6 * i, 1}, ""});
  cv::Mat outlines = full.clone();
  draw_boxes(outlines, crowd, LabelStyle::all);
  for (auto& box : crowd) box.text = "name";
  draw_boxes(full, crowd, LabelStyle::all);
  int hidden = 0, lines = 0;
  for (int y = 0; y < 200; ++y)
    for (int x = 0; x < 200; ++x) {
      if (outlines.at<cv::Vec3b>(y, x) == cv::Vec3b()) continue;
      ++lines;
      hidden += full.at<cv::Vec3b>(y, x) != outlines.at<cv::Vec3b>(y, x);
    }
  CHECK(lines > 1000);
  CHECK(hidden < lines / 10);  // by letters alone
}

TEST_CASE("pictures: names beyond ASCII are drawn, or a note says why not") {
  const std::vector<std::string> european = {"größe", "кошка"}, names = {"größe", "кошка", "猫"};
  const std::string note = font_note(european);
  if (std::filesystem::exists("/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf") && !has(note, "FreeType"))
    CHECK(note == "");
  for (const std::string& name : names) {
    const auto text = code_points(name);
    std::string replaced;
    for (const char32_t c : text) replaced += c < 0x7F ? char(c) : '?';
    CAPTURE(name);
    CHECK(ink(drawn(name)) > 50);
    if (!font_note({name}).empty()) {
      MESSAGE(font_note({name}));
      CHECK(equal(drawn(name), drawn(replaced)));
      continue;
    }
    CHECK_FALSE(equal(drawn(name), drawn(replaced)));
    CHECK(text_extent(name, 24).width > 10);
  }
  if (note.empty()) {  // each letter has a glyph of its own
    const std::vector<std::string> letters = {"ö", "ß", "к", "о", "ш", "а", "?", "o"};
    for (size_t a = 0; a < letters.size(); ++a)
      for (size_t b = 0; b < a; ++b) {
        if (letters[a] == "o" && letters[b] == "о") continue;  // Latin and Cyrillic
        CHECK_FALSE(equal(drawn(letters[a]), drawn(letters[b])));
      }
  }
  if (font_note({"猫犬"}).empty()) CHECK_FALSE(equal(drawn("猫"), drawn("犬")));
  CHECK(font_note({"cat", "dog"}) == "");
  const std::string none = font_note({"cat", "\xF4\x80\x80\x80 x"});  // a code point of private use
  CHECK_MESSAGE(has(none, "note: pictures show '?' in the names of 1 class ("), none);
  CHECK(equal(drawn("\xF4\x80\x80\x80"), drawn("?")));
}

TEST_CASE("pictures: text of invalid UTF-8 and control characters is drawn as '?'") {
  // Numbers, because C++20 cannot print characters of 32 bits.
  using Numbers = std::vector<uint32_t>;
  const auto numbers = [](const std::string& text) {
    const auto points = code_points(text);
    return Numbers(points.begin(), points.end());
  };
  CHECK(numbers("aö猫") == Numbers{'a', 0xF6, 0x732B});
  CHECK(numbers("\xF0\x9F\x90\x88") == Numbers{0x1F408});
  CHECK(numbers("\x1b\xC3") == Numbers{0xFFFD, 0xFFFD});
  CHECK(numbers("\xE7\x8C"
                "a") == Numbers{0xFFFD, 0xFFFD, 'a'});
  CHECK(code_points("\xC0\xAF\xFF").size() >= 2);
  CHECK(equal(drawn("\x1b"), drawn("?")));
  // Shortened text ends between characters, and fits.
  for (int width = 20; width < 200; ++width) {
    const std::string part = fitted_text("größere Katzen", 14, width);
    CHECK(text_extent(part, 14).width <= width);
    for (const uint32_t c : numbers(part)) CHECK(c != 0xFFFD);
  }
  CHECK(fitted_text("cat", 14, 200) == "cat");
  const std::string endless(1000000, 'a');  // names from files may have any length
  CHECK(fitted_text(endless, 14, 122) == fitted_text(endless.substr(0, 200), 14, 122));
  CHECK(fitted_text(endless, 14, -1).empty());
}

TEST_CASE("pictures: truth is on the left, predictions on the right, each with its title") {
  const torch::Tensor images = torch::full({3, 400, 400, 3}, 128, torch::kByte);
  const std::vector<std::vector<LabelledBox>> truth(3, {{{50, 50, 150, 150, 0}, ""}}),
      found(3, {{{250, 250, 350, 350, 0}, ""}}), none(3);
  const std::vector<std::string> names = {"a.jpg", "b.jpg", "c.jpg"};
  const Image left = draw_comparison(images, truth, none, names),
              right = draw_comparison(images, none, found, names),
              empty = draw_comparison(images, none, none, names);
  REQUIRE(left.size() == right.size());
  CHECK(left.cols > 1600);  // two pairs in a row
  CHECK(left.rows > 800);
  const auto changed = [&](const Image& with) {
    cv::Mat differs;
    cv::absdiff(with, empty, differs);
    return cv::boundingRect(
        differs.reshape(1, differs.rows * differs.cols).colRange(0, 1).clone().reshape(1, differs.rows));
  };
  for (const auto& [sheet, x] : {std::pair(&left, 50), {&right, 250 + 404}}) {
    CHECK(std::abs(changed(*sheet).x - x) <= 2);
    CHECK(sheet->at<cv::Vec3b>(10, 500) == empty.at<cv::Vec3b>(10, 500));
  }
  // The title bar has letters over every image.
  for (const int x : {0, 404, 820, 1224}) {
    double most = 0;
    cv::minMaxLoc(cv::Mat(empty(cv::Rect(x, 0, 200, 16))).reshape(1), nullptr, &most);
    CHECK_MESSAGE(most > 150, x);
  }
  // Small images are enlarged, so that text is legible.
  CHECK(draw_batch(torch::full({2, 64, 64, 3}, 9, torch::kByte), {{}, {}}).cols >= 640);
  CHECK(draw_batch(torch::full({1, 416, 416, 3}, 9, torch::kByte), {{}}).size() == cv::Size(416, 416));
}

TEST_CASE(
    "pictures: the truth of an evaluation batch has the pixels of its image, and unreadable images none") {
  Dataset data = shapes_dataset(0, 1, 2);
  data.records[0].boxes = {{0, 0, 100, 100, 1}, {10, 20, 30, 40, 0}};
  const auto boxes = labelled_boxes({0, -1}, {{0.5, 2}, {1, 1}}, data);
  REQUIRE(boxes.size() == 2);
  REQUIRE(boxes[0].size() == 2);
  CHECK(boxes[0][0].text == data.classes[0]);  // the smallest box is the first
  CHECK(boxes[0][0].box.x1 == 5);
  CHECK(boxes[0][0].box.y2 == 80);
  CHECK(boxes[1].empty());
  CHECK(short_names({0, -1}, data) == std::vector<std::string>{data.name_of(0), "unreadable image"});
}
