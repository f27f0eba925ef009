// SPDX-License-Identifier: Apache-2.0
// The folder base/ has the code that every program needs: errors, flags, text, atomic files, threads, random
// numbers, devices and memory. It includes no other folder of this project.
// This file: the frame of main(), with exit codes, signal handlers and process limits.
#pragma once
#include <chrono>
#include <csignal>
#include <functional>
#include <string>

#include "base/text.hpp"

namespace yolox {

// Returns the seconds of a monotonic clock. Only differences have a meaning.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Returns the version of the release, as in the file VERSION.
const char* version();

// Returns the git revision that this program was built from. "+edits-HASH": its sources differed from
// that revision.
const char* git_revision();

// ---- signals

// The latest signal that asked the run to end (0: none), and the number of such signals. SIGHUP (terminal
// closed) and SIGPIPE (reader of a pipe closed) never end a run.
inline volatile std::sig_atomic_t stop_signal = 0, stop_requests = 0;

// Installs signal handlers. SIGTERM, SIGUSR1 (SLURM, spot machines) and SIGINT (Ctrl-C) then only set
// stop_signal, and the training loop ends after its step. A second SIGINT ends the process at once; with
// `launcher` it is counted instead, so that the launcher can forward it to its ranks. A SIGINT within 0.5 s
// of the first signal is ignored, because a rank may get the same Ctrl-C from the terminal and from its
// launcher.
void catch_signals(bool launcher = false);

// Ignores SIGHUP and SIGPIPE. Before catch_signals(), lets SIGTERM, SIGUSR1 and SIGINT print "stopped by ...
// before the first step" and end the process as by default, because nothing needs to be saved yet.
void report_signals();

// ---- main()

// Runs `program` and returns the exit code of main(): 0, 2 after UsageError, 1 after any other exception,
// which is printed as one line on stderr. Before, prepares the process: opens stdin, stdout and stderr on
// /dev/null if they are closed, raises the limit of open files, and calls opencv_single_thread().
int run_program(const std::function<void()>& program);

// Ends the program with this exit code, without the destructors of static objects: those of torch take a
// quarter of a second, and after the loss of a rank they would wait for its collectives. Call it last in
// main().
[[noreturn]] void end_program(int code);

// What to do if a thread or a process cannot be started: the end of a message.
constexpr char kProcessLimit[] = "; raise the limit of processes (ulimit -u, or pids.max of the container)";

// Turns off OpenCV's threads and OpenCL. OpenCV's threads would compete with the worker threads of the data
// loader, which already use all cores. The OpenCL setting holds for the calling thread only; other threads do
// not use OpenCL as long as they use cv::Mat and not cv::UMat.
void opencv_single_thread();

// Prints "error: " and the message of an exception on stderr, without the backtrace that torch appends, and
// with lack of memory in plain words.
void print_error(const std::string& what);

// Throws if text that was printed to stdout could not be written, for example to a full disk. Programs whose
// results are on stdout call it at their end. Training does not, because it has log.txt and must survive the
// loss of its terminal.
void check_stdout();

// Returns true if stdout is a terminal that can rewrite a line.
bool can_rewrite_lines();

// Returns a Python that can import the modules, such as "numpy, onnxruntime", as a word for the shell:
// $PYTHON, or if it is not set .venv/bin/python beside the sources, else python3. Returns "" if none can.
std::string python_with(const std::string& modules);

}  // namespace yolox
