// SPDX-License-Identifier: Apache-2.0
#include "common.hpp"
#include "data/coco_json.hpp"

using namespace yolox;

static std::string coco_error(const std::string& text) {
  TempDir dir;
  const std::string path = dir / "a.json";
  write_text(path, text);
  const std::string message = error_of([&] { read_coco(path); });
  CHECK_MESSAGE(message.find(path) != std::string::npos, "the error must name the file: " << message);
  CHECK(message.find('\n') == std::string::npos);
  return message;
}
// Returns all that is read from a COCO file, as text, with a list in each line.
static std::string read_back(const std::string& text) {
  std::string lines = coco_text(parse_coco(text, "a.json"));
  for (const char* end : {"}],", "}]}"})
    for (size_t at = 0; (at = lines.find(end, at)) != std::string::npos; at += 4) lines.insert(at + 2, "\n");
  return lines;
}
static std::string with_annotation(const std::string& annotation) {
  return R"({"images": [{"id": 1}], "categories": [{"id": 1}], "annotations": [)" + annotation + "]}";
}
static std::vector<Detection> detections(const std::string& text) {
  TempDir dir;
  write_text(dir / "dt.json", text);
  return read_detections(dir / "dt.json");
}

TEST_CASE("coco_json: numbers are parsed in every form of JSON") {
  const auto x = [](const std::string& number) {
    return parse_coco(
               R"({"images":[],"categories":[],"annotations":[{"image_id":1,"category_id":1,"bbox":[)" +
                   number + ",0,1,1]}]}",
               "text")
        .annotations[0]
        .x;
  };
  for (const char* zero : {"0", "-0", "0.0", "0e0", "0e30", "-0E+30", "0e308", "0.000e300", "0e-30", "0e-400",
                           "1e-400", "0.0e-999999999999"})
    CHECK_MESSAGE(x(zero) == 0, zero);
  for (const char* number :
       {"0.1", "-1.5E+3", "123456789.123456789123456789", "2.2250738585072011e-308", "4.9e-324",
        "1.7976931348623157e308", "18446744073709551615", "9007199254740993"})
    CHECK_MESSAGE(x(number) == std::strtod(number, nullptr), number);
  CHECK(has(error_of([&] { x("9e308"); }), "annotations[0].bbox"));
  CHECK(error_of([&] { x("1e400"); }) != "");
  CHECK(error_of([&] { x("-"); }) != "");
}

TEST_CASE("coco_json: defaults, order, unknown keys, nulls, nested values") {
  const std::string text = R"({
    "info": {"images": [{"id": "not this list"}]}, "licenses": [1, [2], {"id": {}}], "extra": null,
    "annotations": [
      {"id": 7, "image_id": 9, "category_id": 3, "bbox": [1.5, 2, 3e1, 0.1], "area": 12.5, "iscrowd": 1,
       "segmentation": [[1, 2, NaN, 4], []], "attributes": {"bbox": [0], "id": "x", "deep": [[[{}]]]}},
      {"image_id": 8, "category_id": 3.0, "bbox": [1, 2, 3, 4], "area": null, "iscrowd": null, "segmentation": []},
      {"id": 5, "image_id": 9, "category_id": 1, "bbox": null},
      {"image_id": 9223372036854775807, "category_id": -9223372036854775808, "bbox": [0, 0, 0, 0], "iscrowd": true,
       "bbox": [-1, -2, 5, 6]}],
    "images": [{"id": 9, "file_name": "sub/\u00e9\ud83d\ude00.jpg", "width": 640, "height": 480.0},
               {"id": 8, "file_name": null, "width": null}],
    "categories": [{"id": 3, "name": "c"}, {"id": 1, "name": "a \"b\""}, {"id": 2, "supercategory": "x"}]})";
  // Of duplicate keys the last one counts.
  CHECK(read_back(text) ==
        R"({"images":[{"id":9,"file_name":"sub/)"
        "\xC3\xA9\xF0\x9F\x98\x80"
        R"(.jpg","width":640,"height":480},{"id":8,"file_name":"000000000008.jpg","width":0,"height":0}]
,"categories":[{"id":1,"name":"a \"b\""},{"id":2,"name":"2"},{"id":3,"name":"c"}]
,"annotations":[{"id":7,"image_id":9,"category_id":3,"bbox":[1.5,2.0,30.0,0.1],"area":12.5,"iscrowd":1},{"id":2,"image_id":8,"category_id":3,"bbox":[1.0,2.0,3.0,4.0],"area":12.0,"iscrowd":0},{"id":4,"image_id":9223372036854775807,"category_id":-9223372036854775808,"bbox":[-1.0,-2.0,5.0,6.0],"area":30.0,"iscrowd":1}]
})");
  const ProblemList problems = parse_coco(text, "a.json").problems;
  REQUIRE(problems.size() == 1);
  CHECK_HAS(problems[0].second, "a.json: annotations[2] has no \"bbox\"");
  TempDir dir;
  write_text(dir / "a.json", "\xEF\xBB\xBF" + text);
  CHECK(coco_text(read_coco(dir / "a.json")) == coco_text(parse_coco(text, "a.json")));
}

TEST_CASE("coco_json: an entry with a wrong value is skipped and reported with file, entry and key") {
  const std::string ids = R"({"image_id": 1, "category_id": 1, )", box = R"("bbox": [1, 2, 3, 4])";
  std::vector<std::pair<std::string, std::string>> rows = {
      {R"({"image_id": 1, )" + box + "}", "annotations[0] has no \"category_id\""},
      {R"({"image_id": 1, "category_id": null, )" + box + "}", "annotations[0] has no \"category_id\""},
      {R"({"image_id": 1, "category_id": 1.5, )" + box + "}", "category_id: found 1.5"},
      {R"({"image_id": 9223372036854775808, "category_id": 1, )" + box + "}", "64 bits"},
      {ids + box + R"(, "area": {}})", "annotations[0].area"},
      {ids + box + R"(, "iscrowd": "no"})", ".iscrowd"},
      {ids + R"("bbox": [1, 2, 3]})", "annotations[0].bbox: found a list of 3 values"},
      {ids + R"("bbox": []})", "annotations[0].bbox: found a list of 0 values"}};
  for (const std::string bad : {"[1, 2, \"x\", 4]", "[1, 2, \"\", 4]", "[1, 2, NaN, 4]", "[1, 2, \"nan\", 4]",
                                "[1, 2, null, 4]", "[1, 2, 3, [4]]", "[[1, 2, 3, 4]]", "\"1 2 3 4\"", "{}"})
    rows.emplace_back(ids + "\"bbox\": " + bad + "}", "annotations[0].bbox");
  for (const std::string entry : {"3", "null", "\"a\"", "[]", R"([1, [2], {"id": [3, {"id": 4}]}])"})
    rows.emplace_back(entry, "annotations[0] is not an object");
  for (const auto& [entry, wanted] : rows) {  // a good annotation follows
    const CocoDataset data = parse_coco(with_annotation(entry + ", " + ids + box + "}"), "a.json");
    REQUIRE(data.annotations.size() == 1);
    CHECK(data.annotations[0].id == 2);
    REQUIRE(data.problems.size() == 1);
    CHECK(data.problems[0].first == "entry cannot be read");
    CHECK_HAS(data.problems[0].second, "a.json: annotations[0]");
    CHECK_HAS(data.problems[0].second, wanted);
  }
  const CocoDataset data = parse_coco(R"({"images": [{"id": 1}, {"id": 2, "width": -3}, {"id": null}], )"
                                      R"("categories": [{"id": {}}, {"id": 1}], "annotations": []})",
                                      "a.json");
  CHECK(data.images.size() == 1);
  CHECK(data.categories.size() == 1);
  REQUIRE(data.problems.size() == 3);
  CHECK_HAS(data.problems[0].second, "images[1].width: found -3");
  CHECK_HAS(data.problems[1].second, "images[2] has no \"id\"");
  CHECK_HAS(data.problems[2].second, "categories[0].id");
}

TEST_CASE("coco_json: numbers in quotes are numbers, names may be numbers, and ids may be text") {
  const CocoDataset data = parse_coco(R"({
    "images": [{"id": "12", "file_name": 7, "width": "640", "height": "480.0"}, {"id": "a5"}, {"id": "a6"}],
    "categories": [{"id": 1, "name": 2025}, {"id": 2, "name": 1.5}, {"id": "dog", "name": "dog"}],
    "annotations": [
      {"id": "x1", "image_id": "12", "category_id": "1", "bbox": ["1", "2.5", 3, "4e1"], "iscrowd": "0"},
      {"id": "x2", "image_id": "a5", "category_id": "dog", "bbox": [1, 2, 3, 4], "area": "7", "iscrowd": "1"}
    ]})",
                                      "a.json");
  CHECK(data.problems.empty());
  const int64_t a5 = data.images.at(1).id, dog = data.categories.at(0).id;
  CHECK(a5 < 0);
  CHECK(a5 != data.images.at(2).id);
  std::string text = coco_text(data);
  for (const auto& [id, name] : {std::pair(a5, "A5"), {data.images[2].id, "A6"}, {dog, "DOG"}})
    for (size_t at; (at = text.find(concat(id))) != std::string::npos;)
      text.replace(at, concat(id).size(), name);
  CHECK_HAS(text, R"([{"id":12,"file_name":"7","width":640,"height":480},{"id":A5,)");
  CHECK_HAS(text, R"([{"id":DOG,"name":"dog"},{"id":1,"name":"2025"},{"id":2,"name":"1.5"}])");
  CHECK_HAS(text, R"("image_id":12,"category_id":1,"bbox":[1.0,2.5,3.0,40.0],"area":120.0,"iscrowd":0})");
  CHECK_HAS(text, R"("image_id":A5,"category_id":DOG,"bbox":[1.0,2.0,3.0,4.0],"area":7.0,"iscrowd":1})");
  // The same text is the same id in a file of detections.
  const auto found =
      detections(R"([{"image_id": "a5", "category_id": "dog", "bbox": [1, 2, 3, 4], "score": "0.5"}])");
  CHECK(found.at(0).image_id == a5);
  CHECK(found[0].category_id == dog);
  CHECK(found[0].score == 0.5);
  // Numbers of more than 64 bits, other spellings and names of numbers are text.
  const CocoDataset odd =
      parse_coco(R"({"images": [{"id": 7}, {"id": "007"}, {"id": "20240131123456789012"}, {"id": "12e4567"},)"
                 R"( {"id": "1.5"}, {"id": "nan"}, {"id": ""}], "categories": [], "annotations": []})",
                 "a.json");
  CHECK(odd.images.size() == 7);
  CHECK(odd.problems.empty());
}

TEST_CASE("coco_json: files that are not COCO files are errors") {
  const std::string good = with_annotation(R"({"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4]})"),
                    deep(1000000, '[');
  for (size_t length = 0; length < good.size(); ++length)  // truncated at every length
    CHECK_HAS(coco_error(good.substr(0, length)), "cut off");
  for (const auto& [text, wanted] : std::vector<std::pair<std::string, std::string>>{
           {"", "byte 0"},
           {"  \n", "empty or cut off"},
           {"hello", "not valid JSON at byte 0"},
           {good + "x", "byte " + std::to_string(good.size())},
           {"[]", "a COCO annotation file has images"},
           {"3", "no list \"images\""},
           {R"([{"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 1}])", "\"images\""},
           {R"({"images": [], "categories": []})", "no list \"annotations\""},
           {R"({"images": [], "annotations": [], "categories": {"id": 1}})", "no list \"categories\""},
           {deep, "cut off"},
           {R"({"images": [{"id": )" + deep, "cut off"},
           {R"({"images": [{"id": 1e999}]})", "byte 19"},
           {R"({"images": [{"id": []}], "categories": [], "annotations": []})", "images[0].id"},
           {R"({"images": [{"id": 1}, {"id": 1}], "categories": [], "annotations": []})",
            "two images have the id 1"},
           {R"({"images": [], "categories": [{"id": 4}, {"id": 4}], "annotations": []})",
            "two categories have the id 4"}})
    CHECK_HAS(coco_error(text), wanted);
  TempDir dir;
  CHECK_HAS(error_of([&] { read_coco(dir / ""); }), "cannot be read (Is a directory); check the path");
  CHECK_HAS(error_of([&] { read_coco(dir / "none.json"); }), "cannot be read");
  const std::string ids = R"([{"image_id": 1, "category_id": 1, )";
  for (const auto& row : std::vector<std::pair<std::string, std::string>>{
           {R"({"images": [], "annotations": []})", "not a list of detections"},
           {ids + R"("bbox": [1, 2, 3, 4], "score": NaN}])", "detections[0].score: found NaN"},
           {ids + R"("bbox": [1, 2, 3, 4]}])", "detections[0] has no \"score\""},
           {ids + R"("score": 1}])", "detections[0] has no \"bbox\""},
           {"[1]", "detections[0] is not an object"},
           {"[[{}]]", "detections[0] is not an object"},
           {"[{}, {}", "detections[0]"}})
    CHECK_HAS(error_of([&] { detections(row.first); }), row.second);
}

TEST_CASE("coco_json: written files are read back bit for bit; a number that is not finite is refused") {
  TempDir dir;
  std::vector<Detection> dets = {{-5, INT64_MAX, 0.1, -1.0 / 3, 1e-300, 12345678.9, 0.0312014663482416861},
                                 {1, 2, 0, 5e-324, 1.7976931348623157e308, 3, 1}};
  for (int i = 1; i < 1000; ++i)
    dets.push_back({i, i, 1.0 / i, std::sqrt(i), std::exp(i % 600), 1.0 * i, std::sin(i)});
  write_detections(dir / "dt.json", dets);
  const std::vector<Detection> back = read_detections(dir / "dt.json");
  REQUIRE(back.size() == dets.size());
  for (size_t i = 0; i < dets.size(); ++i) {
    const Detection &a = dets[i], &b = back[i];
    CHECK((a.image_id == b.image_id && a.category_id == b.category_id && a.x == b.x && a.y == b.y &&
           a.w == b.w && a.h == b.h && a.score == b.score));
  }
  for (const Detection& bad : {Detection{1, 2, 3, 4, 5, 6, NAN}, {1, 2, 3, INFINITY, 5, 6, 1}})
    CHECK_HAS(error_of([&] { write_detections(dir / "dt.json", {bad}); }), "finite");
  CHECK(read_detections(dir / "dt.json").size() == dets.size());  // the file before
  write_detections(dir / "dt.json", {});
  CHECK(read_detections(dir / "dt.json").empty());

  CocoDataset data;
  data.images = {{3, "a \"quoted\"\n\xC3\xA9.jpg", 10, 20}, {1, "b.jpg", 0, 0}};
  data.categories = {{1, "x"}, {5, "y\\"}};
  data.annotations = {{4, 3, 5, 0.1, 0.2, 0.3, 0.4, 0.05, true}, {9, 1, 1, 1, 2, 3, 4, 12, false}};
  write_coco(dir / "gt.json", data);
  const CocoDataset copy = read_coco(dir / "gt.json");
  CHECK(coco_text(copy) == coco_text(data));
  CHECK(copy.images.at(0).file_name == data.images[0].file_name);
  CHECK(copy.annotations.at(0).h == 0.4);
}
