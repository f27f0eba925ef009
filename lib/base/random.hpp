// SPDX-License-Identifier: Apache-2.0
// Counter-based random numbers.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

namespace yolox {

// A random number generator whose numbers depend only on (seed, epoch, index of the sample), and not on the
// thread, the rank, the number of workers or the standard library. The three numbers are hashed to a key. The
// k-th random number is the SplitMix64 finaliser of key + k * golden (Steele et al., "Fast Splittable
// Pseudorandom Number Generators", 2014).
struct Rng {
  Rng(std::uint64_t seed, std::uint64_t epoch, std::uint64_t index)
      : key(mix((mix((mix(seed + golden) ^ epoch) + golden) ^ index) + golden)) {}

  // Returns 64 random bits.
  std::uint64_t next() { return mix(key + ++count * golden); }

  // Returns a number in [lo, hi). Uses fma() because it rounds once on every machine; for a * b + c the
  // compiler chooses between one and two roundings.
  double uniform(double lo, double hi) {
    return std::fma(hi - lo, static_cast<double>(next() >> 11) * 0x1p-53, lo);
  }

  // Returns an integer in [lo, hi], both included; requires lo <= hi. The modulo bias is below 2^-32 for
  // ranges below 2^32.
  std::int64_t randint(std::int64_t lo, std::int64_t hi) {
    return lo + static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(hi - lo + 1));
  }

  // Returns true with probability p.
  bool bernoulli(double p) { return uniform(0, 1) < p; }

 private:
  static constexpr std::uint64_t golden = 0x9E3779B97F4A7C15;
  static std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
  std::uint64_t key, count = 0;
};

// Brings a list into a random order.
template <class T>
void shuffle(std::vector<T>& list, Rng& rng) {
  for (std::int64_t i = std::int64_t(list.size()) - 1; i > 0; --i)
    std::swap(list[i], list[rng.randint(0, i)]);
}

}  // namespace yolox
