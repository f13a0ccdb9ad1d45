// What the machine and the control groups around a process have left, over trees of files made up here.
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "available_memory.h"
#include "check.h"
#include "support.h"

using namespace vattn;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

// A root with files of its own; a machine of 16 GiB with 8 GiB left.
struct Root {
  Root() {
    char path[] = "/tmp/vattn_root_XXXXXX";
    root = mkdtemp(path);
    write("/proc/meminfo",
          "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\nBuffers: 5 kB\n");
  }
  ~Root() { std::filesystem::remove_all(root); }

  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void group(const std::string& text, const std::string& mounts) const {
    write("/proc/self/cgroup", text);
    write("/proc/self/mountinfo", "23 1 0:5 / / rw shared:1 - ext4 /dev/vda rw\n" + mounts);
  }
  void v2(const std::string& directory, const std::string& limit, std::size_t used, std::size_t inactive_file) const {
    write(directory + "/memory.max", limit + "\n");
    write(directory + "/memory.current", std::to_string(used) + "\n");
    write(directory + "/memory.stat",
          "anon 1\nactive_file 9\ninactive_file " + std::to_string(inactive_file) + "\nfile_mapped 3\n");
  }
  void v1(const std::string& directory, const std::string& limit, std::size_t used, std::size_t inactive_file) const {
    write(directory + "/memory.limit_in_bytes", limit + "\n");
    write(directory + "/memory.usage_in_bytes", std::to_string(used) + "\n");
    write(directory + "/memory.stat",
          "cache 1\ninactive_file 0\ntotal_inactive_file " + std::to_string(inactive_file) + "\n");
  }
  std::size_t left() const { return available_memory(root).bytes; }
  std::string source() const { return available_memory(root).source; }

  std::string root;
};

const std::string kV2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
const std::string kV1 =
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw shared:4 - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw shared:5 master:2 - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
const std::string kNone = "9223372036854771712";

std::string limit(std::size_t mebibytes) { return std::to_string(mebibytes * kMiB); }

}  // namespace

TEST(without_groups_it_is_the_machines) {
  const Root root;
  CHECK_EQ(root.left(), 8192 * kMiB);
  CHECK_EQ(available_memory(root.root).total, 16384 * kMiB);
  CHECK_EQ(root.source(), std::string("/proc/meminfo"));
  root.group("0::/\n", kV2);  // the root group has no files of limits
  CHECK_EQ(root.left(), 8192 * kMiB);
}

TEST(a_v2_group_at_the_mounts_root) {  // as a container sees its own
  const Root root;
  root.group("0::/\n", kV2);
  root.v2("/sys/fs/cgroup", limit(1024), 600 * kMiB, 0);
  CHECK_EQ(root.left(), 424 * kMiB);
  CHECK_EQ(available_memory(root.root).total, 1024 * kMiB);
  CHECK_EQ(root.source(), std::string("/sys/fs/cgroup/memory.max"));
  root.v2("/sys/fs/cgroup", limit(1024), 600 * kMiB, 100 * kMiB);  // page cache that can go
  CHECK_EQ(root.left(), 524 * kMiB);
  root.v2("/sys/fs/cgroup", limit(1024), 2000 * kMiB, 0);
  CHECK_EQ(root.left(), 0u);
  root.v2("/sys/fs/cgroup", limit(1024), 10, 20);  // counters are not read at once
  CHECK_EQ(root.left(), 1024 * kMiB);
  root.v2("/sys/fs/cgroup", "max", 600 * kMiB, 0);
  CHECK_EQ(root.left(), 8192 * kMiB);
  root.v2("/sys/fs/cgroup", limit(1024 * 1024), 600 * kMiB, 0);  // more than the machine has
  CHECK_EQ(root.left(), 8192 * kMiB);
}

TEST(every_level_of_v2_counts) {
  const Root root;
  root.group("0::/user.slice/a b:c/job\n", kV2);
  root.v2("/sys/fs/cgroup/user.slice/a b:c/job", "max", 10 * kMiB, 0);
  CHECK_EQ(root.left(), 8192 * kMiB);
  root.v2("/sys/fs/cgroup/user.slice", limit(3000), 1000 * kMiB, 0);
  CHECK_EQ(root.left(), 2000 * kMiB);
  CHECK_EQ(root.source(), std::string("/sys/fs/cgroup/user.slice/memory.max"));
  root.v2("/sys/fs/cgroup/user.slice/a b:c", limit(2000), 700 * kMiB, 0);
  CHECK_EQ(root.left(), 1300 * kMiB);
  root.v2("/sys/fs/cgroup/user.slice/a b:c/job", limit(500), 10 * kMiB, 0);
  CHECK_EQ(root.left(), 490 * kMiB);
  root.v2("/sys/fs/cgroup/user.slice/a b:c/neighbour", limit(1), 0, 0);
  CHECK_EQ(root.left(), 490 * kMiB);
}

TEST(every_level_of_v1_counts_and_v2_beside_it) {
  const Root root;
  root.group("9:name=systemd:/x\n4:hugetlb,memory:/docker/abc\n1:cpu:/\n0::/y\n", kV1);
  root.v1("/sys/fs/cgroup/memory", kNone, 5000 * kMiB, 0);
  root.v1("/sys/fs/cgroup/memory/docker", kNone, 5000 * kMiB, 0);
  root.v1("/sys/fs/cgroup/memory/docker/abc", kNone, 500 * kMiB, 0);
  CHECK_EQ(root.left(), 8192 * kMiB);
  root.v1("/sys/fs/cgroup/memory/docker/abc", limit(900), 500 * kMiB, 50 * kMiB);
  CHECK_EQ(root.left(), 450 * kMiB);
  CHECK_EQ(root.source(), std::string("/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes"));
  root.v1("/sys/fs/cgroup/memory/docker", limit(5100), 5000 * kMiB, 0);
  CHECK_EQ(root.left(), 100 * kMiB);
  root.v2("/sys/fs/cgroup/unified/y", limit(60), 0, 0);
  CHECK_EQ(root.left(), 60 * kMiB);
}

// A container without a namespace of groups sees the host's path, and a mount that begins at its own group.
TEST(a_mount_that_begins_at_a_group) {
  const Root root;
  root.group("4:memory:/docker/abc/job\n",
             "35 31 0:32 /docker/abc /sys/fs/my\\040groups/memory rw - cgroup cgroup rw,memory\n");
  root.v1("/sys/fs/my groups/memory", limit(900), 500 * kMiB, 0);
  CHECK_EQ(root.left(), 400 * kMiB);
  root.v1("/sys/fs/my groups/memory/job", limit(300), 0, 0);
  CHECK_EQ(root.left(), 300 * kMiB);

  // Mounted from a group that is not above this one: what it shows is all there is.
  const Root other;
  other.group("0::/../elsewhere\n", "35 31 0:32 /docker/ab /sys/fs/cgroup rw - cgroup2 cgroup rw\n");
  other.v2("/sys/fs/cgroup", limit(700), 0, 0);
  CHECK_EQ(other.left(), 700 * kMiB);
}

TEST(files_that_make_no_sense_set_no_limit) {
  const Root root;
  root.group("\n::\nx\n4:memory\n0::\n", "1 2\n- - -\n3 4 5 / /sys - cgroup2\n" + kV2);
  root.write("/sys/fs/cgroup/memory.max", "");
  CHECK_EQ(root.left(), 8192 * kMiB);
  root.write("/sys/fs/cgroup/memory.max", limit(700));  // no usage beside it: nothing is known to be left
  CHECK_EQ(root.left(), 0u);
}

TEST(without_descriptors_it_says_so) {
  struct rlimit before{};
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  struct rlimit none = before;
  none.rlim_cur = 0;
  setrlimit(RLIMIT_NOFILE, &none);
  int code = 0;
  try {
    available_memory();
  } catch (const std::system_error& error) {
    code = error.code().value();
  }
  setrlimit(RLIMIT_NOFILE, &before);
  CHECK_EQ(code, EMFILE);
}

TEST(this_machine_has_memory) {
  const AvailableMemory memory = available_memory();
  CHECK(memory.bytes > 0);
  CHECK(memory.bytes <= memory.total);
}
