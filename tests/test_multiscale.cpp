// Input sizes of multi-scale training, and what they mean for cuDNN.
#include "tensors.hpp"

#include <set>

#include "base/device.hpp"
#include "step.hpp"

using namespace yolox;

namespace {

std::vector<int> heights(const MultiScale& sizes, int64_t steps) {
  std::vector<int> all;
  for (int64_t i = 0; i < steps; ++i) all.push_back(sizes.at(i).height);
  return all;
}

}  // namespace

TEST_CASE("b4 multi-scale: drawn from seed and step alone, anew every ten steps, after ten of the base") {
  const MultiScale sizes{{640, 640}, 5, 5, 3};
  const auto drawn = heights(sizes, 1000);
  for (int i = 0; i < 10; ++i) CHECK(drawn[i] == 640);
  int changes = 0;
  for (int i = 0; i < 1000; ++i) {
    CHECK(drawn[i] == drawn[i / 10 * 10]);
    if (i) changes += drawn[i] != drawn[i - 1];
  }
  CHECK(changes > 60);
  CHECK(heights({{640, 640}, 5, 5, 3}, 1000) == drawn);
  CHECK(heights({{640, 640}, 5, 5, 4}, 1000) != drawn);
  CHECK(sizes.at(500).height == drawn[500]);  // whatever was asked before
  for (int64_t seed = 0; seed < 20; ++seed)
    for (const int h : heights({{640, 640}, 5, 5, seed}, 10)) CHECK(h == 640);
}

TEST_CASE("d4 multi-scale: a bounded set of sizes, each with its share, that cuDNN is tuned for") {
  const MultiScale sizes{{640, 640}, 5, 5, 0}, small{{416, 416}, 3, 7, 0}, wide{{320, 640}, 3, 7, 0};
  std::map<int, int> counts;
  for (int64_t i = 10; i < 110010; i += 10) ++counts[sizes.at(i).height];
  CHECK(counts.size() == 11);
  CHECK(counts.begin()->first == 640 - 160);
  CHECK(counts.rbegin()->first == 640 + 160);
  for (const auto& [height, count] : counts) CHECK(std::abs(count - 1000) < 150);
  CHECK(sizes.largest().height == 800);
  std::set<int> of_small;
  for (const int h : heights(small, 20000)) of_small.insert(h);
  CHECK(of_small.size() == 11);
  CHECK(*of_small.begin() == 416 - 96);
  CHECK(*of_small.rbegin() == 416 + 224);
  CHECK(small.largest().height == 640);
  for (int64_t i = 0; i < 2000; i += 10) CHECK(wide.at(i).width == 2 * wide.at(i).height);
  CHECK(wide.largest().width == 2 * wide.largest().height);

  auto& torch_settings = at::globalContext();
  set_determinism(false, false);
  CHECK(torch_settings.benchmarkCuDNN());
  set_determinism(false, true);
  CHECK_FALSE(torch_settings.benchmarkCuDNN());
  set_determinism(false, false);
  set_determinism(true, false);
  CHECK_FALSE(torch_settings.benchmarkCuDNN());
  CHECK(torch_settings.deterministicCuDNN());
  CHECK(torch_settings.deterministicAlgorithms());
  torch_settings.setDeterministicAlgorithms(false, false), torch_settings.setDeterministicCuDNN(false);
}

TEST_CASE("multi-scale: off is the base alone; small bases and one image stay large enough for batch norms") {
  const MultiScale off{{416, 416}, 0, 0, 1}, tiny{{64, 64}, 5, 5, 1}, one{{64, 64}, 5, 5, 1, 2};
  for (int64_t i = 0; i < 1000; ++i) CHECK(off.at(i).height == 416);
  CHECK(off.largest().width == 416);
  const auto small = heights(tiny, 2000), alone = heights(one, 2000);
  CHECK(*std::min_element(small.begin(), small.end()) == 32);
  CHECK(*std::min_element(alone.begin(), alone.end()) == 64);
  const MultiScale fixed{{32, 64}, 0, 0, 1, 2}, narrow{{320, 32}, 5, 5, 1};
  for (int64_t i = 0; i < 1000; ++i) {
    CHECK(fixed.at(i).height == 32);
    CHECK(narrow.at(i).width >= 32);
  }
}

TEST_CASE("multi-scale: images and boxes are resized together") {
  Tensor images = torch::zeros({1, 3, 64, 32});
  images.select(2, 40).fill_(1);
  Targets targets{torch::tensor({{{8.f, 16.f, 4.f, 2.f}}}), torch::zeros({1, 1}, torch::kLong), {1}};
  resize_batch(images, targets, {128, 96});
  CHECK(images.sizes() == c10::IntArrayRef{1, 3, 128, 96});
  CHECK(torch::equal(targets.boxes, torch::tensor({{{24.f, 32.f, 12.f, 4.f}}})));
  CHECK(images.mean({0, 1, 3}).argmax().item<int64_t>() / 2 == 40);
  const Tensor before = images;
  resize_batch(images, targets, {128, 96});
  CHECK(images.is_same(before));
}

TEST_CASE("multi-scale: pixels are placed by their areas, not their corners") {
  Tensor images = torch::tensor({0.f, 1.f}).view({1, 1, 1, 2});
  Targets targets{torch::zeros({1, 0, 4}), torch::zeros({1, 0}, torch::kLong), {0}};
  resize_batch(images, targets, {1, 4});
  CHECK(torch::allclose(images.flatten(), torch::tensor({0.f, 0.25f, 0.75f, 1.f})));
}
