#include "available_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <sstream>
#include <system_error>
#include <vector>

namespace vattn {

std::string contents(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM)
      throw std::system_error(errno, std::generic_category(), path);
    return {};
  }
  std::string text;
  char buffer[4096];
  for (ssize_t count = 0; (count = read(fd, buffer, sizeof buffer)) > 0;)
    text.append(buffer, static_cast<std::size_t>(count));
  close(fd);
  return text;
}

namespace {

constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

// The number that follows a field's name, or that the text starts with; kNoLimit for any other word ("max"), or none.
std::size_t number(const std::string& text, const std::string& field = "") {
  std::istringstream words(text);
  std::string word;
  while (!field.empty() && words >> word && word != field) continue;
  std::size_t value = 0;
  return words >> value ? value : kNoLimit;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

bool contains(const std::vector<std::string>& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// Paths in mountinfo have blanks and the like as \040.
std::string unescaped(const std::string& path) {
  std::string plain;
  for (std::size_t i = 0; i < path.size(); ++i) {
    const bool escape = path[i] == '\\' && i + 3 < path.size();
    plain += escape ? static_cast<char>(std::strtol(path.substr(i + 1, 3).c_str(), nullptr, 8)) : path[i];
    i += escape ? 3 : 0;
  }
  return plain;
}

struct Hierarchy {
  bool v2;
  std::string group;  // of this process, from the hierarchy's root: "/" or "/a/b"
};

std::vector<Hierarchy> memory_hierarchies(const std::string& root) {
  std::vector<Hierarchy> found;
  for (const std::string& line : split(contents(root + "/proc/self/cgroup"), '\n')) {  // id:controllers:group
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (v2 || contains(split(controllers, ','), "memory")) found.push_back({v2, line.substr(second + 1)});
  }
  return found;
}

// The directories of a group and of those around it, innermost first, as far as they are mounted.
std::vector<std::string> directories(const std::string& root, const std::vector<std::string>& mounts,
                                     const Hierarchy& hierarchy) {
  std::vector<std::string> found;
  for (const std::string& line : mounts) {
    // id parent device root mountpoint options [tags] - type source options
    const std::vector<std::string> fields = split(line, ' ');
    const auto dash = std::find(fields.begin(), fields.end(), "-");
    if (fields.size() < 5 || fields.end() - dash < 4) continue;
    const bool fits =
        hierarchy.v2 ? dash[1] == "cgroup2" : dash[1] == "cgroup" && contains(split(dash[3], ','), "memory");
    if (!fits) continue;
    // A container's mount begins at its own group. One that does not lead to this group shows at least its root.
    const std::string top = fields[3] == "/" ? "" : unescaped(fields[3]);
    const std::string mountpoint = root + unescaped(fields[4]);
    const bool below = hierarchy.group.compare(0, top.size(), top) == 0 &&
                       (hierarchy.group.size() == top.size() || hierarchy.group[top.size()] == '/');
    std::string rest = below ? hierarchy.group.substr(top.size()) : "";
    while (!rest.empty()) {
      if (rest != "/") found.push_back(mountpoint + rest);
      rest.resize(rest.rfind('/'));
    }
    found.push_back(mountpoint);
    break;
  }
  return found;
}

std::vector<std::string> cgroup_mounts(const std::string& root) {
  std::vector<std::string> mounts = split(contents(root + "/proc/self/mountinfo"), '\n');
  const auto other = [](const std::string& line) { return line.find(" - cgroup") == std::string::npos; };
  mounts.erase(std::remove_if(mounts.begin(), mounts.end(), other), mounts.end());
  return mounts;
}

}  // namespace

AvailableMemory available_memory(const std::string& root) {
  const std::string meminfo = contents(root + "/proc/meminfo");
  const auto bytes = [&](const char* field, int pages) {
    const std::size_t kibibytes = number(meminfo, field);
    if (kibibytes != kNoLimit) return kibibytes * 1024;
    return static_cast<std::size_t>(sysconf(pages)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  };
  const AvailableMemory machine{bytes("MemAvailable:", _SC_AVPHYS_PAGES), bytes("MemTotal:", _SC_PHYS_PAGES),
                                "/proc/meminfo"};
  AvailableMemory least = machine;
  const std::vector<std::string> mounts = cgroup_mounts(root);
  for (const Hierarchy& hierarchy : memory_hierarchies(root))
    for (const std::string& directory : directories(root, mounts, hierarchy)) {
      const std::string file = directory + (hierarchy.v2 ? "/memory.max" : "/memory.limit_in_bytes");
      const std::size_t limit = number(contents(file));
      if (limit >= machine.total) continue;  // none, or more than there can be
      const std::size_t used =
          number(contents(directory + (hierarchy.v2 ? "/memory.current" : "/memory.usage_in_bytes")));
      const std::size_t unused =
          number(contents(directory + "/memory.stat"), hierarchy.v2 ? "inactive_file" : "total_inactive_file");
      const std::size_t needed = used - std::min(used, unused == kNoLimit ? 0 : unused);
      const std::size_t left = limit - std::min(limit, needed);
      if (left < least.bytes) least = {left, limit, file.substr(root.size())};
    }
  return least;
}

}  // namespace vattn
