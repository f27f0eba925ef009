// SPDX-License-Identifier: Apache-2.0
// report.html: contents, and rendering in a browser.
#include "programs.hpp"

#include "data/shapes.hpp"
#include "metrics/html.hpp"
#include "run/report.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

// Returns the command of an installed browser, or "".
const std::string& chromium() {
  static const std::string found = [] {
    for (const std::string name : {"chromium", "chromium-browser", "google-chrome"})
      if (std::system(("command -v " + name + " >/dev/null 2>&1").c_str()) == 0) return name;
    return std::string();
  }();
  return found;
}

// Opens a page. `what` is --dump-dom, which prints the loaded document, or --screenshot=FILE.
Outcome browse(const TempDir& dir, const std::string& page, const std::string& what) {
  return shell(dir, concat("timeout 60 ", chromium(),
                           " --headless --no-sandbox --disable-gpu --hide-scrollbars --enable-logging=stderr "
                           "--user-data-dir='",
                           dir / "profile", "' ", what, " 'file://", page, "'"));
}

std::string evaluation_of(const CocoDataset& truth, const std::vector<Detection>& found) {
  return evaluation_html("", coco_eval(truth, found), truth, analyse_errors(truth, found), nullptr);
}

// Checks that the page fetches nothing and runs no scripts.
void check_self_contained(const std::string& page) {
  for (const char* foreign : {"http://", "https://", "<script", "<link", "@import", "url("})
    CHECK_MESSAGE(!has(page, foreign), foreign);
}

}  // namespace

TEST_CASE("report: without image sizes, a drawing is as large as its boxes") {
  CocoDataset truth;
  truth.categories = {{1, "cat"}};
  truth.images = {{1, "1.jpg", 0, 0}};
  truth.annotations = {{1, 1, 1, 0, 0, 9, 9, 81, false}};
  const std::vector<Detection> found{{1, 1, -1e12, -1e12, 1, 1, .9}};  // must not determine the size
  CHECK(has(evaluation_of(truth, found), "viewBox='0 0 10 10'"));
}

TEST_CASE("report: HTML escapes, numbers on axes, and base64") {
  CHECK(escaped("<b>\"x\" & 'y'\x01") == "&lt;b&gt;&quot;x&quot; &amp; &#39;y&#39;");
  const std::vector<std::pair<double, std::string>> numbers = {
      {0, "0"},       {0.25, "0.25"}, {1.5e-4, "1.5e-04"}, {2e-10, "2.0e-10"},
      {20000, "20k"}, {3e6, "3M"},    {640, "640"}};
  for (const auto& [value, text] : numbers) CHECK(axis_number(value) == text);
  const std::vector<std::pair<std::string, std::string>> rfc4648 = {
      {"", ""}, {"f", "Zg=="}, {"fo", "Zm8="}, {"foo", "Zm9v"}, {"foob", "Zm9vYg=="}, {"foobar", "Zm9vYmFy"}};
  for (const auto& [bytes, text] : rfc4648) CHECK(base64({bytes.begin(), bytes.end()}) == text);
  for (const double hi : {1e-7, 0.3, 1., 7., 12345.}) {
    const auto t = ticks(0, hi);
    CHECK(t.size() >= 3);
    CHECK(t.size() <= 8);
    CHECK(t.front() == 0);
    CHECK_FALSE(std::signbit(t.front()));
    CHECK(t.back() <= hi * (1 + 1e-6));
  }
}

TEST_CASE("report: curves are reduced to at most 300 means; outliers at the start do not set the axis") {
  std::vector<double> x, y;
  for (int i = 0; i < 100000; ++i) {
    x.push_back(i);
    y.push_back(i % 2 ? std::nan("") : i);
  }
  const auto points = curve(x, y);
  CHECK(points.size() <= 300);
  CHECK(points.size() > 200);
  for (const auto& [at, value] : points) CHECK(at == doctest::Approx(value));
  CHECK(points.back().first > 99500);
  CHECK(curve({1, 2}, {std::nan(""), 5}) == std::vector<std::pair<double, double>>{{2, 5}});
  CHECK(curve({}, {}).empty());

  Series loss{"loss", {{0, 1000}}, "c0"};
  for (int i = 1; i < 100; ++i) loss.points.emplace_back(i, 5 + i % 2);
  const std::string html = chart_html({"Loss", "step", {loss}});
  CHECK(has(html, ">10<"));  // a number on the axis
  CHECK_FALSE(has(html, ">1000<"));
  CHECK(has(chart_html({"a < b", "step", {}}), "a &lt; b"));
}

TEST_CASE("report: a limit is a line in its chart; if it is far above the curve, the legend says so") {
  const auto chart = [](double limit) {
    return chart_html({.title = "Norm",
                       .x_name = "step",
                       .series = {{"norm", {{1, 2}, {2, 4}}, "c0"}},
                       .limit = {{limit, "clipped"}}});
  };
  for (const double limit : {1., 3.9, 10.}) {
    CHECK(count_of(chart(limit), "<line class='mark limit'") == 1);
    CHECK(has(chart(limit), "clipped</span>"));
  }
  CHECK(has(chart(10), ">10<"));  // the axis reaches the limit
  CHECK_FALSE(has(chart(100), "<line class='mark limit'"));
  CHECK(has(chart(100), "clipped, above this chart"));
  CHECK(has(chart_html({.title = "Norm", .x_name = "step", .series = {}, .limit = {{10, "clipped"}}}),
            "no data yet"));
}

TEST_CASE("report: rows of the confusion matrix are the truth, columns are predictions") {
  CocoDataset truth;
  truth.categories = {{1, "cat"}, {2, "dog"}};
  truth.images = {{1, "1.jpg", 200, 100}};
  truth.annotations = {{1, 1, 1, 10, 10, 50, 50, 2500, false}};        // a cat,
  const std::vector<Detection> found = {{1, 2, 10, 10, 50, 50, 0.9}};  // detected as a dog
  const std::string html = evaluation_of(truth, found);
  CHECK(has(html, "Rows: truth. Columns: prediction."));
  CHECK(has(html, ">prediction →</text>"));
  CHECK(has(html, ">truth →</text>"));
  // The only count is in the first row and the second column.
  const size_t count = html.find("<text class='on'");
  REQUIRE(count != std::string::npos);
  const auto attribute = [&](const std::string& name, size_t from) {
    const size_t at = html.find(" " + name + "='", from) + name.size() + 3;
    return std::atof(html.c_str() + at);
  };
  const auto row = [&](const std::string& name) {
    return attribute(
        "y", html.find("<text class='y'", html.rfind("<text class='y'", html.find(">" + name + "</text>"))));
  };
  CHECK(attribute("y", count) == row("cat"));
  CHECK(attribute("y", count) < row("dog"));
  CHECK(attribute("x", count) > attribute("x", html.find("<rect")) + 30);
}

TEST_CASE("report: the time of training is that of the steps, the time of evaluation that of metrics.csv") {
  TempDir dir;
  write_text(dir / "config.json", R"({"bs":4,"clip":10})");
  // 10 steps in 10 s, 40 steps in 80 s; the rows of evaluations and of steps without finite numbers do not
  // count.
  write_text(dir / "metrics.csv",
             "epoch,iteration,loss,images_per_second,AP,AP50,eval_seconds\n1,10,2,4,,,\n1,50,2,2,,,\n1,50,,,"
             "0.5,0.6,42\n");
  const std::string html = training_html(dir.path.string());
  CHECK_MESSAGE(has(html, "<b>1m30s</b><span>training time</span>"), html.substr(0, 1000));
  CHECK_MESSAGE(has(html, "<b>42s</b><span>evaluation time</span>"), html.substr(0, 1000));
}

PROGRAM_TEST("report: the page of a run has its curves, evaluation, images and settings") {
  const std::string page = contents(trained().dir / "a/report.html");
  for (const char* id :
       {"training", "evaluation", "errors", "sizes", "classes", "confusion", "worst", "pictures", "settings"})
    CHECK_MESSAGE(count_of(page, concat("id='", id, "'")) == 1, id);
  check_self_contained(page);
  CHECK(has(page, "After step 12, on 8 images"));  // the last evaluation
  for (const char* chart :
       {"Loss", "AP on the evaluation images", "Learning rate", "Gradient norm", "Images per second",
        "Time spent waiting for images, %", "Precision over recall", "F1 by score threshold"})
    CHECK_MESSAGE(has(page, concat("<h3>", chart, "</h3>")), chart);
  const auto rows = metric_rows(trained().dir / "a/metrics.csv");
  CHECK(has(page, concat("<b>", metric_text(rows.back()[kAP]), "</b><span>last AP</span>")));
  for (const auto& name : shapes_classes()) CHECK_MESSAGE(has(page, "<th>" + name + "</th>"), name);
  CHECK(has(page, "<dt>bs</dt><dd>2</dd>"));
  CHECK(has(page, "clipped to 10"));
  CHECK(has(page, "Rows: truth. Columns: prediction."));
  CHECK(has(page, "truth on the left, prediction on the right"));
  // Date, duration, machine.
  CHECK(has(page, concat("\n", escaped(machine_text()), "; ")));
  CHECK(has(page, "; 1 rank with "));
  const size_t started = page.find("\nStarted 20");
  REQUIRE(started != std::string::npos);
  CHECK(has(page.substr(started, 70), ", this report 20"));
  CHECK(has(page, "</b><span>training time</span>"));
  CHECK(has(page, "</b><span>evaluation time</span>"));

  // up to 8 images with errors, and 3 images of the run
  const TempDir dir;
  const std::string mark = "data:image/jpeg;base64,";
  const size_t images = count_of(page, mark);
  CHECK(images > 3);
  CHECK(images <= 11);
  for (size_t at = 0; (at = page.find(mark, at)) != std::string::npos;) {
    at += mark.size();
    write_text(dir / "image.txt", page.substr(at, page.find('\'', at) - at));
    std::string jpeg = shell(dir, "base64 -d image.txt").out;
    const cv::Mat image = cv::imdecode(cv::Mat(1, int(jpeg.size()), CV_8U, jpeg.data()), cv::IMREAD_COLOR);
    CHECK(image.rows > 0);
    CHECK(std::max(image.cols, image.rows) <= 1400);
  }
}

PROGRAM_TEST("report: a resumed run without a new evaluation keeps the old one on its page") {
  const TempDir& dir = trained().dir;
  succeed(dir, "train", kTrain + "--out went_on --max-iters 4");
  const std::string before = contents(dir / "went_on/report.html");
  std::string config = contents(dir / "went_on/config.json");
  const size_t year = config.find("\"started\":\"20");
  REQUIRE(year != std::string::npos);
  config.replace(year + 11, 4, "2021");
  write_text(dir / "went_on/config.json", config);
  CHECK(has(before, "After step 4, on 8 images"));
  CHECK(has(before, "<b>4</b><span>steps</span>"));
  succeed(dir, "train", "--resume went_on --max-iters 6 --eval-interval 0");
  const std::string after = contents(dir / "went_on/report.html");
  CHECK(has(after, "After step 4, on 8 images"));
  CHECK(count_of(after, "id='evaluation'") == 1);
  CHECK(has(after, "<b>6</b><span>steps</span>"));
  CHECK(has(after, "\nStarted 2021-"));  // by the first process of the run
}

PROGRAM_TEST("report: a report that cannot be written gives a warning, and training continues") {
  const TempDir& dir = trained().dir;
  succeed(dir, "train", kTrain + "--out no_room --max-iters 4");
  fs::remove(dir / "no_room/report.html");
  write_text(dir / "no_room/report.html/in_the_way");
  const std::string said = succeed(dir, "train", "--resume no_room --max-iters 8");
  CHECK(has(said, "warning: cannot write no_room/report.html"));
  CHECK(has(said, "done: no_room/last.pth"));
  CHECK(fs::exists(dir / "no_room/report.html/in_the_way"));
}

PROGRAM_TEST("report: rank 0 writes it from the detections of all ranks") {
  const TempDir& dir = trained().dir;
  succeed(dir, "train", kTrain + "--out two_ranks --procs 2 --max-iters 4 --epochs 1 --no-aug-epochs 0");
  const std::string page = contents(dir / "two_ranks/report.html");
  CHECK(has(page, "After step 4, on 8 images"));
  CHECK(has(page, "; 2 ranks with "));
  CHECK(has(page, "</b><span>evaluation time</span>"));  // of the only epoch
}

PROGRAM_TEST("report: eval writes the error analysis; names of classes and files are escaped") {
  const TempDir& dir = trained().dir;
  CocoDataset truth;
  truth.images = {{1, "a<b>&.jpg", 200, 100}, {2, "", 0, 0}, {3, "c.jpg", 2000, 1}};
  truth.categories = {{1, "<script>alert(1)</script>"}, {2, "\"quoted'"}};
  truth.annotations = {{1, 1, 1, 10, 10, 50, 50, 2500, false},
                       {2, 2, 1, 10, 10, 50, 50, 2500, false},
                       {3, 3, 2, 0, 0, 9, 1, 9, false}};
  write_coco(dir / "odd.json", truth);
  write_detections(dir / "odd_dt.json", {{1, 2, 10, 10, 50, 50, .9}, {2, 1, -900, 10, 5, 50, .8}});
  const std::string printed = succeed(
      dir, "eval", "--gt odd.json --dt odd_dt.json --voc --json odd_e.json --report new/folder/r.html");
  CHECK(has(printed, "Cost of each error type in AP50 points"));
  CHECK(has(printed, "VOC AP at IoU 0.5"));
  CHECK(has(printed, "report: new/folder/r.html"));
  const std::string page = contents(dir / "new/folder/r.html");
  check_self_contained(page);
  CHECK(has(page, "&lt;script&gt;alert(1)&lt;/script&gt;"));
  CHECK(has(page, "&quot;quoted&#39;"));
  CHECK(has(page, "a&lt;b&gt;&amp;.jpg"));
  CHECK_FALSE(has(page, "nan"));
  CHECK(json_number(dir / "odd_e.json", "working_score") == 0.25);
  CHECK(has(contents(dir / "odd_e.json"), R"("voc":{"AP":)"));

  write_text(dir / "words.txt", "no folder");
  check_refusal(dir, "eval", "--gt odd.json --dt odd_dt.json --report words.txt/r.html", 1,
                "--report words.txt/r.html");
  CHECK(run(dir, "eval", "--gt odd.json --dt odd_dt.json --speed").code == 2);
}

TEST_CASE("report: the numbers of objects by size are those of the AP") {
  CocoDataset truth;
  truth.categories = {{1, "cat"}};
  truth.images = {{1, "1.jpg", 640, 480}};
  truth.annotations = {{1, 1, 1, 0, 0, 9, 9, 81, false},
                       {2, 1, 1, 0, 0, 50, 50, 2500, false},
                       {3, 1, 1, 0, 0, 50, 50, 2500, true},    // crowd
                       {4, 2, 1, 0, 0, 9, 9, 81, false},       // in an image that is not evaluated
                       {5, 1, 2, 0, 0, 99, 99, 9801, false}};  // of an unknown class
  const std::string html = evaluation_of(truth, {});
  for (const char* text :
       {"<small>2 objects", "up to 32², 1 objects", "32² to 96², 1 objects", "from 96², 0 objects"})
    CHECK_MESSAGE(has(html, text), text);
}

PROGRAM_TEST("eval: --fuse has the same AP; --speed prints the time of each stage") {
  const TempDir& dir = trained().dir;
  const std::string eval = "--data data --weights a/best.pth --conf 0 --nms 0.9 --bs 4 --report= ";
  succeed(dir, "eval", eval + "--json plain.json");
  const std::string printed = succeed(dir, "eval", eval + "--json fused.json --fuse --speed");
  CHECK(json_number(dir / "fused.json", "AP") ==
        doctest::Approx(json_number(dir / "plain.json", "AP")).epsilon(1e-2));
  for (const std::string stage : {"preprocess", "forward", "decode", "NMS"}) {
    const size_t at = printed.find("\n  " + stage + " ");
    REQUIRE_MESSAGE(at != std::string::npos, stage);
    CHECK(std::stod(printed.substr(at + 3 + stage.size())) > 0);
  }
  CHECK_FALSE(has(printed, "report:"));
}

PROGRAM_TEST("report: a browser shows it without errors, on a phone too, in light and dark mode" *
             doctest::skip(chromium().empty())) {
  TempDir dir;
  const std::string original = (trained().dir.path / "a/report.html").string();
  const Outcome plain = browse(dir, original, "--dump-dom");
  REQUIRE_MESSAGE(plain.code == 0, plain.err);
  CHECK_FALSE(has(plain.err, "CONSOLE"));
  for (const char* id : {"training", "evaluation", "settings"})
    CHECK_MESSAGE(has(plain.out, concat("id=\"", id, "\"")), id);

  // A copy without Content-Security-Policy in a frame as wide as a phone. It reports its width.
  std::string page = contents(original);
  const size_t policy = page.find("<meta http-equiv='Content-Security-Policy'");
  REQUIRE(policy != std::string::npos);
  page.erase(policy, page.find('>', policy) + 1 - policy);
  const size_t end = page.rfind("</body>");
  REQUIRE(end != std::string::npos);
  page.insert(
      end,
      "<script>console.error('is heard');"
      "const broken = [...document.images].filter(i => !i.naturalWidth).length;"
      "parent.postMessage(innerWidth + ' ' + document.documentElement.scrollWidth + ' ' + broken, '*')"
      "</script>");
  write_text(dir / "copy.html", page);
  write_text(dir / "phone.html",
             "<!DOCTYPE html><title>-</title><script>onmessage = e => document.title = e.data"
             "</script><iframe src='copy.html' width='390' height='800' frameborder='0'></iframe>");
  const Outcome phone = browse(dir, dir / "phone.html", "--virtual-time-budget=20000 --dump-dom");
  CHECK(has(phone.err, "is heard"));  // console errors are captured
  CHECK_MESSAGE(has(phone.out, "<title>390 390 0</title>"), phone.out.substr(0, 300));

  std::array<double, 2> brightness;
  for (const int light : {0, 1}) {
    const std::string picture = dir / concat(light, ".png");
    const Outcome o = browse(dir, original,
                             concat("--blink-settings=preferredColorScheme=", light,
                                    " --window-size=1200,1600 --screenshot='", picture, "'"));
    CHECK_FALSE(has(o.err, "CONSOLE"));
    const cv::Mat image = cv::imread(picture);
    REQUIRE(!image.empty());
    brightness[light] = cv::mean(image)[0];
    cv::Scalar mean, deviation;
    cv::meanStdDev(image, mean, deviation);
    CHECK(deviation[0] > 5);  // the page is not empty
  }
  CHECK(brightness[0] < 80);
  CHECK(brightness[1] > 200);
}
