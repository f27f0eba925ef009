// Writes a model into a file that runs without this repository.
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/script.h>

#include <iostream>

#include "evaluate.hpp"
#include "flags.hpp"

using namespace yolox;

struct Config : Flags {
  std::string weights = flag(weights, "What", "weights", "", "FILE.pth", "checkpoint, ours or official");
  std::string out = flag(out, "What", "out", "", "FILE", "file to write, such as model.ts");
  std::string format = flag(format, "How", "format", "torchscript", "NAME",
                            "torchscript: torch.jit.load in Python, torch::jit::load in C++");
  std::string model = flag(model, "How", "model", "", "NAME",
                           "yolox-{nano,tiny,s,m,l,x}; read from the checkpoint when left out");
  std::string size =
      flag(size, "How", "size", "", "N|HxW", "input size; the checkpoint's or the model's when left out");
  std::string preproc = flag(preproc, "How", "preproc", "auto", "auto|bgr|legacy",
                             "pixels that the weights want; noted in the file");
};

static void run(int argc, char** argv) {
  Config config;
  config.parse(argc, argv, "writes a model into a file that runs without this repository");
  usage_check(config.format == "torchscript", "--format takes torchscript, got '", config.format, "'");
  usage_check(!config.out.empty(), "--out FILE is needed");
  std::error_code unequal;
  usage_check(!fs::equivalent(config.out, config.weights, unequal), "--out would overwrite --weights ",
              config.weights, "; give another name");
  if (!config.size.empty()) parse_size(config.size);
  auto loaded = load_model(config.weights, config.model, config.preproc, torch::kCPU);
  const ImageSize size = input_size(loaded.info, config.size);
  const torch::NoGradGuard no_grad;
  for (auto& p : loaded.model->parameters())
    p.set_requires_grad(false);  // so that they become constants of the trace
  torch::manual_seed(0);
  const Tensor images = torch::rand({2, 3, size.height, size.width}) * 255;
  const auto forward = [&](const Tensor& x) { return decode(loaded.model(x), size.height, size.width); };

  // One run is recorded, operation by operation, with the weights as constants.
  torch::jit::Module module("YOLOX");
  const auto [state, outputs] = torch::jit::tracer::trace(
      {images}, [&](torch::jit::Stack inputs) { return torch::jit::Stack{forward(inputs[0].toTensor())}; },
      [](const torch::autograd::Variable&) { return ""; }, /*strict=*/true, /*force_outplace=*/false, &module,
      {"images"});
  module.type()->addMethod(module._ivalue()->compilation_unit()->create_function("forward", state->graph));
  torch::jit::ExtraFilesMap extra;
  std::string names;
  for (const auto& name : loaded.info.classes) names += name + "\n";
  extra["classes.txt"] = names;
  extra["pixels.txt"] = loaded.info.legacy_preproc
                            ? "RGB 0..1, minus ImageNet's mean, over its standard deviation\n"
                            : "BGR 0..255\n";
  std::error_code ignored;
  const std::string part = config.out + ".part";
  try {
    module.save(part, extra);
    fs::rename(part, config.out);
  } catch (const std::exception&) {
    fs::remove(part, ignored);
    fail("cannot write ", config.out, "; is the folder there and writable, the disk not full?");
  }

  auto again = torch::jit::load(config.out);
  const Tensor other = torch::rand({2, 3, size.height, size.width}) * 255;
  const double difference = (again.forward({other}).toTensor() - forward(other)).abs().max().item<double>();
  check(difference < 1e-2, config.out, " differs from the model by ", difference,
        " pixels; it should not be used");
  std::cout << config.out << ": " << loaded.info.model << ", " << loaded.model->num_classes
            << " classes, input [B, 3, " << size.height << ", " << size.width << "] "
            << (loaded.info.legacy_preproc ? "RGB mean/std" : "BGR 0..255") << ", output [B, A, "
            << 5 + loaded.model->num_classes
            << "] (cx, cy, w, h, objectness, classes); largest difference from the model " << difference
            << "\n";
}

int main(int argc, char** argv) {
  return run_program([&] { run(argc, argv); });
}
