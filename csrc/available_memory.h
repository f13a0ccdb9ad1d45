// How much memory the machine, and every control group around this process, still has to give.
#pragma once

#include <cstddef>
#include <string>

namespace vattn {

struct AvailableMemory {
  std::size_t bytes;
  std::size_t total;   // of what bounds it: the machine's memory, or the group's limit
  std::string source;  // the file that the bound is read from
};

// The least of what the machine and the control groups (v1 and v2, each level up to the root of the hierarchy) have
// left. Page cache that nobody uses (inactive_file) counts as left: Linux drops it before it ends a process.
//
// All files are read below `root`, which is empty but for tests. Throws std::system_error where they cannot be opened
// for want of file descriptors or memory; files that are not there set no limit.
AvailableMemory available_memory(const std::string& root = "");

// The whole file; nothing where it is not there. Throws likewise.
std::string contents(const std::string& path);

}  // namespace vattn
