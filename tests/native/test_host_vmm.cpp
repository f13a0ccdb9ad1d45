// The contract in vmm.h, held against the host provider.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <thread>
#include <vector>

#include "check.h"
#include "support.h"

using namespace vattn;

namespace {

constexpr std::size_t kPage = 4096;
const Vmm& vmm = host_vmm();

std::size_t bytes_of(int granularity_log2) { return std::size_t{1} << granularity_log2; }

// Fails the test that leaves something behind.
struct NothingLeft {
  const HostUsage before = host_usage();
  void check() const {
    const HostUsage after = host_usage();
    CHECK_EQ(after.kernel_mappings, before.kernel_mappings);
    CHECK_EQ(after.physical_bytes, before.physical_bytes);
    CHECK_EQ(after.handles, before.handles);
    CHECK_EQ(after.reservations, before.reservations);
  }
};

Address reserve(std::size_t size, std::size_t alignment = 0, Flags flags = 0) {
  Address address = 0;
  CHECK_EQ(vmm.address_reserve(&address, size, alignment, 0, flags), kSuccess);
  return address;
}

Handle create(std::size_t size, int granularity_log2 = kMinGranularityLog2) {
  const AllocationProp prop = host_prop(granularity_log2);
  Handle handle = 0;
  CHECK_EQ(vmm.create(&handle, size, &prop, 0), kSuccess);
  return handle;
}

Result set_access(Address address, std::size_t size, Access access) {
  const AccessDesc desc{{kLocationHost, kMinGranularityLog2}, static_cast<unsigned>(access)};
  return vmm.set_access(address, size, &desc, 1);
}

std::optional<Access> get_access(Address address) {
  const Location location{kLocationHost, kMinGranularityLog2};
  Flags flags = 0;
  if (vmm.get_access(&flags, &location, address) != kSuccess) return std::nullopt;
  return static_cast<Access>(flags);
}

// Maps with all rights.
void place(Address address, std::size_t size, Handle handle) {
  CHECK_EQ(vmm.map(address, size, 0, handle, 0), kSuccess);
  CHECK_EQ(set_access(address, size, Access::kReadWrite), kSuccess);
}

std::size_t most_mappings() {
  std::size_t limit = 0;
  std::ifstream("/proc/sys/vm/max_map_count") >> limit;
  return limit;
}

std::size_t address_space_bytes() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * kPage;
}

template <class Body>
void for_each_granularity(Body&& body) {
  for (int log2 = kMinGranularityLog2; log2 <= kMaxGranularityLog2; ++log2) {
    check::context = "granularity " + std::to_string(bytes_of(log2));
    body(log2, bytes_of(log2));
  }
  check::context.clear();
}

}  // namespace

TEST(reserve_refuses_what_the_contract_excludes) {
  const NothingLeft nothing_left;
  Address address = 0;
  CHECK_EQ(vmm.address_reserve(nullptr, kPage, 0, 0, 0), kInvalidValue);
  CHECK_EQ(vmm.address_reserve(&address, 0, 0, 0, 0), kInvalidValue);
  CHECK_EQ(vmm.address_reserve(&address, kPage + 1, 0, 0, 0), kInvalidValue);
  CHECK_EQ(vmm.address_reserve(&address, kPage / 2, 0, 0, 0), kInvalidValue);
  CHECK_EQ(vmm.address_reserve(&address, kPage, 3 * kPage, 0, 0), kInvalidValue);
  CHECK_EQ(vmm.address_reserve(&address, kPage, 0, kPage, 0), kInvalidValue);
  CHECK_EQ(vmm.address_reserve(&address, kPage, 0, 0, 2), kInvalidValue);
  CHECK_EQ(vmm.address_reserve(&address, std::size_t{1} << 62, 0, 0, 0), kOutOfMemory);
  CHECK_EQ(vmm.address_reserve(&address, ~std::size_t{0} - kPage + 1, std::size_t{1} << 21, 0, 0), kOutOfMemory);
  CHECK_EQ(address, 0u);
  nothing_left.check();
}

TEST(reserve_aligns) {
  const NothingLeft nothing_left;
  const std::size_t address_space = address_space_bytes();
  for (std::size_t alignment = 0; alignment <= bytes_of(26); alignment = alignment ? 2 * alignment : 1) {
    const Address address = reserve(3 * kPage, alignment);
    CHECK_EQ(address % std::max(alignment, kPage), 0u);
    CHECK_EQ(kernel_entries(address, 3 * kPage), 1u);
    CHECK_EQ(host_usage().reservations, nothing_left.before.reservations + 1);
    CHECK_EQ(host_usage().kernel_mappings, nothing_left.before.kernel_mappings + 1);
    CHECK_EQ(vmm.address_free(address, 3 * kPage), kSuccess);
    CHECK_EQ(kernel_entries(address, 3 * kPage), 0u);
  }
  CHECK(address_space_bytes() < address_space + bytes_of(20));  // what alignment had cut off is not kept
  nothing_left.check();
}

TEST(reserve_many_tebibytes) {
  if (VATTN_TSAN) SKIP("TSan shadows every byte of it");
  const std::size_t size = std::size_t{64} << 40;
  const Address address = reserve(size, bytes_of(21));
  CHECK_EQ(word(address + size - 8), 0u);
  CHECK_EQ(vmm.address_free(address, size), kSuccess);
}

TEST(address_free_takes_exactly_one_reservation) {
  const NothingLeft nothing_left;
  const Address address = reserve(4 * kPage);
  CHECK_EQ(vmm.address_free(address, 3 * kPage), kInvalidValue);
  CHECK_EQ(vmm.address_free(address, 5 * kPage), kInvalidValue);
  CHECK_EQ(vmm.address_free(address + kPage, 3 * kPage), kInvalidValue);
  CHECK_EQ(vmm.address_free(0, 4 * kPage), kInvalidValue);
  const Handle handle = create(kPage);
  CHECK_EQ(vmm.map(address + kPage, kPage, 0, handle, 0), kSuccess);
  CHECK_EQ(vmm.address_free(address, 4 * kPage), kInvalidValue);
  CHECK_EQ(set_access(address + kPage, kPage, Access::kReadWrite), kSuccess);
  word(address + kPage) = 7;
  CHECK_EQ(vmm.unmap(address + kPage, kPage), kSuccess);
  CHECK_EQ(vmm.address_free(address, 4 * kPage), kSuccess);
  CHECK_EQ(vmm.address_free(address, 4 * kPage), kInvalidValue);
  CHECK_EQ(vmm.release(handle), kSuccess);
  nothing_left.check();
}

TEST(create_refuses_what_the_contract_excludes) {
  const NothingLeft nothing_left;
  for_each_granularity([&](int log2, std::size_t granularity) {
    const AllocationProp prop = host_prop(log2);
    Handle handle = 0;
    CHECK_EQ(vmm.create(&handle, 0, &prop, 0), kInvalidValue);
    CHECK_EQ(vmm.create(&handle, granularity - 1, &prop, 0), kInvalidValue);
    CHECK_EQ(vmm.create(&handle, granularity / 2, &prop, 0), kInvalidValue);
    CHECK_EQ(vmm.create(&handle, granularity + kPage / 2, &prop, 0), kInvalidValue);
    CHECK_EQ(vmm.create(&handle, granularity, &prop, 1), kInvalidValue);
    CHECK_EQ(vmm.create(nullptr, granularity, &prop, 0), kInvalidValue);
    CHECK_EQ(vmm.create(&handle, granularity, nullptr, 0), kInvalidValue);
    AllocationProp device = prop;
    device.location.type = kLocationDevice;
    CHECK_EQ(vmm.create(&handle, granularity, &device, 0), kInvalidValue);
    CHECK_EQ(handle, 0u);
  });
  for (const int log2 : {-1, 0, kMinGranularityLog2 - 1, kMaxGranularityLog2 + 1, 63, 64}) {
    const AllocationProp prop = host_prop(log2);
    Handle handle = 0;
    CHECK_EQ(vmm.create(&handle, bytes_of(21), &prop, 0), kInvalidValue);
  }
  nothing_left.check();
}

TEST(create_of_absurd_sizes_is_out_of_memory_and_harms_nobody) {
  const NothingLeft nothing_left;
  for_each_granularity([&](int log2, std::size_t granularity) {
    const AllocationProp prop = host_prop(log2);
    const Address address = reserve(granularity, granularity);
    const Handle handle = create(granularity, log2);
    place(address, granularity, handle);
    word(address) = 4711;
    for (const std::size_t size :
         {std::size_t{0} - granularity, std::size_t{1} << 63, (std::size_t{1} << 63) - granularity}) {
      Handle none = 0;
      CHECK_EQ(vmm.create(&none, size, &prop, 0), kOutOfMemory);
    }
    CHECK(!read_faults(address));
    CHECK_EQ(word(address), 4711u);
    const Handle next = create(granularity, log2);  // the file that memory comes from is still in order
    CHECK_EQ(vmm.unmap(address, granularity), kSuccess);
    place(address, granularity, next);
    CHECK_EQ(word(address), 0u);
    CHECK_EQ(vmm.unmap(address, granularity), kSuccess);
    CHECK_EQ(vmm.release(handle), kSuccess);
    CHECK_EQ(vmm.release(next), kSuccess);
    CHECK_EQ(vmm.address_free(address, granularity), kSuccess);
  });
  nothing_left.check();
}

// Where the kernel has no address space left, reservation says so; creation takes none.
TEST(exhaustion_is_an_error_that_changes_nothing) {
  if (VATTN_TSAN) SKIP("TSan needs address space itself");
  const NothingLeft nothing_left;
  const AllocationProp prop = host_prop(21);
  const Handle warm = create(bytes_of(21), 21);
  struct rlimit before{};
  CHECK_EQ(getrlimit(RLIMIT_AS, &before), 0);
  struct rlimit none = before;
  none.rlim_cur = kPage;
  Handle handle = 0;
  Address address = 0;
  setrlimit(RLIMIT_AS, &none);
  const Result created = vmm.create(&handle, bytes_of(21), &prop, 0);
  const Result reserved = vmm.address_reserve(&address, bytes_of(21), 0, 0, 0);
  setrlimit(RLIMIT_AS, &before);
  CHECK_EQ(created, kSuccess);
  CHECK_EQ(reserved, kOutOfMemory);
  CHECK_EQ(host_usage().physical_bytes, nothing_left.before.physical_bytes + 2 * bytes_of(21));
  CHECK_EQ(vmm.release(handle), kSuccess);
  CHECK_EQ(vmm.release(create(bytes_of(21), 21)), kSuccess);
  CHECK_EQ(vmm.release(warm), kSuccess);
  nothing_left.check();
}

// Memory may be there, but there is no file descriptor to look by.
TEST(without_descriptors_creation_says_so) {
  const NothingLeft nothing_left;
  const AllocationProp prop = host_prop(17);
  struct rlimit before{};
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  struct rlimit none = before;
  none.rlim_cur = 0;
  Handle handle = 0;
  setrlimit(RLIMIT_NOFILE, &none);
  const Result created = vmm.create(&handle, bytes_of(28), &prop, 0);
  setrlimit(RLIMIT_NOFILE, &before);
  CHECK_EQ(created, kErrno + EMFILE);
  const char* name = nullptr;
  CHECK_EQ(vmm.error_name(created, &name), kSuccess);
  CHECK_EQ(std::string(name), "EMFILE");
  CHECK_EQ(vmm.release(create(bytes_of(17), 17)), kSuccess);
  nothing_left.check();
}

TEST(exportable_memory_has_a_file_of_its_own) {
  const NothingLeft nothing_left;
  for_each_granularity([&](int log2, std::size_t granularity) {
    AllocationProp prop = host_prop(log2);
    prop.requested_handle_types = kFabric;
    Handle handle = 0;
    CHECK_EQ(vmm.create(&handle, granularity, &prop, 0), kNotSupported);
    CHECK_EQ(handle, 0u);
    prop.requested_handle_types = kPosixFileDescriptor;
    CHECK_EQ(vmm.create(&handle, std::size_t{1} << 63, &prop, 0), kOutOfMemory);
    CHECK_EQ(vmm.create(&handle, 2 * granularity, &prop, 0), kSuccess);
    int fd = -1;
    const Handle ranged = create(granularity, log2);
    CHECK_EQ(vmm.export_handle(&fd, ranged, kPosixFileDescriptor, 0), kInvalidValue);
    CHECK_EQ(vmm.release(ranged), kSuccess);
    CHECK_EQ(vmm.export_handle(&fd, handle, kPosixFileDescriptor, 0), kSuccess);
    struct stat file{};
    CHECK_EQ(fstat(fd, &file), 0);
    CHECK_EQ(file.st_size, static_cast<off_t>(2 * granularity));
    CHECK_EQ(file.st_blocks * 512, static_cast<off_t>(2 * granularity));  // it is filled
    CHECK(ftruncate(fd, 0) != 0);
    CHECK(ftruncate(fd, static_cast<off_t>(4 * granularity)) != 0);
    Handle other = 0;
    CHECK_EQ(vmm.import_handle(&other, reinterpret_cast<void*>(std::uintptr_t(fd)), kPosixFileDescriptor), kSuccess);
    CHECK_EQ(vmm.release(handle), kSuccess);
    CHECK_EQ(vmm.import_handle(nullptr, reinterpret_cast<void*>(std::uintptr_t(fd)), kPosixFileDescriptor),
             kInvalidValue);
    CHECK_EQ(close(fd), 0);
    const Address address = reserve(2 * granularity, granularity);
    place(address, 2 * granularity, other);
    CHECK_EQ(word(address + granularity), 0u);
    CHECK_EQ(vmm.release(other), kSuccess);
    word(address) = 5;
    CHECK_EQ(word(address), 5u);
    CHECK_EQ(vmm.unmap(address, 2 * granularity), kSuccess);
    CHECK_EQ(vmm.address_free(address, 2 * granularity), kSuccess);
  });
  nothing_left.check();
}

TEST(map_refuses_what_the_contract_excludes) {
  const NothingLeft nothing_left;
  for_each_granularity([&](int log2, std::size_t granularity) {
    const Address base = reserve(4 * granularity, granularity);
    const Handle one = create(granularity, log2);
    const Handle two = create(2 * granularity, log2);
    const std::size_t entries = host_usage().kernel_mappings;
    CHECK_EQ(vmm.map(base, granularity, granularity, one, 0), kInvalidValue);          // offset
    CHECK_EQ(vmm.map(base, granularity, 0, one, 2), kInvalidValue);                    // flags
    CHECK_EQ(vmm.map(base, 0, 0, one, 0), kInvalidValue);                              // size
    CHECK_EQ(vmm.map(base, granularity / 2, 0, one, 0), kInvalidValue);                // size
    CHECK_EQ(vmm.map(base, granularity, 0, two, 0), kInvalidValue);                    // part of a handle
    CHECK_EQ(vmm.map(base, 2 * granularity, 0, one, 0), kInvalidValue);                // more than a handle
    CHECK_EQ(vmm.map(base + granularity / 2, granularity, 0, one, 0), kInvalidValue);  // alignment
    CHECK_EQ(vmm.map(base + 1, granularity, 0, one, 0), kInvalidValue);
    CHECK_EQ(vmm.map(base + 4 * granularity, granularity, 0, one, 0), kInvalidValue);  // outside
    CHECK_EQ(vmm.map(base - granularity, granularity, 0, one, 0), kInvalidValue);
    CHECK_EQ(vmm.map(base + 3 * granularity, 2 * granularity, 0, two, 0), kInvalidValue);  // reaches outside
    CHECK_EQ(vmm.map(0, granularity, 0, one, 0), kInvalidValue);
    CHECK_EQ(vmm.map(base, granularity, 0, 0, 0), kInvalidValue);  // no handle
    CHECK_EQ(vmm.map(base, granularity, 0, ~Handle{0}, 0), kInvalidValue);
    const Handle gone = create(granularity, log2);
    CHECK_EQ(vmm.release(gone), kSuccess);
    CHECK_EQ(vmm.map(base, granularity, 0, gone, 0), kInvalidValue);  // released
    const Handle next = create(granularity, log2);
    CHECK_EQ(vmm.map(base, granularity, 0, gone, 0), kInvalidValue);  // released, and other memory took its place
    CHECK_EQ(vmm.release(gone), kInvalidValue);
    CHECK_EQ(vmm.release(next), kSuccess);
    CHECK_EQ(host_usage().kernel_mappings, entries);
    CHECK_EQ(kernel_entries(base, 4 * granularity), 1u);

    CHECK_EQ(vmm.map(base + granularity, granularity, 0, one, 0), kSuccess);
    CHECK_EQ(vmm.map(base + granularity, granularity, 0, one, 0), kAlreadyMapped);
    CHECK_EQ(vmm.map(base, 2 * granularity, 0, two, 0), kAlreadyMapped);                // its end is taken
    CHECK_EQ(vmm.map(base + granularity, 2 * granularity, 0, two, 0), kAlreadyMapped);  // its start is taken
    CHECK_EQ(vmm.map(base + 2 * granularity, 2 * granularity, 0, two, 0), kSuccess);
    CHECK_EQ(vmm.map(base + 3 * granularity, granularity, 0, one, 0), kAlreadyMapped);  // inside another

    CHECK_EQ(vmm.release(two), kSuccess);
    CHECK_EQ(vmm.map(base, granularity, 0, two, 0), kInvalidValue);  // released, though its memory lives
    CHECK_EQ(vmm.unmap(base + granularity, 3 * granularity), kSuccess);
    CHECK_EQ(vmm.release(one), kSuccess);
    CHECK_EQ(vmm.address_free(base, 4 * granularity), kSuccess);
  });
  nothing_left.check();
}

TEST(unmap_takes_whole_mappings_without_a_gap) {
  const NothingLeft nothing_left;
  for_each_granularity([&](int log2, std::size_t granularity) {
    const Address base = reserve(8 * granularity, granularity);
    const Handle one = create(granularity, log2);
    const Handle two = create(2 * granularity, log2);
    // Pages: 0 free, 1 one, 2-3 two, 4 free, 5 one, 6-7 two.
    for (const std::size_t at : {1, 5}) {
      CHECK_EQ(vmm.map(base + at * granularity, granularity, 0, one, 0), kSuccess);
      CHECK_EQ(vmm.map(base + (at + 1) * granularity, 2 * granularity, 0, two, 0), kSuccess);
    }
    const auto unmap = [&](std::size_t page, std::size_t pages) {
      return vmm.unmap(base + page * granularity, pages * granularity);
    };
    CHECK_EQ(unmap(0, 1), kInvalidValue);  // nothing there
    CHECK_EQ(unmap(4, 1), kInvalidValue);
    CHECK_EQ(unmap(1, 0), kInvalidValue);
    CHECK_EQ(unmap(2, 1), kInvalidValue);  // half a mapping, the first
    CHECK_EQ(unmap(3, 1), kInvalidValue);  // and the second
    CHECK_EQ(unmap(1, 2), kInvalidValue);  // one and a half
    CHECK_EQ(unmap(0, 2), kInvalidValue);  // a gap before,
    CHECK_EQ(unmap(1, 4), kInvalidValue);  // behind,
    CHECK_EQ(unmap(1, 7), kInvalidValue);  // and between
    CHECK_EQ(unmap(5, 4), kInvalidValue);  // past the reservation
    CHECK_EQ(unmap(8, 1), kInvalidValue);
    CHECK_EQ(vmm.unmap(0, granularity), kInvalidValue);
    CHECK_EQ(vmm.unmap(base + granularity, granularity / 2), kInvalidValue);
    CHECK_EQ(vmm.unmap(base + granularity + granularity / 2, granularity / 2), kInvalidValue);
    for (const std::size_t page : {1, 2, 3, 5, 6, 7}) CHECK(get_access(base + page * granularity).has_value());
    CHECK_EQ(unmap(1, 3), kSuccess);
    CHECK_EQ(unmap(1, 3), kInvalidValue);
    CHECK_EQ(unmap(6, 2), kSuccess);
    CHECK_EQ(unmap(5, 1), kSuccess);
    for (std::size_t page = 0; page < 8; ++page) CHECK(!get_access(base + page * granularity));
    CHECK_EQ(vmm.release(one), kSuccess);
    CHECK_EQ(vmm.release(two), kSuccess);
    CHECK_EQ(vmm.address_free(base, 8 * granularity), kSuccess);
  });
  nothing_left.check();
}

TEST(set_access_takes_whole_mappings_and_known_rights) {
  const NothingLeft nothing_left;
  const Address base = reserve(4 * kPage);
  const Handle two = create(2 * kPage);
  CHECK_EQ(vmm.map(base + kPage, 2 * kPage, 0, two, 0), kSuccess);
  CHECK(get_access(base + kPage) == Access::kNone);
  CHECK(get_access(base + 3 * kPage - 1) == Access::kNone);
  CHECK(!get_access(base));
  CHECK(!get_access(base + 3 * kPage));
  CHECK(!get_access(0));
  CHECK_EQ(set_access(base, kPage, Access::kRead), kInvalidValue);
  CHECK_EQ(set_access(base, 3 * kPage, Access::kRead), kInvalidValue);
  CHECK_EQ(set_access(base + kPage, 3 * kPage, Access::kRead), kInvalidValue);
  CHECK_EQ(set_access(base + kPage, kPage, Access::kRead), kInvalidValue);
  CHECK_EQ(set_access(base + kPage, 0, Access::kRead), kInvalidValue);
  CHECK_EQ(set_access(0, kPage, Access::kRead), kInvalidValue);
  AccessDesc desc{{kLocationHost, 12}, static_cast<unsigned>(Access::kRead)};
  CHECK_EQ(vmm.set_access(base + kPage, 2 * kPage, &desc, 0), kInvalidValue);
  CHECK_EQ(vmm.set_access(base + kPage, 2 * kPage, nullptr, 1), kInvalidValue);
  desc.location.type = kLocationDevice;
  CHECK_EQ(vmm.set_access(base + kPage, 2 * kPage, &desc, 1), kInvalidValue);
  desc = {{kLocationHost, 12}, 2};
  CHECK_EQ(vmm.set_access(base + kPage, 2 * kPage, &desc, 1), kInvalidValue);
  desc.flags = 4;
  CHECK_EQ(vmm.set_access(base + kPage, 2 * kPage, &desc, 1), kInvalidValue);
  CHECK(get_access(base + kPage) == Access::kNone);
  CHECK_EQ(set_access(base + kPage, 2 * kPage, Access::kRead), kSuccess);
  CHECK(get_access(base + kPage) == Access::kRead);
  CHECK(get_access(base + 2 * kPage) == Access::kRead);

  const Location location{kLocationHost, 12}, device{kLocationDevice, 0};
  Flags flags = 0;
  CHECK_EQ(vmm.get_access(nullptr, &location, base + kPage), kInvalidValue);
  CHECK_EQ(vmm.get_access(&flags, nullptr, base + kPage), kInvalidValue);
  CHECK_EQ(vmm.get_access(&flags, &device, base + kPage), kInvalidValue);
  CHECK_EQ(vmm.unmap(base + kPage, 2 * kPage), kSuccess);
  CHECK_EQ(vmm.release(two), kSuccess);
  CHECK_EQ(vmm.address_free(base, 4 * kPage), kSuccess);
  nothing_left.check();
}

// Without any, reads fault where those of unmapped addresses do.
TEST(rights_are_enforced) {
  for (const bool strict : {false, true}) {
    const NothingLeft nothing_left;
    const Address base = reserve(2 * kPage, 0, strict ? kReserveStrict : 0);
    const Handle handle = create(kPage);
    CHECK_EQ(vmm.map(base, kPage, 0, handle, 0), kSuccess);
    CHECK_EQ(read_faults(base), strict);
    CHECK(write_faults(base));
    CHECK_EQ(set_access(base, kPage, Access::kReadWrite), kSuccess);
    CHECK(!write_faults(base));
    word(base) = 5;
    CHECK_EQ(set_access(base, kPage, Access::kRead), kSuccess);
    CHECK(!read_faults(base));
    CHECK(write_faults(base));
    CHECK_EQ(word(base), 5u);
    CHECK_EQ(set_access(base, kPage, Access::kNone), kSuccess);
    CHECK_EQ(read_faults(base), strict);
    CHECK(write_faults(base));
    CHECK_EQ(vmm.unmap(base, kPage), kSuccess);
    CHECK_EQ(vmm.release(handle), kSuccess);
    CHECK_EQ(vmm.address_free(base, 2 * kPage), kSuccess);
    nothing_left.check();
  }
}

TEST(stray_reads_see_zeros_and_stray_writes_fault) {
  for (const bool strict : {false, true}) {
    const NothingLeft nothing_left;
    const Address base = reserve(4 * kPage, 0, strict ? kReserveStrict : 0);
    const Handle handle = create(kPage);
    const auto check_stray = [&](Address address) {
      CHECK_EQ(read_faults(address), strict);
      if (!strict) CHECK_EQ(word(address), 0u);
      CHECK(write_faults(address));
    };
    for (std::size_t page = 0; page < 4; ++page) check_stray(base + page * kPage);
    place(base + kPage, kPage, handle);
    word(base + kPage) = word(base + 2 * kPage - 8) = ~0ull;
    check_stray(base + kPage - 8);
    check_stray(base + 2 * kPage);
    CHECK_EQ(vmm.unmap(base + kPage, kPage), kSuccess);
    check_stray(base + kPage);
    CHECK_EQ(kernel_entries(base, 4 * kPage), 1u);
    CHECK_EQ(vmm.release(handle), kSuccess);
    CHECK_EQ(vmm.address_free(base, 4 * kPage), kSuccess);
    nothing_left.check();
  }
}

TEST(memory_lives_until_its_last_reference_and_mapping_are_gone) {
  const NothingLeft nothing_left;
  const std::size_t start = nothing_left.before.physical_bytes;
  const Address base = reserve(2 * kPage);

  const Handle unmapped_first = create(kPage);
  place(base, kPage, unmapped_first);
  CHECK_EQ(host_usage().physical_bytes, start + kPage);
  CHECK_EQ(vmm.unmap(base, kPage), kSuccess);
  CHECK_EQ(host_usage().physical_bytes, start + kPage);
  CHECK_EQ(vmm.release(unmapped_first), kSuccess);
  CHECK_EQ(host_usage().physical_bytes, start);
  CHECK_EQ(vmm.release(unmapped_first), kInvalidValue);

  const Handle released_first = create(kPage);
  place(base, kPage, released_first);
  place(base + kPage, kPage, released_first);
  word(base) = 6;
  CHECK_EQ(vmm.release(released_first), kSuccess);
  CHECK_EQ(vmm.release(released_first), kInvalidValue);
  CHECK_EQ(vmm.unmap(base, kPage), kSuccess);
  CHECK_EQ(host_usage().physical_bytes, start + kPage);
  CHECK_EQ(word(base + kPage), 6u);
  CHECK_EQ(vmm.unmap(base + kPage, kPage), kSuccess);
  CHECK_EQ(host_usage().physical_bytes, start);
  CHECK_EQ(vmm.release(released_first), kInvalidValue);

  CHECK_EQ(vmm.release(0), kInvalidValue);
  CHECK_EQ(vmm.address_free(base, 2 * kPage), kSuccess);
  nothing_left.check();
}

TEST(retained_handles_are_references) {
  const NothingLeft nothing_left;
  const Address base = reserve(2 * kPage);
  const Handle handle = create(kPage);
  Handle retained = 0;
  const auto retain = [&](Address address) { return vmm.retain_handle(&retained, reinterpret_cast<void*>(address)); };
  CHECK_EQ(retain(base), kInvalidValue);
  place(base, kPage, handle);
  CHECK_EQ(vmm.retain_handle(nullptr, reinterpret_cast<void*>(base)), kInvalidValue);
  CHECK_EQ(retain(base + kPage), kInvalidValue);
  CHECK_EQ(retained, 0u);
  CHECK_EQ(retain(base + 17), kSuccess);
  CHECK_EQ(retained, handle);
  CHECK_EQ(vmm.release(handle), kSuccess);
  CHECK_EQ(vmm.unmap(base, kPage), kSuccess);
  place(base, kPage, retained);  // one reference is left
  CHECK_EQ(vmm.release(retained), kSuccess);
  CHECK_EQ(vmm.release(retained), kInvalidValue);
  CHECK_EQ(retain(base), kSuccess);  // the mapping alone gives a reference again
  CHECK_EQ(vmm.unmap(base, kPage), kSuccess);
  CHECK_EQ(host_usage().handles, nothing_left.before.handles + 1);
  CHECK_EQ(vmm.release(retained), kSuccess);
  CHECK_EQ(vmm.address_free(base, 2 * kPage), kSuccess);
  nothing_left.check();
}

TEST(one_handle_mapped_twice_is_the_same_memory) {
  const NothingLeft nothing_left;
  for_each_granularity([&](int log2, std::size_t granularity) {
    const Address here = reserve(2 * granularity, granularity), there = reserve(granularity, granularity);
    const Handle handle = create(granularity, log2);
    place(here, granularity, handle);
    place(here + granularity, granularity, handle);
    CHECK_EQ(vmm.map(there, granularity, 0, handle, 0), kSuccess);
    CHECK_EQ(set_access(there, granularity, Access::kRead), kSuccess);
    word(here) = 1;
    word(here + 2 * granularity - 8) = 2;
    CHECK_EQ(word(there), 1u);
    CHECK_EQ(word(there + granularity - 8), 2u);
    CHECK_EQ(word(here + granularity), 1u);
    CHECK(write_faults(there));
    CHECK_EQ(host_usage().physical_bytes, nothing_left.before.physical_bytes + granularity);
    CHECK_EQ(vmm.unmap(here, 2 * granularity), kSuccess);
    CHECK_EQ(vmm.unmap(there, granularity), kSuccess);
    CHECK_EQ(vmm.release(handle), kSuccess);
    CHECK_EQ(vmm.address_free(here, 2 * granularity), kSuccess);
    CHECK_EQ(vmm.address_free(there, granularity), kSuccess);
  });
  nothing_left.check();
}

TEST(created_memory_is_zero_also_when_it_was_used_before) {
  const NothingLeft nothing_left;
  for_each_granularity([&](int log2, std::size_t granularity) {
    const Address base = reserve(2 * granularity, granularity);
    for (int round = 0; round < 3; ++round) {
      // Another split of the file each time: 1 + 1, then 2, then 1 + 1.
      const std::size_t size = round == 1 ? 2 * granularity : granularity;
      std::vector<Handle> handles;
      for (std::size_t at = 0; at < 2 * granularity; at += size) {
        handles.push_back(create(size, log2));
        place(base + at, size, handles.back());
      }
      std::size_t dirty = 0;
      for (std::size_t at = 0; at < 2 * granularity; at += 512) {
        dirty += word(base + at) != 0;
        word(base + at) = 0xdeadbeef;
      }
      CHECK_EQ(dirty, 0u);
      CHECK_EQ(vmm.unmap(base, 2 * granularity), kSuccess);
      for (const Handle handle : handles) CHECK_EQ(vmm.release(handle), kSuccess);
    }
    CHECK_EQ(vmm.address_free(base, 2 * granularity), kSuccess);
  });
  nothing_left.check();
}

TEST(neighbours_created_in_sequence_are_one_kernel_mapping) {
  const NothingLeft nothing_left;
  for_each_granularity([&](int log2, std::size_t granularity) {
    const std::size_t pages = log2 >= 20 ? 8 : 32;
    const Address base = reserve(pages * granularity, granularity);
    std::vector<Handle> handles;
    for (std::size_t page = 0; page < pages; ++page) handles.push_back(create(granularity, log2));
    for (std::size_t page = 0; page < pages; ++page) {
      place(base + page * granularity, granularity, handles[page]);
      const std::size_t expected = page + 1 == pages ? 1 : 2;  // what is mapped, and the rest
      CHECK_EQ(kernel_entries(base, pages * granularity), expected);
      CHECK_EQ(host_usage().kernel_mappings, nothing_left.before.kernel_mappings + expected);
    }
    // Memory given back and created anew takes the same places in the file, lowest first.
    CHECK_EQ(vmm.unmap(base, pages * granularity), kSuccess);
    for (std::size_t page = 0; page < pages; page += 2) CHECK_EQ(vmm.release(handles[page]), kSuccess);
    for (std::size_t page = 0; page < pages; page += 2) handles[page] = create(granularity, log2);
    for (std::size_t page = 0; page < pages; ++page)
      CHECK_EQ(vmm.map(base + page * granularity, granularity, 0, handles[page], 0), kSuccess);
    CHECK_EQ(set_access(base, pages * granularity, Access::kReadWrite), kSuccess);
    CHECK_EQ(kernel_entries(base, pages * granularity), 1u);
    CHECK_EQ(vmm.unmap(base, pages * granularity), kSuccess);
    for (const Handle handle : handles) CHECK_EQ(vmm.release(handle), kSuccess);
    CHECK_EQ(vmm.address_free(base, pages * granularity), kSuccess);
  });
  nothing_left.check();
}

// Mappings of one page need an entry each: what the table has no room for is refused as a whole.
TEST(access_for_several_mappings_is_given_to_all_or_none) {
  const std::size_t limit = most_mappings();
  if (VATTN_TSAN) SKIP("TSan's own mappings count too");
  if (limit > 70000) SKIP("vm.max_map_count is far away");
  const NothingLeft nothing_left;
  const Address base = reserve(limit * kPage);
  const Handle handle = create(kPage);
  for (std::size_t page = 0; page < limit; ++page)
    CHECK_EQ(vmm.map(base + page * kPage, kPage, 0, handle, 0), kSuccess);
  const std::size_t entries = host_usage().kernel_mappings;
  CHECK_EQ(set_access(base, limit * kPage, Access::kReadWrite), kOutOfMemory);
  CHECK_EQ(host_usage().kernel_mappings, entries);
  CHECK_EQ(kernel_entries(base, limit * kPage), 1u);
  CHECK(get_access(base) == std::optional(Access::kNone));
  CHECK_EQ(set_access(base, 8 * kPage, Access::kReadWrite), kSuccess);
  CHECK_EQ(kernel_entries(base, limit * kPage), 9u);
  CHECK_EQ(vmm.unmap(base, limit * kPage), kSuccess);
  CHECK_EQ(vmm.release(handle), kSuccess);
  CHECK_EQ(vmm.address_free(base, limit * kPage), kSuccess);
  nothing_left.check();
}

// Each granularity has a file of its own, and the kernel joins only what is of one file.
TEST(neighbours_of_different_granularities_are_counted_apart) {
  const NothingLeft nothing_left;
  const Address base = reserve(8 * kPage, 2 * kPage);
  const Handle small[]{create(kPage), create(kPage)};
  const Handle large[]{create(2 * kPage, 13), create(2 * kPage, 13)};
  // Offsets kPage and 2 * kPage of their files adjoin, were it one file.
  place(base + kPage, kPage, small[1]);
  place(base + 2 * kPage, 2 * kPage, large[1]);
  CHECK_EQ(kernel_entries(base, 8 * kPage), 4u);
  CHECK_EQ(host_usage().kernel_mappings, nothing_left.before.kernel_mappings + 4);
  CHECK_EQ(vmm.unmap(base + kPage, 3 * kPage), kSuccess);
  for (const Handle handle : {small[0], small[1], large[0], large[1]}) CHECK_EQ(vmm.release(handle), kSuccess);
  CHECK_EQ(vmm.address_free(base, 8 * kPage), kSuccess);
  nothing_left.check();
}

namespace {

// What the contract says, written down page by page.
class Model {
 public:
  Model(int granularity_log2, std::uint64_t seed)
      : log2_(granularity_log2), page_(bytes_of(granularity_log2)), random_(seed), cells_(kPages) {
    entries_before_ = host_usage().kernel_mappings;
    bytes_before_ = host_usage().physical_bytes;
    handles_before_ = host_usage().handles;
    base_ = reserve(kPages * page_, page_);
  }

  void step() {
    switch (random_.below(8)) {
      case 0:
        return random_create();
      case 1:
        return random_release();
      case 2:
      case 3:
      case 4:
        return random_map();
      case 5:
        return random_unmap();
      default:
        return random_access();
    }
  }

  void check() {
    std::size_t bytes = 0, handles = 0;
    for (const auto& [handle, memory] : memory_)
      if (memory.alive()) bytes += memory.content.size() * page_, handles += 1;
    const HostUsage usage = host_usage();
    CHECK_EQ(usage.physical_bytes, bytes_before_ + bytes);
    CHECK_EQ(usage.handles, handles_before_ + handles);
    CHECK_EQ(usage.kernel_mappings - entries_before_, kernel_entries(base_, kPages * page_));
    for (std::size_t page = 0; page < kPages; ++page) {
      const std::optional<Cell>& cell = cells_[page];
      const Address address = base_ + page * page_;
      CHECK(get_access(address + random_.below(page_)) == (cell ? std::optional(cell->access) : std::nullopt));
      if (cell && cell->access == Access::kNone) continue;
      CHECK_EQ(word(address), cell ? memory_.at(cell->handle).content[cell->index] : 0);
      if (!cell || cell->access != Access::kReadWrite) continue;
      memory_.at(cell->handle).content[cell->index] = ++written_;
      word(address) = written_;
    }
  }

  void finish() {
    for (std::size_t page = 0; page < kPages; ++page)
      if (cells_[page] && cells_[page]->index == 0)
        CHECK_EQ(vmm.unmap(base_ + page * page_, memory_.at(cells_[page]->handle).content.size() * page_), kSuccess);
    for (auto& [handle, memory] : memory_)
      for (; memory.references; --memory.references) CHECK_EQ(vmm.release(handle), kSuccess);
    CHECK_EQ(vmm.address_free(base_, kPages * page_), kSuccess);
  }

 private:
  static constexpr std::size_t kPages = 24;
  struct Memory {
    std::vector<std::uint64_t> content;  // the first word of each page
    std::size_t references = 1;
    std::size_t mappings = 0;
    bool alive() const { return references + mappings > 0; }
  };
  struct Cell {
    Handle handle;
    std::size_t index;  // which page of the handle
    Access access;
  };

  Handle any_handle() {
    if (memory_.empty() || random_.one_in(20)) return random_.below(1000000) + 1000000;  // never handed out
    auto it = memory_.end();
    for (std::size_t back = 1 + random_.below(std::min<std::size_t>(memory_.size(), 12)); back--;) --it;
    return it->first;
  }
  // Mostly some whole mappings, sometimes anything.
  std::pair<std::size_t, std::size_t> any_range() {
    std::size_t page = random_.below(kPages + 1), count = random_.below(6);
    if (random_.one_in(4)) return {page, count};
    while (page < kPages && (!cells_[page] || cells_[page]->index)) ++page;
    std::size_t end = page;
    for (std::size_t mappings = 1 + random_.below(4); mappings-- && end < kPages && cells_[end];)
      end += memory_.at(cells_[end]->handle).content.size();
    return {page, end - page};
  }
  bool whole(std::size_t page, std::size_t count) const {
    if (count == 0 || page + count > kPages) return false;
    for (std::size_t i = page; i < page + count; ++i)
      if (!cells_[i]) return false;
    const Cell& last = *cells_[page + count - 1];
    return cells_[page]->index == 0 && last.index + 1 == memory_.at(last.handle).content.size();
  }

  void random_create() {
    const AllocationProp prop = host_prop(log2_);
    const std::size_t pages = 1 + random_.below(3);
    const bool wrong = random_.one_in(10);
    Handle handle = 0;
    CHECK_EQ(vmm.create(&handle, pages * page_ - (wrong ? page_ / 2 : 0), &prop, 0), wrong ? kInvalidValue : kSuccess);
    if (wrong) return;
    CHECK(!memory_.contains(handle));
    memory_.emplace(handle, Memory{std::vector<std::uint64_t>(pages)});
  }
  void random_release() {
    const Handle handle = any_handle();
    const auto it = memory_.find(handle);
    const bool valid = it != memory_.end() && it->second.references;
    CHECK_EQ(vmm.release(handle), valid ? kSuccess : kInvalidValue);
    if (valid) it->second.references -= 1;
  }
  void random_map() {
    const Handle handle = any_handle();
    const auto it = memory_.find(handle);
    const std::size_t pages = it != memory_.end() ? it->second.content.size() : 1;
    const std::size_t page = random_.below(kPages + 1);
    const std::size_t skew = random_.one_in(20) ? page_ / 2 : 0;
    Result expected = kSuccess;
    if (it == memory_.end() || !it->second.references || skew || page + pages > kPages)
      expected = kInvalidValue;
    else if (std::any_of(&cells_[page], &cells_[page] + pages, [](const auto& cell) { return cell.has_value(); }))
      expected = kAlreadyMapped;
    CHECK_EQ(vmm.map(base_ + page * page_ + skew, pages * page_, 0, handle, 0), expected);
    if (expected != kSuccess) return;
    for (std::size_t i = 0; i < pages; ++i) cells_[page + i] = Cell{handle, i, Access::kNone};
    it->second.mappings += 1;
  }
  void random_unmap() {
    const auto [page, count] = any_range();
    const bool valid = whole(page, count);
    CHECK_EQ(vmm.unmap(base_ + page * page_, count * page_), valid ? kSuccess : kInvalidValue);
    for (std::size_t i = page; valid && i < page + count; ++i) {
      if (cells_[i]->index == 0) memory_.at(cells_[i]->handle).mappings -= 1;
      cells_[i].reset();
    }
  }
  void random_access() {
    const auto [page, count] = any_range();
    const bool valid = whole(page, count);
    static constexpr Access kRights[]{Access::kNone, Access::kRead, Access::kReadWrite, Access::kReadWrite};
    const Access access = kRights[random_.below(4)];
    CHECK_EQ(set_access(base_ + page * page_, count * page_, access), valid ? kSuccess : kInvalidValue);
    for (std::size_t i = page; valid && i < page + count; ++i) cells_[i]->access = access;
  }

  const int log2_;
  const std::size_t page_;
  Random random_;
  Address base_ = 0;
  std::size_t entries_before_, bytes_before_, handles_before_;
  std::uint64_t written_ = 0;
  std::map<Handle, Memory> memory_;
  std::vector<std::optional<Cell>> cells_;
};

}  // namespace

TEST(random_calls_agree_with_the_model_and_with_the_kernel) {
  const NothingLeft nothing_left;
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    Model model(12 + 2 * static_cast<int>(seed % 3), seed);
    for (int step = 0; step < 400; ++step) {
      check::context = "seed " + std::to_string(seed) + ", step " + std::to_string(step);
      model.step();
      model.check();
    }
    model.finish();
  }
  nothing_left.check();
}

TEST(the_kernels_limit_of_mappings_is_an_error_before_it_is_reached) {
  const std::size_t limit = most_mappings();
  if (VATTN_TSAN) SKIP("TSan's own mappings count too");
  if (limit > 70000) SKIP("vm.max_map_count is far away");
  const NothingLeft nothing_left;
  const Address base = reserve(limit * kPage);
  const Handle handle = create(kPage);
  std::size_t mapped = 0;
  Result result = kSuccess;
  // With gaps between, so that each costs two entries.
  for (; mapped < limit / 2; ++mapped) {
    const Address at = base + 2 * mapped * kPage;
    CHECK_EQ(vmm.map(at, kPage, 0, handle, 0), kSuccess);
    if ((result = set_access(at, kPage, Access::kReadWrite)) == kSuccess) continue;
    CHECK_EQ(vmm.unmap(at, kPage), kSuccess);
    break;
  }
  CHECK_EQ(result, kOutOfMemory);
  const std::size_t entries = kernel_entries();
  CHECK(entries < limit - 256);
  CHECK(entries > limit - 1024);
  // Without a file descriptor nobody can count what there is room for.
  struct rlimit before{};
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  struct rlimit none = before;
  none.rlim_cur = 0;
  CHECK_EQ(vmm.map(base + 2 * mapped * kPage, kPage, 0, handle, 0), kSuccess);
  setrlimit(RLIMIT_NOFILE, &none);
  result = set_access(base + 2 * mapped * kPage, kPage, Access::kReadWrite);
  setrlimit(RLIMIT_NOFILE, &before);
  CHECK_EQ(result, kErrno + EMFILE);
  CHECK_EQ(vmm.unmap(base + 2 * mapped * kPage, kPage), kSuccess);
  // Half of the mappings gone, there is room again.
  for (std::size_t i = 0; i < mapped; i += 2) CHECK_EQ(vmm.unmap(base + 2 * i * kPage, kPage), kSuccess);
  place(base, kPage, handle);
  CHECK_EQ(vmm.unmap(base, kPage), kSuccess);
  for (std::size_t i = 1; i < mapped; i += 2) CHECK_EQ(vmm.unmap(base + 2 * i * kPage, kPage), kSuccess);
  CHECK_EQ(vmm.release(handle), kSuccess);
  CHECK_EQ(vmm.address_free(base, limit * kPage), kSuccess);
  nothing_left.check();
}

// Whoever may open the file can otherwise cut it off under the mappings.
TEST(the_file_cannot_be_cut_off) {
  const NothingLeft nothing_left;
  const Address address = reserve(kPage);
  const Handle handle = create(kPage);
  place(address, kPage, handle);
  word(address) = 5;
  int found = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code none;
    if (std::filesystem::read_symlink(entry, none).string().find("memfd:vattn") == std::string::npos) continue;
    const int fd = open(entry.path().c_str(), O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0);
    CHECK_EQ(fcntl(fd, F_GET_SEALS) & (F_SEAL_SHRINK | F_SEAL_SEAL), F_SEAL_SHRINK | F_SEAL_SEAL);
    CHECK_EQ(ftruncate(fd, 0), -1);
    CHECK_EQ(errno, EPERM);
    CHECK_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);  // nor can others seal it, against its owner
    CHECK_EQ(ftruncate(fd, off_t{1} << 33), 0);          // longer, which harms nobody
    close(fd);
    ++found;
  }
  CHECK(found > 0);
  std::vector<Handle> more;
  for (int i = 0; i < 100; ++i) more.push_back(create(kPage));
  for (const Handle one : more) CHECK_EQ(vmm.release(one), kSuccess);
  CHECK_EQ(word(address), 5u);
  CHECK_EQ(vmm.unmap(address, kPage), kSuccess);
  CHECK_EQ(vmm.release(handle), kSuccess);
  CHECK_EQ(vmm.address_free(address, kPage), kSuccess);
  nothing_left.check();
}

// "dd" in the kernel's flags of a mapping: not in core dumps.
std::size_t dumped_entries(Address address, std::size_t size) {
  std::ifstream maps("/proc/self/smaps");
  std::size_t dumped = 0;
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long long begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &begin, &end) == 2) inside = begin < address + size && end > address;
    if (inside && line.rfind("VmFlags:", 0) == 0) dumped += line.find(" dd") == std::string::npos;
  }
  return dumped;
}

TEST(no_core_dump_has_the_memory) {
  const Address address = reserve(8 * kPage);
  const auto is_kept = [&] {
    return kernel_entries(address, 8 * kPage) > 0 && dumped_entries(address, 8 * kPage) == 0;
  };
  CHECK(is_kept());
  const Handle handle = create(kPage);
  place(address + kPage, kPage, handle);
  place(address + 3 * kPage, kPage, handle);
  CHECK(is_kept());
  CHECK_EQ(vmm.unmap(address + kPage, kPage), kSuccess);
  CHECK(is_kept());
  place(address + kPage, kPage, handle);
  CHECK(is_kept());
  for (const Address at : {address + kPage, address + 3 * kPage}) CHECK_EQ(vmm.unmap(at, kPage), kSuccess);
  CHECK_EQ(vmm.release(handle), kSuccess);
  CHECK_EQ(vmm.address_free(address, 8 * kPage), kSuccess);
}

TEST(every_call_from_any_thread) {
  const NothingLeft nothing_left;
  std::atomic<int> wrong{0};
  const auto work = [&](std::uint64_t seed) {
    constexpr std::size_t kSlots = 8;
    const AllocationProp prop = host_prop(12 + static_cast<int>(seed % 2));
    const std::size_t size = bytes_of(prop.location.id);
    const auto require = [&](bool held) { wrong += !held; };
    Random random(seed);
    Address base = 0;
    require(vmm.address_reserve(&base, kSlots * size, size, 0, 0) == kSuccess);
    std::vector<Handle> handles(kSlots, 0);
    for (int step = 0; step < 400; ++step) {
      const std::size_t slot = random.below(kSlots);
      const Address at = base + slot * size;
      if (handles[slot]) {
        require(word(at) == seed * kSlots + slot);
        require(vmm.unmap(at, size) == kSuccess && vmm.release(handles[slot]) == kSuccess);
        handles[slot] = 0;
      } else {
        require(vmm.create(&handles[slot], size, &prop, 0) == kSuccess);
        require(vmm.map(at, size, 0, handles[slot], 0) == kSuccess);
        require(set_access(at, size, Access::kReadWrite) == kSuccess);
        require(get_access(at) == Access::kReadWrite);
        require(word(at) == 0);
        word(at) = seed * kSlots + slot;
      }
      require(host_usage().reservations > 0);
    }
    for (std::size_t slot = 0; slot < kSlots; ++slot)
      if (handles[slot])
        require(vmm.unmap(base + slot * size, size) == kSuccess && vmm.release(handles[slot]) == kSuccess);
    require(vmm.address_free(base, kSlots * size) == kSuccess);
  };
  std::vector<std::thread> threads;
  for (std::uint64_t seed = 1; seed <= 4; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(wrong, 0);
  nothing_left.check();
}

// What another process has given out is mapped read-only, counts nowhere, and is not given back.
TEST(foreign_memory_is_only_mapped) {
  const NothingLeft nothing;
  const int number = open_host_file(12);
  AllocationProp prop = host_prop(12 | number << kFileShift);
  Handle mine = 0;
  CHECK_EQ(vmm.create(&mine, kPage, &prop, 0), kSuccess);
  const std::size_t bytes = host_usage().physical_bytes;
  const int descriptor = host_file_descriptor(12, number);
  const int readable = open(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), O_RDONLY | O_CLOEXEC);
  CHECK_EQ(pwrite(descriptor, "x", 1, offset_in_file(mine)), 1);
  const int foreign = open_foreign_file(12, readable);
  close(readable);
  const std::size_t handles = host_usage().handles;
  const Handle theirs = foreign_memory(12, foreign, {offset_in_file(mine)}).first;
  const HandleRange again = foreign_memory(12, foreign, {offset_in_file(mine), 1 << 20, offset_in_file(mine)});
  CHECK_EQ(again.count, std::size_t{1});
  CHECK_EQ(vmm.release(again.first), kSuccess);
  CHECK_EQ(vmm.release(again.first), kInvalidValue);
  for (const off_t wrong : {off_t{1}, off_t{-4096}, off_t{1} << 20})
    CHECK_EQ(foreign_memory(12, foreign, {wrong}).count, std::size_t{0});
  CHECK_EQ(host_usage().handles, handles + 1);
  CHECK_THROWS(std::system_error, open_foreign_file(12, -1));
  CHECK_EQ(host_usage().physical_bytes, bytes);
  AllocationProp of_foreign = host_prop(12 | foreign << kFileShift);
  Handle none = 0;
  CHECK_EQ(vmm.create(&none, kPage, &of_foreign, 0), kInvalidValue);

  Address at = 0;
  CHECK_EQ(vmm.address_reserve(&at, kPage, 0, 0, 0), kSuccess);
  CHECK_EQ(vmm.map(at, kPage, 0, theirs, 0), kSuccess);
  const AccessDesc writable{{kLocationHost, 12}, static_cast<unsigned>(Access::kReadWrite)};
  const AccessDesc read_only{{kLocationHost, 12}, static_cast<unsigned>(Access::kRead)};
  CHECK(vmm.set_access(at, kPage, &writable, 1) != kSuccess);
  CHECK_EQ(vmm.set_access(at, kPage, &read_only, 1), kSuccess);
  CHECK_EQ(*reinterpret_cast<const char*>(at), 'x');
  CHECK_EQ(vmm.unmap(at, kPage), kSuccess);
  CHECK_EQ(vmm.release(theirs), kSuccess);
  CHECK_EQ(vmm.address_free(at, kPage), kSuccess);
  close_host_file(12, foreign);

  leave_in_file(mine);
  CHECK_EQ(vmm.release(mine), kSuccess);
  close_host_file(12, number);
  char kept = 0;
  CHECK_EQ(pread(descriptor, &kept, 1, 0), 1);
  CHECK_EQ(kept, 'x');
  close(descriptor);
}

// Each page of a run lives by itself: with the last one, the run goes, and its handles name nothing any more.
TEST(foreign_pages_that_are_entered_together_go_one_by_one) {
  const NothingLeft nothing;
  const int number = open_host_file(12);
  AllocationProp prop = host_prop(12 | number << kFileShift);
  std::vector<Handle> mine(3);
  std::vector<off_t> offsets;
  for (Handle& handle : mine) {
    CHECK_EQ(vmm.create(&handle, kPage, &prop, 0), kSuccess);
    offsets.insert(offsets.begin(), offset_in_file(handle));
  }
  const int descriptor = host_file_descriptor(12, number);
  const int foreign = open_foreign_file(12, descriptor);
  const std::size_t handles = host_usage().handles;
  const HandleRange run = foreign_memory(12, foreign, offsets);
  const HandleRange other = foreign_memory(12, foreign, offsets);
  CHECK_EQ(run.count, 3u);
  CHECK_EQ(host_usage().handles, handles + 6);
  for (std::size_t i = 0; i < run.count; ++i) {
    CHECK_EQ(offset_in_file(run.first + i), offsets[i]);
    CHECK_EQ(offset_in_file(other.first + i), offsets[i]);
  }
  Handle beyond = run.first + run.count;
  CHECK_EQ(vmm.release(beyond), kInvalidValue);
  CHECK_THROWS(std::out_of_range, offset_in_file(beyond));

  Address at = 0;
  CHECK_EQ(vmm.address_reserve(&at, 3 * kPage, 0, 0, 0), kSuccess);
  CHECK_EQ(vmm.map(at, kPage, 0, beyond, 0), kInvalidValue);
  CHECK_EQ(vmm.map(at, kPage, 0, run.first + 1, 0), kSuccess);
  CHECK_EQ(vmm.release(run.first + 1), kSuccess);
  CHECK_EQ(vmm.map(at + kPage, kPage, 0, run.first + 1, 0), kInvalidValue);  // no reference is left
  Handle held = 0;
  CHECK_EQ(vmm.retain_handle(&held, reinterpret_cast<void*>(at)), kSuccess);
  CHECK_EQ(held, run.first + 1);
  for (const std::size_t i : {0, 2}) {
    leave_in_file(run.first + i);  // as it is left anyway
    CHECK_EQ(vmm.release(run.first + i), kSuccess);
    CHECK_EQ(vmm.release(run.first + i), kInvalidValue);
    CHECK_THROWS(std::out_of_range, leave_in_file(run.first + i));
  }
  CHECK_EQ(host_usage().handles, handles + 4);
  close_host_file(12, foreign);  // which stays as long as there are pages of it
  CHECK_EQ(vmm.unmap(at, kPage), kSuccess);
  CHECK_EQ(vmm.release(held), kSuccess);
  CHECK_EQ(vmm.release(held), kInvalidValue);
  CHECK_EQ(host_usage().handles, handles + 3);
  CHECK_EQ(vmm.map(at, kPage, 0, other.first, 0), kSuccess);
  CHECK_EQ(vmm.unmap(at, kPage), kSuccess);
  for (std::size_t i = 0; i < other.count; ++i) CHECK_EQ(vmm.release(other.first + i), kSuccess);
  CHECK_THROWS(std::out_of_range, foreign_memory(12, foreign, offsets));
  CHECK_EQ(vmm.address_free(at, 3 * kPage), kSuccess);
  for (const Handle handle : mine) CHECK_EQ(vmm.release(handle), kSuccess);
  close_host_file(12, number);
  close(descriptor);
}
