// SPDX-License-Identifier: Apache-2.0
// Times COCO evaluation from JSON files. Prints one line of JSON: the seconds of each stage and the 12 COCO
// metrics. bench/coco_eval.py makes the files and compares with other programs.
//   build/bench_coco_eval --gt GT.json --dt DT.json [--threads N]
#include "coco_eval.hpp"

#include <chrono>
#include <cstdlib>
#include <iostream>

int main(int argc, char** argv) try {
  std::string gt_path, dt_path;
  int threads = 0;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    yolox::check(i + 1 < argc, flag, " needs a value");
    if (flag == "--gt")
      gt_path = argv[i + 1];
    else if (flag == "--dt")
      dt_path = argv[i + 1];
    else if (flag == "--threads")
      threads = std::atoi(argv[i + 1]);
    else
      yolox::fail("unknown flag ", flag, "; the flags are --gt, --dt and --threads");
  }
  auto seconds = [last = std::chrono::steady_clock::now()]() mutable {
    const auto start = last;
    last = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(last - start).count();
  };
  const yolox::CocoDataset gt = yolox::read_coco(gt_path);
  const double read_gt = seconds();
  const std::vector<yolox::Detection> dt = yolox::read_detections(dt_path);
  const double read_dt = seconds();
  const yolox::EvalResult r = yolox::coco_eval(gt, dt, threads);
  const double evaluate = seconds();

  std::cout.precision(17);
  std::cout << "{\"read_gt\": " << read_gt << ", \"read_dt\": " << read_dt << ", \"evaluate\": " << evaluate
            << ", \"stats\": [" << r.AP;
  for (const double value :
       {r.AP50, r.AP75, r.APs, r.APm, r.APl, r.AR1, r.AR10, r.AR100, r.ARs, r.ARm, r.ARl})
    std::cout << ", " << value;
  std::cout << "]}" << std::endl;
} catch (const std::exception& error) {
  std::cerr << "coco_eval: " << error.what() << std::endl;
  return 1;
}
