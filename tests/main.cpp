#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "base/program.hpp"
#include "base/threads.hpp"

int main(int argc, char** argv) {
  yolox::share_cores(argv);  // and all that it starts
  return doctest::Context(argc, argv).run();
}
