// Address spaces under a mapper: contents through grow, shrink and alias, and failure of every driver call.
#include <algorithm>
#include <set>
#include <utility>

#include "check.h"
#include "support.h"

using namespace vattn;

namespace {

const AddressSpace::Shape kShape{2, 3, 2, 6};  // 4 lanes
constexpr std::size_t kPage = 4096;

// With the log run dry: the last word of every page in the books, by slot, then column, then lane.
using Contents = std::vector<std::vector<std::uint64_t>>;

template <class Visit>
void for_each_page(const World& world, Visit&& visit) {
  const AddressSpace::Shape& shape = world.space->shape();
  for (std::size_t slot = 0; slot < shape.slots; ++slot)
    for (std::size_t column = world.space->first(slot); column < world.space->columns(slot); ++column)
      for (std::size_t lane = 0; lane < world.space->lanes(); ++lane)
        visit(slot, world.at(lane / shape.runs, slot, lane % shape.runs, column) + kPage - 8);
}

Contents contents(const World& world) {
  Contents words(world.space->shape().slots);
  for_each_page(world, [&](std::size_t slot, Address address) { words[slot].push_back(word(address)); });
  return words;
}

// Writes to every page that may be written what is nowhere else, and returns what the pages then hold.
Contents fill(const World& world) {
  static std::uint64_t next = 0;
  for_each_page(world, [&](std::size_t, Address address) {
    const Location location{kLocationHost, 12};
    Flags flags = 0;
    CHECK_EQ(host_vmm().get_access(&flags, &location, address), kSuccess);
    if (flags == static_cast<Flags>(Access::kReadWrite)) word(address) = ++next;
  });
  return contents(world);
}

bool common_prefixes_equal(const Contents& a, const Contents& b) {
  for (std::size_t slot = 0; slot < a.size(); ++slot)
    if (!std::equal(a[slot].begin(), a[slot].begin() + std::min(a[slot].size(), b[slot].size()), b[slot].begin()))
      return false;
  return true;
}

struct Books {
  explicit Books(const World& world) {
    const PoolCounts counts = world.pool->counts();
    absent = counts.absent, free = counts.free, taken = counts.taken;
    for (PageId page = 0; page < counts.budget; ++page) references.push_back(world.pool->references(page));
    for (std::size_t slot = 0; slot < world.space->shape().slots; ++slot) {
      first.push_back(world.space->first(slot));
      columns.push_back(world.space->columns(slot));
    }
  }
  bool operator==(const Books&) const = default;

  std::size_t absent, free, taken;
  std::vector<std::uint32_t> references;
  std::vector<std::size_t> first, columns;
};

// With the log run dry: books, mappings and memory agree. `bytes` is what the process held before the world.
void check_world(const World& world, std::size_t bytes) {
  auto asking = std::exchange(intercept, nullptr);  // the checks' own calls are not the worker's
  world.space->check();
  intercept = std::move(asking);
  world.pool->check();
  const PoolCounts counts = world.pool->counts();
  CHECK_EQ(host_usage().physical_bytes - bytes, (counts.free + counts.taken) * world.pool->page_size());
}

// Takes back what failed, as the caller of a mapper has to.
std::size_t revert_failures(World& world) {
  const auto failures = take_failures(*world.mapper);
  for (auto it = failures.rbegin(); it != failures.rend(); ++it) (*it)->revert();
  return failures.size();
}

}  // namespace

TEST(slots_grow_and_shrink_where_the_formula_says) {
  const std::size_t bytes = host_usage().physical_bytes;
  World world(kShape, 3 * 4 * 6);
  CHECK_EQ(world.space->lanes(), 4u);
  CHECK_EQ(world.space->tensor_bytes(), 3u * 2 * 6 * kPage);
  for (std::size_t slot = 0; slot < 3; ++slot) {
    CHECK(world.grow(slot, slot + 1) == Status::kDone);
    for (std::size_t tensor = 0; tensor < 2; ++tensor)
      for (std::size_t run = 0; run < 2; ++run) {
        const Address start = world.at(tensor, slot, run, 0);
        for (Address address = start; address < start + (slot + 1) * kPage; address += 8) {
          if (word(address)) CHECK(!"memory is new");
          word(address) = address;
        }
        CHECK(write_faults(start + (slot + 1) * kPage));
      }
    check_world(world, bytes);
  }
  for (std::size_t slot = 0; slot < 3; ++slot)
    for (std::size_t tensor = 0; tensor < 2; ++tensor)
      for (std::size_t run = 0; run < 2; ++run)
        for (std::size_t page = 0; page <= slot; ++page)
          CHECK_EQ(word(world.at(tensor, slot, run, page) + 16), world.at(tensor, slot, run, page) + 16);

  const Contents before = fill(world);
  CHECK(world.grow(1, 4) == Status::kDone);  // to the slot's end
  CHECK_EQ(world.space->columns(1), 6u);
  CHECK(common_prefixes_equal(before, contents(world)));
  CHECK(world.shrink(1, 5) == Status::kDone);
  CHECK_EQ(world.space->columns(1), 1u);
  CHECK(common_prefixes_equal(before, contents(world)));
  CHECK(write_faults(world.at(0, 1, 0, 1)));
  CHECK(!write_faults(world.at(0, 1, 0, 0)));
  CHECK_EQ(word(world.at(0, 1, 0, 1)), 0u);
  CHECK(world.shrink(1, 0) == Status::kDone);
  check_world(world, bytes);
  CHECK(world.clear() == Status::kDone);
  check_world(world, bytes);
  CHECK_EQ(host_usage().physical_bytes, bytes);
}

TEST(pages_go_from_slot_to_slot_without_being_created_again) {
  World world(kShape, 4 * 6);
  const auto calls = [&](Call call) { return world.driver->stats(call).count; };
  CHECK(world.grow(0, 6) == Status::kDone);
  CHECK(world.shrink(0, 6) == Status::kDone);
  CHECK(world.grow(2, 6) == Status::kDone);
  CHECK_EQ(calls(Call::kCreate), 24u);
  CHECK_EQ(calls(Call::kMap), 48u);
  CHECK_EQ(calls(Call::kSetAccess), 8u);  // one per lane, not per page
  CHECK_EQ(calls(Call::kUnmap), 4u);
  CHECK_EQ(calls(Call::kReserve), 2u);
  CHECK_EQ(calls(Call::kSetContext), 1u);
  CHECK_EQ(calls(Call::kRelease), 0u);
  CHECK(world.driver->stats(Call::kCreate).nanoseconds > 0);
  CHECK(world.clear() == Status::kDone);
  CHECK_EQ(calls(Call::kRelease), 24u);
}

TEST(pages_that_are_held_are_attached_again_when_no_slot_has_them) {
  World world(kShape, 2 * 4);
  CHECK(world.grow(0, 2) == Status::kDone);
  const Contents before = fill(world);
  const Pages held = world.space->pages(0, 0, 2);
  for (const PageId page : held.ids) world.pool->retain(page);
  CHECK(world.shrink(0, 2) == Status::kDone);
  CHECK_EQ(world.pool->counts().free, 0u);
  check_references(*world.pool, {world.space}, {&held});
  CHECK(world.run([&](Transaction& t) { world.space->attach(t, 2, held, Access::kRead); }) == Status::kDone);
  CHECK(contents(world)[2] == before[0]);
  CHECK(write_faults(world.at(0, 2, 0, 1)));
  check_references(*world.pool, {world.space}, {&held});
  CHECK_THROWS(std::logic_error, check_references(*world.pool, {world.space}, {}));
  for (const PageId page : held.ids) world.pool->drop(page);
  CHECK(world.clear() == Status::kDone);
}

TEST(lanes_grown_at_once_are_few_kernel_mappings) {
  World world({1, 2, 3, 16}, 3 * 16);
  const std::size_t before = host_usage().kernel_mappings;
  CHECK(world.grow(0, 16) == Status::kDone);
  CHECK_EQ(host_usage().kernel_mappings, before + 1);  // the three lanes adjoin here
  CHECK(world.clear() == Status::kDone);
  CHECK_EQ(host_usage().kernel_mappings, before);
}

TEST(a_lane_grows_into_neighbouring_memory) {
  World world({1, 4, 1, 8}, 8);
  CHECK(world.grow(1, 1) == Status::kDone);
  CHECK(world.grow(0, 2) == Status::kDone);
  CHECK(world.grow(2, 1) == Status::kDone);
  CHECK(world.shrink(1, 1) == Status::kDone);
  CHECK(world.shrink(2, 1) == Status::kDone);
  const std::size_t before = host_usage().kernel_mappings;
  CHECK(world.grow(0, 1) == Status::kDone);  // by the page that was slot 2's, not slot 1's
  CHECK_EQ(host_usage().kernel_mappings, before);
  CHECK(world.clear() == Status::kDone);
}

TEST(columns_of_another_shape_are_not_attached) {
  World world(kShape, 4 * 4);
  CHECK(world.grow(0, 3) == Status::kDone);
  const Pages pages = world.space->pages(0, 0, 3), middle = world.space->pages(0, 1, 2);
  CHECK_EQ(pages.columns(), 3u);
  CHECK(pages.part(1, 2).ids == middle.ids);
  CHECK_EQ(pages.part(3, 3).columns(), 0u);
  CHECK_THROWS(std::logic_error, pages.part(2, 4));
  CHECK_THROWS(std::logic_error, pages.part(2, 1));
  Transaction t;
  CHECK_THROWS(std::logic_error, world.space->attach(t, 2, {2, pages.ids}, Access::kRead));
  CHECK_EQ(world.space->columns(2), 0u);
  CHECK_EQ(world.pool->references(pages.ids[0]), 1u);
  CHECK(world.clear() == Status::kDone);
}

// A window that moves on: columns come at the end and go at the front, and what stays is where it was.
TEST(a_slot_gives_back_its_first_columns) {
  const std::size_t bytes = host_usage().physical_bytes;
  World world(kShape, 4 * 3);
  CHECK(world.grow(1, 2) == Status::kDone);
  for (std::size_t first = 1; first <= 4; ++first) {
    const Contents words = fill(world);
    const auto moved = world.submit([&](Transaction& t) {
      world.space->retire(t, 1, 1);
      world.space->grow(t, 1, 1);
    });
    world.mapper->wait(moved->ticket());
    CHECK(moved->status() == Status::kDone);
    CHECK_EQ(world.space->first(1), first);
    CHECK_EQ(world.space->columns(1), first + 2);
    const std::vector<std::uint64_t> before = words[1], after = contents(world)[1];
    CHECK(std::equal(before.begin() + 4, before.end(), after.begin()));
    check_world(world, bytes);
  }
  Transaction t;
  CHECK_THROWS(std::logic_error, world.space->retire(t, 1, 3));
  CHECK_THROWS(std::logic_error, world.space->place(t, 1, 0));        // it has columns
  CHECK_THROWS(std::logic_error, world.space->place(t, 0, 7));        // past the slot's end
  CHECK_THROWS(std::logic_error, (void)world.space->pages(1, 3, 5));  // has left
  CHECK(t.empty());
  CHECK(world.clear() == Status::kDone);
  check_world(world, bytes);
}

TEST(aliases_show_the_same_memory) {
  const std::size_t bytes = host_usage().physical_bytes;
  World world(kShape, 4 * 6);
  CHECK(world.grow(0, 3) == Status::kDone);
  fill(world);
  CHECK(world.alias(1, 0, 2, Access::kRead) == Status::kDone);
  CHECK(world.grow(1, 2) == Status::kDone);  // two that are shared, two of its own
  Contents now = fill(world);
  CHECK_EQ(world.pool->counts().taken, 4u * 5);
  CHECK(std::equal(now[0].begin(), now[0].begin() + 8, now[1].begin()));
  CHECK(now[0][8] != now[1][8]);
  CHECK(write_faults(world.at(1, 1, 1, 1)));
  CHECK(!write_faults(world.at(1, 1, 1, 2)));
  word(world.at(0, 0, 1, 1)) = 99;
  CHECK_EQ(word(world.at(0, 1, 1, 1)), 99u);
  check_world(world, bytes);

  // Appends what the slot lacks, writable if asked for.
  CHECK(world.shrink(1, 3) == Status::kDone);
  CHECK(world.alias(1, 0, 3, Access::kReadWrite) == Status::kDone);
  CHECK_EQ(world.space->columns(1), 3u);
  now = fill(world);
  CHECK(now[0] == now[1]);
  CHECK(write_faults(world.at(0, 1, 0, 0)));
  word(world.at(0, 1, 0, 2)) = 98;
  CHECK_EQ(word(world.at(0, 0, 0, 2)), 98u);
  CHECK(world.alias(1, 0, 3, Access::kRead) == Status::kDone);  // there is nothing to append
  CHECK(world.alias(1, 0, 0, Access::kRead) == Status::kDone);
  check_world(world, bytes);

  // An alias of an alias outlives both.
  CHECK(world.alias(2, 1, 3, Access::kRead) == Status::kDone);
  now = contents(world);
  CHECK(world.shrink(0, 3) == Status::kDone);
  CHECK(world.shrink(1, 3) == Status::kDone);
  CHECK(contents(world)[2] == now[0]);
  CHECK_EQ(word(world.at(0, 2, 0, 2)), 98u);
  CHECK_EQ(world.pool->counts().taken, 4u * 3);
  check_world(world, bytes);
  CHECK(world.clear() == Status::kDone);
  check_world(world, bytes);
}

TEST(what_has_no_room_throws_and_changes_nothing) {
  World world(kShape, 4 * 7);
  CHECK(world.grow(0, 5) == Status::kDone);
  CHECK(world.alias(1, 0, 1, Access::kRead) == Status::kDone);
  const Books before(world);
  Transaction t;
  CHECK_THROWS(std::logic_error, world.space->grow(t, 0, 2));                      // past the slot's end
  CHECK_THROWS(std::logic_error, world.space->grow(t, 2, 3));                      // past the budget, in the third lane
  CHECK_THROWS(std::logic_error, world.space->shrink(t, 0, 6));                    // below nothing
  CHECK_THROWS(std::logic_error, alias(*world.space, t, 2, 0, 6, Access::kRead));  // more than the source has
  CHECK_THROWS(std::out_of_range, world.space->grow(t, 3, 1));
  CHECK_THROWS(std::out_of_range, world.space->shrink(t, 3, 0));
  CHECK_THROWS(std::out_of_range, alias(*world.space, t, 3, 0, 1, Access::kRead));
  CHECK_THROWS(std::out_of_range, alias(*world.space, t, 2, 3, 1, Access::kRead));
  CHECK(t.empty());
  CHECK(Books(world) == before);
  world.space->check();
  CHECK(world.clear() == Status::kDone);
}

TEST(a_transaction_never_submitted_can_be_reverted) {
  const std::size_t bytes = host_usage().physical_bytes;
  World world(kShape, 4 * 8);
  CHECK(world.grow(0, 2) == Status::kDone);
  const Contents words = fill(world);
  const Books before(world);
  Transaction t;
  CHECK(t.empty());
  world.space->grow(t, 0, 2);
  alias(*world.space, t, 1, 0, 3, Access::kRead);
  world.space->shrink(t, 0, 3);
  release_free(*world.pool, t, 100);
  CHECK(!t.empty());
  CHECK(!(Books(world) == before));
  t.revert();
  CHECK(Books(world) == before);
  t.revert();  // has nothing left to take back
  CHECK(Books(world) == before);
  CHECK(contents(world) == words);
  check_world(world, bytes);
  CHECK(world.clear() == Status::kDone);
}

TEST(check_sees_what_the_books_do_not_say) {
  World world(kShape, 4 * 6);
  CHECK(world.grow(0, 2) == Status::kDone);
  CHECK(world.alias(1, 0, 1, Access::kRead) == Status::kDone);
  const Vmm& vmm = host_vmm();
  const AccessDesc read{{kLocationHost, 12}, 1}, write{{kLocationHost, 12}, 3};
  const Address page = world.at(1, 0, 1, 1), past = world.at(1, 0, 1, 2);
  Handle handle = 0, other = 0;
  CHECK_EQ(vmm.retain_handle(&handle, reinterpret_cast<void*>(page)), kSuccess);
  CHECK_EQ(vmm.retain_handle(&other, reinterpret_cast<void*>(page - kPage)), kSuccess);
  world.space->check();
  CHECK_EQ(vmm.set_access(page, kPage, &read, 1), kSuccess);
  CHECK_THROWS(std::logic_error, world.space->check());
  CHECK_EQ(vmm.unmap(page, kPage), kSuccess);
  CHECK_THROWS(std::logic_error, world.space->check());
  CHECK_EQ(vmm.map(page, kPage, 0, other, 0), kSuccess);
  CHECK_EQ(vmm.set_access(page, kPage, &write, 1), kSuccess);
  CHECK_THROWS(std::logic_error, world.space->check());
  CHECK_EQ(vmm.unmap(page, kPage), kSuccess);
  CHECK_EQ(vmm.map(page, kPage, 0, handle, 0), kSuccess);
  CHECK_EQ(vmm.set_access(page, kPage, &write, 1), kSuccess);
  world.space->check();
  CHECK_EQ(vmm.map(past, kPage, 0, handle, 0), kSuccess);
  CHECK_THROWS(std::logic_error, world.space->check());
  CHECK_EQ(vmm.unmap(past, kPage), kSuccess);
  world.space->check();
  CHECK_EQ(vmm.release(handle), kSuccess);
  CHECK_EQ(vmm.release(other), kSuccess);
  CHECK(world.clear() == Status::kDone);
}

TEST(a_space_that_cannot_be_reserved_leaves_nothing_reserved) {
  const HostUsage before = host_usage();
  for (std::size_t n = 1; n <= 3; ++n) {
    std::size_t calls = 0;
    const Interception fault(
        [&](Call call) { return call == Call::kReserve && ++calls == n ? kOutOfMemory : kSuccess; });
    const auto driver = std::make_shared<Driver>(intercepted_vmm(), host_prop(12), nullptr, 0, kMapRestore);
    const auto pool = std::make_shared<PagePool>(kPage, 1);
    bool thrown = false;
    try {
      AddressSpace space(driver, pool, {3, 1, 1, 4});
    } catch (const DriverFailure& failure) {
      thrown = true;
      CHECK(failure.call == Call::kReserve);
      CHECK_EQ(failure.result, kOutOfMemory);
      CHECK_EQ(std::string(failure.what()), "cuMemAddressReserve failed with CUDA_ERROR_OUT_OF_MEMORY (2)");
    }
    CHECK(thrown);
    CHECK_EQ(host_usage().reservations, before.reservations);
  }
}

TEST(a_space_unmaps_what_is_mapped_when_it_goes) {
  const HostUsage before = host_usage();
  for (const bool fail : {false, true}) {
    World world(kShape, 4 * 6, intercepted_vmm());
    CHECK(world.grow(0, 3) == Status::kDone);
    CHECK(world.alias(1, 0, 2, Access::kRead) == Status::kDone);
    std::size_t maps = 0;
    const Interception fault(
        [&](Call call) { return fail && call == Call::kMap && ++maps == 3 ? kUnknown : kSuccess; });
    // Where it fails nobody collects the failure: what was decided is in the books, and did not happen.
    CHECK(world.grow(0, 2) == (fail ? Status::kFailed : Status::kDone));
    CHECK(world.shrink(1, 1) == (fail ? Status::kCancelled : Status::kDone));
    world.mapper.reset();
    world.space.reset();
    CHECK_EQ(host_usage().reservations, before.reservations);
    CHECK_EQ(host_usage().kernel_mappings, before.kernel_mappings);
  }
}

namespace {

// A sequence with every kind of operation, several to a transaction, pages of both rights, shared and created anew.
struct Step {
  const char* name;
  World::Decide decide;
};

std::vector<Step> script(World& world) {
  AddressSpace& space = *world.space;
  PagePool& pool = *world.pool;
  return {
      {"grow", [&](Transaction& t) { space.grow(t, 0, 3); }},
      {"alias", [&](Transaction& t) { alias(space, t, 1, 0, 2, Access::kRead); }},
      {"grow behind an alias", [&](Transaction& t) { space.grow(t, 1, 2); }},
      {"shrink the source", [&](Transaction& t) { space.shrink(t, 0, 2); }},
      {"release", [&](Transaction& t) { release_free(pool, t, 3); }},
      {"grow two", [&](Transaction& t) { space.grow(t, 2, 1), space.grow(t, 0, 1); }},
      {"nothing", [](Transaction&) {}},
      {"shrink over own and aliased columns", [&](Transaction& t) { space.shrink(t, 1, 3); }},
      {"shrink, release, grow and alias",
       [&](Transaction& t) {
         space.shrink(t, 2, 1);
         release_free(pool, t, 100);
         space.grow(t, 0, 1);
         alias(space, t, 1, 0, 3, Access::kReadWrite);
       }},
      {"release and create again",
       [&](Transaction& t) {
         release_free(pool, t, 100);
         space.grow(t, 2, 2);
       }},
      {"clear",
       [&](Transaction& t) {
         for (std::size_t slot = 0; slot < 3; ++slot) space.shrink(t, slot, space.columns(slot));
         release_free(pool, t, 100);
       }},
  };
}

constexpr Result kCodes[]{kOutOfMemory, kUnknown, kInvalidValue, kMapFailed};

// Fails the calls whose numbers, from 1, are chosen; remembers which kind the first of them was.
struct Faulty {
  std::set<std::size_t> chosen;
  Result code;
  std::size_t calls = 0, failures = 0;
  Call failed_call = Call::kMap;
  Result operator()(Call call) {
    if (call == Call::kReserve || call == Call::kFree) return kSuccess;
    if (!chosen.contains(++calls)) return kSuccess;
    if (failures++ == 0) failed_call = call;
    return code;
  }
};

// Releases that failed are made again with the next transaction.
void tidy(World& world) {
  CHECK(world.run([](Transaction&) {}) == Status::kDone);
}

}  // namespace

// One transaction at a time: the one that fails leaves everything as it was, and succeeds when it is tried again.
TEST(the_nth_call_fails_for_every_n) {
  const HostUsage before = host_usage();
  std::set<Call> kinds;
  for (std::size_t n = 1;; ++n) {
    World world(kShape, 4 * 6, intercepted_vmm());
    Faulty faulty{{n}, kCodes[n % 4]};
    const Interception fault(std::ref(faulty));
    for (const Step& step : script(world)) {
      check::context = "call " + std::to_string(n) + " fails, at: " + step.name;
      const Books books(world);
      const Contents words = fill(world);
      const auto transaction = world.submit(step.decide);
      world.mapper->wait(transaction->ticket());
      if (transaction->status() != Status::kDone) {
        CHECK(transaction->status() == Status::kFailed);
        CHECK(transaction->failed_call() == faulty.failed_call);
        CHECK_EQ(transaction->failed_result(), faulty.code);
        CHECK_EQ(faulty.failures, 1u);
        CHECK(world.mapper->failed());
        CHECK_EQ(revert_failures(world), 1u);
        CHECK(!world.mapper->failed());
        CHECK(!world.mapper->broken());
        CHECK(Books(world) == books);
        CHECK(faulty.failed_call != Call::kRelease);
        check_world(world, before.physical_bytes);
        CHECK(contents(world) == words);
        fill(world);
        CHECK(world.run(step.decide) == Status::kDone);
      } else {
        CHECK(common_prefixes_equal(words, contents(world)));
      }
      tidy(world);
      check_world(world, before.physical_bytes);
    }
    CHECK_EQ(host_usage().physical_bytes, before.physical_bytes);
    if (!faulty.failures) break;
    kinds.insert(faulty.failed_call);
  }
  CHECK(kinds == std::set({Call::kCreate, Call::kRelease, Call::kMap, Call::kUnmap, Call::kSetAccess}));
  CHECK_EQ(host_usage().reservations, before.reservations);
}

// All of them in the log at once: what comes after the failed one is cancelled, and taken back with it.
TEST(the_nth_call_fails_with_the_log_full_for_every_n) {
  const HostUsage before = host_usage();
  for (std::size_t n = 1;; ++n) {
    check::context = "call " + std::to_string(n) + " fails";
    World world(kShape, 4 * 6, intercepted_vmm());
    Faulty faulty{{n}, kCodes[n % 4]};
    const Interception fault(std::ref(faulty));
    const std::vector<Step> steps = script(world);
    std::vector<Books> books;
    std::vector<std::shared_ptr<Transaction>> submitted;
    for (const Step& step : steps) {
      books.emplace_back(world);
      submitted.push_back(world.submit(step.decide));
    }
    const auto failures = take_failures(*world.mapper);
    std::size_t done = 0;
    while (done < submitted.size() && submitted[done]->status() == Status::kDone) ++done;
    for (std::size_t i = done; i < submitted.size(); ++i)
      CHECK(submitted[i]->status() == (i == done ? Status::kFailed : Status::kCancelled));
    CHECK(failures == std::vector(submitted.begin() + static_cast<std::ptrdiff_t>(done), submitted.end()));
    for (auto it = failures.rbegin(); it != failures.rend(); ++it) (*it)->revert();
    CHECK(!world.mapper->broken());
    tidy(world);
    check_world(world, before.physical_bytes);
    if (!faulty.failures) break;
    CHECK_EQ(failures.empty(), faulty.failed_call == Call::kRelease);
    if (!failures.empty()) CHECK(Books(world) == books.at(done));
    for (std::size_t i = done; i < steps.size(); ++i) CHECK(world.run(steps[i].decide) == Status::kDone);
    check_world(world, before.physical_bytes);
    CHECK_EQ(host_usage().physical_bytes, before.physical_bytes);
  }
  CHECK_EQ(host_usage().reservations, before.reservations);
}

// Calls n and n + k fail: the mapper is broken exactly if the second was part of undoing the first, until that is done.
TEST(an_undo_that_fails_is_reported_and_mended) {
  const std::size_t bytes = host_usage().physical_bytes;
  std::size_t broken = 0;
  for (std::size_t n = 1, failures = 1; failures; ++n) {
    for (std::size_t k = 1; k == 1 || failures == 2; ++k) {
      check::context = "calls " + std::to_string(n) + " and " + std::to_string(n + k) + " fail";
      World world({1, 3, 2, 6}, 2 * 6, intercepted_vmm());
      CHECK(world.grow(0, 3) == Status::kDone);
      CHECK(world.alias(1, 0, 1, Access::kRead) == Status::kDone);
      CHECK(world.shrink(0, 1) == Status::kDone);
      const Books books(world);
      const Contents words = fill(world);
      Faulty faulty{{n, n + k}, kUnknown};
      std::set<Call> failed;
      {
        const Interception fault([&](Call call) {
          const Result result = faulty(call);
          if (result != kSuccess) failed.insert(call);
          return result;
        });
        const Status status = world.run([&](Transaction& t) {
          release_free(*world.pool, t, 1);
          world.space->grow(t, 1, 2);
          world.space->shrink(t, 1, 3);
          world.space->grow(t, 2, 1);
        });
        failures = faulty.failures;
        const bool undone = failures && faulty.failed_call != Call::kRelease;
        CHECK(status == (undone ? Status::kFailed : Status::kDone));
        const bool breaks = undone && failures == 2 && !failed.contains(Call::kRelease);
        CHECK_EQ(world.mapper->broken(), breaks);
        broken += breaks;
      }
      CHECK(!world.mapper->ruined());
      CHECK(world.mapper->mend());
      CHECK(!world.mapper->broken());
      const bool undone = revert_failures(world) > 0;
      tidy(world);
      check_world(world, bytes);
      if (undone) {
        CHECK(Books(world) == books);
        CHECK(contents(world) == words);
      }
      CHECK(world.clear() == Status::kDone);
    }
  }
  CHECK(broken > 50);
}

TEST(a_context_that_cannot_be_set_fails_every_transaction) {
  Vmm table = host_vmm();
  table.set_context = [](void*) -> Result { return kInvalidContext; };
  World world(kShape, 4 * 6, table);
  const Books before(world);
  for (int round = 0; round < 2; ++round) {
    const auto failed = world.submit([&](Transaction& t) { world.space->grow(t, 0, 1); });
    const auto cancelled = world.submit([&](Transaction& t) { world.space->shrink(t, 0, 1); });
    CHECK_EQ(revert_failures(world), 2u);
    CHECK(failed->status() == Status::kFailed);
    CHECK(failed->failed_call() == Call::kSetContext);
    CHECK_EQ(failed->failed_result(), kInvalidContext);
    CHECK(cancelled->status() == Status::kCancelled);
    CHECK(Books(world) == before);
  }
  CHECK_EQ(world.driver->stats(Call::kCreate).count, 0u);
}

// Random transactions, several in the log at once, some of which fail.
TEST(random_transactions_with_random_faults_keep_books_and_mappings_together) {
  const HostUsage before = host_usage();
  std::size_t failures = 0;
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    Random random(seed), chance(seed + 1000);  // the caller's, the worker's
    World world({2, 4, 1, 8}, 2 * 14, intercepted_vmm());
    bool faulty = false;  // since the last reverts: undoing does not fail here
    const Interception fault([&](Call call) {
      const bool fails = !faulty && chance.one_in(60);
      faulty = faulty || (fails && call != Call::kRelease);  // one that fails is made again later
      return fails ? kOutOfMemory : kSuccess;
    });
    const auto decide = [&](Transaction& t) {
      for (std::size_t operations = 1 + random.below(3); operations--;) {
        const std::size_t slot = random.below(4), source = random.below(4);
        const std::size_t columns = world.space->columns(slot);
        const PoolCounts counts = world.pool->counts();
        const std::size_t mapped = columns - world.space->first(slot);
        switch (random.below(7)) {
          case 0:
          case 1:
            world.space->grow(t, slot, random.below(std::min((counts.free + counts.absent) / 2, 8 - columns) + 1));
            break;
          case 2:
            world.space->shrink(t, slot, random.below(mapped + 1));
            break;
          case 3:
            world.space->retire(t, slot, random.below(mapped + 1));
            break;
          case 4:
            if (mapped) break;
            world.space->place(t, slot, random.below(9));
            break;
          case 5:
            if (slot == source || std::max(columns, world.space->first(source)) != columns) break;
            alias(*world.space, t, slot, source, random.below(world.space->columns(source) + 1),
                  random.one_in(2) ? Access::kRead : Access::kReadWrite);
            break;
          default:
            release_free(*world.pool, t, random.below(4));
        }
      }
    };
    for (int round = 0; round < 60; ++round) {
      check::context = "seed " + std::to_string(seed) + ", round " + std::to_string(round);
      std::vector<Books> books;
      std::vector<std::shared_ptr<Transaction>> submitted;
      for (std::size_t count = 1 + random.below(4); submitted.size() < count;) {
        books.emplace_back(world);
        submitted.push_back(world.submit(decide));
      }
      const std::size_t failed = revert_failures(world);
      const std::size_t done = submitted.size() - failed;
      for (std::size_t i = 0; i < submitted.size(); ++i) {
        const Status expected = i < done ? Status::kDone : i == done ? Status::kFailed : Status::kCancelled;
        CHECK(submitted[i]->status() == expected);
      }
      if (failed) CHECK(Books(world) == books[done]);
      CHECK_EQ(faulty, failed > 0);
      CHECK(!world.mapper->broken());
      faulty = true;
      tidy(world);
      check_world(world, before.physical_bytes);
      failures += failed > 0;
      faulty = false;
    }
    faulty = true;
    CHECK(world.clear() == Status::kDone);
    CHECK_EQ(host_usage().physical_bytes, before.physical_bytes);
  }
  CHECK(failures > 20);
}

// With the table of mappings full, a transaction fails at its map, and undoing it has to put mappings back.
TEST(a_full_table_of_mappings_fails_a_transaction_without_breaking_the_mapper) {
  constexpr std::size_t kPage = 4096, kMost = 70'000;
  const AllocationProp prop = host_prop(12);
  for (std::size_t spare = 0; spare < 8; ++spare) {
    World world({1, 3, 1, 64}, 100);
    CHECK(world.grow(0, 8) == Status::kDone);
    Address base = 0;
    Handle handle = 0;
    CHECK_EQ(host_vmm().address_reserve(&base, 2 * kMost * kPage, 0, 0, 0), kSuccess);
    CHECK_EQ(host_vmm().create(&handle, kPage, &prop, 0), kSuccess);
    std::size_t filled = 0;
    while (host_vmm().map(base + 2 * filled * kPage, kPage, 0, handle, 0) == kSuccess) ++filled;
    for (std::size_t i = 0; i < spare / 2; ++i)
      CHECK_EQ(host_vmm().unmap(base + 2 * --filled * kPage, kPage), kSuccess);
    const auto transaction = world.submit([&](Transaction& t) {
      world.space->shrink(t, 0, 4);
      world.space->grow(t, 2, 1);
      alias(*world.space, t, 1, 2, 1, Access::kRead);
    });
    world.mapper->wait(transaction->ticket());
    CHECK(!world.mapper->broken());
    for (const auto& failure : take_failures(*world.mapper)) failure->revert();
    world.space->check();
    while (filled-- > 0) CHECK_EQ(host_vmm().unmap(base + 2 * filled * kPage, kPage), kSuccess);
    CHECK_EQ(host_vmm().release(handle), kSuccess);
    CHECK_EQ(host_vmm().address_free(base, 2 * kMost * kPage), kSuccess);
    CHECK(world.clear() == Status::kDone);
  }
}

// With zero_on_free

namespace {

// With the log run dry: whether every page that has memory and no holder is zero.
bool free_pages_are_zero(World& world) {
  auto asking = std::exchange(intercept, nullptr);
  const std::size_t page_size = world.pool->page_size();
  const Vmm& vmm = host_vmm();
  const AccessDesc read{{kLocationHost, 12}, 1};
  PagePool copy = *world.pool;
  bool zero = true;
  Address address = 0;
  CHECK_EQ(vmm.address_reserve(&address, page_size, page_size, 0, 0), kSuccess);
  std::vector<PageId> created;
  for (const PageId page : copy.take(copy.counts().free, nullptr, &created)) {
    CHECK_EQ(vmm.map(address, page_size, 0, world.pool->handle(page), 0), kSuccess);
    CHECK_EQ(vmm.set_access(address, page_size, &read, 1), kSuccess);
    for (std::size_t i = 0; i < page_size; i += 8) zero = zero && word(address + i) == 0;
    CHECK_EQ(vmm.unmap(address, page_size), kSuccess);
  }
  CHECK_EQ(vmm.address_free(address, page_size), kSuccess);
  intercept = std::move(asking);
  return zero;
}

World::Decide change(World& world, std::size_t slot, std::size_t less, std::size_t grown, std::size_t more) {
  return [&world, slot, less, grown, more](Transaction& t) {
    world.space->shrink(t, slot, less);
    world.space->grow(t, grown, more);
  };
}

}  // namespace

TEST(freed_pages_are_zero_before_anybody_has_them) {
  for (const bool zero_on_free : {false, true}) {
    const std::size_t bytes = host_usage().physical_bytes;
    World world(kShape, 4 * 6, host_vmm(), 12, zero_on_free);
    CHECK(world.grow(0, 4) == Status::kDone);
    const Contents before = fill(world);
    CHECK(world.alias(1, 0, 4, Access::kRead) == Status::kDone);
    CHECK(world.shrink(0, 4) == Status::kDone);
    CHECK(contents(world)[1] == before[0]);  // a holder is left
    CHECK(world.shrink(1, 2) == Status::kDone);
    CHECK_EQ(world.pool->counts().free, 4u * 2);
    CHECK_EQ(free_pages_are_zero(world), zero_on_free);
    CHECK(world.run(change(world, 1, 2, 2, 6)) == Status::kDone);  // freed and taken again at once
    const Contents after = contents(world);
    CHECK_EQ(after[2] == std::vector<std::uint64_t>(4 * 6, 0), zero_on_free);
    check_world(world, bytes);
    CHECK(world.clear() == Status::kDone);
    check_world(world, bytes);
    CHECK_EQ(world.driver->stats(Call::kMemset).count > 0, zero_on_free);
  }
}

TEST(zeroing_takes_place_once_per_transaction) {
  World world(kShape, 4 * 6, host_vmm(), 12, true);
  CHECK(world.grow(0, 6) == Status::kDone);
  CHECK(world.shrink(0, 6) == Status::kDone);
  CHECK_EQ(world.driver->stats(Call::kMemset).count, 1u);
  CHECK(world.grow(1, 6) == Status::kDone);
  CHECK_EQ(world.driver->stats(Call::kMemset).count, 1u);
  CHECK(world.clear() == Status::kDone);
}

// What the worker cannot give back when it ends goes with the next address space.
TEST(what_fails_when_the_worker_ends_is_given_back_later) {
  for (const Call failing : {Call::kRelease, Call::kUnmap, Call::kFree}) {
    check::context = std::string(call_name(failing)) + " fails";
    const HostUsage before = host_usage();
    World world(kShape, 4 * 6, intercepted_vmm(), 12, true);
    CHECK(world.grow(0, 2) == Status::kDone);
    {
      bool zeroed = false;
      const Interception fault([&](Call call) {
        zeroed = zeroed || call == Call::kMemset;
        return zeroed && call == failing ? kUnknown : kSuccess;
      });
      CHECK(world.shrink(0, 2) == Status::kDone);
      CHECK(world.run([&](Transaction& t) { release_free(*world.pool, t, 4 * 2); }) == Status::kDone);
      CHECK(zeroed);
      world.mapper.reset();
    }
    CHECK(host_usage().physical_bytes > before.physical_bytes || host_usage().reservations > before.reservations + 2);
    world.space.reset();
    CHECK_EQ(host_usage().physical_bytes, before.physical_bytes);
    CHECK_EQ(host_usage().handles, before.handles);
    CHECK_EQ(host_usage().reservations, before.reservations);
    CHECK_EQ(host_usage().kernel_mappings, before.kernel_mappings);
  }
}

// Whatever fails: a page that stays with its holder keeps its contents, and one that is free is zero.
TEST(with_zeroing_the_nth_call_fails_for_every_n) {
  const HostUsage before = host_usage();
  std::set<Call> failed, survived;
  bool broke = false;
  for (std::size_t n = 1;; ++n) {
    World world(kShape, 4 * 6, intercepted_vmm(), 12, true);
    std::size_t calls = 0, failures = 0;
    Call which = Call::kMap;
    const Interception fault([&](Call call) {
      if (++calls != n) return Result{kSuccess};
      ++failures, which = call;
      return kCodes[n % 4];
    });
    bool broken = false;
    for (const Step& step : script(world)) {
      check::context = "call " + std::to_string(n) + " fails, at: " + step.name;
      const Books books(world);
      const Contents words = fill(world);
      const std::size_t failures_before = failures;
      const auto transaction = world.submit(step.decide);
      world.mapper->wait(transaction->ticket());
      if (transaction->status() != Status::kDone) {
        CHECK(transaction->status() == Status::kFailed);
        CHECK(transaction->failed_call() == which);
        failed.insert(which);
        CHECK_EQ(revert_failures(world), 1u);
        CHECK(Books(world) == books);
        broken = world.mapper->broken();
        // Once zeroing began it cannot be taken back: the pool refuses to go on.
        CHECK_EQ(broken, which == Call::kEventRecord || which == Call::kEventSynchronize);
        broke = broke || broken;
        if (broken) break;
        CHECK(contents(world) == words);
        fill(world);
        CHECK(world.run(step.decide) == Status::kDone);
      } else {
        if (failures > failures_before) survived.insert(which);
        CHECK(common_prefixes_equal(words, contents(world)));
      }
      tidy(world);
      check_world(world, before.physical_bytes);
      CHECK(free_pages_are_zero(world));
    }
    if (!failures) break;
    world.mapper.reset();
    world.space.reset();
    CHECK_EQ(host_usage().reservations, before.reservations);
    if (broken)
      for (PageId page = 0; page < world.pool->used(); ++page) host_vmm().release(world.pool->handle(page));
    CHECK_EQ(host_usage().physical_bytes, before.physical_bytes);
  }
  CHECK(broke);
  CHECK(failed.contains(Call::kMemset) && failed.contains(Call::kReserve) && failed.contains(Call::kMap));
  CHECK(survived == std::set({Call::kUnmap, Call::kFree, Call::kRelease}));  // they are made again
}
