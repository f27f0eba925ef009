// SPDX-License-Identifier: Apache-2.0
// Training on several ranks. Each rank is a process, started by a test or by the launcher of ./train.
#include <sys/resource.h>

#include <list>
#include <optional>

#include "base/threads.hpp"
#include "programs.hpp"
#include "run/run.hpp"

using namespace yolox;
using namespace yolox::test;

// A case that one rank runs. It is skipped by default; outcomes_on_ranks() starts this program with only this
// case, once per rank.
#define RANK_CASE(name) TEST_CASE(name* doctest::test_suite("ranks") * doctest::skip())

namespace {

// The device of the ranks in this file: cpu, or cuda with `tests --device cuda`, a GPU for each rank.
bool on_gpus() { return test_device() == "cuda"; }
torch::Device device_of(const RankInfo& p) {
  return on_gpus() ? torch::Device(torch::kCUDA, c10::DeviceIndex(p.local_rank)) : torch::Device(torch::kCPU);
}
// The flag of ./train that starts several ranks.
std::string on(int ranks) { return concat(on_gpus() ? " --gpus " : " --procs ", ranks, " "); }
// Returns true, and says why a case is skipped, if the ranks have to share a GPU.
bool too_few_gpus(int ranks) {
  const bool few = on_gpus() && int(torch::cuda::device_count()) < ranks;
  if (few) MESSAGE("skipped: ", ranks, " ranks need ", ranks, " GPUs");
  return few;
}

// Returns a port of the loopback interface that is free.
int free_port() {
  int port = 0;
  close(listen_on_loopback(port));
  return port;
}

// Runs the RANK_CASE `name` on `ranks` ranks and returns their exit codes and outputs.
std::vector<Outcome> outcomes_on_ranks(int ranks, const std::string& name) {
  const TempDir dir;
  const int port = free_port();
  std::list<Process> started;
  for (int r = 0; r < ranks; ++r) {
    const Process::Command command{concat("env WORLD_SIZE=", ranks, " RANK=", r, " LOCAL_RANK=", r,
                                          " LOCAL_WORLD_SIZE=", ranks,
                                          " MASTER_ADDR=127.0.0.1 MASTER_PORT=", port,
                                          " $YOLOX_PROGRAMS/tests --no-skip --no-colors -tc='", name, "'")};
    started.emplace_back(dir, command, concat("rank", r, "_"));
  }
  std::vector<Outcome> outcomes;
  for (Process& p : started) {
    const int code = p.wait();
    outcomes.push_back({code, contents(p.out) + contents(p.err), ""});
  }
  return outcomes;
}
// Runs the RANK_CASE `name` and checks that it passes on all ranks.
void on_ranks(int ranks, const std::string& name) {
  if (too_few_gpus(ranks)) return;
  for (const Outcome& o : outcomes_on_ranks(ranks, name)) {
    CHECK_MESSAGE(o.code == 0, o.out);
    CHECK_HAS(o.out, " 1 passed |");
  }
}

double max_difference(const Tensor& a, const Tensor& b) {
  return a.numel() == 0 ? 0 : (a.to(torch::kDouble) - b.to(torch::kDouble)).abs().max().item<double>();
}

// Returns the images of `batch` that belong to this rank: rank r has r images, so rank 0 has none.
Tensor uneven_share(const Tensor& batch, const RankInfo& p) {
  const int64_t before = int64_t(p.rank) * (p.rank - 1) / 2;
  return batch.slice(0, before, before + p.rank);
}

struct Steps {
  DataDir dir{7};
  std::string flags =
      "--data data --model yolox-nano --size 64 --bs 6 --epochs 6 --warmup-epochs 0 --mixup-prob 1 "
      "--amp fp64 --lr 6e-6 --device " +
      test_device() + " ";
};

bool alive(pid_t pid) {
  const std::string stat = contents(concat("/proc/", pid, "/stat"));
  return !stat.empty() && !has(stat, ") Z ");
}
bool all_gone(const std::vector<pid_t>& pids, double seconds) {
  for (const double start = now(); now() - start < seconds; usleep(20000))
    if (std::none_of(pids.begin(), pids.end(), alive)) return true;
  return false;
}

// A run on two ranks that does not end by itself, and has made a few steps.
struct Endless {
  explicit Endless(const std::string& flags = "") {
    process.emplace(dir, "train",
                    "--data data --model yolox-nano --size 64 --bs 6 --epochs 10000 --eval-interval 0 "
                    "--save-minutes 0.001 --procs 2 --out r " +
                        flags);
    const bool trains = process->until(
        [&] { return metric_rows(dir / "r/metrics.csv").size() >= 2 && fs::exists(dir / "r/last.bak.pth"); });
    REQUIRE_MESSAGE(trains, contents(process->out) << contents(process->err));
    ranks = children_of(process->pid);
    REQUIRE(ranks.size() == 2);
  }
  std::string said() const { return contents(process->err); }
  // Returns true if the run makes more steps.
  bool goes_on() {
    const size_t rows = metric_rows(dir / "r/metrics.csv").size();
    return process->until([&] { return metric_rows(dir / "r/metrics.csv").size() > rows; });
  }

  DataDir dir{7};
  std::optional<Process> process;
  std::vector<pid_t> ranks;
};

}  // namespace

// ---- cases that run on each rank

RANK_CASE("rank: collectives give the right results, and different weights or settings are detected") {
  RankInfo p = rank_info_from_environment();
  // run_first_on_one_rank_per_machine() must choose the lowest rank, whatever its local rank.
  p.local_rank = p.world - 1 - p.rank;
  const torch::Device device = device_of(p);
  Ranks ranks(p, device, 60);
  const double all_ranks = p.world * (p.world - 1) / 2.0;
  CHECK(ranks.sum({1.0, double(p.rank)}) == std::vector{double(p.world), all_ranks});
  CHECK(ranks.max({-double(p.rank), double(p.rank)}) == std::vector{0.0, p.world - 1.0});
  CHECK(ranks.broadcast(7.0 + p.rank) == 7);
  CHECK(ranks.broadcast(concat("rank ", p.rank)) == "rank 0");
  const auto all = ranks.gather(std::vector<double>(p.rank, 0.5 + p.rank));
  REQUIRE(all.size() == size_t(p.world));
  for (int r = 0; r < p.world; ++r) CHECK(all[r] == std::vector<double>(r, 0.5 + r));
  CHECK(ranks.gather({}).at(0).empty());
  // Small tensors are summed through shared memory, larger ones through sockets. Then many collectives in a
  // row, to which each rank is late in turn.
  for (const int64_t size : {int64_t(SharedMemory::kMaxValues), int64_t(SharedMemory::kMaxValues) + 1}) {
    const Tensor numbers = torch::arange(size, torch::kDouble);
    Tensor sums = (numbers + p.rank).to(device);
    ranks.sum(sums);
    CHECK(torch::equal(sums.cpu(), p.world * numbers + all_ranks));
  }
  bool right = true;
  for (int i = 0; i < 3000; ++i) {
    if (i % 50 == p.rank) usleep(300);
    right = right && ranks.sum({double(i), double(p.rank)})[0] == double(p.world) * i;
  }
  CHECK(right);
  CHECK_HAS(error_of([&] { ranks.sum(std::vector<double>(2 + p.rank)); }),
            concat("rank ", p.rank, " sums ", 2 + p.rank, " numbers where rank "));

  const auto on_device = torch::dtype(torch::kFloat).device(device);
  const Tensor a = torch::full({2, 3}, p.rank, on_device).t(), b = torch::full({}, 2.0 * p.rank, on_device),
               count = torch::full({}, p.rank, on_device.dtype(torch::kLong));
  ranks.average({a, count, b});
  CHECK(torch::equal(a, torch::full({3, 2}, all_ranks / p.world, on_device)));
  CHECK(b.item<double>() == 2 * all_ranks / p.world);
  CHECK(count.item<int64_t>() == p.rank);

  ranks.check_same_settings({{"--lr", "1"}, {"--bs", "a\nb"}});
  const std::string refused = error_of([&] {
    ranks.check_same_settings(
        {{"--lr", "1"}, {"--bs", p.rank == 1 ? "3" : "2"}, {"steps done", concat(p.rank)}});
  });
  if (p.rank == 0) CHECK(refused == "");
  if (p.rank == 1) CHECK_HAS(refused, "--bs 3 where rank 0 has 2, steps done 1 where rank 0 has 0");
  if (p.rank == 2) CHECK_HAS(refused, "other settings than rank 0: steps done 2");

  const std::vector<Tensor> state{torch::full({2, 3}, p.rank + 1, on_device).t(),
                                  torch::full({}, p.rank + 7, on_device)};
  CHECK_HAS(error_of([&] { ranks.check_equal(state, "at step 7"); }), "at step 7 rank 1 has other weights");
  ranks.broadcast(state);
  ranks.check_equal(state, "after");
  CHECK(torch::equal(state[0], torch::full({3, 2}, 1, on_device)));
  CHECK(state[1].item<double>() == 7);

  const std::string made = (fs::temp_directory_path() / concat("yolox-turn-", p.port)).string();
  CHECK(ranks.run_first_on_one_rank_per_machine([&] {
    if (p.rank == 0) {
      usleep(200000);
      write_text(made);
    }
    return fs::exists(made);
  }));
  ranks.barrier();
  fs::remove(made);
}

RANK_CASE("rank: another rank ends") {
  const RankInfo p = rank_info_from_environment();
  auto& ranks = *new Ranks(p, device_of(p), 60);
  ranks.barrier();
  if (p.rank == 1) _exit(3);
  // The sum through shared memory knows who ended.
  CHECK_HAS(error_of([&] { ranks.sum({1.0}); }), "lost rank 1 (");
  usleep(p.rank == 0 ? 500000 : 1000000);
  if (p.rank == 0) _exit(3);
  try {
    ranks.barrier();
    FAIL("a rank has ended");
  } catch (const std::exception& e) {
    CHECK_MESSAGE(rank_exit_code(e) == kLostRank, e.what());
  }
}

// The last rank waits for an image that never comes, and the others wait for this rank.
RANK_CASE("rank: the data loader hangs") {
  const RankInfo p = rank_info_from_environment();
  Ranks ranks(p, torch::kCPU, 60);
  const char* remedy = p.world == 3 ? "; a remedy" : nullptr;
  start_timeout(1 + p.rank, concat("rank ", p.rank), remedy);
  Dataset data;
  data.records.assign(2, {"", 1, 8, 8, {}});
  data.stored = [](size_t, double) {
    sleep(60);
    return ImageRegion{Image({8, 8}, uchar(0))};
  };
  const BatchSettings settings{{}, false, false, 0, 1, 2, 1, 1, 0};
  made_progress("step 7");
  if (p.rank + 1 == p.world) Batches(data, settings, 0, {64, 64}, torch::kCPU, 0).next();
  ranks.barrier();
}

RANK_CASE("rank: SyncBN equals batch norm over the whole batch") {
  const RankInfo p = rank_info_from_environment();
  Ranks ranks(p, device_of(p), 60);
  const int64_t images = int64_t(p.world) * (p.world - 1) / 2;
  const bool has_kernels = device_of(p).is_cuda() && has_fused_norm();
  for (const auto& [of_case, fused] : {std::pair(torch::kFloat, false),
                                       {torch::kDouble, false},
                                       {torch::kBFloat16, false},
                                       {torch::kFloat, true},
                                       {torch::kBFloat16, true}}) {
    const auto type = of_case;  // INFO cannot capture a structured binding
    INFO("type " << type);
    use_fused_norm(fused && has_kernels);
    torch::manual_seed(5);
    torch::nn::BatchNorm2d whole(torch::nn::BatchNorm2dOptions(8).momentum(0.03).eps(1e-3));
    const auto exact = type == torch::kDouble ? torch::kDouble : torch::kFloat;
    whole->to(device_of(p), exact);
    whole->weight.data().uniform_(0.5, 2);
    whole->bias.data().uniform_(-1, 1);
    const auto mine = std::dynamic_pointer_cast<torch::nn::BatchNorm2dImpl>(whole->clone());
    const Tensor batch = (torch::randn({images, 8, 5, 7}) * 3 + 100).to(device_of(p)).to(type).to(exact);
    const Tensor weight = torch::randn({images, 8, 5, 7}).to(device_of(p), exact);
    Tensor x = batch.clone().contiguous(torch::MemoryFormat::ChannelsLast).requires_grad_();
    const Tensor y = torch::silu(whole(x));
    (y * weight).sum().backward();

    const auto over = c10::make_intrusive<Collectives>(ranks.sync_bn_collectives());
    Tensor share =
        uneven_share(batch, p).to(type).contiguous(torch::MemoryFormat::ChannelsLast).requires_grad_();
    const Tensor out = bn_silu(share, *mine, over);
    (out * uneven_share(weight, p)).sum().backward();
    const double tolerance = type == torch::kDouble ? 1e-10 : type == torch::kFloat ? 2e-4 : 0.1;
    CHECK(max_difference(out, uneven_share(y, p)) < tolerance);
    CHECK(max_difference(share.grad(), uneven_share(x.grad(), p)) < tolerance);
    for (auto [a, b] : {std::pair(mine->weight.grad(), whole->weight.grad()),
                        std::pair(mine->bias.grad(), whole->bias.grad())}) {
      Tensor sum = a.clone();
      ranks.sum(sum);
      CHECK(max_difference(sum, b) < 30 * tolerance);
    }
    CHECK(max_difference(mine->running_mean, whole->running_mean) < tolerance);
    CHECK(max_difference(mine->running_var, whole->running_var) < tolerance);
    CHECK(mine->num_batches_tracked.item<int64_t>() == 1);
  }
}

RANK_CASE("rank: gradients of two heads are all-reduced once") {
  const RankInfo p = rank_info_from_environment();
  Ranks ranks(p, device_of(p), 60);
  torch::manual_seed(1);
  std::vector<Tensor> params, copies;  // weights and biases of a trunk and two heads
  for (const auto& shape : std::vector<std::vector<int64_t>>{{3, 4}, {3}, {2, 3}, {2}, {2, 3}, {2}}) {
    params.push_back(torch::randn(shape).to(device_of(p)).requires_grad_());
    copies.push_back(params.back().detach().clone().requires_grad_());
  }
  const auto model = [](const std::vector<Tensor>& p, int head, const Tensor& x) {
    return torch::linear(torch::linear(x, p[0], p[1]), p[2 + 2 * head], p[3 + 2 * head]).square().sum();
  };
  GradientReducer reduction(ranks, params);
  const auto input = [&](int rank, int step) {
    torch::manual_seed(100 + 10 * step + rank);
    return torch::randn({2, 4}).to(device_of(p));
  };
  for (int step = 0; step < 6; ++step) {
    INFO("step " << step);
    // First all ranks use the heads in turn, then each rank uses its own head. Gradients of two
    // micro-batches are accumulated before the all-reduce.
    const auto head = [&](int rank) { return step < 4 ? step % 2 : rank % 2; };
    for (int rank = 0; rank < p.world; ++rank)
      for (int part = 0; part < 2; ++part)
        (model(copies, head(rank), input(rank, 2 * step + part)) / p.world).backward();
    for (int part = 0; part < 2; ++part) {
      const Tensor loss = model(params, head(p.rank), input(p.rank, 2 * step + part));
      if (part == 1) reduction.before_backward({loss});
      loss.backward();
    }
    for (size_t i = 0; i < params.size(); ++i) {
      Tensor &got = params[i].mutable_grad(), &want = copies[i].mutable_grad();
      CHECK(got.defined() == want.defined());
      if (want.defined()) CHECK(max_difference(got, want) < 1e-6 * (1 + want.abs().max().item<double>()));
      got = want = Tensor();
    }
  }
}

PROGRAM_TEST("ranks: collectives give the right results, and different weights or settings are detected") {
  on_ranks(3, "rank: collectives*");
}
PROGRAM_TEST("ranks: a rank that loses another one says so; one that hangs says where and why") {
  CHECK_HAS(outcomes_on_ranks(3, "rank: another rank ends")[2].out, " 1 passed |");
  const auto hang = outcomes_on_ranks(2, "rank: the data loader hangs");
  CHECK(hang[0].code == kLostRank);
  CHECK_HAS(hang[0].out,
            "error: rank 0 has been at step 7 for 1 s (--timeout): it waits for other ranks; see");
  CHECK(hang[1].code == 1);
  CHECK_HAS(hang[1].out,
            "error: rank 1 has been at step 7 for 2 s (--timeout): it waits for the data loader\n");
  CHECK(outcomes_on_ranks(1, "rank: the data loader hangs")[0].code == 1);
  const auto nccl = outcomes_on_ranks(3, "rank: the data loader hangs");
  CHECK(nccl[0].code == kNcclFailed);
  CHECK_HAS(nccl[0].out, "error: rank 0 has been at step 7 for 1 s; a remedy\n");
}
TEST_CASE("ranks: an error of the rank itself is distinguished from the loss of another rank") {
  for (const auto& [what, lost] :
       {std::pair("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:539] Connection closed by peer", true),
        {"NCCL communicator was aborted on rank 1", true},
        {"NCCL error in: x.cpp:1, remote process exited or there was a network error", true},
        {"NCCL error in: x.cpp:1, unhandled cuda error (run with NCCL_DEBUG=INFO for details)", false},
        {"CUDA error: an illegal memory access was encountered", false},
        {"CUDA out of memory. Tried to allocate 2 GiB", false},
        {"last.pth: No space left on device", false}})
    CHECK_MESSAGE(rank_exit_code(std::runtime_error(what)) == (lost ? kLostRank : 0), what);
  CHECK(rank_exit_code(RankError(kNcclFailed, "NCCL cannot connect: NCCL error in: x.cpp:1")) == kNcclFailed);
}
TEST_CASE("ranks: an error of NCCL keeps its cause") {
  const std::string error =
      "NCCL error in: /pytorch/x.cpp:77, unhandled system error, NCCL version 2.30.7\nncclSystemError: "
      "System call failed.\nLast error:\nError while creating shared memory segment /dev/shm/nccl-3\nframe "
      "#0";
  CHECK(nccl_cause(error) ==
        "NCCL error in: /pytorch/x.cpp:77, unhandled system error, NCCL version 2.30.7: Error while creating "
        "shared memory segment /dev/shm/nccl-3");
}

TEST_CASE("ranks: two ranks with one GPU are refused") {
  const auto check_second = [](const char* gpu, const char* host, const char* boot) {
    check_gpus({{"a", 10, "0000:3b:00", "1"}, {host, 11, gpu, boot}});
  };
  check_gpus({{"a", 10, "", "1"}, {"a", 11, "", "1"}});
  check_second("0000:5e:00", "a", "1");
  check_second("0000:3b:00", "b", "2");
  check_second("0000:3b:00", "a", "2");  // two machines of one name
  CHECK_THROWS_WITH(check_second("0000:3b:00", "a", "1"), doctest::Contains("rank 0 and rank 1 share a GPU"));
}
PROGRAM_TEST("ranks: SyncBN over uneven shares, one of them empty, equals batch norm over the whole batch") {
  on_ranks(2, "rank: SyncBN equals batch norm over the whole batch");
  on_ranks(3, "rank: SyncBN equals batch norm over the whole batch");
}
PROGRAM_TEST(
    "ranks: gradients of two heads, of which a step uses one, are all-reduced once after all micro-batches") {
  on_ranks(2, "rank: gradients of two heads are all-reduced once");
}

// ---- training runs

PROGRAM_TEST(
    "train: 1, 2 and 3 ranks make the same steps, also when a run is resumed with another number of ranks") {
  if (too_few_gpus(3)) return;
  Steps s;
  succeed(s.dir, "train", s.flags + "--eval-interval 0 --max-iters 1 --lr 0 --out start");
  const std::string flags = s.flags + "--eval-interval 0 --max-iters 4 --accum ";
  succeed(s.dir, "train", flags + "1 --out one");
  for (const int ranks : {2, 3}) {
    const std::string printed = succeed(s.dir, "train", concat(flags, "1", on(ranks), "--out r", ranks));
    CHECK(relative_difference(s.dir, concat("r", ranks), "one", "start") < 1e-7);
    CHECK(count_of(printed, "epoch      iter") == 1);  // only rank 0 prints
    CHECK(has(printed, concat("batch size 6 (", 6 / ranks, " per rank)")));
    CHECK(has(printed, "ranks   0 on "));
    CHECK(has(printed, "ranks   memory "));
    CHECK(has(printed, "slowest"));
    for (int r = 1; r < ranks; ++r)
      CHECK(has(contents(s.dir / concat("r", ranks, "/log_rank", r, ".txt")), "  2/6 "));
  }
  // Without SyncBN each rank has its own statistics, so the steps differ. Evaluation, checkpoints and a
  // resumed run use the mean of the statistics.
  const std::string own = s.flags + on(2) + "--no-sync-bn --deterministic --eval-interval 1 --out own";
  succeed(s.dir, "train", own + " --max-iters 4");
  CHECK(relative_difference(s.dir, "own", "one", "start") > 1e-4);
  succeed(s.dir, "train", own + "2 --max-iters 3");
  succeed(s.dir, "train", "--resume own2 --max-iters 4");
  CHECK(relative_difference(s.dir, "own2", "own", "start") == 0);

  succeed(s.dir, "train", s.flags + on(3) + "--eval-interval 0 --max-iters 2 --out moved");
  CHECK_HAS(succeed(s.dir, "train", "--resume moved --max-iters 3" + on(4)),
            "batch size 6 (2 or one less per rank)");
  succeed(s.dir, "train", "--resume moved --max-iters 4" + on(1));
  CHECK(relative_difference(s.dir, "moved", "one", "start") < 1e-7);
}

SHARED_PROGRAM_TEST("train: 1 and 3 ranks make the same steps from the real nano, with mosaic, multi-scale") {
  if (too_few_gpus(3)) return;
  TempDir dir;
  // In fp64, because in fp32 two runs on one rank, with one thread and with two, differ after ten steps as
  // much as the weights have changed.
  const std::string flags = concat("--data ", shared("data/coco128_json"), " --model yolox-nano --weights ",
                                   shared("data/weights/yolox_nano_coco_v011_rebuilt.pth"),
                                   " --size 96 --bs 6 --epochs 10 --eval-interval 0 --amp fp64 --device ",
                                   test_device(), " --max-iters ");
  succeed(dir, "train", flags + "1 --lr 0 --out start");
  succeed(dir, "train", flags + "11 --out one");
  succeed(dir, "train", concat(flags, "11", on(3), "--out r3"));
  CHECK(relative_difference(dir, "r3", "one", "start") < 1e-6);
}

PROGRAM_TEST("train: ranks evaluate each image once in total, and AP equals that of one rank and of eval") {
  if (too_few_gpus(3)) return;
  Steps s;
  const std::string flags = s.flags + "--max-iters 4 --eval-interval 1 --conf 0 --nms 0.9 ";
  succeed(s.dir, "train", flags + "--out one");
  const auto ap = [&](const std::string& run) { return last_ap(s.dir, run); };
  CHECK(has(succeed(s.dir, "train", concat(flags, on(3), "--out three")), " 7 images"));
  CHECK(ap("three") == doctest::Approx(ap("one")).epsilon(1e-9));
  succeed(s.dir, "train", concat(flags, "--amp off", on(3), "--out single"));
  succeed(s.dir, "eval", "--data data --weights single/last.pth --conf 0 --nms 0.9 --json ap.json --bs 2");
  CHECK(json_number(s.dir / "ap.json", "AP") == doctest::Approx(ap("single")).epsilon(1e-9));
}

PROGRAM_TEST("train: bad batch sizes, missing GPUs and wrong rank settings are refused at once") {
  const TempDir& dir = trained().dir;
  const auto refused = [&](const std::string& before, const std::string& flags, const std::string& part) {
    const Outcome o = shell(dir, before + "$YOLOX_PROGRAMS/train " + kTrain + "--out no " + flags);
    CHECK(o.code == 2);
    CHECK_HAS(o.err, part);
  };
  refused("", "--bs 16 --procs 3", "--bs 16 is not divisible by the 3 ranks; give 15 or 18");
  refused("", "--resume auto --bs 16 --procs 3", "--bs 16 is not divisible by the 3 ranks");  // a new run
  refused("", "--bs 4 --procs 2 --accum 3", "each rank has only 2 images per step");
  refused("", "--procs 2 --gpus 2", "cannot be used together");
  refused("", "--gpus 1 --device cuda:1", "--device cuda:1 cannot be used with --gpus, which takes");
  refused("", "--eval-interval 0 --patience 2", "--patience needs evaluations; leave --eval-interval 0");
  refused("", "--bs 16 --procs 2 --device cuda", "--device cuda cannot be used with --procs");
  refused("", "--bs 16 --gpus 16", "--gpus 16: there are");
  refused("", "--bs 2 --accum 3", "--accum must be at most the batch size (--bs 2), got 3");
  refused("export WORLD_SIZE=2 LOCAL_RANK=0 RANK=x; ", "--bs 2", "RANK=x is not a number");
  refused("export WORLD_SIZE=2 LOCAL_RANK=0 RANK=2; ", "--bs 2", "rank 2 of 2");
  refused("export WORLD_SIZE=2 RANK=1; ", "--bs 2", "one of several ranks, but LOCAL_RANK is not set");
  refused("export WORLD_SIZE=2 LOCAL_RANK=0 RANK=0; ", "--bs 2 --procs 2",
          "--procs starts ranks, but this process already is one of 2");
  refused("export SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=4; ", "--bs 4 --procs 4",
          "in a shell of `srun --pty`, set SLURM_STEP_NUM_TASKS=1");
  for (const char* size : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})  // each process would train the whole model
    refused(concat("export ", size, "=4; "), "--bs 4",
            "not as ranks; start one process with --gpus or --procs 4");
  check_refusal(dir, "train", "--data data --model yolox-nano --size 64 --bs 9 --procs 9 --out no", 1,
                "9 ranks and only 8 images");
}

PROGRAM_TEST("ranks: the store listens on the loopback interface only if MASTER_ADDR is 127.0.0.1") {
  const TempDir& dir = trained().dir;
  const int port = free_port();
  const std::string hex = formatted(":%04X ", port);
  const auto listeners = [&] {  // local addresses in state 0A, LISTEN
    std::vector<std::string> found;
    for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
      std::istringstream lines(contents(table));
      for (std::string line; std::getline(lines, line);)
        if (has(line, hex) && has(line, " 0A ")) found.push_back(line.substr(line.find(": ") + 2, 8));
    }
    return found;
  };
  const Process::Command command{concat("env MASTER_ADDR=127.0.0.1 MASTER_PORT=", port,
                                        " WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 $YOLOX_PROGRAMS/train ", kTrain,
                                        "--bs 2 --out no --timeout 30")};
  Process p(dir, command);
  REQUIRE(p.until([&] { return !listeners().empty(); }));
  CHECK(listeners() == std::vector<std::string>{"0100007F"});
}

PROGRAM_TEST("ranks: a rank that does not arrive within the timeout is named") {
  const TempDir& dir = trained().dir;
  const int port = free_port();
  const std::string flags = " $YOLOX_PROGRAMS/train " + kTrain + "--bs 3 --out no --timeout 2";
  // Starts a rank of three. Returns its stderr.
  const auto rank = [&](int rank, int port, const std::string& more = "", int code = 1) {
    const Outcome o = shell(
        dir, concat("export MASTER_ADDR=127.0.0.1 MASTER_PORT=", port, " WORLD_SIZE=3 OMP_NUM_THREADS=1; ",
                    more, " RANK=", rank, " LOCAL_RANK=", rank, flags));
    CHECK(o.code == code);
    return o.err;
  };
  CHECK_HAS(rank(0, port, "(RANK=1 LOCAL_RANK=1" + flags + " 2>/dev/null) &"),
            concat("rank 2 of 3 did not reach the rendezvous at 127.0.0.1:", port, " within 2 s"));
  const Outcome o =
      shell(dir, concat("SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=3 MASTER_PORT=", port, flags));
  CHECK_HAS(o.err, "note: waiting for rank 1, 2 of 3 (SLURM_STEP_NUM_TASKS=3) at 127.0.0.1:");
  CHECK_HAS(o.err, "To train with this process alone: SLURM_STEP_NUM_TASKS=1 ./train ...\n");
  const std::string said = rank(2, port);
  CHECK_HAS(said, concat("rank 2 cannot connect to rank 0 at 127.0.0.1:", port));
  CHECK_MESSAGE(lines_of(said).size() == 1, said);  // without warnings and stack traces of torch
  // A port that is in use. Its program accepts connections and never answers.
  int taken = 0;
  const int fd = listen_on_loopback(taken);
  const std::string refused = rank(0, taken);
  CHECK_HAS(refused, concat("cannot listen on port ", taken));
  CHECK_HAS(refused, "Address already in use");
  CHECK_HAS(rank(1, taken, "", kLostRank),
            concat("rank 1 has been at the connection to rank 0 at 127.0.0.1:", taken));
  close(fd);
  // An attempt that torchrun has not counted left its keys in the store of the agent.
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.waitWorkers = false;
  options.port = 0;
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  agent->set("yolox/0/here/0", {1});
  CHECK_HAS(rank(0, agent->getPort(), "TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=0"),
            "rank 0 finds itself in the store of torchrun, which still has an earlier attempt");
}

PROGRAM_TEST("launcher: a killed rank is named, the others end, and the checkpoint is valid") {
  for (const int victim : {1, 0}) {
    Endless run;
    kill(run.ranks[victim], SIGKILL);
    REQUIRE(run.process->ends());
    CHECK(run.process->wait() == 128 + SIGKILL);
    CHECK(all_gone(run.ranks, 1));
    CHECK_HAS(run.said(), concat("error: rank ", victim, " of 2 on "));
    CHECK_HAS(run.said(), "was killed by SIGKILL");
    CHECK(steps_of(run.dir) > 0);
  }
}

PROGRAM_TEST("launcher: if it is killed, all ranks end; on SIGTERM all ranks save at the same step") {
  Endless run;
  kill(run.process->pid, SIGKILL);
  run.process->wait();
  CHECK(all_gone(run.ranks, 5));
  const TempDir& dir = run.dir;
  fs::remove(dir / "out.txt");  // output of the previous run
  Process p(dir, "train", "--resume r");
  REQUIRE(p.until([&] { return has(contents(p.out), "epoch      iter"); }));
  usleep(300000);
  const auto ranks = children_of(p.pid);
  kill(p.pid, SIGTERM);
  CHECK(p.wait() == 0);
  CHECK(all_gone(ranks, 1));
  CHECK(has(contents(p.out), "stopped by Terminated at step"));
  CHECK(has(contents(p.out), "resume with: ./train --resume r"));
  const auto last = [&](const char* log) { return lines_of(contents(dir / log)).back(); };
  CHECK(last("r/log.txt") == last("r/log_rank1.txt"));
}

PROGRAM_TEST("launcher: suspended ranks go on; if one of them hangs, it is named and the others end") {
  for (const int victim : {1, 0}) {
    Endless run("--timeout 8");
    for (const pid_t rank : run.ranks) kill(rank, SIGSTOP);
    sleep(10);
    for (const pid_t rank : run.ranks) kill(rank, SIGCONT);
    CHECK_MESSAGE(run.goes_on(), run.said());
    kill(run.ranks[victim], SIGSTOP);
    REQUIRE(run.process->ends());
    CHECK(run.process->wait() == kLostRank);
    CHECK(all_gone(run.ranks, 1));
    CHECK_HAS(run.said(), concat("error: rank ", 1 - victim, " ("));
    CHECK_HAS(run.said(), " for 8 s (--timeout): it waits for other ranks");
    CHECK_HAS(run.said(), concat("error: rank ", 1 - victim, " of 2 on "));
    CHECK_HAS(run.said(), concat(" lost another rank; rank ", victim, " had not ended"));
  }
}

PROGRAM_TEST("train: on two ranks a nonfinite loss ends the run; a full disk is reported") {
  DataDir dir(8);
  const std::string flags = "--data data --model yolox-nano --size 64 --bs 6 --procs 2 --warmup-epochs 0 ";
  Outcome o = run(dir, "train", flags + "--lr 1e30 --out a");
  CHECK(o.code == 1);
  CHECK_HAS(o.err, "the loss is not finite at step");
  CHECK(fs::exists(dir / "a/nonfinite.pth"));
  CHECK_FALSE(has(o.err, "lost"));

  // The final checkpoint cannot be saved.
  succeed(dir, "train", flags + "--max-iters 2 --out b");
  const std::string before = contents(dir / "b/last.pth");
  o = run_with_full_disk(dir, "train", "--resume b --max-iters 4");
  CHECK(o.code == 1);
  CHECK_HAS(o.err, "last.pth");
  CHECK(contents(dir / "b/last.pth") == before);
}

PROGRAM_TEST("train: after a rank runs out of memory, all resume the checkpoint, in more micro-batches") {
  DataDir dir(8);
  const std::string flags =
      "--data data --model yolox-nano --size 320 --no-multiscale --bs 16 --procs 2 --epochs 12 "
      "--eval-interval 0 --save-minutes 0.00001 --deterministic ";
  const int64_t whole = peak_address_space(dir, flags + "--max-iters 2"),
                images = peak_address_space(dir, flags + "--max-iters 2 --accum 4"),
                limit = images + (whole - images) / 4;  // kB
  REQUIRE(whole - images > 200000);

  // Rank 1 runs out of memory during the run, which then equals one that is resumed by hand at this step.
  // With any limit from the start on, it returns freed memory, so that each step has to ask for it again.
  Process p(dir, {concat("sh -c 'ulimit -S -v ", 10 * whole, "; exec $YOLOX_PROGRAMS/train ", flags,
                         "--out one'")});
  REQUIRE(p.until([&] { return metric_rows(dir / "one/metrics.csv").size() >= 2; }));
  const rlimit most{rlim_t(limit) * 1024, RLIM_INFINITY};
  REQUIRE(prlimit(children_of(p.pid).at(1), RLIMIT_AS, &most, nullptr) == 0);
  CHECK_MESSAGE(p.wait() == 0, contents(p.err));
  const std::string error = contents(p.err), mark = "resuming one at step ", printed = contents(p.out);
  CHECK_HAS(error, "with 320x320 pixels on rank 1; resume the run, which then computes each step in 2 micro");
  CHECK_HAS(error, "out of memory: resuming one");
  CHECK_FALSE(fs::exists(dir / "one/crash.txt"));
  REQUIRE_MESSAGE(has(printed, mark), printed);
  succeed(dir, "train",
          concat(flags, "--out by_hand --max-iters ",
                 std::stoi(printed.substr(printed.find(mark) + mark.size()))));
  fs::copy(dir / "one/parts", dir / "by_hand/parts");
  succeed(dir, "train", "--resume by_hand --max-iters 0");
  CHECK(difference(dir / "one/last.pth", dir / "by_hand/last.pth") == "");
  CHECK(metric_rows(dir / "one/metrics.csv").size() == 12);
  CHECK_HAS(contents(dir / "one/log.txt"), " instead of 1, because memory ran out (one/parts)");
}

PROGRAM_TEST("train: a run stopped while two ranks evaluate repeats that evaluation when it is resumed") {
  DataDir dir(8);
  write_scenes(dir / "large", 100);  // their evaluation takes a second
  fs::rename(dir / "large/train", dir / "data/val");
  fs::rename(dir / "large/annotations/instances_train.json", dir / "data/annotations/instances_val.json");
  const std::string flags =
      "--data data --model yolox-nano --size 256 --bs 4 --procs 2 --conf 0 --eval-interval 1 --epochs 2 "
      "--deterministic ";
  succeed(dir, "train", flags + "--out whole");
  {
    Process p(dir, "train", flags + "--out r");
    // The checkpoint of the last step of the epoch is written before the evaluation starts.
    REQUIRE(p.until([&] {
      return fs::exists(dir / "r/last.bak.pth") || metric_rows(dir / "r/metrics.csv").size() >= 2;
    }));
    usleep(300000);
    kill(p.pid, SIGTERM);
    CHECK(p.wait() == 0);
    CHECK_HAS(contents(p.out), "stopped by Terminated at step 2");
  }
  CHECK_FALSE(fs::exists(dir / "r/best.pth"));  // the evaluation was not completed
  succeed(dir, "train", "--resume r");
  CHECK(difference(dir / "r/last.pth", dir / "whole/last.pth") == "");
  CHECK(last_ap(dir, "r") == last_ap(dir, "whole"));
}

PROGRAM_TEST("launcher: the message and exit code of a failed rank are reported") {
  DataDir dir(8);
  // The image is damaged after it was checked, and only one rank reads it.
  const std::string flags =
      "--data data --model yolox-nano --size 64 --bs 8 --epochs 1 --aug none --strict --procs 2 ";
  succeed(dir, "train", flags + "--out a");
  const auto images = fs::directory_iterator(dir.path / "data/train");
  const std::string image = fs::path(images->path()).string(), whole = contents(image);
  std::string damaged = whole.substr(0, 200);
  damaged.resize(whole.size());
  const auto time = fs::last_write_time(image);
  write_text(image, damaged);
  fs::last_write_time(image, time);
  const Outcome o = run(dir, "train", flags + "--out b");
  CHECK(o.code == 1);
  CHECK_HAS(o.err, fs::path(image).filename().string());
  CHECK(has(o.err, " failed with exit code 1"));
}

// Two hosts, a and b, simulated by network namespaces that a veth pair connects.
struct TwoHosts {
  // Returns false, with a message, if no network namespaces can be made here.
  bool start() const {
    const bool made = root(
        "ip netns add $A && ip netns add $B && "
        "ip link add va netns $A type veth peer name vb netns $B && "
        "ip -n $A addr add 10.9.0.1/24 dev va && ip -n $B addr add 10.9.0.2/24 dev vb && "
        "for n in $A $B; do ip -n $n link set lo up; done; "
        "ip -n $A link set va up && ip -n $B link set vb up && "
        "ip netns exec $A unshare --uts hostname hosta");
    if (!made) MESSAGE("skipped: no network namespaces can be made here");
    return made;
  }
  ~TwoHosts() { root("ip netns del $A; ip netns del $B"); }
  bool root(const std::string& commands) const {
    return std::system(
               concat("PATH=$PATH:/usr/sbin:/sbin; A=ya", id, " B=yb", id, "; exec 2>/dev/null; ", commands)
                   .c_str()) == 0;
  }
  // Returns the shell command that runs `command` on a host: 'a' or 'b'. All its processes end with it.
  std::string on(char host, const std::string& command) const {
    return concat("env PATH=$PATH:/usr/sbin:/sbin ip netns exec y", host, id,
                  " unshare --uts --pid --mount-proc --fork --kill-child sh -c 'hostname host", host,
                  "; exec ", command, "'");
  }
  const int id = getpid();
};

PROGRAM_TEST("torchrun: a host is lost, the other goes on with the same batches; both do when it is back") {
  const std::string python = cached_python_with("torch");
  if (python.empty()) MESSAGE("skipped: no Python with torch");
  const TwoHosts hosts;
  if (python.empty() || !hosts.start()) return;
  DataDir dir(8);
  const std::string flags =
      "--data data --model yolox-nano --size 64 --bs 4 --epochs 20 --eval-interval 20 --warmup-epochs 0 "
      "--amp fp64 --conf 0 --nms 0.9 --lr 4e-6 --device cpu ";
  const auto command = [&](char host) {
    return Process::Command{hosts.on(
        host, concat("env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 GLOO_SOCKET_IFNAME=v", host, " ", python,
                     " -m torch.distributed.run --no-python --nnodes 1:2 --max-restarts 3 "
                     "--nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 10.9.0.1:29500 "
                     "--rdzv-conf last_call_timeout=5,is_host=",
                     host == 'a', " --local-addr 10.9.0.", host == 'a' ? 1 : 2, " $YOLOX_PROGRAMS/train ",
                     flags, "--timeout 5 --save-minutes 0.001 --resume auto --out r"))};
  };
  Process a(dir, command('a'), "a_");
  {
    Process b(dir, command('b'), "b_");
    REQUIRE_MESSAGE(a.until([&] { return fs::exists(dir / "r/last.pth") && steps_of(dir) > 2; }),
                    contents(a.err));
    hosts.root("ip -n $B link set vb down");
  }
  REQUIRE_MESSAGE(a.until([&] { return has(contents(a.out), "resuming r at step "); }), contents(a.err));
  hosts.root("ip -n $B link set vb up");
  Process again(dir, command('b'), "again_");
  REQUIRE_MESSAGE(a.ends(), contents(a.out));
  CHECK_MESSAGE(a.wait() == 0, contents(a.out) << contents(a.err));
  const std::string printed = contents(a.out);
  const size_t alone = printed.find("batch size 4 (4 per rank)");
  REQUIRE_MESSAGE(alone != std::string::npos, printed);
  CHECK(has(printed.substr(0, alone), "batch size 4 (2 per rank)"));
  CHECK(has(printed.substr(alone), "batch size 4 (2 per rank)"));
  CHECK(steps_of(dir) == 40);
  succeed(dir, "train", flags + "--out one");
  succeed(dir, "train", flags + "--eval-interval 0 --lr 0 --max-iters 1 --out start");
  CHECK(relative_difference(dir, "r", "one", "start") < 1e-6);
  CHECK(last_ap(dir, "r") == doctest::Approx(last_ap(dir, "one")).epsilon(1e-9));
}

PROGRAM_TEST("train: --bs auto, --cache, --profile and --patience work on two ranks") {
  DataDir dir(67);
  const std::string flags = "--data data --model yolox-nano --size 64 --epochs 40 --procs 2 --no-sync-bn ";
  const std::string found =
      succeed(dir, "train", flags + "--bs auto --accum 9 --cache ram --max-iters 2 --out a");
  CHECK_HAS(found, "images per rank need");
  CHECK(has(found, "--bs auto: 6 (at least ten steps in an epoch)"));  // 3 images on each rank
  CHECK(has(found, "cache   "));
  CHECK_HAS(succeed(dir, "train", flags + "--bs 6 --profile --out b"), "reduce");
  CHECK_HAS(succeed(dir, "train", flags + "--bs 66 --lr 0 --eval-interval 1 --patience 2 --out c"),
            "stopping: 2 evaluations without a better AP");
}

TEST_CASE("ranks: rank, world size and master address are read from the variables of torchrun and SLURM") {
  const auto place = [](const std::string& variables) {
    std::list<Env> set;
    std::istringstream words(variables);
    for (std::string word; words >> word;) {
      const size_t name = word.find('=');
      set.emplace_back(word.substr(0, name), word.c_str() + name + 1);
    }
    return rank_info_from_environment();
  };
  const std::string two = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 ",
                    one_node = "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=gpu7 ";
  struct Row {
    std::string variables;
    int rank, world, local_rank, local_world;  // the local rank selects the device
    const char* host;
    int port;
  };
  for (const auto& [variables, rank, world, local_rank, local_world, host, port] : std::vector<Row>{
           {"", 0, 1, 0, 1, "127.0.0.1", 0},
           {"WORLD_SIZE=1", 0, 1, 0, 1, "127.0.0.1", 0},
           {"SLURM_JOB_ID=7 SLURM_PROCID=0", 0, 1, 0, 1, "127.0.0.1", 0},      // sbatch without srun
           {"SLURM_STEP_NUM_TASKS=1 PMI_SIZE=4", 0, 1, 0, 1, "127.0.0.1", 0},  // a process of srun --mpi=pmi2
           {"RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1234", 5, 8, 1, 4,
            "a", 1234},
           {"SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=6 SLURM_LOCALID=2 SLURM_STEP_TASKS_PER_NODE=2(x2),4 "
            "SLURM_NODEID=2 SLURM_STEP_NODELIST=gpu[007-009,12],x SLURM_JOB_ID=12345678",
            6, 8, 2, 4, "gpu007", 20000 + 12345678 % 20000},
           {one_node, 0, 2, 0, 2, "127.0.0.1", 20000},
           {one_node + "MASTER_ADDR=gpu7", 0, 2, 0, 2, "127.0.0.1", 20000},
           {two + "MASTER_ADDR=::1", 0, 2, 0, 2, "127.0.0.1", 29500},
           {two + "MASTER_ADDR=gpu7", 0, 2, 0, 2, "gpu7", 29500},
           {two + "MASTER_ADDR=[fd00::2]", 0, 2, 0, 2, "fd00::2", 29500}}) {
    INFO(std::string(variables));
    const RankInfo p = place(variables);
    CHECK(std::vector{p.rank, p.world, p.local_rank, p.local_world, p.port} ==
          std::vector{rank, world, local_rank, local_world, port});
    CHECK(p.host == host);
    CHECK(p.started_by_others() == (world > 1));
  }
  CHECK(place(two + "TORCHELASTIC_USE_AGENT_STORE=True").agent_hosts_store);
  const std::string step = concat(one_node, "SLURM_CPUS_PER_TASK=");
  CHECK(place(concat(step, usable_cores())).sharing == 1);      // of 2 * N cores, this rank has N
  CHECK(place(concat(step, usable_cores() / 2)).sharing == 2);  // --cpu-bind=none
  for (const auto& [list, first] : {std::pair("n[3,5-7]-ib,x", "n3-ib"), {"n3-ib,n[4-5]", "n3-ib"}})
    CHECK(first_slurm_host(list) == first);
  for (const char* port : {"0", "65536"})
    CHECK_HAS(error_of([&] { place(two + "MASTER_PORT=" + port); }),
              concat("MASTER_PORT=", port, " is not a port in 1..65535"));
}
