// SPDX-License-Identifier: Apache-2.0
// Comparison of letterbox, affine map and HSV jitter with recorded results of official YOLOX.
#include "tensors.hpp"
//
#include "album.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

Image to_image(const torch::Tensor& t) {  // [H, W, 3] or [3, H, W], uint8
  const auto hwc = (t.size(2) == 3 ? t : t.permute({1, 2, 0})).contiguous();
  return cv::Mat(hwc.size(0), hwc.size(1), CV_8UC3, hwc.data_ptr()).clone();
}

double number(const c10::impl::GenericDict& d, const std::string& key) {
  const auto v = d.at(key);
  return v.isInt() ? double(v.toInt()) : v.toDouble();
}

}  // namespace

SHARED_TEST("official letterbox is reproduced pixel for pixel") {
  const auto d = fixture("aug_cv46.pth");
  for (int i = 0; i < number(d, "letterbox_count"); ++i) {
    const std::string name = "letterbox" + std::to_string(i);
    const Image want = to_image(tensor(d, name + "_out"));
    const Letterbox got = letterbox(to_image(tensor(d, name + "_in")), want.size());
    CHECK_MESSAGE(max_difference(got.image, want) == 0, name);
    CHECK(got.scale.x == number(d, name + "_r"));
    CHECK(got.scale.y == number(d, name + "_r"));
  }
}

SHARED_TEST("official HSV jitter is reproduced, within one level in the last columns") {
  const auto d = fixture("aug_cv46.pth");
  const Image in = to_image(tensor(d, "hsv_in"));
  for (int i = 0; i < 5; ++i) {
    const std::string name = "hsv" + std::to_string(i);
    const auto draws = tensor(d, name + "_draws");
    const auto g = (draws[0] * torch::tensor({5.0, 30.0, 30.0}, torch::kDouble) * draws[1]).contiguous();
    const double* gain = g.data_ptr<double>();
    const Image got = official::hsv(in, {gain[0], gain[1], gain[2]}),
                want = to_image(tensor(d, name + "_out"));
    const int whole = in.cols / 32 * 32;
    CHECK(max_difference(got.colRange(0, whole), want.colRange(0, whole)) == 0);
    CHECK(max_difference(got, want) <= 1);
  }
}

SHARED_TEST("official affine map is reproduced") {
  const auto d = fixture("aug_cv46.pth");
  for (int i = 0; d.contains("affine" + std::to_string(i) + "_draws"); ++i) {
    const std::string name = "affine" + std::to_string(i);
    const auto draws = tensor(d, name + "_draws").contiguous();
    const double* v = draws.data_ptr<double>();
    const cv::Size size = to_image(tensor(d, name + "_out")).size();
    const auto m = affine_matrix({v[0], v[1], v[2], v[3], v[4], v[5]}, size);
    const auto expected = tensor(d, name + "_M").contiguous();
    for (int k = 0; k < 6; ++k) CHECK(std::abs(m.val[k] - expected.data_ptr<double>()[k]) < 1e-14 * 256);
  }
}
