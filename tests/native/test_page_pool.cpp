// The books of physical pages.
#include <algorithm>
#include <ctime>
#include <functional>
#include <limits>
#include <set>

#include "check.h"
#include "page_pool.h"
#include "support.h"

using namespace vattn;

namespace {

using Ids = std::vector<PageId>;

void check_counts(const PagePool& pool, std::size_t absent, std::size_t free, std::size_t taken) {
  pool.check();
  const PoolCounts counts = pool.counts();
  CHECK_EQ(counts.absent, absent);
  CHECK_EQ(counts.free, free);
  CHECK_EQ(counts.taken, taken);
}

// Everything that a pool's books say, by draining a copy.
struct Books {
  explicit Books(const PagePool& pool) {
    pool.check();
    const PoolCounts counts = pool.counts();
    for (PageId page = 0; page < counts.budget; ++page) references.push_back(pool.references(page));
    PagePool copy = pool;
    Ids created;
    for (const PageId page : copy.take(counts.free + counts.absent, nullptr, &created)) free.insert(page);
    absent.insert(created.begin(), created.end());
    for (const PageId page : absent) free.erase(page);
  }
  bool operator==(const Books&) const = default;

  std::vector<std::uint32_t> references;
  std::set<PageId> free, absent;
};

}  // namespace

TEST(pages_are_taken_in_sequence_and_created_once) {
  PagePool pool(4096, 8);
  check_counts(pool, 8, 0, 0);
  Ids created;
  CHECK(pool.take(3, nullptr, &created) == (Ids{0, 1, 2}));
  CHECK(created == (Ids{0, 1, 2}));
  check_counts(pool, 5, 0, 3);
  pool.drop(1);
  check_counts(pool, 5, 1, 2);
  created.clear();
  CHECK(pool.take(2, nullptr, &created) == (Ids{1, 3}));  // what is free first
  CHECK(created == (Ids{3}));
  check_counts(pool, 4, 0, 4);
}

TEST(neighbours_are_preferred) {
  PagePool pool(4096, 10);
  Ids created;
  pool.take(10, nullptr, &created);
  for (const PageId page : {0, 2, 3, 6, 7, 8}) pool.drop(page);
  const PageId five = 5, one = 1, nine = 9;
  CHECK(pool.take(2, &five, &created) == (Ids{6, 7}));  // next to `after`, then next to that
  CHECK(pool.take(3, &one, &created) == (Ids{2, 3, 0}));
  CHECK(pool.take(1, &nine, &created) == (Ids{8}));
  CHECK_EQ(created.size(), 10u);

  // Of absent pages as well.
  for (const PageId page : {2, 3, 4, 5}) pool.drop(page);
  pool.remove_free(4);
  created.clear();
  CHECK(pool.take(3, &one, &created) == (Ids{2, 3, 4}));
  CHECK(created == (Ids{2, 3, 4}));
  for (const PageId page : {2, 3, 4}) pool.drop(page);
  pool.remove_free(3);
  const PageId three = 3;
  CHECK(pool.take(3, &three, &created) == (Ids{4, 5, 2}));
  const PageId far = std::numeric_limits<PageId>::max();
  CHECK(pool.take(1, &far, &created) == (Ids{3}));
}

TEST(taking_more_than_there_is_throws_and_takes_nothing) {
  PagePool pool(4096, 4);
  Ids created;
  pool.drop(pool.take(2, nullptr, &created).front());
  const Books before(pool);
  created.clear();
  CHECK_THROWS(std::logic_error, pool.take(4, nullptr, &created));
  CHECK(created.empty());
  CHECK(Books(pool) == before);
  CHECK_EQ(pool.take(3, nullptr, &created).size(), 3u);
  check_counts(pool, 0, 0, 4);
  CHECK_THROWS(std::logic_error, pool.take(1, nullptr, &created));
  CHECK(pool.take(0, nullptr, &created).empty());
}

TEST(a_page_is_free_when_its_last_holder_drops_it) {
  PagePool pool(4096, 2);
  Ids created;
  pool.take(1, nullptr, &created);
  pool.retain(0);
  CHECK_EQ(pool.references(0), 2u);
  pool.drop(0);
  check_counts(pool, 1, 0, 1);
  pool.drop(0);
  check_counts(pool, 1, 1, 0);
  CHECK_THROWS(std::logic_error, pool.drop(0));
  CHECK_THROWS(std::logic_error, pool.drop(1));
  check_counts(pool, 1, 1, 0);
}

TEST(remove_free_takes_free_pages_only) {
  PagePool pool(4096, 6);
  Ids created;
  pool.take(5, nullptr, &created);
  for (const PageId page : {1, 2, 4}) pool.drop(page);
  CHECK(pool.remove_free(0).empty());
  CHECK(pool.remove_free(2) == (Ids{4, 2}));  // the highest, so that what stays is compact
  check_counts(pool, 3, 1, 2);
  CHECK(pool.remove_free(7) == (Ids{1}));
  check_counts(pool, 4, 0, 2);
  CHECK(pool.remove_free(1).empty());
}

TEST(a_page_nobody_holds_cannot_be_retained) {
  PagePool pool(4096, 2);
  CHECK_THROWS(std::logic_error, pool.retain(0));
  pool.check();
}

TEST(a_budget_that_page_indices_cannot_name_is_refused) {
  CHECK_THROWS(std::invalid_argument, PagePool(4096, std::size_t{1} << 40));
  CHECK_THROWS(std::invalid_argument, PagePool(4096, std::size_t{1} << 60));
}

TEST(check_sees_a_broken_law) {
  PagePool retained_while_free(4096, 2);
  Ids created;
  retained_while_free.take(1, nullptr, &created);
  retained_while_free.drop(0);
  retained_while_free.undo_drop(0);
  retained_while_free.check();
  retained_while_free.undo_remove_free({0});  // held and free
  CHECK_THROWS(std::logic_error, retained_while_free.check());

  PagePool miscounted(4096, 2);
  miscounted.take(1, nullptr, &created);
  CHECK_THROWS(std::logic_error, miscounted.undo_drop(1));
  miscounted.drop(0);
  miscounted.remove_free(1);
  miscounted.undo_drop(0);  // held and absent
  CHECK_THROWS(std::logic_error, miscounted.check());
}

TEST(random_operations_keep_the_law_and_undo_exactly) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    Random random(seed);
    const std::size_t budget = 1 + random.below(24);
    PagePool pool(4096, budget);
    std::vector<std::uint32_t> references(budget, 0);  // the model: who holds what, and what has memory
    std::vector<bool> memory(budget, false);
    struct Done {
      Books before;
      std::vector<std::uint32_t> references;
      std::vector<bool> memory;
      std::function<void()> undo;
    };
    std::vector<Done> log;
    const auto some_held = [&] {
      Ids held;
      for (PageId page = 0; page < budget; ++page)
        if (references[page]) held.push_back(page);
      return held.empty() ? std::numeric_limits<PageId>::max() : held[random.below(held.size())];
    };
    for (int step = 0; step < 150; ++step) {
      check::context = "seed " + std::to_string(seed) + ", step " + std::to_string(step);
      Done done{Books(pool), references, memory, nullptr};
      const PoolCounts counts = pool.counts();
      switch (random.below(6)) {
        case 0:
        case 1: {
          const std::size_t count = random.below(std::min<std::size_t>(counts.free + counts.absent, 5) + 1);
          const PageId after = static_cast<PageId>(random.below(budget));
          Ids created;
          const Ids pages = pool.take(count, random.one_in(2) ? &after : nullptr, &created);
          CHECK_EQ(pages.size(), count);
          for (const PageId page : pages) {
            CHECK_EQ(references[page]++, 0u);
            if (memory[page]) CHECK(!std::count(created.begin(), created.end(), page));
          }
          for (const PageId page : created) {
            CHECK(!memory[page]);
            CHECK(std::count(pages.begin(), pages.end(), page));
            memory[page] = true;
          }
          CHECK_EQ(created.size(), count - std::min(count, counts.free));
          done.undo = [&pool, pages, created] { pool.undo_take(pages, created); };
          break;
        }
        case 2:
        case 3: {
          const PageId page = some_held();
          if (page >= budget) continue;
          pool.drop(page);
          references[page] -= 1;
          done.undo = [&pool, page] { pool.undo_drop(page); };
          break;
        }
        case 4: {
          const PageId page = some_held();
          if (page >= budget) continue;
          pool.retain(page);
          references[page] += 1;
          done.undo = [&pool, page] { pool.drop(page); };
          break;
        }
        case 5: {
          const std::size_t count = random.below(4);
          const Ids pages = pool.remove_free(count);
          CHECK_EQ(pages.size(), std::min(count, counts.free));
          for (const PageId page : pages) {
            CHECK(memory[page] && !references[page]);
            memory[page] = false;
          }
          done.undo = [&pool, pages] { pool.undo_remove_free(pages); };
          break;
        }
      }
      log.push_back(std::move(done));
      if (random.one_in(20))
        for (std::size_t back = random.below(8); back-- && !log.empty(); log.pop_back()) {
          log.back().undo();
          CHECK(Books(pool) == log.back().before);
          references = log.back().references;
          memory = log.back().memory;
        }
      Books now(pool);
      CHECK(now.references == references);
      for (PageId page = 0; page < budget; ++page) {
        CHECK_EQ(now.absent.contains(page), !memory[page]);
        CHECK_EQ(now.free.contains(page), memory[page] && !references[page]);
      }
    }
    for (; !log.empty(); log.pop_back()) log.back().undo();
    check_counts(pool, budget, 0, 0);
  }
}

// Made and dropped a hundred thousand times, where a pass over the budget would take minutes.
TEST(a_pool_costs_nothing_for_its_budget) {
  constexpr std::size_t kBudget = PagePool::kForeign;
  const std::clock_t start = std::clock();  // of this process, since others may have the machine
  for (int i = 0; i < 100'000; ++i) {
    PagePool pool(4096, kBudget);
    CHECK_EQ(pool.counts().absent, kBudget);
    CHECK_EQ(pool.references(kBudget - 1), 0u);
    CHECK_EQ(pool.used(), 0u);
    pool.check();
  }
  CHECK(std::clock() - start < 10 * CLOCKS_PER_SEC);
  PagePool pool(4096, kBudget);
  Ids created;
  CHECK_EQ(pool.take(3, nullptr, &created).back(), 2u);
  CHECK_EQ(pool.used(), 3u);
  CHECK_THROWS(std::logic_error, pool.retain(3));
  CHECK_THROWS(std::logic_error, pool.drop(kBudget - 1));
  check_counts(pool, kBudget - 3, 0, 3);
}

// While the worker reads handles the caller takes more pages.
TEST(handles_stay_where_they_are) {
  PagePool pool(4096, 100'000);
  Ids created;
  std::vector<Handle*> places;
  while (places.size() < 100'000) {
    for (const PageId page : pool.take(1000, nullptr, &created)) {
      places.push_back(&pool.handle(page));
      *places.back() = page + 1;
    }
  }
  for (PageId page = 0; page < places.size(); ++page) {
    CHECK_EQ(&pool.handle(page), places[page]);
    CHECK_EQ(*places[page], page + 1);
  }
}

TEST(foreign_pages_have_no_part_in_the_budget) {
  PagePool pool(4096, 2);
  const PageId page = pool.add_foreign(77, 1).at(0);
  CHECK(PagePool::foreign(page));
  CHECK_EQ(pool.references(page), 0u);
  CHECK_THROWS(std::logic_error, pool.drop(page));
  pool.retain(page);
  CHECK_EQ(pool.handle(page), 77u);
  CHECK_THROWS(std::logic_error, pool.remove_foreign(page));
  CHECK(!pool.drop(page));  // not free: it is another's
  pool.undo_drop(page);
  CHECK_EQ(pool.references(page), 1u);
  pool.drop(page);
  CHECK_EQ(pool.counts().absent, 2u);
  pool.check();
  CHECK_EQ(pool.remove_foreign(page), 77u);
  CHECK_EQ(pool.add_foreign(78, 1).at(0), page);
}

TEST(foreign_pages_of_neighbouring_handles_are_added_together) {
  PagePool pool(4096, 2);
  CHECK(pool.add_foreign(5, 0).empty());
  const std::vector<PageId> pages = pool.add_foreign(1000, 5000);
  for (std::size_t i = 0; i < pages.size(); ++i) CHECK_EQ(pool.handle(pages[i]), 1000 + i);
  for (const std::size_t i : {3, 4000, 17}) CHECK_EQ(pool.remove_foreign(pages[i]), 1000 + i);
  std::set<PageId> all(pages.begin(), pages.end());
  const std::vector<PageId> more = pool.add_foreign(9000, 5);  // of which three get indices that were removed
  std::size_t again = 0;
  for (std::size_t i = 0; i < more.size(); ++i) {
    CHECK_EQ(pool.handle(more[i]), 9000 + i);
    again += all.contains(more[i]);
    all.insert(more[i]);
  }
  CHECK_EQ(again, 3u);
  CHECK_EQ(all.size(), 5002u);
  CHECK_EQ(pool.handle(pages[5]), 1005u);
}
