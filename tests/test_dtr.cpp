// SPDX-License-Identifier: Apache-2.0
// DTR: training within a memory budget gives bit-identical results, keeps the budget and leaks no memory.
#include <malloc.h>

#include "layers/sync_bn.hpp"
#include "programs.hpp"

#include <thread>

#include "base/memory.hpp"
#include "dtr/budget.hpp"
#include "dtr/record.hpp"
#include "train_step.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

// Returns settings with a budget for the memory that a step adds. The networks of these tests are small, so
// small storages may be evicted too.
DtrSettings relative_budget(double budget, int64_t min_size = 1024) {
  DtrSettings s;
  s.automatic = [budget](double used, int64_t) { return used + budget; };
  s.min_size = min_size;
  return s;
}

int64_t live() { return CountingAllocator::get().live(); }

bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = a.detach().cpu().contiguous(), y = b.detach().cpu().contiguous();
  return x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes() &&
         (x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
}

// Results of a step: gradients, statistics and losses.
struct Step {
  std::vector<Tensor> results;
  double bytes;  // peak of the memory added by the step
};
bool same_bits(const Step& a, const Step& b) {
  return std::ranges::equal(a.results, b.results, [](auto& x, auto& y) { return same_bits(x, y); });
}

struct Net : SmallTraining {
  explicit Net(bool in_order = true, at::ScalarType type = torch::kFloat, int64_t size = 96,
               torch::Device device = torch::kCPU)
      : SmallTraining({2, 1, 1}, size, in_order, type, device) {}
  // Computes one step. Always starts from the same weights, statistics and random numbers.
  Step step(Dtr& dtr) {
    torch::manual_seed(5);
    training->optimizer.zero_grad();
    SavedStatistics buffers(*model);
    const AtEnd restored([&] { buffers.restore(); });
    auto& allocator = CountingAllocator::get();
    allocator.reset_peak();
    const double before = double(live());
    const Losses l = dtr.run([&] { return compute(*training, 1, /*use_l1=*/true); });
    Step s{{l.total, l["iou"], l["obj"], l["cls"], l["l1"], l["positives"]},
           double(allocator.peak()) - before};
    for (const auto& tensors : {grads(), model->buffers()})
      for (const Tensor& t : tensors) s.results.push_back(t.clone());
    training->optimizer.zero_grad();
    return s;
  }
  // Computes a step without DTR, after one that allocates buffers that later steps reuse.
  Step plain_step() {
    Dtr off;
    step(off);
    return step(off);
  }
};

// Returns the operator of this name. Function: its type.
template <class Function>
auto operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

// Registers the operation NAMESPACE::test_op(x), which calls a function of the test. DTR may repeat one of
// the namespace yolox.
struct TestOperation {
  explicit TestOperation(std::function<Tensor(const Tensor&)> f, const std::string& ns = "yolox")
      : name(ns + "::test_op"), library(torch::Library::FRAGMENT, ns, std::nullopt, __FILE__, __LINE__) {
    does = std::move(f);
    library.def("test_op(Tensor x) -> Tensor",
                torch::dispatch(c10::DispatchKey::CPU, [](const Tensor& x) { return does(x); }));
  }
  Tensor operator()(const Tensor& x) const {
    const torch::NoGradGuard no_grad;
    return operator_of<Tensor(const Tensor&)>(name.c_str()).call(x);
  }
  std::string name;
  torch::Library library;
  inline static std::function<Tensor(const Tensor&)> does;
};

// Checks that steps within each budget, as a fraction of the memory of a plain step, give bit-identical
// results.
void check_budgets(Net& net, const std::vector<double>& budgets = {0.7, 0.55, 0.48}) {
  const Step plain = net.plain_step();
  const int64_t before = live();
  CHECK(plain.bytes > 1e6);
  Dtr ample(relative_budget(kNoLimit));
  CHECK(same_bits(net.step(ample), plain));
  CHECK(ample.step().operations > 200);
  CHECK(ample.step().evictions == 0);
  for (const double part : budgets) {
    INFO("of the memory of a plain step: " << part);
    Dtr dtr(relative_budget(part * plain.bytes));
    const Step step = net.step(dtr);
    CHECK(same_bits(step, plain));
    CHECK(step.bytes <= part * plain.bytes);
    CHECK((dtr.step().rematerialisations > 0) == (part < 1));
  }
  Dtr off;
  CHECK(same_bits(net.step(off), plain));
  CHECK(off.step().operations == 0);
  CHECK(dtr_detail::alive == 0);
  CHECK(live() < before + 1000);
  CHECK_FALSE(c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Fake));
}

}  // namespace

// ---- equal to a plain step, within the budget

TEST_CASE("dtr: gradients, losses and statistics have the bits of a plain step, within the budget") {
  Net net;
  check_budgets(net, {1.05, 0.7, 0.55, 0.48});
  Net contiguous(/*in_order=*/false);  // with torch's own batch norms
  check_budgets(contiguous);
  Net exact(true, torch::kDouble);
  check_budgets(exact);
  Net frozen;
  freeze(*frozen.model, {"backbone"});
  set_training_mode(*frozen.model);
  frozen.training.emplace(training_of(frozen.model));
  check_budgets(frozen, {0.6});
}
TEST_CASE("dtr: equal to a plain step under autocast to bfloat16, and to float16 with a scaled loss") {
  Net net;
  net.training->amp = torch::kBFloat16;
  // On a processor without instructions for bfloat16, a convolution of torch copies its input (im2col). That
  // of the stem, with the weights and gradients of all layers, needs 0.72 of the memory of the step at once.
  check_budgets(net, {0.85, 0.75});
  Net half;
  half.training->amp = torch::kHalf;
  half.training->scaler = GradScaler(true, torch::kCPU);
  check_budgets(half, {0.6});
}
// As on a GPU: the size of an allocation is not known in advance, so DTR reserves room for one operation.
TEST_CASE("dtr: equal to a plain step if the memory is measured only between operations") {
  Net net;
  const Step plain = net.plain_step();
  DtrSettings s = relative_budget(0.7 * plain.bytes);
  s.used = [] { return AllocatedBytes{double(live()), double(CountingAllocator::get().peak())}; };
  s.cost = estimated_cost;  // deterministic
  Dtr dtr(s);
  for (int i = 0; i < 4; ++i) {
    const Step step = net.step(dtr);
    CHECK(same_bits(step, plain));
    CHECK(dtr.step().rematerialisations > 0);
    CHECK(dtr.step().peak - dtr.step().budget ==
          doctest::Approx(step.bytes - 0.7 * plain.bytes).epsilon(0.01));
    if (i < 2) continue;  // the first steps measure the memory of operations
    CHECK(step.bytes <= 0.7 * plain.bytes);
  }

  // The budget also holds while a long chain is rematerialised.
  const int64_t size = 64 * 64 * 4;
  s.automatic = [](double used, int64_t) { return used + 5.5 * size; };
  const torch::NoGradGuard no_grad;
  const Tensor x = torch::randn({64, 64});
  Dtr chain(s);
  chain.run([&] {
    std::vector<Tensor> all{x};
    for (int i = 0; i < 30; ++i) all.push_back(all.back().sin());
    chain.evict_all();
    CountingAllocator::get().reset_peak();
    const int64_t before = live();
    all.back().sum();
    CHECK(CountingAllocator::get().peak() - before < 6 * size);
    all.resize(2);
  });
  CHECK(chain.step().rematerialisations >= 30);
}

// A block of an edited model: GELU, attention in two ways, dropout, and in-place operations.
struct AttentionBlock : Block {
  explicit AttentionBlock(BlockPtr b) : inner(register_module("inner", std::move(b))) {}
  Tensor forward(Tensor x) override {
    x = torch::gelu(inner->forward(x));
    const Tensor t = x.flatten(2).transpose(1, 2).contiguous(), heads = t.unsqueeze(1);
    const Tensor scores = torch::softmax(t.matmul(t.transpose(1, 2)) / std::sqrt(double(t.size(2))), -1);
    Tensor y = scores.matmul(t) + at::scaled_dot_product_attention(heads, heads, heads).squeeze(1);
    y = torch::dropout(torch::layer_norm(y, {y.size(2)}), 0.1, is_training());
    return x + y.mul(2).relu_().transpose(1, 2).view_as(x);
  }
  BlockPtr inner;
};

TEST_CASE("dtr: an edited model with GELU, attention, dropout and in-place operations equals a plain step") {
  Net net;
  auto& neck = *net.model->backbone->as<YOLOPAFPN>();
  neck.C3_p3 = neck.replace_module("C3_p3", BlockPtr(std::make_shared<AttentionBlock>(neck.C3_p3)));
  neck.C3_n3 = neck.replace_module("C3_n3", BlockPtr(std::make_shared<AttentionBlock>(neck.C3_n3)));
  check_budgets(net, {0.75, 0.6});
  Dtr dtr(relative_budget(kNoLimit));
  net.step(dtr);
  CHECK(has(dtr.pinned_operations(), "aten::relu_ ("));
}

TEST_CASE("dtr: operations on lists are rematerialised; results of in-place, random, sparse ones are kept") {
  const Tensor x = torch::randn({64, 64}), rows = torch::arange(5);
  const std::vector<Tensor> list{x, torch::randn({64, 64})};
  const c10::List<std::optional<Tensor>> columns({std::nullopt, rows});
  // Each returns one result.
  const std::vector<std::function<Tensor()>> pure{
      [&] { return torch::cat(list); },
      [&] { return at::_foreach_add(list, 1)[1]; },
      [&] { return at::index(x, columns); },
  };
  const std::vector<std::function<Tensor()>> kept{
      [&] { return x.exp().index_put_({rows}, torch::ones({64})); },
      [&] { return x.exp().resize_({2048}); },
      [&] { return torch::rand_like(x); },
      [&] { return x.exp().to_sparse().to_dense(); },
  };
  for (const auto* table : {&pure, &kept})
    for (size_t row = 0; row < table->size(); ++row) {
      INFO(row);
      torch::manual_seed(3);
      const Tensor plain = (*table)[row]();
      torch::manual_seed(3);
      Dtr dtr(relative_budget(kNoLimit, 256));
      const Tensor within = dtr.run([&] {
        const Tensor result = (*table)[row]();
        dtr.evict_all();
        return result;
      });
      CHECK(same_bits(plain, within));
      CHECK(dtr.step().rematerialisations == (table == &pure));
    }
}

TEST_CASE("dtr: rematerialisation repeats no all-reduce of SyncBN") {
  for (const auto type : {torch::kFloat, torch::kDouble}) {  // with and without the fused operation
    Net net(true, type);
    int64_t sums = 0;
    use_sync_bn(*net.model, {[&](Tensor& t) {
      ++sums;
      // Writes as a collective does, without an operation that DTR could record.
      for (int64_t i = 0; i < t.numel(); ++i) t.data_ptr<double>()[i] *= 2;
    }});
    const Step plain = net.plain_step();
    const int64_t of_step = sums / 2;
    CHECK(of_step > 50);
    for (const double part : {0.5, 0.01}) {
      Dtr dtr(relative_budget(part * plain.bytes));
      sums = 0;
      CHECK(same_bits(net.step(dtr), plain));
      CHECK(dtr.step().rematerialisations > 0);
      CHECK(sums == of_step);
    }
  }
}

TEST_CASE("dtr: what cannot be computed again is kept: written by the program, lent, on another device") {
  int times = 0;
  const TestOperation odd(
      [&](const Tensor& x) {
        ++times;
        x.data_ptr<float>()[0] = 100;  // not declared in the schema
        return x + 1;
      },
      "dtr_test");
  const Tensor weight = torch::randn({64, 64}), image = torch::randn({64, 64});
  const Tensor want = weight + image;
  Dtr dtr(relative_budget(kNoLimit));
  dtr.run([&] {
    const torch::NoGradGuard no_grad;
    // An input of a recorded operation is copied before it is overwritten.
    const Tensor sum = weight + image;
    weight.mul_(2);
    image.t().zero_();
    // A storage that the program fills through data_ptr() is pinned.
    const Tensor raw = torch::empty({64, 64});
    std::fill_n(raw.data_ptr<float>(), raw.numel(), 5.f);
    const Tensor twice = raw * 2, pinned = raw * 3;
    dtr.pin(pinned);
    pinned.data_ptr<float>()[0] = -1;
    // An operation that may write to any argument runs once, and its storages are pinned.
    const Tensor x = torch::full({64, 64}, 2.f), before = x * 3, y = odd(x), z = y * 2;
    dtr.evict_all();
    CHECK(dtr.step().evictions == 4);
    CHECK(torch::equal(sum, want));
    CHECK(twice.sum().item<float>() == 10 * 64 * 64);
    CHECK(pinned[0][0].item<float>() == -1);
    CHECK(before.sum().item<float>() == 6 * 64 * 64);
    CHECK(z[0][0].item<float>() == 202);
    CHECK(x[0][0].item<float>() == 100);
    CHECK(dtr.step().rematerialisations == 5);  // also of x before odd(), for `before`
    // pin() rematerialises an evicted tensor.
    dtr.evict_all();
    dtr.pin(twice);
    CHECK(twice.const_data_ptr<float>()[7] == 10);
  });
  CHECK(times == 1);

  // The owner of lent memory may overwrite it, so that a record has a copy.
  std::vector<float> lent(64 * 64, 2.f);
  const Tensor product = dtr.run([&] {
    const Tensor product = torch::from_blob(lent.data(), {64, 64}) * 3;
    std::fill(lent.begin(), lent.end(), -1.f);
    dtr.evict_all();
    return product;
  });
  CHECK(dtr.step().rematerialisations == 1);
  CHECK(product.eq(6).all().item<bool>());

  // The destination of an in-place operation is rematerialised if its source depends on it.
  dtr.run([&] {
    const torch::NoGradGuard no_grad;
    const Tensor x = torch::arange(4096) / 4096.0, y = x.exp(), z = y.sin();
    const Tensor want = x.clone().exp_().sin_();
    dtr.pin(want);
    dtr.evict_all();
    y.copy_(z);
    CHECK(torch::equal(y, want));
    CHECK(torch::equal(z, want));
  });

  DtrSettings s = relative_budget(kNoLimit);
  s.device = torch::kCUDA;
  Dtr of_gpu(s);
  of_gpu.run([&] {
    const Tensor x = torch::randn({64, 64}), y = x.exp();
    y.add_(1);
    of_gpu.evict_all();
    CHECK(same_bits(y, x.exp() + 1));
  });
  CHECK(of_gpu.step().evictions == 0);
}

TEST_CASE("dtr: allocations of threads outside the step cause no eviction") {
  Dtr dtr(relative_budget(100000));
  dtr.run([&] {
    const torch::NoGradGuard no_grad;
    const Tensor x = torch::ones({20000}), y = x * 2;
    const int64_t dropped = dtr.step().evictions;
    std::thread([] { torch::zeros({100000}); }).join();
    CHECK(dtr.step().evictions == dropped);
  });
}

TEST_CASE("dtr: a rematerialisation with another result or an exception is an error") {
  int calls = 0;
  const TestOperation operation([&](const Tensor& x) { return ++calls % 2 ? x + 1 : (x + 1).t(); });
  const Tensor x = torch::arange(64 * 64).view({64, 64}) * 1.f;
  Dtr dtr(relative_budget(kNoLimit));
  CHECK(has(error_of([&] {
              dtr.run([&] {
                const Tensor y = operation(x);
                dtr.evict_all();
                return y.sum();
              });
            }),
            "yolox::test_op, repeated, returned a result with another memory layout"));
  CHECK(dtr_detail::alive == 0);

  // After an exception, reading a tensor that cannot be rematerialised is an error.
  calls = 0;
  TestOperation::does = [&](const Tensor& x) {
    check(++calls == 1, "the second time it fails");
    return x + 1;
  };
  Tensor kept, other;
  CHECK(error_of([&] {
          dtr.run([&] {
            other = x * 2;
            kept = operation(x);
            dtr.evict_all();
            fail("the program");
          });
        }) == "the program");
  CHECK(same_bits(other, x * 2));
  CHECK_THROWS_WITH(kept.data_ptr(), doctest::Contains("in a step that has failed"));
  CHECK(dtr_detail::alive == 0);
}

TEST_CASE("dtr: freed memory is reused for allocations of the same size, so that the process does not grow" *
          not_sanitized) {
  keep_freed_memory();
  CountingAllocator::get();
  const int64_t size = 1000003;  // 4 MB
  std::vector<Tensor> blocks, between;
  for (int i = 0; i < 8; ++i) {
    blocks.push_back(torch::ones({size}));
    between.push_back(torch::ones({20000}));
  }
  const double before = resident_bytes();
  for (int i = 0; i < 100; ++i) {
    blocks[i % 8] = Tensor();
    between.push_back(torch::ones({2000}));
    blocks[i % 8] = torch::ones({size});
    REQUIRE(uintptr_t(blocks[i % 8].data_ptr()) % 64 == 0);
  }
  CHECK(resident_bytes() - before < 40e6);
  // The defaults of glibc again, for the cases that follow in this process.
  mallopt(M_MMAP_MAX, 65536);
  mallopt(M_TOP_PAD, 0);
  mallopt(M_TRIM_THRESHOLD, 128 << 10);
  return_freed_memory();
}

TEST_CASE("dtr: if memory runs out within the budget, more is evicted and the operation is repeated") {
  constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
  int64_t capacity = kAll;
  const TestOperation hungry([&](const Tensor& x) {
    if (live() > capacity) throw std::runtime_error("CUDA out of memory. Tried to allocate 1 MiB");
    return x + 1;
  });
  torch::Library once(torch::Library::FRAGMENT, "yolox_once", std::nullopt, __FILE__, __LINE__);
  sync_bn_detail::register_collectives();
  once.def(
      "test_statistics(Tensor x, Tensor(a!) running_mean, __torch__.torch.classes.yolox.Collectives? over) "
      "-> Tensor",
      torch::dispatch(c10::DispatchKey::CPU,
                      [](const Tensor& x, Tensor mean, const std::optional<CollectivesPtr>&) {
                        mean.add_(1);
                        return TestOperation::does(x);
                      }));
  const auto statistics = operator_of<Tensor(const Tensor&, Tensor, const std::optional<CollectivesPtr>&)>(
      "yolox_once::test_statistics");
  Dtr dtr(relative_budget(kNoLimit));
  dtr.run([&] {
    const torch::NoGradGuard no_grad;
    const Tensor x = torch::full({64, 64}, 2.f), mean = torch::full({3}, 7.f);
    std::vector<Tensor> all;
    for (int i = 0; i < 10; ++i) all.push_back(x * i);
    // Rematerialises all tensors, and then lets the operations run out of memory until five are evicted.
    const auto leave_no_memory = [&] {
      capacity = kAll;
      for (int i = 0; i < 10; ++i) CHECK(all[i].sum().item<float>() == 2 * i * 64 * 64);
      capacity = live() - 5 * 64 * 64 * 4;
    };
    const auto right = [](const Tensor& y) { return y.sum().item<float>() == 3 * 64 * 64; };
    leave_no_memory();
    const Tensor y = hungry(x);
    CHECK(right(y));
    CHECK(dtr.step().out_of_memory_count == 1);
    // The same holds for a rematerialisation.
    leave_no_memory();
    dtr.evict_all();
    leave_no_memory();
    CHECK(right(y));
    CHECK(dtr.step().out_of_memory_count == 2);
    // A batch norm updates its statistics once, whether memory runs out or not. A collective is not repeated.
    leave_no_memory();
    CHECK(right(statistics.call(x, mean, std::nullopt)));
    CHECK(dtr.step().out_of_memory_count == 3);
    CHECK(mean.sum().item<float>() == 3 * 8);
    leave_no_memory();
    const auto over = c10::make_intrusive<Collectives>(SyncBnCollectives{});
    CHECK_THROWS_WITH(statistics.call(x, mean, over), doctest::Contains("out of memory"));
    CHECK(dtr.step().out_of_memory_count == 4);
    capacity = 0;  // evictions cannot help
    CHECK_THROWS_WITH(hungry(x), doctest::Contains("out of memory"));
    capacity = kAll;
  });
}

GPU_TEST("gpu: with DTR a step equals a plain step, within a budget and when memory runs out") {
#ifdef YOLOX_CUDA
  const Deterministic deterministic;
  const AtEnd no_limit([] { c10::cuda::CUDACachingAllocator::setMemoryFraction(1, 0); });
  const torch::Device gpu(torch::kCUDA, 0);
  Net net(true, torch::kFloat, 416, gpu);
  Dtr off;
  net.step(off);
  empty_cache(gpu);
  const double before = allocated_bytes(gpu).now;
  const Step plain = net.step(off);
  const double step = allocated_bytes(gpu).peak - before;
  CHECK(step > 100e6);
  for (const double part : {0.7, 0.5}) {
    INFO("of the memory of a plain step: " << part);
    Dtr dtr(dtr_settings(before + part * step, gpu, 1));
    for (int i = 0; i < 4; ++i) {  // the first steps measure the costs
      empty_cache(gpu);
      CHECK(same_bits(net.step(dtr), plain));
    }
    CHECK(dtr.step().rematerialisations > 0);
    CHECK_NOTHROW(dtr.check_budget(dtr.step().limit));
    CHECK(allocated_bytes(gpu).peak <= Dtr::kSlack * (before + part * step));
  }
  // Without an effective budget, memory runs out.
  Dtr none(dtr_settings(1e15, gpu, 1));
  empty_cache(gpu);
  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  c10::cuda::CUDACachingAllocator::setMemoryFraction((memory_used(gpu) + 0.6 * step) / double(total), 0);
  CHECK(same_bits(net.step(none), plain));
  CHECK(none.step().out_of_memory_count > 0);
#endif
}

TEST_CASE("dtr: the automatic budget follows free memory, down at once, up slowly; less if memory runs out") {
  AutomaticBudget budget;
  const auto next = [&](double free, int times = 1, int64_t out_of_memory = 0) {
    double bytes = 0;
    for (int i = 0; i < times; ++i) bytes = budget.next(2e9, free, out_of_memory);
    return doctest::Approx(bytes).epsilon(1e-3);
  };
  CHECK(10e9 == next(8e9));
  CHECK(6e9 == next(4e9));
  CHECK(6.5e9 == next(9e9));
  CHECK(2e9 == next(-5));
  CHECK(10e9 == next(8e9, 201));
  CHECK(9.5e9 == next(8e9, 1, 3));
  CHECK(9.5e9 == next(8e9, 99));
  CHECK(10e9 == next(8e9, 400));

  // If a step cannot keep an automatic budget, it is no error.
  Net net;
  const Step plain = net.plain_step();
  Dtr dtr(relative_budget(0.01 * plain.bytes));
  CHECK(same_bits(net.step(dtr), plain));
  CHECK(dtr.step().limit > dtr.step().budget);
  CHECK_NOTHROW(dtr.check_budget(dtr.step().limit));
  CHECK(dtr_settings(kNoLimit, torch::kCPU, 2).automatic(0, 0) ==
        doctest::Approx(free_memory() / 2).epsilon(0.2));
  CHECK(dtr_settings(3e9, torch::kCPU, 2).budget == 3e9);
  CHECK_FALSE(Dtr(dtr_settings(0, torch::kCPU, 1)).on());
}

// ---- ./train --dtr

namespace {

// Returns " --dtr GB " with the smallest sufficient budget, from the error message of train.
std::string smallest_budget(const TempDir& dir, const std::string& flags) {
  const Outcome o = run(dir, "train", flags + "--out no --dtr 0.001");
  CHECK_MESSAGE(o.code == 2, o.out << o.err);
  const std::string named = " MB is too small for this step; ";
  REQUIRE_MESSAGE(has(o.err, named), o.err);
  CHECK_FALSE(has(o.err, "lost"));
  return concat(" --dtr ", std::ceil(1.01 * std::stod(o.err.substr(o.err.find(named) + named.size()))) / 1000,
                " ");
}
// Returns the number of rematerialisations in all steps of a run.
double rematerialisations_in(const TempDir& dir, const std::string& run_folder) {
  double again = 0;
  for (const auto& row : metric_rows(dir / (run_folder + "/metrics.csv")))
    if (!std::isnan(row[kDtr + 2])) again += row[kDtr + 2];
  return again;
}

}  // namespace

PROGRAM_TEST("train: --dtr gives the same weights, names a sufficient budget, and works with --bs auto") {
  DataDir dir(16);
  const std::string flags =
      "--data data --model yolox-nano --size 96 --bs 8 --epochs 3 --eval-interval 3 --max-iters 5 "
      "--deterministic --no-multiscale --warmup-epochs 0 --device cpu ";
  succeed(dir, "train", flags + "--out plain");
  const std::string budget = smallest_budget(dir, flags);
  const double gigabytes = std::stod(budget.substr(budget.find("dtr ") + 4));
  CHECK(gigabytes > 0.01);
  const std::string within = succeed(dir, "train", flags + "--out within" + budget);
  const auto a = weights_of(dir, "plain"), b = weights_of(dir, "within");
  for (const auto& e : a) CHECK(same_bits(e.value().toTensor(), b.at(e.key()).toTensor()));
  CHECK(last_ap(dir, "within", kAPWithDtr) == last_ap(dir, "plain"));
  CHECK_HAS(within, "dtr     ");
  CHECK(has(within, "times the computation"));
  CHECK(rematerialisations_in(dir, "within") > 0);
  for (const auto& row : metric_rows(dir / "within/metrics.csv"))
    if (!std::isnan(row[kDtr])) CHECK(row[kDtr] <= Dtr::kSlack * 1e9 * gigabytes);
  // A resumed run keeps --dtr.
  CHECK(has(succeed(dir, "train", "--resume within --max-iters 6"), "dtr     "));
  succeed(dir, "train", flags + "--out free --dtr auto");
  CHECK(same_bits(a.at("head.stems.0.conv.weight").toTensor(),
                  weights_of(dir, "free").at("head.stems.0.conv.weight").toTensor()));

  write_scenes(dir / "many", 200);
  const std::string searched = succeed(dir, "train", flags + "--data many --bs auto --out bs" + budget);
  CHECK_HAS(searched, "times the computation");
  const std::string mark = "--bs auto: ";
  const int found = std::stoi(searched.substr(searched.find(mark) + mark.size()));
  CHECK(found >= 1);
  CHECK(found < 16);

  check_refusal(dir, "train", flags + "--out no --dtr x", 2, "--dtr must be off, auto or GB, got 'x'");
}

PROGRAM_TEST("train: --dtr works with fp16, --debug, --profile and --resume") {
  DataDir dir(8);
  const std::string flags =
      "--data data --model yolox-nano --size 64 --bs 4 --epochs 2 --eval-interval 0 --deterministic "
      "--no-multiscale --device cpu ";
  const std::string fp16 = flags + "--amp fp16 --optimizer adamw ", budget = smallest_budget(dir, flags);
  succeed(dir, "train", fp16 + "--out plain");
  succeed(dir, "train", fp16 + smallest_budget(dir, fp16) + "--max-iters 3 --out cut");
  const std::string printed = succeed(dir, "train", "--resume cut --max-iters 0");
  CHECK(difference(dir / "cut/last.pth", dir / "plain/last.pth") == "");
  CHECK_HAS(printed, " rematerialisations");
  CHECK_FALSE(has(printed, "; 0 rematerialisations"));
  succeed(dir, "train", flags + "--max-iters 1 --out short");
  succeed(dir, "train", flags + budget + "--max-iters 1 --debug --out debug");
  CHECK(difference(dir / "debug/last.pth", dir / "short/last.pth") == "");
  CHECK(rematerialisations_in(dir, "debug") > 0);
  CHECK(has(succeed(dir, "train", flags + budget + "--epochs 20 --profile --out p"), "p/trace.json"));
}

PROGRAM_TEST("train: two ranks train to the same weights with and without --dtr") {
  DataDir dir(8);
  const std::string flags =
      "--data data --model yolox-nano --size 96 --bs 4 --epochs 2 --eval-interval 0 --procs 2 "
      "--accum 2 --deterministic --no-multiscale ";
  const std::string budget = smallest_budget(dir, flags);
  succeed(dir, "train", flags + "--out plain");
  succeed(dir, "train", flags + budget + "--out within");
  CHECK(difference(dir / "within/last.pth", dir / "plain/last.pth") == "");
  CHECK(rematerialisations_in(dir, "within") > 0);
}
