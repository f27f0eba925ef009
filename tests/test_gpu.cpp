// SPDX-License-Identifier: Apache-2.0
// What a GPU computes: numbers, settings, memory, errors and data. Needs a GPU, or a build with
// YOLOX_SIMULATED_CUDA. Otherwise these cases are skipped.
#include "gpu.hpp"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/AllocatorConfig.h>

#include "dtr/budget.hpp"

using namespace yolox;
using namespace yolox::test;

GPU_TEST("gpu: versions and memory of the GPU and of the libraries") {
  parse_device("cuda");
  report_fact("GPU", device_name(kGpu));
  report_fact("memory", short_bytes(gpu_memory(kGpu)));
  report_fact("LibTorch", TORCH_VERSION);
  for (std::string line : lines_of(at::detail::getCUDAHooks().showConfig())) {
    line.erase(0, std::min(line.size(), line.find_first_not_of(" -")));
    if (line.rfind("NVCC", 0) != 0) report_fact("CUDA", line);
  }
  report_fact("allocator", c10::CachingAllocator::getAllocatorSettings());
  report_fact("precision of --amp auto", default_precision(kGpu));
  CHECK(gpu_memory(kGpu) > 1e9);
  const bool of_user = std::getenv("PYTORCH_ALLOC_CONF") || std::getenv("PYTORCH_CUDA_ALLOC_CONF");
  if (kSimulated && !of_user)
    CHECK(c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments());
}

GPU_TEST("gpu: output and gradients of the six models equal those of the CPU in float64") {
  allow_tf32(false);
  for (const ModelRow& size : model_sizes()) {
    INFO(size.name);
    // The simulated device computes with torch's kernels for the CPU. One depthwise and one plain model show
    // that.
    if (kSimulated && size.name != std::string("yolox-nano") && size.name != std::string("yolox-s")) continue;
    std::map<std::string, std::vector<Tensor>> results;
    for (const auto& [name, device, type] : {std::tuple("exact", torch::Device(torch::kCPU), torch::kDouble),
                                             {"float64", kGpu, torch::kDouble},
                                             {"CPU float32", torch::Device(torch::kCPU), torch::kFloat},
                                             {"float32", kGpu, torch::kFloat}}) {
      torch::manual_seed(1);
      YOLOX model = make_model(size.name, 3);
      move(model, device, type);
      to_channels_last(*model);
      model->train();
      const Tensor x = 255 * torch::rand({2, 3, 64, 96}, torch::kDouble);
      const Predictions p = model(x.to(device, type));
      (p.reg.square().mean() + p.obj.square().mean() + p.cls.square().mean()).backward();
      std::vector<Tensor> grads;
      for (const Tensor& w : model->parameters()) grads.push_back(w.grad().flatten());
      results[name] = {p.reg.cpu(), p.obj.cpu(), p.cls.cpu(), torch::cat(grads).cpu()};
    }
    const auto worst = [&](const char* name) { return largest_error(results[name], results["exact"]); };
    check_figure(concat(size.name, " float64"), worst("float64"), 1e-9);
    // Another order of sums, and Winograd kernels, may be several times as far from float64 as the CPU is.
    const double of_cpu = worst("CPU float32");
    check_figure(concat(size.name, " float32"), worst("float32"),
                 kSimulated ? 4 * of_cpu : std::max(2e-3, 10 * of_cpu));
  }
}

GPU_TEST("gpu: losses, assignment and gradients equal those of the CPU") {
  constexpr int kSide = 320, kClasses = 8;
  cv::RNG random(3);
  const auto boxes = [&](int count, double from, double to) {  // centres between from and to
    std::vector<Box> all;
    for (int i = 0; i < count; ++i) {
      const double w = random.uniform(4.0, 150.0), h = random.uniform(4.0, 150.0);
      const double x = random.uniform(from, to) - w / 2, y = random.uniform(from, to) - h / 2;
      all.push_back({x, y, x + w, y + h, random.uniform(0, kClasses)});
    }
    return all;
  };
  // No object, one, 300, out of reach of all anchor points, and a normal image.
  const Targets targets = make_targets({{},
                                        {boxes(1, 0, kSide)},
                                        {boxes(300, 0, kSide)},
                                        {boxes(3, 2 * kSide, 3 * kSide)},
                                        {boxes(12, 0, kSide)}});
  const auto options = torch::TensorOptions(torch::kDouble);
  const int64_t points = make_anchors(kSide, kSide, options).stride.numel(), n = targets.counts.size();
  torch::manual_seed(2);
  const Predictions on_cpu{torch::randn({n, points, 4}, options), torch::randn({n, points}, options),
                           torch::randn({n, points, kClasses}, options)};
  for (const auto& [precision, limit] : {std::pair(torch::kDouble, 1e-10), {torch::kFloat, 1e-4}}) {
    const at::ScalarType type = precision;  // a lambda cannot capture a structured binding
    std::vector<std::vector<Tensor>> results;
    for (const torch::Device device : {torch::Device(torch::kCPU), kGpu}) {
      const auto leaf = [&](const Tensor& t) { return t.to(device, type).detach().requires_grad_(); };
      const Predictions p{leaf(on_cpu.reg), leaf(on_cpu.obj), leaf(on_cpu.cls)};
      const Targets there{targets.boxes.to(device), targets.classes.to(device), targets.counts};
      const Losses losses = yolox_loss(p, kSide, kSide, there, /*use_l1=*/true);
      losses.total.backward();
      std::vector<Tensor> all{losses.total, p.reg.grad(), p.obj.grad(), p.cls.grad()};
      for (const auto& v : losses.values) all.push_back(v.value);
      const Anchors anchors = make_anchors(kSide, kSide, p.reg.options());
      const Tensor decoded = decode_boxes(p.reg.detach(), anchors);
      for (const int64_t pairs : {0, 20000})  // one chunk, several chunks
        all.push_back(simota(decoded, p.obj.detach(), p.cls.detach(), anchors, there, pairs));
      for (Tensor& t : all) t = t.detach().cpu();
      results.push_back(all);
    }
    check_figure(type == torch::kDouble ? "float64" : "float32", largest_error(results[1], results[0]),
                 limit);
  }
}

GPU_TEST("gpu: NMS keeps the boxes that it keeps on the CPU") {
  torch::manual_seed(6);
  Tensor decoded = torch::rand({19, 3000, 5 + 4});
  decoded.slice(-1, 0, 2) *= 400;
  decoded.slice(-1, 2, 4) *= 120;
  const auto a = postprocess(decoded, 0.2, 0.5), b = postprocess(decoded.to(kGpu), 0.2, 0.5);
  REQUIRE(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    CHECK(a[i].size(0) > 50);
    REQUIRE(a[i].sizes() == b[i].sizes());
    CHECK(relative_error(b[i], a[i]) < 1e-6);
  }
  for (const auto& d : postprocess(decoded.slice(1, 0, 0).to(kGpu), 0.2, 0.5))
    CHECK(d.sizes() == torch::IntArrayRef({0, 7}));
}

GPU_TEST("gpu: three steps in float64 equal those of the CPU, with SGD, Adam and AdamW") {
  for (const std::string optimizer : {"sgd", "adam", "adamw"}) {
    INFO(optimizer);
    const Trajectory cpu = train_nano(torch::kCPU, "fp64", optimizer);
    const Trajectory gpu = train_nano(kGpu, "fp64", optimizer);
    // Adam divides each gradient by its own size, so that rounding decides on the weights whose gradient is
    // near 0.
    double losses = 0;
    for (size_t i = 0; i < cpu.steps.size(); ++i)
      losses = std::max(losses, std::abs(gpu.steps[i].total / cpu.steps[i].total - 1));
    check_figure(optimizer + ", losses", losses, optimizer == "sgd" ? 1e-9 : 1e-8);
    check_figure(optimizer + ", weights", largest_error(gpu.weights, cpu.weights), 1e-6);
  }
}

GPU_TEST("gpu: the first loss in float32, bf16 and fp16 equals that of float64 within a tolerance") {
  allow_tf32(false);
  const Trajectory cpu = train_nano(torch::kCPU, "fp64");
  const auto small_scale = [](Trainer& t) { t.training->scaler.scale.fill_(4); };
  // In 16 bits, another rounding also assigns other anchor points to some objects.
  for (const auto& [amp, most] : {std::pair("off", 1e-4), {"bf16", 0.05}, {"fp16", 0.05}}) {
    const std::string name = amp;  // INFO cannot capture a structured binding
    INFO(name);
    const Trajectory gpu = train_nano(kGpu, amp, "sgd", small_scale);
    for (const StepMetrics& n : gpu.steps) CHECK(n.finite());
    check_figure(name, std::abs(gpu.steps[0].total / cpu.steps[0].total - 1), most);
  }
}

// ---- the CUDA kernels of bn_silu

namespace {

// Returns output, gradients and running statistics of batch norm and SiLU, on the CPU in float64.
std::vector<Tensor> norm_results(const Tensor& input, torch::Device device, torch::ScalarType type,
                                 const CollectivesPtr& over = {}) {
  torch::nn::BatchNorm2d bn(torch::nn::BatchNorm2dOptions(input.size(1)).eps(1e-3).momentum(0.03));
  torch::manual_seed(4);
  {
    const torch::NoGradGuard no_grad;
    bn->weight.normal_();
    bn->bias.normal_();
  }
  bn->to(device, type == torch::kDouble ? torch::kDouble : torch::kFloat);
  const Tensor x = input.to(device, type).contiguous(torch::MemoryFormat::ChannelsLast).requires_grad_();
  const Tensor y = bn_silu(x, *bn, over);
  CHECK((y.grad_fn()->name().find("BnSilu") != std::string::npos) == (type != torch::kDouble));
  y.backward(torch::randn(y.sizes(), torch::kDouble).to(device, type));
  std::vector<Tensor> all{y,
                          x.grad(),
                          bn->weight.grad(),
                          bn->bias.grad(),
                          bn->running_mean,
                          bn->running_var,
                          bn->num_batches_tracked};
  for (Tensor& t : all) t = t.detach().to(torch::kCPU, torch::kDouble);
  return all;
}

}  // namespace

FUSED_TEST("gpu: the CUDA kernels of bn_silu equal batch norm and SiLU in float64") {
  torch::manual_seed(2);
  for (const auto& shape : {std::vector<int64_t>{2, 16, 40, 33}, {3, 5, 7, 9}, {1, 640, 4, 3}})
    for (const auto& [type, tolerance] :
         {std::pair(torch::kFloat, 1e-5), {torch::kHalf, 2e-3}, {torch::kBFloat16, 2e-2}}) {
      INFO("channels " << shape[1]);
      const Tensor x = (torch::randn(shape) * 3 + 2).to(type);
      const auto exact = norm_results(x, torch::kCPU, torch::kDouble), gpu = norm_results(x, kGpu, type);
      CHECK(largest_error(gpu, exact) < tolerance);
      const auto again = norm_results(x, kGpu, type);
      for (size_t i = 0; i < exact.size(); ++i) CHECK(torch::equal(gpu[i], again[i]));
    }
}

FUSED_TEST("gpu: the CUDA kernels of bn_silu over two ranks with SyncBN equal one rank") {
  const auto over = c10::make_intrusive<Collectives>(two_equal_ranks());
  torch::manual_seed(2);
  const Tensor x = torch::randn({2, 24, 9, 7}) * 3 + 2;
  const auto one = norm_results(x, kGpu, torch::kFloat), two = norm_results(x, kGpu, torch::kFloat, over);
  for (const size_t i : {0, 1, 2, 3, 4}) CHECK(relative_error(two[i], one[i]) < 1e-6);
  const double n = 2 * 9 * 7;  // the variance is unbiased
  CHECK(relative_error((two[5] - 0.97) * (2 * n - 1) / (2 * n), (one[5] - 0.97) * (n - 1) / n) < 1e-5);
  const auto none = norm_results(x.slice(0, 0, 0), kGpu, torch::kFloat, over);  // no image on either rank
  CHECK(none[0].numel() == 0);
  CHECK(torch::isfinite(none[5]).all().item<bool>());
}

FUSED_TEST("gpu: the CUDA kernels of bn_silu train yolox-nano as the operations of torch do") {
  allow_tf32(false);
  const auto prepare = [](Trainer& t) { use_sync_bn(*t.model, two_equal_ranks()); };
  const Trajectory fused = train_nano(kGpu, "off", "sgd", prepare);
  use_fused_norm(false);
  const Trajectory plain = train_nano(kGpu, "off", "sgd", prepare);
  CHECK(std::abs(fused.steps[0].total / plain.steps[0].total - 1) < 1e-5);
  CHECK(std::abs(fused.steps[0]["grad_norm"] / plain.steps[0]["grad_norm"] - 1) < 1e-3);
}

FUSED_TEST("gpu: DTR repeats the CUDA kernels of bn_silu, but not the update of the statistics") {
  torch::manual_seed(2);
  const Tensor x = torch::randn({2, 16, 24, 24}).to(kGpu).contiguous(torch::MemoryFormat::ChannelsLast);
  const auto step = [&](Dtr& dtr) {
    torch::nn::BatchNorm2d bn(16), second(16);
    bn->to(kGpu);
    second->to(kGpu);
    const Tensor weight = torch::ones({1}, kGpu).requires_grad_();
    dtr.run([&] {
      const Tensor y = bn_silu(x * weight + 1, *bn);
      if (dtr.on()) dtr.evict_all();
      const Tensor z = bn_silu(y * 2, *second);
      if (dtr.on()) dtr.evict_all();
      z.square().sum().backward();
    });
    return std::vector<Tensor>{weight.grad(),   bn->weight.grad(),     bn->bias.grad(),    bn->running_mean,
                               bn->running_var, second->weight.grad(), second->running_var};
  };
  DtrSettings s = dtr_settings(1e15, kGpu, 1);
  s.min_size = 1024;
  Dtr off, dtr(s);
  const auto plain = step(off), again = step(dtr);
  CHECK(dtr.step().rematerialisations >= 3);
  for (size_t i = 0; i < plain.size(); ++i) CHECK(torch::equal(plain[i], again[i]));
}

GPU_TEST("gpu: --amp auto is bf16 or fp16; TF32 is on with --amp tf32 only") {
  const auto prepared = [](const std::string& amp) {
    Config config;
    config.amp = amp;
    prepare_process(config, RankInfo());
    return config.amp;
  };
  CHECK(prepared("auto") == default_precision(kGpu));
  CHECK(default_precision(kGpu) != "off");
  const auto& context = at::globalContext();
  for (const std::string amp : {"off", "tf32", "bf16", "fp16"}) {
    INFO(amp);
    at::globalContext().setAllowTF32CuDNN(true);  // torch's default
    CHECK(prepared(amp) == amp);
    CHECK(context.allowTF32CuDNN() == (amp == "tf32"));
    CHECK(context.allowTF32CuBLAS() == (amp == "tf32"));
  }
  allow_tf32(false);
}

TEST_CASE("--amp auto selects bf16, fp16 or off by compute capability and tensor cores") {
  CHECK(precision_of_gpu(9, 0, "NVIDIA H200") == "bf16");
  CHECK(precision_of_gpu(8, 0, "NVIDIA A100") == "bf16");
  CHECK(precision_of_gpu(7, 5, "Tesla T4") == "fp16");
  CHECK(precision_of_gpu(7, 0, "Tesla V100") == "fp16");
  CHECK(precision_of_gpu(7, 5, "NVIDIA GeForce GTX 1660 Ti") == "off");
  CHECK(precision_of_gpu(7, 5, "NVIDIA T400 4GB") == "off");
}

GPU_TEST("gpu: a step that runs out of memory is repeated in micro-batches") {
#ifdef YOLOX_CUDA
  constexpr int kBatch = 8;
  const int side = kSimulated ? 96 : 416;
  Trainer trainer("yolox-nano", kGpu, "off");
  GpuBatches batches(noise(side, 6), side, kBatch, kBatch);
  const Batch batch = batches.next();
  Training& t = *trainer.training;
  trainer(batch, 0.001);
  t.optimizer.zero_grad();
  empty_cache(kGpu);
  const double before = memory_used(kGpu);
  trainer(batch, 0.001);
  const double step = memory_peak(kGpu) - before;
  t.optimizer.zero_grad();
  empty_cache(kGpu);

  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  const AtEnd no_limit([] { c10::cuda::CUDACachingAllocator::setMemoryFraction(1, 0); });
  c10::cuda::CUDACachingAllocator::setMemoryFraction((memory_used(kGpu) + 0.75 * step) / double(total), 0);
  CHECK(trainer(batch, 0.001).finite());
  CHECK_HAS(contents(trainer.folder / "log.txt"), "out of memory at step 2 with");
  CHECK(has(contents(trainer.folder / "log.txt"), "repeated in 2 micro-batches"));
#endif
}

// The next case runs this one in a process of its own. FAILURE: what fails.
TEST_CASE("gpu: child: the GPU fails" * doctest::test_suite("ranks") * doctest::skip()) {
  report_signals();
  crash_context(".", "settings");
  const auto program = [] {
#ifdef YOLOX_SIMULATED_CUDA
    const std::string failure = environment_variable("FAILURE");
    if (failure == "no kernels") {
      simulated_cuda::fail_from_now_on(
          "CUDA error: no kernel image is available for execution on the device");
      parse_device("cuda");
    }
#endif
    GpuBatches batches(noise(64, 3), 64, 12);
    batches.next();
    const Batch batch = batches.next();
#ifdef YOLOX_SIMULATED_CUDA
    if (failure != "kernel") {
      Trainer trainer("yolox-nano", kGpu, "off");
      trainer.start(batch, 0.001);
      simulated_cuda::hang();
      start_timeout(5, "rank 3");
      made_progress("step 7");
      for (int i = 0; i < 3; ++i) trainer.start(batch, 0.001);
    }
    simulated_cuda::fail_from_now_on("CUDA error: device-side assert triggered");
#else
    torch::zeros({3}, kGpu).index({torch::full({1}, 7, torch::TensorOptions(torch::kLong).device(kGpu))});
#endif
    torch::cuda::synchronize();
    return 0;
  };
  _exit(run_rank(program, [] { write_crash(); }));
}

GPU_TEST("gpu: after a failed kernel, or if the GPU hangs or has no kernels, the run ends with one line") {
  for (const auto& [failure, code, error] :
       {std::tuple("kernel", 1, "error: CUDA error: device-side assert triggered"),
        {"hang", 1, "error: rank 3 has been at step 7 for 5 s (--timeout): it waits for the GPU; if the"},
        {"no kernels", 2, "error: --device cuda: this LibTorch has no kernels for cuda:0 ("}}) {
    if (!kSimulated && failure != std::string("kernel")) continue;
    const TempDir dir;
    const Outcome o = shell(dir, concat("FAILURE='", failure,
                                        "' $YOLOX_PROGRAMS/tests --no-skip -tc='gpu: child: the GPU fails'"));
    CHECK(o.code == code);
    CHECK_HAS(o.err, error);
    CHECK_FALSE(has(o.err, "terminate called"));
    CHECK_FALSE(has(o.err, "frame #"));
    if (failure == std::string("kernel"))
      CHECK_HAS(contents(dir / "crash.txt"), "device-side assert triggered");
  }
}

#ifdef YOLOX_SIMULATED_CUDA
GPU_TEST("gpu: if there is no pinned memory, the loader makes the same batches without it") {
  simulated_cuda::refuse_pinned_memory(true);
  const AtEnd accepted([] { simulated_cuda::refuse_pinned_memory(false); });
  GpuBatches batches(noise(64, 3), 64, 12);
  Loader plain(noise(64, 3), 0, 12, 2, {64, 64}, 2, torch::kCPU);
  for (int i = 0; i < 6; ++i) CHECK(torch::equal(batches.next().images.cpu(), plain.next().images));
}
#endif

GPU_TEST("gpu: batches stay intact while both streams are busy") {
  GpuBatches batches(noise(64, 3), 64, 24);
  Loader plain(noise(64, 3), 0, 24, 2, {64, 64}, 2, torch::kCPU);
  const Tensor x = torch::rand({kSimulated ? 16 : 4096, kSimulated ? 16 : 4096}, kGpu);
  const auto busy = [&] {
    for (int i = 0; i < 30; ++i) x.mm(x);
  };
  for (int i = 0; i < 12; ++i) {
    const Batch want = plain.next();
    if (i % 2) busy();  // the next batch is copied meanwhile
    Batch got = batches.next();
    CHECK(got.images.is_cuda());
    busy();  // the host is ahead: the batch is read much later
    const Tensor images = got.images.clone(), boxes = got.targets.boxes.clone(),
                 classes = got.targets.classes.clone();
    got = Batch();  // its memory is free for the next copy
    CHECK(torch::equal(images.cpu(), want.images));
    CHECK(torch::equal(boxes.cpu(), want.targets.boxes));
    CHECK(torch::equal(classes.cpu(), want.targets.classes));
  }
}

namespace {

// Returns why work() waits for the device, each time that it does.
template <class Work>
std::vector<std::string> waits(const Work& work) {
#ifdef YOLOX_SIMULATED_CUDA
  simulated_cuda::reset_counts();
  work();
  return simulated_cuda::host_waits();
#elif defined(YOLOX_CUDA)
  struct Counter : c10::WarningHandler {
    std::vector<std::string> all;
    void process(const c10::Warning& warning) override {
      if (has(warning.msg(), "synchronizing CUDA")) all.push_back(warning.msg());
    }
  } counter;
  const c10::WarningUtils::WarningHandlerGuard guard(&counter);
  const c10::WarningUtils::WarnAlways always(true);
  const AtEnd off(
      [] { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); });
  c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_WARN);
  work();
  return counter.all;
#else
  (void)work;
  return {};
#endif
}

}  // namespace

GPU_TEST("gpu: a step does not synchronise with the device; numbers of several steps are read at once") {
  const Tensor one = torch::ones({}, kGpu);
  CHECK(waits([&] { one.item<float>(); }).size() == 1);  // shows that a wait would be found
  const AtEnd off([] { use_fused_norm(false); });
  for (const auto& [amp, sync_bn, fused, graph] : {std::tuple("off", false, false, false),
                                                   {"fp16", false, false, false},
                                                   {"bf16", true, false, false},
                                                   {"bf16", false, true, false},
                                                   {"bf16", true, true, false},
                                                   {"bf16", false, true, kSimulated}}) {
    use_fused_norm(fused && has_fused_norm());
    Trainer trainer("yolox-s", kGpu, amp);
    trainer.use_graphs(graph);
    if (sync_bn) use_sync_bn(*trainer.model, two_equal_ranks());
    const int side = kSimulated ? 64 : 256;
    GpuBatches batches(noise(side, 20), side, 5 * 2);
    trainer(batches.next(), 0.001);
    for (int i = 0; i < 3; ++i) trainer.start(batches.next(), 0.001);
    const Batch batch = batches.next();
    for (const auto& wait : waits([&] { trainer.start(batch, 0.001); })) FAIL_CHECK(wait);
#ifdef YOLOX_SIMULATED_CUDA
    const int64_t calls = simulated_cuda::operator_calls();
    report_fact(concat("operators per step, ", amp, sync_bn ? ", SyncBN" : "", fused ? ", fused norm" : "",
                       graph ? ", graph" : ""),
                concat(calls));
    if (graph) CHECK(calls <= 20);  // a graph and a few copies
#endif
    std::vector<StepRow> steps;
    const auto waited = waits([&] { steps = trainer.steps->unread.read(); });
    if (kSimulated) CHECK(waited.size() == 1);
    REQUIRE(steps.size() == 4);
    for (size_t i = 0; i < 4; ++i) {
      CHECK(steps[i].step == int64_t(i) + 1);
      CHECK(steps[i].numbers.total != steps[(i + 1) % 4].numbers.total);
    }
  }
}
