// The host provider: CUDA's virtual memory calls over Linux memory (memfd_create, mmap), with CUDA's contract.
//
// Physical memory is a range of a memfd, or, if it can be exported, a memfd of its own; a reservation is an anonymous
// mapping that cannot be written, so that a stray read past the mapped pages sees zeros and a stray write faults. A
// location of type kLocationHost names its granularity by its id, the power of two: 12 (4 KiB) to 21 (2 MiB).
#pragma once

#include <sys/types.h>

#include <vector>

#include "vmm.h"

namespace vattn {

constexpr int kMinGranularityLog2 = 12;
constexpr int kMaxGranularityLog2 = 21;

// A flag of address_reserve: what is not mapped cannot be read either, instead of reading as zeros.
constexpr Flags kReserveStrict = 1;

// A flag of map: puts back what was mapped a moment ago. It may use the mappings that others must leave free, so that
// undoing works where the table was found full.
constexpr Flags kMapRestore = 1;

// Results from here on are Linux's errno: the machine has the memory, but something else stopped the call.
constexpr Result kErrno = 10000;

const Vmm& host_vmm();

// Memory that another process counts is in a file of its own. A location names it beside the granularity, in the bits
// from kFileShift on; 0 is the process's own.
constexpr int kFileShift = 8;
// Opens a file for pages of a granularity; its number. Throws std::system_error.
int open_host_file(int granularity_log2);
// A descriptor of that file, which is the caller's to close. Throws std::system_error.
int host_file_descriptor(int granularity_log2, int number);
// Closes the file as soon as no memory of it is left.
void close_host_file(int granularity_log2, int number);

// A file of another process, which may be readable only; its number. The descriptor stays the caller's. Throws
// std::system_error: it is no memfd, or it can be made shorter under its mappings.
int open_foreign_file(int granularity_log2, int descriptor);
// Handles that are neighbours: the first one, and those that follow it.
struct HandleRange {
  Handle first = 0;
  std::size_t count = 0;
};
// Pages of such a file, each referenced once, from the first one on as far as the file has them; they are mapped, never
// created or given back. Throws std::out_of_range: there is no such file.
HandleRange foreign_memory(int granularity_log2, int number, std::vector<off_t> offsets);
// Where memory begins in its file. Throws std::out_of_range: it is no memory of a file, or is gone.
off_t offset_in_file(Handle handle);
// When this memory has no reference and no mapping left, its file keeps what is in it.
void leave_in_file(Handle handle);

// Mappings that Linux allows a process (vm.max_map_count).
std::size_t max_mappings();

struct HostUsage {
  std::size_t kernel_mappings;  // entries that this provider's reservations have in the kernel's table of mappings
  std::size_t physical_bytes;   // memory that handles or mappings keep alive
  std::size_t handles;          // handles and mapped memory not yet gone
  std::size_t reservations;
};
HostUsage host_usage();

}  // namespace vattn
