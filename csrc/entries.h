// Entries of a directory of published blocks, as vattn/broker/directory.py writes them, side by side:
//
//     key | when it was published, 8 bytes | token ids, 8 bytes each | offsets, 8 bytes each | checksum of all before
//     it
//
// Nothing is assumed of what they say, only of how long they are.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace vattn {

inline constexpr std::size_t kKeyBytes = 32;

// Tells an entry that was written to its end from any other; no secret, and no defence against who means to forge one.
// Throws std::invalid_argument if `bytes` is no number of words of 8 bytes.
std::uint64_t checksum(std::string_view bytes);

// What lies in a file from a place on, as far as it has so much. Throws std::system_error.
struct Piece {
  std::unique_ptr<char[]> data;
  std::size_t size = 0;

  std::string_view view() const { return {data.get(), size}; }
};
Piece read_piece(int file, off_t at, std::size_t size);

// How many entries, from the first on, have these keys, side by side as well.
std::size_t entries_alike(std::string_view entries, std::size_t entry_bytes, std::string_view keys);
// The same of entries in a file, for who reads them again: if the last one has its key, those before it are taken to
// have theirs, and not read. Throws std::system_error.
std::size_t entries_alike(int file, off_t at, std::size_t entry_bytes, std::string_view keys);

// The offsets of the entries, from the first on, that are whole and have these keys and these tokens, of so many bytes
// an entry.
std::string entry_offsets(std::string_view entries, std::size_t entry_bytes, std::string_view keys,
                          std::string_view tokens, std::size_t token_bytes);
// The same of entries in a file. Throws std::system_error.
std::string entry_offsets(int file, off_t at, std::size_t entry_bytes, std::string_view keys, std::string_view tokens,
                          std::size_t token_bytes);

}  // namespace vattn
