// SPDX-License-Identifier: Apache-2.0
// The run folder: creating, locking and finding runs and their checkpoints.
#pragma once
#include <string>
#include <vector>

namespace yolox {

// Returns the paths of the checkpoints of a run, newest first: last.pth, then step_N.pth by falling N.
std::vector<std::string> list_checkpoints(const std::string& run);

// Returns the run with the newest checkpoint, or "" if no run has one. Looks at the folders in runs/, and at
// the folders in the working folder that have been used by a run (--out NAME).
std::string newest_run();

// Returns the folder of the run that a value of --resume names: a folder, its last.pth, or "newest" or "last"
// for newest_run(). Throws UsageError if `text` is another file.
std::string run_folder_of(const std::string& text);

// Deletes last.pth if it was saved before the first step, so that a new run can use the folder.
void remove_unstarted_checkpoint(const std::string& run);

// Deletes the temporary files (*.tmp.*) of a process that was killed while it wrote.
void remove_temporary_files(const std::string& run);

// Locks a run folder (flock) until this process ends, because only one training may use a folder. Throws if
// another process holds the lock, or if a folder or a pipe has the name of a checkpoint. Locks nothing on a
// file system without locks.
void lock_run_folder(const std::string& run);

// Creates and locks the folder of a new run: `wanted`, or if that is empty runs/<name>, runs/<name>-2, ...
// Throws if the folder cannot be written or already holds a run. Returns the path.
std::string create_run_folder(const std::string& wanted, const std::string& name);

}  // namespace yolox
