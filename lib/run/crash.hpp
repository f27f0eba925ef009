// SPDX-License-Identifier: Apache-2.0
// Crash reports. crash.txt in the run folder has the fatal signal or the exception that ended a run, the step
// with its images, all settings and versions, and the stack after a signal or std::terminate(). The stack of
// an exception that main() has caught is lost; gdb shows it (CONTRIBUTING.md). Each crash appends a report.
//
//   crash_context(run, settings);                              // as soon as the run folder exists
//   crash_step("step 120 (epoch 3), images: a.jpg, b.jpg");    // each step
//   catch (...) { write_crash("GPU memory 3.1G of 16G"); throw; }
//
// There is no report after SIGKILL, which the kernel sends when memory runs out.
#pragma once
#include <string>

namespace yolox {

// Installs handlers of fatal signals and std::terminate(), which write reports to folder/name. A report
// contains `text` (settings, versions) and the command line. A second call only changes folder, name and
// text.
void crash_context(const std::string& folder, const std::string& text, const std::string& name = "crash.txt");

// Sets the description of the current step. Only one thread may call it.
void crash_step(const std::string& text);

// Writes a report about the exception that the enclosing catch block handles. more: additional lines, such as
// the memory of the GPU. Does nothing before crash_context().
void write_crash(const std::string& more = "");

}  // namespace yolox
