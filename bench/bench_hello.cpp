// SPDX-License-Identifier: Apache-2.0
// The smallest program with torch: what bench/edit.sh compares compile times with.
#include <torch/torch.h>

#include <iostream>

int main() { std::cout << torch::rand({2, 3}) << std::endl; }
