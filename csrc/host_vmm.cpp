#include "host_vmm.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "available_memory.h"
#include "fork_guard.h"

namespace vattn {
namespace {

// Makes an empty memfd with these seals.
//
// Whoever may open /proc/PID/fd could otherwise cut the file off under its mappings, which is a SIGBUS in a kernel.
// Memory is given back by punching holes, so nothing here ever shrinks a file.
Result make_file(off_t size, int seals, int* file) {
  constexpr unsigned kNoExecSeal = 8;  // MFD_NOEXEC_SEAL, which Linux < 6.3 refuses
  int fd = memfd_create("vattn", MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal);
  if (fd < 0 && errno == EINVAL) fd = memfd_create("vattn", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return kErrno + errno;
  if ((size && ftruncate(fd, size) != 0) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL | seals) != 0) {
    const Result failed = kErrno + errno;
    close(fd);
    return failed;
  }
  *file = fd;
  return kSuccess;
}

// Hands out ranges of one memfd, lowest first, so that memory created in sequence has neighbouring offsets:
// neighbouring mappings of neighbouring offsets cost one entry in the kernel's table instead of one each.
class PhysicalFile {
 public:
  Result allocate(std::size_t size, off_t* offset) {
    if (const Result r = open(); r != kSuccess) return r;
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      if (hole->second < size) continue;
      *offset = hole->first;
      used_ += size;
      const std::size_t rest = hole->second - size;
      holes_.erase(hole);
      if (rest) holes_.emplace(*offset + static_cast<off_t>(size), rest);
      return kSuccess;
    }
    if (size > static_cast<std::size_t>(std::numeric_limits<off_t>::max() - end_)) return kOutOfMemory;
    // Somebody else who has the file open may have made it longer, never shorter.
    struct stat now{};
    const off_t needed = end_ + static_cast<off_t>(size);
    if (fstat(fd_, &now) != 0 || (now.st_size < needed && ftruncate(fd_, needed) != 0)) return kErrno + errno;
    *offset = end_;
    end_ += static_cast<off_t>(size);
    used_ += size;
    return kSuccess;
  }

  void deallocate(off_t offset, std::size_t size, bool keep) {
    used_ -= size;
    if (keep) return;
    fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(size));
    auto next = holes_.lower_bound(offset);
    if (next != holes_.end() && next->first == offset + static_cast<off_t>(size)) {
      size += next->second;
      next = holes_.erase(next);
    }
    if (next != holes_.begin()) {
      auto before = std::prev(next);
      if (before->first + static_cast<off_t>(before->second) == offset) {
        before->second += size;
        return;
      }
    }
    holes_.emplace(offset, size);
  }

  int fd() const { return fd_; }
  std::size_t used() const { return used_; }

  Result open() { return fd_ >= 0 ? kSuccess : make_file(0, 0, &fd_); }
  Result open(int descriptor) {
    fd_ = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    return fd_ >= 0 ? kSuccess : kErrno + errno;
  }
  void use(std::size_t size) { used_ += size; }
  void close_file() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

  bool unwanted = false;  // nobody asks for memory of it any more
  bool foreign = false;   // another process gives out its memory

 private:
  int fd_ = -1;
  off_t end_ = 0;
  std::size_t used_ = 0;
  std::map<off_t, std::size_t> holes_;
};

// Memory lives while any is left.
struct Counts {
  std::uint32_t references = 0;
  std::uint32_t mappings = 0;
};

struct Physical {
  int granularity_log2;
  int location;  // of its file among the files, if it is in one
  int own;       // the descriptor of a file of its own; -1: a range of one of the files
  off_t offset;
  std::size_t size;
  Counts counts;
  bool kept = false;  // its file keeps what is in it
};

// Pages of a foreign file, whose handles are neighbours. A prompt has thousands, which come at once: what they have in
// common is entered once for all, and of each page only where it is, and its counts.
struct ForeignRun {
  int granularity_log2;
  int location;
  std::vector<off_t> offsets;
  std::vector<Counts> counts;
  std::size_t left;  // pages that live
};

// Physical memory by handle. A handle names a place and how often that was used, or a run and a page of it, so that a
// stale one is refused and not mistaken for another.
class PhysicalTable {
 public:
  // What a handle stands for.
  struct Found {
    int granularity_log2;
    int location;
    int own;
    off_t offset;
    std::size_t size;
    bool kept;
    Counts* counts;  // which moves with the next `add`
  };

  Handle add(const Physical& memory) {
    std::size_t number = places_.size();
    if (empty_.empty()) {
      places_.push_back({memory, 1, true});
      empty_.reserve(places_.capacity());  // so that `erase` cannot fail
    } else {
      number = empty_.back();
      empty_.pop_back();
      places_[number] = {memory, (places_[number].uses + 1) & kMostUses, true};
    }
    return Handle{places_[number].uses} << 32 | number;
  }
  // The handle of the first page; those of the others follow it.
  Handle add(ForeignRun&& run) {
    do last_run_ = (last_run_ + 1) & kMostUses;
    while (runs_.contains(last_run_));
    foreign_pages_ += run.left;
    runs_.emplace(last_run_, std::move(run));
    return kForeign | Handle{last_run_} << 32;
  }
  // Nothing for a handle that was erased or never given.
  std::optional<Found> find(Handle handle) {
    const std::size_t number = number_of(handle);
    if (handle & kForeign) {
      const auto found = runs_.find(run_of(handle));
      if (found == runs_.end() || number >= found->second.offsets.size()) return {};
      ForeignRun& run = found->second;
      Counts& counts = run.counts[number];
      if (counts.references + counts.mappings == 0) return {};
      const std::size_t size = std::size_t{1} << run.granularity_log2;
      return Found{run.granularity_log2, run.location, -1, run.offsets[number], size, true, &counts};
    }
    if (number >= places_.size() || !places_[number].full || places_[number].uses != handle >> 32) return {};
    Physical& memory = places_[number].memory;
    return Found{memory.granularity_log2, memory.location, memory.own, memory.offset, memory.size, memory.kept,
                 &memory.counts};
  }
  Found at(Handle handle) {
    const std::optional<Found> found = find(handle);
    if (!found) throw std::out_of_range("no such memory");
    return *found;
  }
  void keep(Handle handle) {
    if (!find(handle)) throw std::out_of_range("no such memory");
    if (!(handle & kForeign)) places_[number_of(handle)].memory.kept = true;
  }
  // Pre: nothing of its counts is left.
  void erase(Handle handle) {
    if (!(handle & kForeign)) {
      places_[number_of(handle)].full = false;
      empty_.push_back(number_of(handle));
      return;
    }
    foreign_pages_ -= 1;
    const auto run = runs_.find(run_of(handle));
    if (--run->second.left == 0) runs_.erase(run);
  }
  std::size_t size() const { return places_.size() - empty_.size() + foreign_pages_; }
  // The files that only one memory has.
  void close_own() {
    for (Place& place : places_)
      if (place.full && place.memory.own >= 0) close(std::exchange(place.memory.own, -1));
  }

 private:
  static constexpr Handle kForeign = Handle{1} << 63;
  static constexpr std::uint32_t kMostUses = 0x7FFFFFFF;
  struct Place {
    Physical memory;
    std::uint32_t uses;
    bool full;
  };
  static std::size_t number_of(Handle handle) { return handle & 0xFFFFFFFF; }
  static std::uint32_t run_of(Handle handle) { return static_cast<std::uint32_t>((handle & ~kForeign) >> 32); }

  std::vector<Place> places_;
  std::vector<std::size_t> empty_;
  std::unordered_map<std::uint32_t, ForeignRun> runs_;
  std::uint32_t last_run_ = 0;
  std::size_t foreign_pages_ = 0;
};

// Until it gets its first access, a mapping is in the books only: neighbours whose memory is side by side in a file
// then become one entry of the kernel's table with one call.
struct Mapping {
  std::size_t size;
  Handle handle;
  int fd;
  off_t offset;
  Access access = Access::kNone;
  bool restored = false;  // it takes the place of one that was there before
  bool entered = false;
};

struct Reservation {
  std::size_t size;
  bool strict;
  std::map<Address, Mapping> mappings;
};

struct State {
  std::mutex mutex;
  std::map<int, PhysicalFile> files;  // by the location's id: the granularity, and the file's number
  int next_file = 1;
  PhysicalTable physical;
  std::map<Address, Reservation> reservations;
  std::size_t kernel_mappings = 0;
  std::size_t max_mappings = 0;    // that the kernel allows the process, as last asked
  std::size_t other_mappings = 0;  // of the rest of the process, as last counted
  std::size_t physical_bytes = 0;
  std::size_t memory_allowance = 0;  // bytes to create before the machine's memory is looked at again
  ForkGuard fork;
};

std::atomic<State*> current_state{new State};

// The parent's mappings are not there in a forked child.
State& state() { return of_this_process(current_state); }

// A child that keeps a file open, or a mapping of it, keeps all of the memory after its owner has gone, and can read
// it. So each child closes the files before it does anything else, also one that never comes here; and the lock is held
// during a fork, so that none falls between the making of a file or a mapping and what keeps it out of children.
thread_local State* forking = nullptr;  // locked by the fork that the calling thread makes

[[maybe_unused]] const int cleared_in_child = pthread_atfork(
    [] {
      forking = current_state.load(std::memory_order_acquire);
      forking->mutex.lock();
    },
    [] { forking->mutex.unlock(); },
    [] {
      for (auto& [location, file] : forking->files) file.close_file();
      forking->physical.close_own();
      forking->mutex.unlock();
    });

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

// Keeps new mappings out of children and of core dumps. It cannot fail: they are whole, so nothing has to be split.
void keep_to_this_process(void* address, std::size_t size) {
  madvise(address, size, MADV_DONTFORK);
  madvise(address, size, MADV_DONTDUMP);
}

// The advice belongs to the mapping that this replaces, so each new one asks for it again.
bool map_fixed(Address address, std::size_t size, int protection, int flags, int fd, off_t offset) {
  return mmap(pointer(address), size, protection, MAP_FIXED | flags, fd, offset) != MAP_FAILED;
}

constexpr int kReservationFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

int reservation_protection(bool strict) { return strict ? PROT_NONE : PROT_READ; }

// Makes a range reserved again, whatever was there.
bool reserve_again(Address address, std::size_t size, bool strict) {
  if (!map_fixed(address, size, reservation_protection(strict), kReservationFlags, -1, 0)) return false;
  keep_to_this_process(pointer(address), size);
  return true;
}

// Brings the file's range into memory, zeroed. Writing takes two thirds of the time of populating a mapping, and leaves
// the table of mappings, and the lock that every fault in the process takes, alone.
Result populate(int fd, off_t offset, std::size_t size) {
  static const std::array<char, 1 << 16> zeros{};
  while (size > 0) {
    const ssize_t written = pwrite(fd, zeros.data(), std::min(size, zeros.size()), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return written == 0 || errno == ENOMEM || errno == ENOSPC ? kOutOfMemory : kErrno + errno;
    offset += written;
    size -= static_cast<std::size_t>(written);
  }
  return kSuccess;
}

// What is mapped without access can be read as what is not mapped can: kernels read past what they use while the worker
// is between its calls.
int protection_of(Access access, bool strict) {
  if (access == Access::kReadWrite) return PROT_READ | PROT_WRITE;
  return access == Access::kRead ? PROT_READ : reservation_protection(strict);
}

Result from_errno() { return errno == ENOMEM ? kOutOfMemory : kErrno + errno; }

std::map<Address, Reservation>::iterator find_reservation(State& s, Address address) {
  auto it = s.reservations.upper_bound(address);
  if (it == s.reservations.begin()) return s.reservations.end();
  --it;
  return address < it->first + it->second.size ? it : s.reservations.end();
}

const Mapping* find_mapping(const Reservation& reservation, Address address) {
  auto it = reservation.mappings.upper_bound(address);
  if (it == reservation.mappings.begin()) return nullptr;
  --it;
  return address < it->first + it->second.size ? &it->second : nullptr;
}

// The mappings of [address, address + size), if they cover it exactly.
bool whole_mappings(Reservation& reservation, Address address, std::size_t size,
                    std::map<Address, Mapping>::iterator* first, std::map<Address, Mapping>::iterator* last) {
  *first = reservation.mappings.find(address);
  Address reached = address;
  for (*last = *first; *last != reservation.mappings.end() && reached < address + size; ++*last) {
    if ((*last)->first != reached) return false;
    reached += (*last)->second.size;
  }
  return size > 0 && reached == address + size;
}

bool adjoining(const Mapping& left, const Mapping& right) {
  return left.fd == right.fd && left.offset + static_cast<off_t>(left.size) == right.offset;
}

// The kernel joins neighbours that are alike: both not entered, or the same file at adjoining offsets with the same
// rights.
bool joined(const Reservation& reservation, Address boundary) {
  const auto entered = [&](Address address) {
    const Mapping* mapping = find_mapping(reservation, address);
    return mapping && mapping->entered ? mapping : nullptr;
  };
  const Mapping *left = entered(boundary - 1), *right = entered(boundary);
  if (!left || !right) return left == right;
  return adjoining(*left, *right) &&
         protection_of(left->access, reservation.strict) == protection_of(right->access, reservation.strict);
}

// Boundaries inside the reservation, from begin to end inclusive, at which the kernel needs a new entry.
std::size_t seams(Address base, const Reservation& reservation, Address begin, Address end) {
  std::size_t count = 0;
  Address previous = 0;
  auto visit = [&](Address at) {
    if (at == previous || at <= base || at >= base + reservation.size) return;
    previous = at;
    count += !joined(reservation, at);
  };
  visit(begin);
  for (auto it = reservation.mappings.lower_bound(begin); it != reservation.mappings.end() && it->first < end; ++it) {
    visit(it->first);
    visit(it->first + it->second.size);
  }
  visit(end);
  return count;
}

// A table of mappings that is full to the last entry fails malloc and thread creation elsewhere, so some are left.
constexpr std::size_t kReservedMappings = 512;

// Whether the kernel's table has room for `more` and a reserve. Near the limit the rest of the process is counted anew.
Result room_for_mappings(State& s, std::size_t more) try {
  const auto fits = [&] { return s.kernel_mappings + s.other_mappings + more + kReservedMappings <= s.max_mappings; };
  if (s.other_mappings == 0 || !fits()) {
    const std::size_t most = max_mappings();
    const std::string maps = contents("/proc/self/maps");
    const auto lines = static_cast<std::size_t>(std::count(maps.begin(), maps.end(), '\n'));
    s.max_mappings = most;
    s.other_mappings = lines > s.kernel_mappings ? lines - s.kernel_mappings : 1;
  }
  return fits() ? kSuccess : kOutOfMemory;
} catch (const std::system_error& error) {
  return kErrno + error.code().value();
}

// Where memory is exhausted Linux ends a process instead of refusing, so that `create` has to refuse before. Looking
// costs as much as creating a page, hence not every time. What is left to the rest is 256 MiB, less in a small group.
Result room_for_memory(State& s, std::size_t size) try {
  constexpr std::size_t kReserve = std::size_t{256} << 20;
  if (size > s.memory_allowance) {
    const AvailableMemory memory = available_memory();
    const std::size_t reserve = std::min(kReserve, memory.total / 8);
    if (memory.bytes < reserve || size > memory.bytes - reserve) return kOutOfMemory;
    s.memory_allowance = std::max(size, reserve / 4);
  }
  s.memory_allowance -= size;
  return kSuccess;
} catch (const std::system_error& error) {
  return kErrno + error.code().value();
}

void forget_file(State& s, std::map<int, PhysicalFile>::iterator file) {
  if (!file->second.unwanted || file->second.used()) return;
  file->second.close_file();
  s.files.erase(file);
}

// Takes away memory of which nothing is left.
void forget(State& s, Handle handle, const PhysicalTable::Found& memory) {
  if (memory.counts->references + memory.counts->mappings > 0) return;
  bool foreign = false;
  if (memory.own >= 0) {
    close(memory.own);
  } else {
    const auto file = s.files.find(memory.location);
    foreign = file->second.foreign;
    file->second.deallocate(memory.offset, memory.size, memory.kept);
    forget_file(s, file);
  }
  if (!foreign) s.physical_bytes -= memory.size;
  s.physical.erase(handle);
}

Result address_reserve(Address* address, std::size_t size, std::size_t alignment, Address hint, Flags flags) {
  const std::size_t page = std::size_t{1} << kMinGranularityLog2;
  if (!address || size == 0 || size % page || (alignment & (alignment - 1)) || hint || (flags & ~kReserveStrict))
    return kInvalidValue;
  if (alignment < page) alignment = page;
  State& s = state();
  const bool strict = flags & kReserveStrict;
  const std::lock_guard lock(s.mutex);
  const std::size_t padded = size + alignment - page;
  if (padded < size) return kOutOfMemory;
  void* raw = mmap(nullptr, padded, reservation_protection(strict), kReservationFlags, -1, 0);
  if (raw == MAP_FAILED) return from_errno();
  const Address start = reinterpret_cast<Address>(raw);
  const Address aligned = (start + alignment - 1) & ~(Address{alignment} - 1);
  if (aligned > start) munmap(raw, aligned - start);
  const Address excess = start + padded - (aligned + size);
  if (excess) munmap(pointer(aligned + size), excess);
  keep_to_this_process(pointer(aligned), size);
  s.reservations.emplace(aligned, Reservation{size, strict, {}});
  s.kernel_mappings += 1;
  *address = aligned;
  return kSuccess;
}

Result address_free(Address address, std::size_t size) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  auto it = s.reservations.find(address);
  if (it == s.reservations.end() || it->second.size != size || !it->second.mappings.empty()) return kInvalidValue;
  if (munmap(pointer(address), size) != 0) return from_errno();
  s.reservations.erase(it);
  s.kernel_mappings -= 1;
  return kSuccess;
}

Result create(Handle* handle, std::size_t size, const AllocationProp* prop, Flags flags) {
  if (!handle || !prop || flags || prop->location.type != kLocationHost) return kInvalidValue;
  const int location = prop->location.id, log2 = location & ((1 << kFileShift) - 1);
  if (location < 0 || log2 < kMinGranularityLog2 || log2 > kMaxGranularityLog2) return kInvalidValue;
  if (size == 0 || size % (std::size_t{1} << log2)) return kInvalidValue;
  if (prop->requested_handle_types & ~kPosixFileDescriptor) return kNotSupported;
  const bool exportable = prop->requested_handle_types != 0;
  State& s = state();
  PhysicalFile* file = nullptr;  // which stays where it is while it has memory
  Handle made = 0;
  int own = -1;
  off_t offset = 0;
  {
    const std::lock_guard lock(s.mutex);
    if (location >> kFileShift && (exportable || !s.files.contains(location))) return kInvalidValue;
    file = &s.files[location];
    if (file->foreign) return kInvalidValue;
    if (const Result r = room_for_memory(s, size); r != kSuccess) return r;
    if (exportable && size > static_cast<std::size_t>(std::numeric_limits<off_t>::max())) return kOutOfMemory;
    const Result r =
        exportable ? make_file(static_cast<off_t>(size), F_SEAL_GROW, &own) : file->allocate(size, &offset);
    if (r != kSuccess) return r;
    // Entered before it is filled, so that a child of a fork during that closes the descriptor.
    made = s.physical.add(Physical{log2, location, own, offset, size, {1, 0}});
    s.physical_bytes += size;
  }
  // Zeroing is what creation costs. Done here, the first touch never has to, and cannot find memory exhausted, which
  // would be a SIGBUS there and is an error here.
  const Result filled = populate(exportable ? own : file->fd(), offset, size);
  if (filled == kSuccess) {
    *handle = made;
    return kSuccess;
  }
  const std::lock_guard lock(s.mutex);
  const PhysicalTable::Found memory = s.physical.at(made);
  memory.counts->references = 0;
  forget(s, made, memory);
  return filled;
}

Result release(Handle handle) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto memory = s.physical.find(handle);
  if (!memory || memory->counts->references == 0) return kInvalidValue;
  memory->counts->references -= 1;
  forget(s, handle, *memory);
  return kSuccess;
}

Result map(Address address, std::size_t size, std::size_t offset, Handle handle, Flags flags) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto memory = s.physical.find(handle);
  if (!memory || memory->counts->references == 0 || offset || (flags & ~kMapRestore)) return kInvalidValue;
  const std::size_t granularity = std::size_t{1} << memory->granularity_log2;
  if (size != memory->size || address % granularity) return kInvalidValue;
  auto it = find_reservation(s, address);
  if (it == s.reservations.end() || address + size > it->first + it->second.size) return kInvalidValue;
  Reservation& reservation = it->second;
  auto next = reservation.mappings.lower_bound(address);
  if (find_mapping(reservation, address) || (next != reservation.mappings.end() && next->first < address + size))
    return kAlreadyMapped;
  const int fd = memory->own >= 0 ? memory->own : s.files[memory->location].fd();
  reservation.mappings.emplace(
      address,
      Mapping{
          .size = size, .handle = handle, .fd = fd, .offset = memory->offset, .restored = (flags & kMapRestore) != 0});
  memory->counts->mappings += 1;
  return kSuccess;
}

Result unmap(Address address, std::size_t size) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  auto it = find_reservation(s, address);
  if (it == s.reservations.end()) return kInvalidValue;
  Reservation& reservation = it->second;
  std::map<Address, Mapping>::iterator first, last;
  if (!whole_mappings(reservation, address, size, &first, &last)) return kInvalidValue;
  const std::size_t seams_before = seams(it->first, reservation, address, address + size);
  const bool entered = std::any_of(first, last, [](const auto& mapping) { return mapping.second.entered; });
  if (entered && !reserve_again(address, size, reservation.strict)) return from_errno();
  for (auto mapping = first; mapping != last; ++mapping) {
    const PhysicalTable::Found memory = s.physical.at(mapping->second.handle);
    memory.counts->mappings -= 1;
    forget(s, mapping->second.handle, memory);
  }
  reservation.mappings.erase(first, last);
  s.kernel_mappings += seams(it->first, reservation, address, address + size) - seams_before;
  return kSuccess;
}

// Neighbouring mappings that one call of the kernel can give another access: all entered, with one access; or none of
// them, and side by side in a file.
struct Piece {
  std::map<Address, Mapping>::iterator first;
  std::size_t size;

  const Mapping& mapping() const { return first->second; }
  bool change(Access access, bool strict) const {
    const int protection = protection_of(access, strict);
    if (mapping().entered) return mprotect(pointer(first->first), size, protection) == 0;
    if (access == Access::kNone) return true;
    return map_fixed(first->first, size, protection, MAP_SHARED, mapping().fd, mapping().offset);
  }
  void change_back(bool strict) const {
    if (mapping().entered)
      mprotect(pointer(first->first), size, protection_of(mapping().access, strict));
    else
      reserve_again(first->first, size, strict);
  }
};

std::vector<Piece> pieces(std::map<Address, Mapping>::iterator first, std::map<Address, Mapping>::iterator last) {
  std::vector<Piece> found;
  for (auto it = first; it != last; ++it) {
    const Mapping &left = it == first ? it->second : std::prev(it)->second, &right = it->second;
    const bool alike = left.entered == right.entered && left.access == right.access;
    if (it != first && alike && (right.entered || adjoining(left, right)))
      found.back().size += right.size;
    else
      found.push_back({it, right.size});
  }
  return found;
}

Result set_access(Address address, std::size_t size, const AccessDesc* descs, std::size_t count) {
  if (!descs || count != 1 || descs->location.type != kLocationHost) return kInvalidValue;
  const auto access = static_cast<Access>(descs->flags);
  if (access != Access::kNone && access != Access::kRead && access != Access::kReadWrite) return kInvalidValue;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  auto it = find_reservation(s, address);
  if (it == s.reservations.end()) return kInvalidValue;
  Reservation& reservation = it->second;
  std::map<Address, Mapping>::iterator first, last;
  if (!whole_mappings(reservation, address, size, &first, &last)) return kInvalidValue;
  const std::vector<Piece> all = pieces(first, last);
  const auto added = static_cast<std::size_t>(std::count_if(all.begin(), all.end(), [&](const Piece& piece) {
    return access != Access::kNone && !piece.mapping().entered && !piece.mapping().restored;
  }));
  if (added)
    if (const Result room = room_for_mappings(s, added + 1); room != kSuccess) return room;
  for (auto piece = all.begin(); piece != all.end(); ++piece) {
    if (piece->change(access, reservation.strict)) continue;
    const Result failed = from_errno();
    while (piece != all.begin()) (--piece)->change_back(reservation.strict);
    return failed;
  }
  // Once for all pieces, of which each would take two calls more.
  if (access != Access::kNone) keep_to_this_process(pointer(address), size);
  const std::size_t seams_before = seams(it->first, reservation, address, address + size);
  for (auto mapping = first; mapping != last; ++mapping) {
    mapping->second.access = access;
    mapping->second.entered |= access != Access::kNone;
  }
  s.kernel_mappings += seams(it->first, reservation, address, address + size) - seams_before;
  // Fills the process's page table now instead of by faults in the caller's kernels. A read suffices: shared memory
  // that may be written is entered writable. The memory is there already, so a refusal (Linux < 5.14) only costs those
  // faults.
  if (access != Access::kNone) madvise(pointer(address), size, MADV_POPULATE_READ);
  return kSuccess;
}

Result get_access(Flags* flags, const Location* location, Address address) {
  if (!flags || !location || location->type != kLocationHost) return kInvalidValue;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  auto it = find_reservation(s, address);
  const Mapping* mapping = it == s.reservations.end() ? nullptr : find_mapping(it->second, address);
  if (!mapping) return kInvalidValue;
  *flags = static_cast<Flags>(mapping->access);
  return kSuccess;
}

Result retain_handle(Handle* handle, void* address) {
  if (!handle) return kInvalidValue;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  auto it = find_reservation(s, reinterpret_cast<Address>(address));
  const Mapping* mapping =
      it == s.reservations.end() ? nullptr : find_mapping(it->second, reinterpret_cast<Address>(address));
  if (!mapping) return kInvalidValue;
  *handle = mapping->handle;
  s.physical.at(*handle).counts->references += 1;
  return kSuccess;
}

Result export_handle(void* shareable, Handle handle, unsigned type, Flags flags) {
  if (!shareable || flags || type != kPosixFileDescriptor) return kInvalidValue;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto memory = s.physical.find(handle);
  if (!memory || memory->counts->references == 0 || memory->own < 0) return kInvalidValue;
  const int fd = fcntl(memory->own, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return kErrno + errno;
  std::memcpy(shareable, &fd, sizeof fd);
  return kSuccess;
}

// A descriptor that was opened read-only makes memory that cannot be mapped for writing: the kernel refuses it.
Result import_handle(Handle* handle, void* shareable, unsigned type) {
  if (!handle || type != kPosixFileDescriptor) return kInvalidValue;
  const auto given = reinterpret_cast<std::uintptr_t>(shareable);
  if (given > static_cast<std::uintptr_t>(std::numeric_limits<int>::max())) return kInvalidValue;
  // Only a file that nobody can make shorter, or longer: any other could fault under a kernel, or is not what it seems.
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  const std::size_t page = std::size_t{1} << kMinGranularityLog2;
  struct stat file{};
  const int seals = fcntl(static_cast<int>(given), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || fstat(static_cast<int>(given), &file) != 0) return kInvalidValue;
  const auto size = static_cast<std::size_t>(file.st_size);
  if (size == 0 || size % page) return kInvalidValue;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const int fd = fcntl(static_cast<int>(given), F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return kErrno + errno;
  *handle = s.physical.add(Physical{kMinGranularityLog2, 0, fd, 0, size, {1, 0}});
  s.physical_bytes += size;
  return kSuccess;
}

Result memset_async(Address address, unsigned char value, std::size_t size, StreamHandle) {
  State& s = state();
  {
    const std::lock_guard lock(s.mutex);
    auto it = find_reservation(s, address);
    if (it == s.reservations.end() || size == 0) return kInvalidValue;
    for (Address at = address; at < address + size;) {
      auto mapping = it->second.mappings.upper_bound(at);
      if (mapping == it->second.mappings.begin()) return kInvalidValue;
      --mapping;
      if (at >= mapping->first + mapping->second.size || mapping->second.access != Access::kReadWrite)
        return kInvalidValue;
      at = mapping->first + mapping->second.size;
    }
  }
  std::memset(pointer(address), value, size);
  return kSuccess;
}

// Kernels on the host are done when they return, so that an event is complete as soon as it is recorded; there is one,
// for all. There is no context but null, and nothing captures.
EventHandle the_event() {
  static char place;
  return reinterpret_cast<EventHandle>(&place);
}

Result event_create(EventHandle* event, unsigned) {
  if (!event) return kInvalidValue;
  *event = the_event();
  return kSuccess;
}

Result check_event(EventHandle event) { return event == the_event() ? kSuccess : kInvalidHandle; }

Result event_record(EventHandle event, StreamHandle) { return check_event(event); }

Result context_synchronize() { return kSuccess; }

Result stream_is_capturing(StreamHandle, unsigned* status) {
  if (!status) return kInvalidValue;
  *status = 0;
  return kSuccess;
}

Result set_context(void* context) { return context ? kInvalidContext : kSuccess; }

Result get_context(void** context) {
  if (!context) return kInvalidValue;
  *context = nullptr;
  return kSuccess;
}

Result exchange_capture_mode(unsigned* mode) {
  static thread_local unsigned current = kCaptureGlobal;
  if (!mode || *mode > kCaptureRelaxed) return kInvalidValue;
  std::swap(*mode, current);
  return kSuccess;
}

Result error_name(Result result, const char** name) {
  if (!name) return kInvalidValue;
  *name = nullptr;
  switch (result) {
    case kSuccess:
      *name = "CUDA_SUCCESS";
      break;
    case kInvalidValue:
      *name = "CUDA_ERROR_INVALID_VALUE";
      break;
    case kOutOfMemory:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      break;
    case kNotInitialized:
      *name = "CUDA_ERROR_NOT_INITIALIZED";
      break;
    case kInvalidContext:
      *name = "CUDA_ERROR_INVALID_CONTEXT";
      break;
    case kMapFailed:
      *name = "CUDA_ERROR_MAP_FAILED";
      break;
    case kUnmapFailed:
      *name = "CUDA_ERROR_UNMAP_FAILED";
      break;
    case kAlreadyMapped:
      *name = "CUDA_ERROR_ALREADY_MAPPED";
      break;
    case kNotMapped:
      *name = "CUDA_ERROR_NOT_MAPPED";
      break;
    case kInvalidHandle:
      *name = "CUDA_ERROR_INVALID_HANDLE";
      break;
    case kNotReady:
      *name = "CUDA_ERROR_NOT_READY";
      break;
    case kNotPermitted:
      *name = "CUDA_ERROR_NOT_PERMITTED";
      break;
    case kNotSupported:
      *name = "CUDA_ERROR_NOT_SUPPORTED";
      break;
    case kCaptureUnsupported:
      *name = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
      break;
    case kCaptureImplicit:
      *name = "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
      break;
    case kUnknown:
      *name = "CUDA_ERROR_UNKNOWN";
      break;
    case kErrno + EPERM:
      *name = "EPERM";
      break;
    case kErrno + EAGAIN:
      *name = "EAGAIN";
      break;
    case kErrno + ENOMEM:
      *name = "ENOMEM";
      break;
    case kErrno + EACCES:
      *name = "EACCES";
      break;
    case kErrno + ENFILE:
      *name = "ENFILE";
      break;
    case kErrno + EMFILE:
      *name = "EMFILE";
      break;
    case kErrno + EFBIG:
      *name = "EFBIG";
      break;
    case kErrno + ENOSYS:
      *name = "ENOSYS";
      break;
    default:
      return kInvalidValue;
  }
  return kSuccess;
}

}  // namespace

const Vmm& host_vmm() {
  static const Vmm table{
      .address_reserve = address_reserve,
      .address_free = address_free,
      .create = create,
      .release = release,
      .map = map,
      .unmap = unmap,
      .set_access = set_access,
      .get_access = get_access,
      .retain_handle = retain_handle,
      .export_handle = export_handle,
      .import_handle = import_handle,
      .memset_async = memset_async,
      .event_create = event_create,
      .event_destroy = check_event,
      .event_record = event_record,
      .event_query = check_event,
      .event_synchronize = check_event,
      .context_synchronize = context_synchronize,
      .stream_is_capturing = stream_is_capturing,
      .set_context = set_context,
      .get_context = get_context,
      .exchange_capture_mode = exchange_capture_mode,
      .error_name = error_name,
  };
  return table;
}

int open_host_file(int granularity_log2) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const int number = s.next_file;
  PhysicalFile file;
  if (const Result r = file.open(); r != kSuccess)
    throw std::system_error(r - kErrno, std::generic_category(), "memfd_create");
  s.files.emplace(granularity_log2 | number << kFileShift, file);
  s.next_file += 1;
  return number;
}

int open_foreign_file(int granularity_log2, int descriptor) {
  const auto fail = [](int error) { throw std::system_error(error, std::generic_category(), "a foreign file"); };
  const int seals = fcntl(descriptor, F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK)) fail(seals < 0 ? errno : EPERM);
  State& s = state();
  const std::lock_guard lock(s.mutex);
  PhysicalFile file;
  file.foreign = true;
  if (const Result r = file.open(descriptor); r != kSuccess) fail(r - kErrno);
  s.files.emplace(granularity_log2 | s.next_file << kFileShift, file);
  return s.next_file++;
}

HandleRange foreign_memory(int granularity_log2, int number, std::vector<off_t> offsets) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const int location = granularity_log2 | number << kFileShift;
  const off_t size = off_t{1} << granularity_log2;
  PhysicalFile& file = s.files.at(location);
  struct stat now{};  // the file is sealed against becoming shorter
  const bool known = file.foreign && fstat(file.fd(), &now) == 0;
  const auto has = [&](off_t offset) { return offset >= 0 && offset % size == 0 && offset <= now.st_size - size; };
  if (!known) offsets.clear();
  offsets.erase(std::find_if_not(offsets.begin(), offsets.end(), has), offsets.end());
  const std::size_t count = offsets.size();
  if (count == 0) return {};
  std::vector<Counts> counts(count, Counts{1, 0});
  const Handle first =
      s.physical.add(ForeignRun{granularity_log2, location, std::move(offsets), std::move(counts), count});
  file.use(count * static_cast<std::size_t>(size));
  return {first, count};
}

off_t offset_in_file(Handle handle) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const PhysicalTable::Found memory = s.physical.at(handle);
  if (memory.own >= 0) throw std::out_of_range("memory that has a file of its own");
  return memory.offset;
}

void leave_in_file(Handle handle) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.physical.keep(handle);
}

int host_file_descriptor(int granularity_log2, int number) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto file = s.files.find(granularity_log2 | number << kFileShift);
  const int fd = file == s.files.end() ? -1 : fcntl(file->second.fd(), F_DUPFD_CLOEXEC, 0);
  if (fd < 0) throw std::system_error(file == s.files.end() ? EBADF : errno, std::generic_category(), "fcntl");
  return fd;
}

void close_host_file(int granularity_log2, int number) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto file = s.files.find(granularity_log2 | number << kFileShift);
  if (file == s.files.end()) return;
  file->second.unwanted = true;
  forget_file(s, file);
}

std::size_t max_mappings() {
  std::size_t value = 65530;
  std::istringstream(contents("/proc/sys/vm/max_map_count")) >> value;
  return value;
}

HostUsage host_usage() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return {s.kernel_mappings, s.physical_bytes, s.physical.size(), s.reservations.size()};
}

}  // namespace vattn
