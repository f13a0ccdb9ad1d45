// What failed calls left behind of things that are gone: reservations, mappings and memory that could not be given back
// in their time. Each is tried again when the next address space is made or goes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "driver.h"

namespace vattn {

struct Remains {
  std::shared_ptr<Driver> driver;
  std::size_t page_size = 0, base_bytes = 0;
  std::vector<Address> bases = {};   // reservations of `base_bytes`
  std::vector<Address> mapped = {};  // pages in them
  std::vector<Handle> handles = {};

  // False if something has to wait: for a capture to end, or until a call that failed succeeds.
  bool give_back();
};

void leave_behind(Remains remains);
// Tries to give back everything that is left behind.
void give_back_left_behind();

}  // namespace vattn
