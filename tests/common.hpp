// What every test file includes first: torch, then doctest (torch brings a CHECK macro of its own), and the
// folder of reference data. Tests that need it are declared with SHARED_TEST and are counted as skipped where
// it is missing.
#pragma once
#include <torch/torch.h>
#undef CHECK
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

// Folder with fixtures/ and data/: $YOLOX_SHARED, else ../shared beside the repository.
inline std::string shared_dir() {
  const char* env = std::getenv("YOLOX_SHARED");
  return env && *env ? env : YOLOX_SOURCE_DIR "/../shared";
}
inline std::string shared(const std::string& path) { return shared_dir() + "/" + path; }
inline bool have_shared() { return std::filesystem::exists(shared("fixtures/README.md")); }

#define SHARED_TEST(name) TEST_CASE(name* doctest::skip(!have_shared()))

// A flat fixture file (str -> tensor, number or list), read by torch itself: independent of checkpoint.hpp.
inline c10::impl::GenericDict fixture(const std::string& name) {
  std::ifstream file(shared("fixtures/" + name), std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  return torch::pickle_load(bytes).toGenericDict();
}
inline torch::Tensor tensor(const c10::impl::GenericDict& d, const std::string& key) {
  REQUIRE_MESSAGE(d.contains(key), "fixture has no " << key);
  return d.at(key).toTensor();
}

// |a - b| / |b| over the whole tensor (L2), in double.
inline double relative_error(const torch::Tensor& a, const torch::Tensor& b) {
  const auto x = a.detach().to(torch::kDouble).flatten(), y = b.detach().to(torch::kDouble).flatten();
  return ((x - y).norm() / y.norm().clamp_min(1e-300)).item<double>();
}

// A folder that is gone at the end of the test.
struct TempDir {
  std::filesystem::path path;
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "yolox_test_XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::string operator/(const std::string& name) const { return (path / name).string(); }
};
