// SPDX-License-Identifier: Apache-2.0
#include "run/fast_paths.hpp"

#include <ATen/record_function.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <set>
#include <sstream>
#include <utility>

#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "base/program.hpp"
#include "data/cache.hpp"
#include "data/dataset.hpp"
#include "layers/bn_silu.hpp"
#include "models.hpp"
#include "run/setup.hpp"
#include "run/step_graphs.hpp"
#include "step.hpp"

namespace yolox {

std::vector<FastPath> fast_paths(torch::Device device, const std::string& amp) {
  std::vector<FastPath> paths;
  if (!device.is_cuda() || amp == "fp64") return paths;
  if (has_fused_norm())
    paths.push_back({"norm", "fused norm", [](bool on) { use_fused_norm(on); }, check_operations});
  paths.push_back({"graph", "CUDA graphs", [](bool) {}, check_graphs});  // used by StepGraphs
  return paths;
}

namespace {

constexpr double kSecondsOfCheck = 300;
// A line of the child process that begins with this text is its result: "ok 3e-7" or the reason of the
// failure.
const std::string kResult = "fast path: ", kOk = "ok ";

// Turns a path on in its scope.
struct Using {
  explicit Using(const FastPath& path) : path(path) { path.use(true); }
  ~Using() { path.use(false); }
  const FastPath& path;
};

// Largest difference of two tensors, relative to the largest value of `exact`. Infinite if x is not finite.
double relative_difference(const Tensor& x, const Tensor& exact) {
  const Tensor reference = exact.to(torch::kFloat),
               difference = (x.to(torch::kFloat) - reference).abs().max();
  const double most = (difference / reference.abs().max().clamp_min(1e-30)).item<double>();
  return std::isfinite(most) ? most : std::numeric_limits<double>::infinity();
}

// Returns the output, the gradients and the running statistics of batch norm and SiLU for random images of
// this shape. All calls use the same numbers, rounded to `type`, and compute with them in `compute`.
std::vector<Tensor> layer_results(const std::vector<int64_t>& shape, torch::Device device,
                                  at::ScalarType type, at::ScalarType compute, const CollectivesPtr& over) {
  torch::manual_seed(0);
  torch::nn::BatchNorm2d bn(torch::nn::BatchNorm2dOptions(shape[1]).eps(1e-3).momentum(0.03));
  bn->to(device);
  const auto random = [&] {
    const Tensor x = torch::randn(shape, torch::TensorOptions(device)).to(type).to(compute);
    return x.contiguous(torch::MemoryFormat::ChannelsLast);
  };
  {
    const torch::NoGradGuard no_grad;
    bn->weight.normal_();
    bn->bias.normal_();
  }
  // The gradient is a part of that of a concatenation, as in the CSP blocks.
  const Tensor x = random().requires_grad_(), y = bn_silu(x, bn, over), other = random();
  torch::cat({y, other}, 1).backward(torch::cat({random(), other}, 1));
  return {y.detach(), x.grad(), bn->weight.grad(), bn->bias.grad(), bn->running_mean, bn->running_var};
}

// Returns a batch of random images with random boxes.
Batch random_batch(const FastPathCase& c, int64_t images, int64_t objects, torch::Device device) {
  const ImageSize size = parse_size(c.size);
  const auto options = torch::TensorOptions(device);
  Tensor pixels = 255 * torch::rand({images, 3, size.height / 32, size.width / 32}, options);
  pixels = torch::upsample_nearest2d(pixels, {size.height, size.width}).permute({0, 2, 3, 1});
  const Tensor unit = torch::rand({images, objects, 4}, options);
  const Tensor side = torch::tensor({double(size.width), double(size.height)}).to(device, torch::kFloat);
  const Tensor counts = torch::full({images}, objects, options.dtype(torch::kLong));
  Batch batch;
  batch.images = pixels.to(torch::kByte).contiguous();
  batch.targets = {torch::cat({unit.slice(2, 0, 2) * side, 16 + unit.slice(2, 2, 4) * side / 3}, 2),
                   torch::randint(c.classes, {images, objects}, options.dtype(torch::kLong)),
                   std::vector<int64_t>(images, objects), counts};
  return batch;
}

// A model with its optimizer, and a batch.
struct Trial {
  explicit Trial(const FastPathCase& c, int64_t images)
      : device(parse_device(c.device)), settings{device.type(), dtype_of(c.amp)}, training(train(c)) {
    if (c.sync_bn) use_sync_bn(*training.model, two_equal_ranks());
    settings.cast_weights = cast_weights(*training.model, settings.amp);
    if (c.amp == "fp16") training.scaler.scale.fill_(4);  // large enough for some steps, never an overflow
    const Batch batch = random_batch(c, images, 8, device);
    pixels = preprocess(batch.images, false);
    targets = batch.targets;
  }

  // Returns loss and gradient norm of a step, and updates the weights.
  std::pair<double, double> step() {
    const Losses losses = compute_gradients(network_of(training.model), pixels, targets, 1,
                                            training.optimizer, training.scaler, settings);
    const auto grads = gradients(training.optimizer.groups);
    training.scaler.unscale(grads);
    const Tensor norm = clip_gradients(grads, 10);
    training.optimizer.step(1e-4);
    return {losses.total.item<double>(), norm.item<double>()};
  }

  // Returns the shapes of the inputs of all batch norms.
  std::set<std::vector<int64_t>> norm_shapes() {
    static std::set<std::vector<int64_t>> shapes;  // a callback cannot capture
    shapes.clear();
    const auto note = [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
      if (std::string(function.name()) == "aten::batch_norm")
        shapes.insert(function.inputs()[0].toTensor().sizes().vec());
      return nullptr;
    };
    const torch::NoGradGuard no_grad;
    YOLOX model = copy_of(training.model, device);
    const auto handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback(note).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
    model(pixels);
    at::removeCallback(handle);
    return shapes;
  }

  torch::Device device;
  StepSettings settings;
  Training training;
  Tensor pixels;  // [B, 3, H, W] float
  Targets targets;

 private:
  Training train(const FastPathCase& c) const {
    torch::manual_seed(0);
    YOLOX model = make_model(c.model, c.classes);
    move(model, device, torch::kFloat);
    to_channels_last(*model);
    Config config;
    config.amp = c.amp;
    config.optimizer = c.optimizer;
    fill_in(config);
    return new_training(config, model, device);
  }
};

// Limits of relative differences for a precision (--amp).
struct Limits {
  double layer, loss;
};
Limits limits_of(const std::string& amp) {
  if (amp == "fp16") return {2e-3, 0.05};
  if (amp == "bf16") return {2e-2, 0.05};
  return {1e-4, amp == "tf32" ? 2e-3 : 1e-4};
}

FastPathResult check_layers(const FastPath& path, const FastPathCase& c, Trial& trial) {
  FastPathResult result;
  const double limit = limits_of(c.amp).layer;
  const CollectivesPtr over =
      c.sync_bn ? c10::make_intrusive<Collectives>(two_equal_ranks()) : CollectivesPtr();
  const at::ScalarType type = trial.settings.amp;
  const char* const names[] = {"output",        "input gradient", "weight gradient",
                               "bias gradient", "running mean",   "running variance"};
  for (const auto& shape : trial.norm_shapes()) {
    const auto exact = layer_results(shape, trial.device, type, torch::kFloat, over);
    const Using on(path);
    const auto fast = layer_results(shape, trial.device, type, type, over);
    for (size_t i = 0; i < exact.size(); ++i) {
      const double difference = relative_difference(fast[i], exact[i]);
      result.difference = std::max(result.difference, difference);
      if (difference > limit)
        return {
            concat("the ", names[i], " of a layer with shape ", torch::IntArrayRef(shape), " ",
                   std::isfinite(difference) ? concat("differs by ", rounded(difference),
                                                      " of its largest value (limit ", rounded(limit), ")")
                                             : "is not finite"),
            result.difference};
    }
    if (!c.deterministic) continue;
    const auto again = layer_results(shape, trial.device, type, type, over);
    for (size_t i = 0; i < fast.size(); ++i)
      if (!torch::equal(fast[i], again[i]))
        return {concat("the ", names[i], " of two calls differs, which --deterministic excludes"), 0};
  }
  return result;
}

// Numbers of two steps from the same weights. noise: relative size of random changes of the pixels.
struct StepResults {
  double values[3];  // loss and gradient norm of the first step, loss of the second one
};
StepResults step_results(const FastPathCase& c, int64_t images, double noise) {
  Trial trial(c, images);
  trial.pixels += 255 * noise * torch::rand_like(trial.pixels);
  const auto [loss, norm] = trial.step();
  return {loss, norm, trial.step().first};
}

// Returns the relative rounding error of a precision.
double rounding_of(const std::string& amp) { return amp == "bf16" ? 0x1p-8 : amp == "off" ? 1e-6 : 0x1p-11; }

// Returns the limit of relative differences from `exact`: 10 times the effect of rounding, at least `least`.
// other, third: the results after the pixels were changed by their rounding error. Rounding assigns other
// anchor points to some objects, which has a large effect in a small batch.
double limit_of(double least, double exact, double other, double third) {
  const double effect = std::max(std::abs(other / exact - 1), std::abs(third / exact - 1));
  return std::isfinite(effect) ? std::max(least, 10 * effect) : least;
}

// Returns what is wrong with a number, or "".
std::string compare(const std::string& name, double value, double expected, double limit) {
  if (!std::isfinite(expected)) return "";
  if (!std::isfinite(value)) return concat("the ", name, " is not finite");
  if (std::abs(value / expected - 1) <= limit) return "";
  return concat("the ", name, " is ", value, " instead of ", expected);
}

std::string compare_steps(const FastPath& path, const FastPathCase& c, int64_t images) {
  const double noise = rounding_of(c.amp);
  const StepResults exact = step_results(c, images, 0), other = step_results(c, images, noise),
                    third = step_results(c, images, -noise);
  const Using on(path);
  const StepResults fast = step_results(c, images, 0);
  const char* const names[] = {"loss", "gradient norm", "loss of the second step"};
  for (int i = 0; i < 3; ++i) {
    const double limit = limit_of(limits_of(c.amp).loss, exact.values[i], other.values[i], third.values[i]);
    const std::string failure = compare(names[i], fast.values[i], exact.values[i], limit);
    if (!failure.empty()) return failure;
  }
  return "";
}

// Results of run_steps().
struct GraphSteps {
  std::vector<double> values;         // loss and gradient norm of each step
  std::vector<Tensor> before, state;  // model, EMA, optimizer and gradient scaler, before and after the steps

  // Returns the largest difference of the states, relative to the change of the tensors.
  double difference(const GraphSteps& o) const {
    double error = 0, change = 0;
    for (size_t i = 0; i < state.size(); ++i) {
      if (!state[i].is_floating_point()) continue;
      const Tensor x = state[i].to(torch::kDouble);
      error += (o.state[i] - x).square().sum().item<double>();
      change += (before[i] - x).square().sum().item<double>();
    }
    return std::sqrt(error / change);
  }
  // Returns the number of tensors whose bits differ.
  int64_t unequal(const GraphSteps& o) const {
    int64_t n = 0;
    for (size_t i = 0; i < state.size(); ++i) n += !torch::equal(state[i], o.state[i]);
    return n;
  }
};

// Runs five steps as train.cpp does, the last two with L1 loss and at a larger size. most_graphs: as in
// StepGraphs; with 0, no step is recorded, but the input is copied to the same memory.
GraphSteps run_steps(const FastPathCase& c, int64_t images, int64_t most_graphs) {
  Trial trial(c, 1);
  Training& t = trial.training;
  StepGraphs graphs(true, *t.model, trial.device, {}, most_graphs);
  const EmaTensors averaged = ema_tensors(*t.ema, *t.model);
  const auto copy_of_state = [&] {
    std::vector<Tensor> copies;
    for (const Tensor& x : tensors_of(t)) copies.push_back(x.detach().clone());
    return copies;
  };
  GraphSteps results;
  results.before = copy_of_state();
  StepGuard guard;
  torch::manual_seed(1);
  for (int i = 0; i < 5; ++i) {
    trial.settings.use_l1 = i >= 3;
    ImageSize size = parse_size(c.size);
    if (i >= 3) size = {size.height + 32, size.width + 32};
    const StepInput next{random_batch(c, images * c.accum, 4 + 3 * i, trial.device), 1e-4 * (1 + i % 3),
                         ema_decay({}, 500 * (i + 1))};
    const auto [losses, norm] = graphs.run(next, size, trial.settings.use_l1, [&](const StepInput& in) {
      const Input input = make_network_input(in.batch, size, false, torch::kFloat);
      const Losses losses = compute_gradients(network_of(t.model), input.images, input.targets, c.accum,
                                              t.optimizer, t.scaler, trial.settings);
      const auto grads = gradients(t.optimizer.groups);
      t.scaler.unscale(grads);
      const Tensor norm = clip_gradients(grads, 10);
      const Tensor skip = guard.skip(losses.total, norm);
      t.optimizer.step(in.lr, skip);
      ema_update(averaged, in.ema_decay, skip);
      t.scaler.update();
      return std::pair(losses, norm);
    });
    results.values.push_back(losses.total.item<double>());
    results.values.push_back(norm.item<double>());
  }
  results.state = copy_of_state();
  return results;
}

}  // namespace

FastPathResult check_operations(const FastPath& path, const FastPathCase& c, int64_t images) {
  Trial trial(c, images);
  FastPathResult result = check_layers(path, c, trial);
  if (result.failure.empty()) result.failure = compare_steps(path, c, images);
  return result;
}

FastPathResult check_graphs(const FastPath&, const FastPathCase& c, int64_t images) {
  constexpr int64_t kMost = 100;
  set_determinism(true, /*memory_is_short=*/false);
  const GraphSteps plain = run_steps(c, images, 0);
  const int64_t unequal = plain.unequal(run_steps(c, images, kMost));
  set_determinism(c.deterministic, /*memory_is_short=*/false);
  if (unequal > 0)
    return {concat("with deterministic algorithms, ", unequal, " tensors of the training state differ"), 0};
  if (c.deterministic) return {};
  // Now with the algorithms of the run. Their results differ from call to call, and small differences grow,
  // because rounding assigns other anchor points to some objects.
  const GraphSteps graphs = run_steps(c, images, kMost);
  for (size_t i = 0; i < plain.values.size(); ++i) {
    const std::string name = concat(i % 2 == 0 ? "loss" : "gradient norm", " of step ", i / 2);
    const std::string failure = compare(name, graphs.values[i], plain.values[i], i % 2 == 0 ? 0.1 : 0.5);
    if (!failure.empty()) return {failure, 0};
  }
  const double difference = plain.difference(graphs), limit = 0.5;
  if (difference <= limit) return {"", difference};
  return {concat("the training state differs by ", rounded(difference), " of its change (limit ", limit, ")"),
          0};
}

FastPathResult check_fast_path(const FastPath& path, const FastPathCase& c) {
  for (int64_t images = c.images;; images = std::max<int64_t>(1, images / 2)) {
    try {
      return path.check(path, c, images);
    } catch (const std::exception& e) {
      if (!is_out_of_memory(e) || images == 1) throw;
    }
    empty_cache(parse_device(c.device));
  }
}

// ---- the child process

bool is_fast_path_check(int argc, char** argv) {
  return argc > 1 && std::string(argv[1]).rfind("--check-fast-path=", 0) == 0;
}

int fast_path_check(int argc, char** argv) {
  return run_program([&] {
    FastPathCase c;
    c.parse(argc, argv, "checks a fast path");
    const torch::Device device = parse_device(c.device);
    allow_tf32(c.amp == "tf32");
    set_determinism(c.deterministic, /*memory_is_short=*/false);
    const std::vector<std::string> with = split_list(c.with);
    for (const FastPath& path : fast_paths(device, c.amp)) {
      if (std::find(with.begin(), with.end(), path.name) != with.end()) path.use(true);
      if (path.name != c.path) continue;
      const FastPathResult result = check_fast_path(path, c);
      std::cout << kResult << (result.failure.empty() ? concat(kOk, result.difference) : result.failure)
                << std::endl;
    }
  });
}

namespace {

// Runs this program with these arguments. Returns its output, and sets `status` to that of waitpid(). Kills
// it after kSecondsOfCheck.
std::string run_child(const std::vector<std::string>& words, int& status) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) fail("cannot create a pipe: ", std::strerror(errno));
  const pid_t parent = getpid(), pid = fork();
  if (pid < 0) fail("cannot start a process: ", std::strerror(errno));
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    dup2(ends[1], 1);
    dup2(ends[1], 2);
    launch_detail::start_again(words);
  }
  close(ends[1]);
  std::string output;
  const double deadline = now() + kSecondsOfCheck;
  for (char text[4096];;) {
    pollfd pipe{ends[0], POLLIN, 0};
    const double left = deadline - now();
    if (left <= 0) {
      kill(pid, SIGKILL);
      output += concat("\nthe check took more than ", kSecondsOfCheck, " s");
      break;
    }
    if (poll(&pipe, 1, int(1000 * left) + 1) <= 0) continue;
    const ssize_t n = read(ends[0], text, sizeof text);
    if (n <= 0) break;
    output.append(text, size_t(n));
  }
  close(ends[0]);
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
  return output;
}

std::string first_line(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

// Returns everything that the result of a check depends on, as text.
std::string key_of(const FastPathCase& c, torch::Device device) {
  struct stat program {};
  stat("/proc/self/exe", &program);
  const std::string name = device_name(device);  // without the number of the GPU
  std::string key =
      concat(name.substr(name.find(' ') + 1), "\ndriver ", first_line("/proc/driver/nvidia/version"),
             "\nLibTorch " TORCH_VERSION "\nprogram ", program.st_size, " bytes, ", program.st_mtim.tv_sec,
             ".", program.st_mtim.tv_nsec, "\n");
  for (const auto& [name, value] : c.values()) key += concat(name, " ", name == "device" ? "" : value, "\n");
  return key;
}

// Returns the file that keeps the result for this key, or "" if there is no cache folder.
std::string cache_file(const std::string& key) {
  try {
    ContentKey hash;
    hash.add(key);
    return concat(disk_place().folder, "/fast-path-", hash.text(), ".txt");
  } catch (const std::exception&) {
    return "";
  }
}

// Returns the last line of `output` that is not empty.
std::string last_line(const std::string& output) {
  std::istringstream in(output);
  std::string last;
  for (std::string line; std::getline(in, line);)
    if (!line.empty()) last = line;
  return last;
}

// Runs a check in a child process, or reads its result from the cache.
FastPathResult checked(const FastPathCase& c, torch::Device device) {
  const std::string key = key_of(c, device), cache = cache_file(key);
  std::ifstream in(cache);
  std::string result(std::istreambuf_iterator<char>(in), {});
  if (result.compare(0, key.size(), key) == 0) {
    result.erase(0, key.size());
  } else {
    std::vector<std::string> words{"/proc/self/exe"};
    for (const auto& [name, value] : c.values())
      if (value != "false") words.push_back(value == "true" ? "--" + name : concat("--", name, "=", value));
    int status = 0;
    const std::string output = run_child(words, status);
    result = last_line(output);
    if (status != 0 || result.rfind(kResult, 0) != 0)
      return {concat("its check ", launch_detail::describe_exit_status(status),
                     result.empty() ? "" : ": " + printable(result)),
              0};
    result.erase(0, kResult.size());
    if (!cache.empty()) replace_text(cache, key + result);
  }
  if (result.rfind(kOk, 0) != 0) return {result, 0};
  return {"", std::strtod(result.c_str() + kOk.size(), nullptr)};
}

}  // namespace

// Returns why a path cannot be used with these settings, or "".
static std::string obstacle(const std::string& path, const Config& config, torch::Device device,
                            const Ranks& ranks, bool graphs) {
  if (!device.is_cuda()) return "needs a GPU";
  if (config.amp == "fp64") return "does not support --amp fp64";
  if (path == "norm")
    return has_fused_norm() ? "" : "is not possible, because nvcc was not found when this program was built";
  if (!graphs) return "is not possible in this program";
  if (!ranks.alone()) return "is not possible with several ranks";
  if (config.dtr != "off") return "is not possible with --dtr";
  if (config.debug) return "is not possible with --debug";
  if (config.profile) return "is not possible with --profile, which times the parts of a step";
  if (config.bs == 0) return "is not possible with --bs auto, because a graph needs memory of its own";
  return "";
}

bool uses_fast_path(const Config& config, const std::string& name) {
  const std::vector<std::string> used = split_list(config.fast);
  return std::find(used.begin(), used.end(), name) != used.end();
}

std::string use_fast_paths(Config& config, int64_t classes, torch::Device device, Ranks& ranks, bool graphs,
                           std::vector<std::string>& notes) {
  for (const std::string& name : split_list(config.fast)) {
    const bool is_path = name == "norm" || name == "graph";
    usage_check(is_path || name == "off" || name == "auto", "--fast must be off, auto, norm or graph, got '",
                name, "'");
    const std::string why = is_path ? obstacle(name, config, device, ranks, graphs) : "";
    usage_check(why.empty() || !config.was_given("fast"), "--fast ", name, " ", why);
  }
  const ImageSize size = base_size(config);
  FastPathCase c;
  c.model = config.model;
  c.classes = int(classes);
  c.size = concat(size.height, "x", size.width);
  c.accum = config.accum;
  c.images = std::max(1, (config.bs > 0 ? config.bs / ranks.info.world : 8) / config.accum);
  c.amp = config.amp;
  c.optimizer = config.optimizer;
  c.sync_bn = config.sync_bn && !ranks.alone();
  c.deterministic = config.deterministic;
  c.device = concat("cuda:", int(device.index()));
  std::string used, shown;
  for (const FastPath& path : fast_paths(device, config.amp)) {
    if (!uses_fast_path(config, "auto") && !uses_fast_path(config, path.name)) continue;
    if (!obstacle(path.name, config, device, ranks, graphs).empty()) continue;
    c.path = path.name;
    c.with = used;
    const FastPathResult result = ranks.run_first_on_one_rank_per_machine([&] { return checked(c, device); });
    const double failed = ranks.max(!result.failure.empty());
    if (!result.failure.empty())
      notes.push_back(concat("warning: training goes on without the ", path.what, " (--fast ", path.name,
                             "), because ", result.failure));
    else if (failed > 0)
      notes.push_back(concat("warning: training goes on without the ", path.what, " (--fast ", path.name,
                             "), because its check failed on another rank; see log_rankN.txt"));
    if (failed > 0) continue;
    path.use(true);
    used += (used.empty() ? "" : ",") + path.name;
    shown += concat(shown.empty() ? "fast    " : ", ", path.what, " (differs by at most ",
                    rounded(ranks.max(result.difference)), ")");
  }
  config.fast = used.empty() ? "off" : used;
  return shown;
}

}  // namespace yolox
