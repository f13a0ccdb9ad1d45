// Python bindings of the mechanism; no logic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <exception>
#include <system_error>
#include <type_traits>

#include "address_space.h"
#include "available_memory.h"
#include "block_rows.h"
#include "entries.h"
#include "host_vmm.h"
#include "mapper.h"
#include "without_lock.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace vattn;

namespace {

using Table = std::map<std::string, std::uintptr_t>;

// Visits the table's entries under CUDA's names, so that reading and building one name them in one place.
template <class Vmm_, class Visit>
void visit_table(Vmm_& vmm, Visit&& visit) {
  visit("cuMemAddressReserve", vmm.address_reserve);
  visit("cuMemAddressFree", vmm.address_free);
  visit("cuMemCreate", vmm.create);
  visit("cuMemRelease", vmm.release);
  visit("cuMemMap", vmm.map);
  visit("cuMemUnmap", vmm.unmap);
  visit("cuMemSetAccess", vmm.set_access);
  visit("cuMemGetAccess", vmm.get_access);
  visit("cuMemRetainAllocationHandle", vmm.retain_handle);
  visit("cuMemExportToShareableHandle", vmm.export_handle);
  visit("cuMemImportFromShareableHandle", vmm.import_handle);
  visit("cuMemsetD8Async", vmm.memset_async);
  visit("cuEventCreate", vmm.event_create);
  visit("cuEventDestroy", vmm.event_destroy);
  visit("cuEventRecord", vmm.event_record);
  visit("cuEventQuery", vmm.event_query);
  visit("cuEventSynchronize", vmm.event_synchronize);
  visit("cuCtxSynchronize", vmm.context_synchronize);
  visit("cuStreamIsCapturing", vmm.stream_is_capturing);
  visit("cuCtxSetCurrent", vmm.set_context);
  visit("cuCtxGetCurrent", vmm.get_context);
  visit("cuThreadExchangeStreamCaptureMode", vmm.exchange_capture_mode);
  visit("cuGetErrorName", vmm.error_name);
}

Table table_of(const Vmm& vmm) {
  Table table;
  visit_table(vmm, [&](const char* name, auto function) { table[name] = reinterpret_cast<std::uintptr_t>(function); });
  return table;
}

StreamHandle stream_of(std::uintptr_t stream) { return reinterpret_cast<StreamHandle>(stream); }

int log2_of(std::size_t granularity) {
  int log2 = 0;
  while (log2 < 63 && (std::size_t{1} << log2) < granularity) log2 += 1;
  return log2;
}

nb::bytes host_prop(std::size_t granularity, int file) {
  AllocationProp prop{};
  prop.type = 1;
  prop.location = {kLocationHost, log2_of(granularity) | file << kFileShift};
  return nb::bytes(&prop, sizeof prop);
}

// Destroys what makes driver calls of its own then. It may be the last step of raising an error, and the calls of a
// table may be functions of Python, which must not be called while an error is set. Only who has the interpreter's lock
// has an error; PyGILState_Check, which says so, is not in the stable ABI.
template <class T>
void destroy(T* object) {
  if (is_without_lock || !PyGILState_GetThisThreadState()) return delete object;
  const nb::error_scope raised;
  // Its worker may need the interpreter's lock before it ends.
  if constexpr (std::is_same_v<T, Mapper>) without_lock([&] { object->stop(); });
  delete object;
}

std::shared_ptr<Driver> make_driver(const Table& table, nb::bytes prop, std::uintptr_t context, Flags reserve_flags,
                                    Flags restore_flags, bool unmap_ranges, bool read_only,
                                    const std::vector<std::uintptr_t>& streams, const std::vector<int>& peers) {
  Vmm vmm;
  visit_table(vmm, [&](const char* name, auto& function) {
    const auto entry = table.find(name);
    if (entry == table.end() || !entry->second) throw nb::value_error((std::string("the table lacks ") + name).c_str());
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(entry->second);
  });
  AllocationProp allocation;
  if (prop.size() != sizeof allocation) throw nb::value_error("prop must hold one CUmemAllocationProp");
  std::memcpy(&allocation, prop.c_str(), sizeof allocation);
  std::vector<StreamHandle> handles;
  for (const std::uintptr_t stream : streams) handles.push_back(stream_of(stream));
  std::vector<Location> locations;
  for (const int peer : peers) locations.push_back({kLocationDevice, peer});
  return {new Driver(vmm, allocation, reinterpret_cast<void*>(context), reserve_flags, restore_flags, unmap_ranges,
                     read_only, std::move(handles), locations),
          &destroy<Driver>};
}

using Stats = nb::typed<nb::dict, nb::str, nb::typed<nb::tuple, nb::int_, nb::float_>>;

Stats call_stats(const Driver& driver) {
  Stats stats;
  for (unsigned i = 0; i < kCalls; ++i) {
    const CallStats s = driver.stats(static_cast<Call>(i));
    stats[call_name(static_cast<Call>(i))] = nb::make_tuple(s.count, static_cast<double>(s.nanoseconds) * 1e-9);
  }
  return stats;
}

void remove_foreign(PagePool& pool, const Pages& pages) {
  for (const PageId page : pages.ids) host_vmm().release(pool.remove_foreign(page));
}

std::vector<Pages> add_foreign(PagePool& self, int file, const nb::bytes& offsets,
                               const std::vector<std::pair<std::size_t, std::size_t>>& shape) {
  std::size_t block = 0;
  for (const auto& [columns, lanes] : shape) {
    if (columns == 0 || lanes == 0) throw nb::value_error("a kind of tensor without pages");
    block += columns * lanes;
  }
  if (block == 0) throw nb::value_error("a block without tensors");
  std::vector<off_t> wanted(offsets.size() / sizeof(off_t));
  if (!wanted.empty()) std::memcpy(wanted.data(), offsets.c_str(), wanted.size() * sizeof(off_t));
  const auto [first, count] = foreign_memory(log2_of(self.page_size()), file, std::move(wanted));
  const std::size_t blocks = count / block;
  std::vector<Pages> found;
  try {
    for (std::size_t rest = blocks * block; rest < count; ++rest) host_vmm().release(first + rest);
    for (const auto& [columns, lanes] : shape) {
      found.push_back({lanes, {}});
      found.back().ids.reserve(blocks * columns * lanes);
    }
    const std::vector<PageId> pages = self.add_foreign(first, blocks * block);
    for (auto page = pages.begin(); page != pages.end();)
      for (std::size_t kind = 0; kind < shape.size(); ++kind) {
        const auto end = page + static_cast<std::ptrdiff_t>(shape[kind].first * shape[kind].second);
        found[kind].ids.insert(found[kind].ids.end(), page, end);
        page = end;
      }
  } catch (...) {
    for (std::size_t page = 0; page < blocks * block; ++page) host_vmm().release(first + page);
    throw;
  }
  return found;
}

nb::ndarray<nb::pytorch, std::uint8_t> tensor(nb::handle_t<AddressSpace> self, std::size_t index, int device_type,
                                              int device_id, nb::handle owner) {
  const AddressSpace& space = nb::cast<const AddressSpace&>(self);
  const std::size_t shape[1] = {space.tensor_bytes()};
  const nb::tuple owners = nb::make_tuple(self, owner);
  return {reinterpret_cast<void*>(space.base(index)),
          1,
          shape,
          owners,
          nullptr,
          nb::dtype<std::uint8_t>(),
          device_type,
          device_id};
}

Pages joined(const std::vector<const Pages*>& blocks) {
  Pages pages{blocks.empty() ? 0 : blocks.front()->lanes, {}};
  for (const Pages* const block : blocks) {
    if (block->lanes != pages.lanes) throw std::logic_error("joined columns of several shapes");
    pages.ids.insert(pages.ids.end(), block->ids.begin(), block->ids.end());
  }
  return pages;
}

using BlockArray = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::device::cpu, nb::c_contig>;
using CountArray = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::device::cpu, nb::c_contig>;

BlockRows block_rows(const BlockArray& blocks, const CountArray& counts) {
  if (counts.size() != blocks.shape(0)) throw std::logic_error("not a count for every row");
  return {blocks.data(), blocks.shape(1), counts.data()};
}

// Throws std::logic_error where there is no such row, or its count is over its length.
void check_row(const BlockRows& rows, std::size_t count, std::size_t row) {
  if (row >= count) throw std::logic_error("no such row or window");
  if (rows.counts[row] < 0 || static_cast<std::size_t>(rows.counts[row]) > rows.stride)
    throw std::logic_error("a count does not fit its row");
}

std::vector<std::size_t> common(const BlockArray& table, const CountArray& counts, const BlockArray& shown,
                                const CountArray& shown_counts, const std::vector<std::size_t>& rows,
                                const std::vector<std::size_t>& windows) {
  const BlockRows rows_of = block_rows(table, counts), windows_of = block_rows(shown, shown_counts);
  if (rows.size() != windows.size()) throw std::logic_error("not a window for every row");
  std::vector<std::size_t> found(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    check_row(rows_of, table.shape(0), rows[i]);
    check_row(windows_of, shown.shape(0), windows[i]);
    found[i] = common_blocks(rows_of, rows[i], windows_of, windows[i]);
  }
  return found;
}

void raise_failure(const char* call, Result result, const std::string& name) {
  try {
    const nb::object make = nb::module_::import_("vattn.drivers.failure").attr("failure");
    const nb::object error = make(call, result, name);
    PyErr_SetObject(error.type().ptr(), error.ptr());
  } catch (nb::python_error& error) {  // a signal's, which nanobind would make a RuntimeError of
    error.restore();
  }
}

void raise_driver_error(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const DriverFailure& failure) {
    raise_failure(call_name(failure.call), failure.result, failure.name);
  } catch (const std::system_error& error) {  // no thread, or no file descriptor
    const Result result = kErrno + error.code().value();
    const char* name = nullptr;
    host_vmm().error_name(result, &name);
    raise_failure(error.what(), result, name ? name : "an unknown result");
  }
}

}  // namespace

std::string_view view(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

NB_MODULE(_native, m) {
  m.doc() = "The mechanism of vattn: physical pages, address spaces, and the worker that maps one into the other.";
  // Tensors may outlive the interpreter's modules, and what they keep alive is then reported as leaked.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(raise_driver_error);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&set_exiting));

  m.def("host_table", [] { return table_of(host_vmm()); }, "Addresses of the host provider's calls, by CUDA's names.");
  m.def("host_prop", &host_prop, "granularity"_a, "file"_a = 0,
        "The CUmemAllocationProp that asks the host for such pages, of the process's own file or of another one.");
  m.def(
      "open_host_file", [](std::size_t granularity) { return open_host_file(log2_of(granularity)); }, "granularity"_a,
      "A file of its own for pages that another process counts; its number, for `host_prop`.");
  m.def(
      "host_file_descriptor",
      [](std::size_t granularity, int file) { return host_file_descriptor(log2_of(granularity), file); },
      "granularity"_a, "file"_a, "A descriptor of that file, to be closed by the caller.");
  m.def(
      "close_host_file", [](std::size_t granularity, int file) { close_host_file(log2_of(granularity), file); },
      "granularity"_a, "file"_a, "Closes that file as soon as no memory of it is left.");
  m.def(
      "open_foreign_file",
      [](std::size_t granularity, int descriptor) { return open_foreign_file(log2_of(granularity), descriptor); },
      "granularity"_a, "descriptor"_a,
      "A file of another process, of which pages are mapped read-only; its number. The descriptor stays the caller's.");
  m.def(
      "table_names",
      [] {
        std::vector<std::string> names;
        visit_table(host_vmm(), [&](const char* name, auto) { names.emplace_back(name); });
        return names;
      },
      "CUDA's names of the calls that a table has.");
  m.attr("HOST_RESERVE_STRICT") = kReserveStrict;
  m.attr("HOST_MAP_RESTORE") = kMapRestore;
  m.attr("HOST_ERRNO") = kErrno;
  m.def("host_max_mappings", &max_mappings, "Mappings that Linux allows this process.");
  nb::class_<AvailableMemory>(m, "AvailableMemory")
      .def_ro("bytes", &AvailableMemory::bytes)
      .def_ro("total", &AvailableMemory::total)
      .def_ro("source", &AvailableMemory::source);
  m.def("available_memory", &available_memory, "root"_a = "",
        "What the machine and the control groups around this process have left, and which file says so.");
  m.def(
      "checksum", [](const nb::bytes& data) { return checksum(view(data)); }, "data"_a,
      "Of the words of 8 bytes of an entry of a directory, which ends with it.");
  m.def(
      "entries_alike",
      [](int file, off_t at, std::size_t entry_bytes, const nb::bytes& keys) {
        return entries_alike(file, at, entry_bytes, view(keys));
      },
      "file"_a, "at"_a, "entry_bytes"_a, "keys"_a,
      "How many entries of a directory, from the one at this place of its file on, seem to have these keys, side by\n"
      "side: if the last one has its key, so do those before it.");
  m.def(
      "entry_offsets",
      [](int file, off_t at, std::size_t entry_bytes, const nb::bytes& keys, const nb::bytes& tokens,
         std::size_t token_bytes) {
        const std::string found = entry_offsets(file, at, entry_bytes, view(keys), view(tokens), token_bytes);
        return nb::bytes(found.data(), found.size());
      },
      "file"_a, "at"_a, "entry_bytes"_a, "keys"_a, "tokens"_a, "token_bytes"_a,
      "The offsets of the entries, from the one at this place of a directory's file on, that are whole and have these\n"
      "keys and tokens, side by side. `token_bytes` are those of the tokens of one entry.");
  m.attr("HOST_MIN_GRANULARITY") = std::size_t{1} << kMinGranularityLog2;
  m.attr("HOST_MAX_GRANULARITY") = std::size_t{1} << kMaxGranularityLog2;

  nb::class_<HostUsage>(m, "HostUsage")
      .def_ro("kernel_mappings", &HostUsage::kernel_mappings)
      .def_ro("physical_bytes", &HostUsage::physical_bytes)
      .def_ro("handles", &HostUsage::handles)
      .def_ro("reservations", &HostUsage::reservations);
  m.def("host_usage", &host_usage, "What the host provider holds for this process.");

  nb::class_<Driver>(m, "Driver", "A provider's table of calls with the properties of its memory, counted and timed.")
      .def(nb::new_(&make_driver), "table"_a, "prop"_a, "context"_a = 0, "reserve_flags"_a = 0, "restore_flags"_a = 0,
           "unmap_ranges"_a = true, "read_only"_a = true, "streams"_a = std::vector<std::uintptr_t>{},
           "peers"_a = std::vector<int>{},
           "unmap_ranges: whether one unmap may take several neighbouring mappings. read_only: whether memory can be "
           "mapped read-only; if not, such mappings can be written. streams: those that may capture graphs, which "
           "exist as long as the driver. peers: devices that have access to the memory as well.")
      .def_prop_ro("read_only", &Driver::read_only)
      .def("try_read_only", &Driver::try_read_only, "size"_a,
           "Whether the provider maps memory read-only, tried on `size` bytes.")
      .def(
          "record", [](Driver& self, std::uintptr_t stream) { return self.record(stream_of(stream)); }, "stream"_a,
          "An event that is complete when all is that was launched on the stream.")
      .def(
          "capturing", [](Driver& self, std::uintptr_t stream) { return self.capturing(stream_of(stream)); },
          "stream"_a, "Whether the stream captures a graph, or cannot be used because another one does.")
      .def("any_capturing", &Driver::any_capturing,
           "Whether any stream captures a graph, as far as the driver knows them.")
      .def("result_name", &Driver::result_name, "result"_a, "The provider's name for a result.")
      .def("call_stats", &call_stats, "Calls so far by CUDA's names: (count, seconds).");

  nb::class_<Event>(m, "Event", "A point in a stream.")
      .def("done", &Event::done, "Whether all is complete that was launched before it.");

  nb::class_<PoolCounts>(m, "PoolCounts")
      .def_ro("budget", &PoolCounts::budget)
      .def_ro("absent", &PoolCounts::absent)
      .def_ro("free", &PoolCounts::free)
      .def_ro("taken", &PoolCounts::taken);

  nb::class_<PagePool>(m, "PagePool", "Physical pages by index; absent + free + taken == budget.")
      .def(nb::new_([](std::size_t page_size, std::size_t budget, bool zero_on_free) {
             return std::make_shared<PagePool>(page_size, budget, zero_on_free);
           }),
           "page_size"_a, "budget"_a, "zero_on_free"_a = false,
           "zero_on_free: a page whose last reference goes is zeroed in the transaction that drops it.")
      .def_prop_ro("zero_on_free", &PagePool::zero_on_free)
      .def_prop_ro("page_size", &PagePool::page_size)
      .def("counts", &PagePool::counts)
      .def_prop_rw("limit", &PagePool::limit, &PagePool::set_limit, "Pages that may have memory now; at first all.")
      .def(
          "release_free",
          [](std::shared_ptr<PagePool> self, Transaction& transaction, std::size_t count) {
            const std::vector<PageId> pages = self->remove_free(count);
            if (pages.empty()) return std::size_t{0};
            transaction.add({Operation::Kind::kRelease, pages});
            transaction.on_revert([self, pages] { self->undo_remove_free(pages); });
            return pages.size();
          },
          "transaction"_a, "count"_a, "Gives the memory of up to `count` free pages back; how many.")
      .def(
          "hold",
          [](std::shared_ptr<PagePool> self, Transaction& transaction, const std::vector<const Pages*>& pages) {
            std::vector<PageId> ids;
            for (const Pages* const each : pages) ids.insert(ids.end(), each->ids.begin(), each->ids.end());
            for (const PageId page : ids) self->retain(page);
            transaction.on_revert([self, ids = std::move(ids)] {
              for (const PageId page : ids) self->drop(page);
            });
          },
          "transaction"_a, "pages"_a, "Adds a reference to each, that they stay whether a slot has them or not.")
      .def(
          "let_go",
          [](std::shared_ptr<PagePool> self, Transaction& transaction, const Pages& pages) {
            transaction.drop(*self, pages.ids);
            transaction.on_revert([self, pages] {
              for (const PageId page : pages.ids) self->undo_drop(page);
            });
          },
          "transaction"_a, "pages"_a, "Takes those references back.")
      .def("add_foreign", &add_foreign, "file"_a, "offsets"_a, "shape"_a,
           "Pages of a foreign file, which are to be mapped read-only: per kind, those of as many blocks as the file\n"
           "has. Nobody holds them yet. `shape` is columns and lanes of a block, per kind; `offsets` are numbers of\n"
           "8 bytes, by block, kind, column, then lane.")
      .def("remove_foreign", &remove_foreign, "pages"_a, "Removes foreign pages that nothing holds or maps any more.")
      .def(
          "offsets",
          [](PagePool& self, const Pages& pages) {
            std::vector<off_t> offsets;
            for (const PageId page : pages.ids) offsets.push_back(offset_in_file(self.handle(page)));
            return offsets;
          },
          "pages"_a, "Where pages that the worker has created are in their file, by column, then lane.")
      .def(
          "leave",
          [](PagePool& self, const Pages& pages) {
            for (const PageId page : pages.ids) {
              leave_in_file(self.handle(page));
              host_vmm().release(self.handle(page));
            }
          },
          "pages"_a, "Gives pages up so that their file keeps what is in them; after the worker has ended.")
      .def("check", &PagePool::check);

  m.def("common_blocks", &common, "table"_a, "counts"_a, "shown"_a, "shown_counts"_a, "rows"_a, "windows"_a,
        "For each pair of a row of `table` and a row of `shown`, how many block numbers at their starts are equal; "
        "`counts` and `shown_counts` are the numbers in use in each row.");

  nb::class_<Pages>(m, "Pages", "The pages of neighbouring columns: a list, which holds no reference.")
      .def_prop_ro("columns", &Pages::columns)
      .def("part", &Pages::part, "begin"_a, "end"_a, "Those of columns [begin, end) of these.");
  m.def("check_references", &check_references, "pool"_a, "spaces"_a, "held"_a,
        "Whether every page of these has as many references as slots and entries of `held` have it.");

  nb::enum_<Status>(m, "Status")
      .value("PENDING", Status::kPending)
      .value("DONE", Status::kDone)
      .value("FAILED", Status::kFailed)
      .value("CANCELLED", Status::kCancelled);

  nb::class_<Transaction>(m, "Transaction", "Decisions in the books, and the operations that make them true.")
      .def(nb::new_([] { return std::make_shared<Transaction>(); }))
      .def_prop_ro("empty", &Transaction::empty)
      .def_prop_ro("ticket", &Transaction::ticket, "0 until it is submitted.")
      .def_prop_ro("status", &Transaction::status)
      .def_prop_ro("failed_call", [](const Transaction& t) { return call_name(t.failed_call()); })
      .def_prop_ro("failed_code", &Transaction::failed_result)
      .def(
          "wait_for",
          [](Transaction& self, std::shared_ptr<Event> event) {
            self.add({.kind = Operation::Kind::kFence, .pages = {}, .event = std::move(event)});
          },
          "event"_a.none(), "What follows waits for the event; None: for all that was launched in the context.")
      .def("revert", &Transaction::revert,
           "Takes its decisions back; for one that did not happen. Does nothing the second time.");

  nb::class_<AddressSpace>(m, "AddressSpace", "Equal virtual tensors that grow and shrink together.")
      .def(nb::new_([](std::shared_ptr<Driver> driver, std::shared_ptr<PagePool> pool, std::size_t tensors,
                       std::size_t slots, std::size_t runs, std::size_t run_pages, bool zeroed) {
             const AddressSpace::Shape shape{tensors, slots, runs, run_pages, zeroed};
             return std::shared_ptr<AddressSpace>(new AddressSpace(std::move(driver), std::move(pool), shape),
                                                  &destroy<AddressSpace>);
           }),
           "driver"_a, "pool"_a, nb::kw_only(), "tensors"_a, "slots"_a, "runs"_a, "run_pages"_a, "zeroed"_a = false,
           "zeroed: whether pages are zero when they are mapped by `grow`, whatever memory they are.")
      .def_prop_ro("slots", [](const AddressSpace& self) { return self.shape().slots; })
      .def_prop_ro("lanes", &AddressSpace::lanes)
      .def_prop_ro("tensor_bytes", &AddressSpace::tensor_bytes)
      .def("first", &AddressSpace::first, "slot"_a)
      .def("columns", &AddressSpace::columns, "slot"_a)
      .def("grow", &AddressSpace::grow, "transaction"_a, "slot"_a, "count"_a, "tag"_a = 0)
      .def("shrink", &AddressSpace::shrink, "transaction"_a, "slot"_a, "count"_a)
      .def("retire", &AddressSpace::retire, "transaction"_a, "slot"_a, "count"_a)
      .def("has_older", &AddressSpace::has_older, "slot"_a, "begin"_a, "tag"_a,
           "Whether a column of the slot from `begin` on was grown with a smaller tag.")
      .def("place", &AddressSpace::place, "transaction"_a, "slot"_a, "column"_a)
      .def(
          "attach",
          [](AddressSpace& self, Transaction& transaction, std::size_t slot, const std::vector<const Pages*>& blocks) {
            self.attach(transaction, slot, joined(blocks), Access::kRead);
          },
          "transaction"_a, "slot"_a, "blocks"_a, "Appends pages that somebody holds, read-only, as one range.")
      .def(
          "pages",
          [](const AddressSpace& self, std::size_t slot, std::size_t from, std::size_t to) {
            return self.pages(slot, from, to);
          },
          "slot"_a, "begin"_a, "end"_a)
      .def(
          "has",
          [](const AddressSpace& self, std::size_t slot, const std::vector<const Pages*>& blocks) {
            return self.pages(slot, self.first(slot), self.columns(slot)).ids == joined(blocks).ids;
          },
          "slot"_a, "blocks"_a, "Whether the slot's columns are exactly these.")
      .def(
          "occupied",
          [](const AddressSpace& self) {
            std::vector<std::size_t> slots;
            for (std::size_t slot = 0; slot < self.shape().slots; ++slot)
              if (self.columns(slot) > self.first(slot)) slots.push_back(slot);
            return slots;
          },
          "The slots that have columns.")
      .def("check", &AddressSpace::check)
      .def("tensor", &tensor, "index"_a, "device_type"_a, "device_id"_a, "owner"_a.none() = nb::none(),
           "One virtual tensor as uint8 [tensor_bytes], which keeps the addresses reserved while it lives, and `owner` "
           "alive.");

  nb::class_<Mapper>(m, "Mapper", "The worker that executes transactions in the order of their tickets.")
      .def(nb::new_([](std::shared_ptr<Driver> driver, std::shared_ptr<PagePool> pool) {
             return std::shared_ptr<Mapper>(new Mapper(std::move(driver), std::move(pool)), &destroy<Mapper>);
           }),
           "driver"_a, "pool"_a)
      .def("submit", &Mapper::submit, "transaction"_a)
      .def(
          "wait", [](Mapper& self, Ticket ticket) { without_lock([&] { self.wait(ticket); }); }, "ticket"_a)
      .def("passed", &Mapper::passed, "ticket"_a)
      .def_prop_ro("last", &Mapper::last)
      .def_prop_ro("failed", &Mapper::failed)
      .def_prop_ro("broken", &Mapper::broken, "Whether a failed transaction is not wholly undone.")
      .def_prop_ro("ruined", &Mapper::ruined, "Whether nothing can mend that.")
      .def(
          "mend",
          [](Mapper& self) {
            bool mended = false;
            without_lock([&] { mended = self.mend(); });
            return mended;
          },
          "Goes on with undoing where a call failed; whether it is done.")
      .def(
          "failures",
          [](Mapper& self) {
            without_lock([&] { self.wait(self.last()); });
            return self.failures();
          },
          "Waits for the log to run dry; then failed and cancelled transactions, oldest first.")
      .def("resume", &Mapper::resume, "Forgets the failures, which were taken back, and lets the log go on.")
      .def("stock", &Mapper::stock, "pages"_a,
           "Memory for this many pages is wanted in stock, as far as the budget has room; what is beyond stays.")
      .def_prop_ro("created", &Mapper::created, "Pages that have memory now, those in stock included.")
      .def_prop_ro("stocked", &Mapper::stocked, "Pages for which there is memory in stock.")
      .def(
          "unstock",
          [](Mapper& self) {
            std::size_t pages = 0;
            without_lock([&] { pages = self.unstock(); });
            return pages;
          },
          "Gives the stock back, and wants none; how many pages that was.")
      .def(
          "check", [](Mapper& self) { without_lock([&] { self.check(); }); },
          "Waits for the log to run dry; then whether all memory is in the books or in stock, within the budget.")
      .def("stop", [](Mapper& self) { without_lock([&] { self.stop(); }); });
}
