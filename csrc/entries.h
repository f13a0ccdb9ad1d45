// Entries of a directory of published blocks, as vattn/broker/directory.py writes them, side by side:
//
//     key | when it was published, 8 bytes | token ids, 8 bytes each | offsets, 8 bytes each | checksum of all before
//     it
//
// Nothing is assumed of what they say, only of how long they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace vattn {

inline constexpr std::size_t kKeyBytes = 32;

// Tells an entry that was written to its end from any other; no secret, and no defence against who means to forge one.
// Throws std::invalid_argument if `bytes` is no number of words of 8 bytes.
std::uint64_t checksum(std::string_view bytes);

// How many entries, from the first on, have these keys, side by side as well.
std::size_t entries_alike(std::string_view entries, std::size_t entry_bytes, std::string_view keys);

// The offsets of the entries, from the first on, that are whole and have these keys and these tokens, of so many bytes
// an entry.
std::string entry_offsets(std::string_view entries, std::size_t entry_bytes, std::string_view keys,
                          std::string_view tokens, std::size_t token_bytes);

}  // namespace vattn
