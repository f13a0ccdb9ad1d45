// Entries of a directory, as bytes that somebody else has written.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

#include "check.h"
#include "entries.h"

using namespace vattn;

namespace {

constexpr std::size_t kTokenBytes = 16, kEntryBytes = kKeyBytes + 8 + kTokenBytes + 2 * 8 + 8;

std::string key(int number) { return std::string(kKeyBytes, static_cast<char>('a' + number)); }
std::string tokens(int number) { return std::string(kTokenBytes, static_cast<char>('A' + number)); }
std::string offsets(int number) { return std::string(16, static_cast<char>(number)); }

std::string entry(int number) {
  std::string body = key(number) + std::string(8, '\7') + tokens(number) + offsets(number);
  const std::uint64_t sum = checksum(body);
  return body.append(reinterpret_cast<const char*>(&sum), sizeof sum);
}

struct Run {
  explicit Run(int count) {
    for (int i = 0; i < count; ++i) {
      entries += entry(i);
      keys += key(i);
      ids += tokens(i);
      expected += offsets(i);
    }
  }
  std::string found() const { return entry_offsets(entries, kEntryBytes, keys, ids, kTokenBytes); }
  std::string entries, keys, ids, expected;
};

}  // namespace

TEST(entries_are_read_as_far_as_there_are_some) {
  const Run run(3);
  CHECK_EQ(run.found(), run.expected);
  for (std::size_t size = 0; size <= run.entries.size(); ++size) {
    const std::string_view some = std::string_view(run.entries).substr(0, size);
    CHECK_EQ(entries_alike(some, kEntryBytes, run.keys), size / kEntryBytes);
    CHECK_EQ(entry_offsets(some, kEntryBytes, run.keys, run.ids, kTokenBytes),
             run.expected.substr(0, size / kEntryBytes * 16));
  }
  CHECK_EQ(entries_alike(run.entries, kEntryBytes, run.keys.substr(0, 2 * kKeyBytes + 5)), 2u);
  CHECK_EQ(entry_offsets(run.entries, kEntryBytes, run.keys, run.ids.substr(0, 20), kTokenBytes),
           run.expected.substr(0, 16));
}

TEST(entries_of_a_file_are_alike_if_the_last_one_is) {
  Run run(4);
  run.entries.replace(kEntryBytes, kEntryBytes, kEntryBytes, '\0');  // which whoever reads them finds
  const int file = memfd_create("entries", MFD_CLOEXEC);
  const std::string text = "head" + run.entries;
  CHECK_EQ(pwrite(file, text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  CHECK(read_piece(file, 4, run.entries.size()).view() == run.entries);
  CHECK(read_piece(file, 4 + kEntryBytes, 10 * kEntryBytes).view() == run.entries.substr(kEntryBytes));
  CHECK_EQ(entries_alike(file, 4, kEntryBytes, run.keys), 4u);
  CHECK_EQ(entries_alike(file, 4, kEntryBytes, run.keys.substr(0, 2 * kKeyBytes)), 1u);
  CHECK_EQ(entries_alike(file, 4, kEntryBytes, run.keys + key(4)), 1u);
  CHECK_EQ(entries_alike(file, 4 + 4 * kEntryBytes, kEntryBytes, run.keys), 0u);
  CHECK_EQ(entries_alike(file, 4, kEntryBytes, ""), 0u);
  CHECK_THROWS(std::system_error, entries_alike(-1, 4, kEntryBytes, run.keys));
  close(file);
}

TEST(offsets_of_entries_in_a_file_are_those_of_all_of_them_as_far_as_they_go) {
  const int many = 500, wrong = 321;  // more than are read at once
  Run run(many);
  const int file = memfd_create("entries", MFD_CLOEXEC);
  CHECK_EQ(pwrite(file, run.entries.data(), run.entries.size(), 0), static_cast<ssize_t>(run.entries.size()));
  const auto found = [&](int from, std::string_view keys, std::string_view ids) {
    return entry_offsets(file, from * static_cast<off_t>(kEntryBytes), kEntryBytes, keys, ids, kTokenBytes);
  };
  CHECK(found(0, run.keys, run.ids) == run.expected);
  CHECK(found(7, run.keys.substr(7 * kKeyBytes), run.ids.substr(7 * kTokenBytes)) == run.expected.substr(7 * 16));
  for (const int few : {0, 1, wrong}) {
    CHECK(found(0, run.keys.substr(0, few * kKeyBytes), run.ids) == run.expected.substr(0, few * 16));
    CHECK(found(0, run.keys, run.ids.substr(0, few * kTokenBytes)) == run.expected.substr(0, few * 16));
  }
  CHECK_EQ(pwrite(file, "?", 1, wrong * kEntryBytes + kKeyBytes), 1);
  CHECK(found(0, run.keys, run.ids) == run.expected.substr(0, wrong * 16));
  CHECK_THROWS(std::system_error, entry_offsets(-1, 0, kEntryBytes, run.keys, run.ids, kTokenBytes));
  close(file);
}

TEST(an_entry_of_which_any_bit_is_another_is_none) {
  const Run run(3);
  for (std::size_t at = kEntryBytes; at < 2 * kEntryBytes; ++at)
    for (int bit = 0; bit < 8; ++bit) {
      Run changed = run;
      changed.entries[at] = static_cast<char>(changed.entries[at] ^ (1 << bit));
      CHECK_EQ(changed.found(), run.expected.substr(0, 16));
    }
}

TEST(an_erased_entry_and_one_that_was_never_written_are_none) {
  Run run(1);
  run.entries.assign(kEntryBytes, '\0');
  run.keys.assign(kKeyBytes, '\0');
  run.ids.assign(kTokenBytes, '\0');
  CHECK_EQ(run.found(), std::string());
}

TEST(the_order_of_words_is_in_the_checksum) {
  CHECK(checksum(std::string(8, '\1') + std::string(8, '\2')) != checksum(std::string(8, '\2') + std::string(8, '\1')));
  CHECK(checksum(std::string(8, '\0')) != checksum(std::string(16, '\0')));
  CHECK_THROWS(std::invalid_argument, checksum("seven b"));
  CHECK_THROWS(std::invalid_argument, entry_offsets("", kKeyBytes + 8 + kTokenBytes, "", "", kTokenBytes));
}
