// SPDX-License-Identifier: Apache-2.0
// A GPU that runs CUDA C++ kernels as plain C++, for tests: the grid, its blocks and threads, shared memory
// and __syncthreads(). Include it before a .cu file, and define launch().
//
// A block runs on one thread of the CPU. Each of its CUDA threads is a fiber with a stack of its own. A fiber
// runs until __syncthreads() or its end, then the next one runs. After a barrier the order is reversed, so
// that a missing __syncthreads() leads to wrong results. A kernel must not throw.
#pragma once
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <stdexcept>
#include <vector>

struct dim3 {
  explicit dim3(unsigned x = 1, unsigned y = 1) : x(x), y(y) {}
  unsigned x, y;
};

namespace emulated_cuda {

struct Position {
  unsigned x = 0, y = 0;
};
inline thread_local Position thread_index, block_index;
inline thread_local dim3 grid_size;

// The threads of a block. setjmp() switches between fibers without system calls; swapcontext() makes two.
class Block {
 public:
  explicit Block(int threads) : fibers(threads) {}

  // Runs the kernel for all threads.
  void run(const std::function<void()>& kernel) {
    current = this;
    body = &kernel;
    for (Fiber& f : fibers) f.ends = false;
    size_t left = fibers.size();
    for (bool forward = true; left > 0; forward = !forward) {
      const size_t before = left;
      for (size_t i = 0; i < fibers.size(); ++i) {
        running = forward ? i : fibers.size() - 1 - i;
        if (fibers[running].ends) continue;
        thread_index.x = unsigned(running);
        resume(fibers[running]);
        if (fibers[running].ends) --left;
      }
      if (left == 0 || left == before) continue;
      for (Fiber& f : fibers) f.has_begun = false;
      throw std::logic_error("some threads of a block wait at __syncthreads(), and some have ended");
    }
  }
  // Returns to run(), which goes on with another fiber.
  static void wait() {
    if (_setjmp(current->fibers[current->running].place) == 0) _longjmp(current->caller, 1);
  }

 private:
  static constexpr size_t kStack = 64 << 10;
  struct Fiber {
    std::unique_ptr<char[]> stack{new char[kStack]};
    jmp_buf place{};
    bool has_begun = false, ends = false;
  };
  // A function of its own, because longjmp() does not restore the variables of the function that calls
  // setjmp().
  __attribute__((noinline)) void resume(Fiber& f) {
    if (_setjmp(caller) == 0) enter(f);
  }
  static void enter(Fiber& f) {
    if (f.has_begun) _longjmp(f.place, 1);
    f.has_begun = true;
    ucontext_t context{};
    getcontext(&context);
    context.uc_stack.ss_sp = f.stack.get();
    context.uc_stack.ss_size = kStack;
    makecontext(&context, &start, 0);
    setcontext(&context);
  }
  static void start() {
    for (;;) {  // one kernel after the other
      (*current->body)();
      current->fibers[current->running].ends = true;
      wait();
    }
  }

  static inline thread_local Block* current = nullptr;
  std::vector<Fiber> fibers;
  jmp_buf caller{};
  const std::function<void()>* body = nullptr;
  size_t running = 0;
};

// Runs the kernel for all blocks.
template <class... Parameters, class... Arguments>
void run(void (*kernel)(Parameters...), dim3 blocks, int threads, Arguments... arguments) {
  static thread_local std::map<int, Block> all;  // by number of threads
  Block& block = all.try_emplace(threads, threads).first->second;
  grid_size = blocks;
  for (block_index.y = 0; block_index.y < blocks.y; ++block_index.y)
    for (block_index.x = 0; block_index.x < blocks.x; ++block_index.x)
      block.run([&] { kernel(arguments...); });
}

}  // namespace emulated_cuda

// NOLINTBEGIN(bugprone-reserved-identifier)
#define __global__
#define __device__
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define threadIdx emulated_cuda::thread_index
#define blockIdx emulated_cuda::block_index
#define gridDim emulated_cuda::grid_size
inline void __syncthreads() { emulated_cuda::Block::wait(); }
inline float __fdividef(float a, float b) { return a / b; }
using __half = c10::Half;
using __nv_bfloat16 = c10::BFloat16;
// NOLINTEND(bugprone-reserved-identifier)
