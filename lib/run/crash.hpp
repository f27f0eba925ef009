// SPDX-License-Identifier: Apache-2.0
// Crash reports. crash.txt in the run folder describes the fatal signal or the exception that ended a run:
// its message, the step with its images, memory, all settings and versions. The stack is there after a signal
// and after std::terminate(). The stack of an exception that main() has caught is lost, except in the message
// of an error of torch; gdb shows it (CONTRIBUTING.md). Each crash appends a report.
//
//   crash_context(run, settings);                              // as soon as the run folder exists
//   crash_step("step 120 (epoch 3), images: a.jpg, b.jpg");    // each step
//   catch (...) { write_crash("GPU memory 3.1G of 16G"); throw; }
//
// There is no report after SIGKILL, which the kernel sends when memory runs out.
#pragma once
#include <string>

namespace yolox {

// Installs the handlers of fatal signals and std::terminate(), which then write reports to folder/name. A
// report contains `text` (settings, versions), the command line and the host. Call it from the main thread. A
// second call only changes folder, name and text.
void crash_context(const std::string& folder, const std::string& text, const std::string& name = "crash.txt");

// Sets the description of the current step, cut to 16384 bytes. Takes less than a microsecond. Only one
// thread may call it. A signal handler always sees a complete text.
void crash_step(const std::string& text);

// Writes a report about the exception that the enclosing catch block handles. more: additional lines, such as
// the memory of the GPU. Does nothing before crash_context().
void write_crash(const std::string& more = "");

}  // namespace yolox
