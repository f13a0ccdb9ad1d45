#include "entries.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace vattn {

namespace {

constexpr std::size_t kWord = sizeof(std::uint64_t);
constexpr std::size_t kPieceBytes = 8192;  // what is read at once stays in the fastest cache, and touches little memory

std::uint64_t word_at(std::string_view bytes, std::size_t at) {
  std::uint64_t word;
  std::memcpy(&word, bytes.data() + at, kWord);
  return word;
}

void check_entries(std::size_t entry_bytes, std::size_t token_bytes) {
  if (entry_bytes < kKeyBytes + 2 * kWord || entry_bytes - kKeyBytes - 2 * kWord < token_bytes)
    throw std::invalid_argument("entries that are too short for their tokens");
}

}  // namespace

std::uint64_t checksum(std::string_view bytes) {
  if (bytes.size() % kWord) throw std::invalid_argument("a checksum of words that are not whole");
  // Each step is a bijection of the sum, and of the word: a change of one word cannot cancel out.
  std::uint64_t sum = 0x9E3779B97F4A7C15 + bytes.size();
  for (std::size_t at = 0; at < bytes.size(); at += kWord)
    sum = std::rotl((sum ^ word_at(bytes, at)) * 0xC2B2AE3D27D4EB4F, 31);
  return sum;
}

Piece read_piece(int file, off_t at, std::size_t size) {
  Piece piece{std::make_unique_for_overwrite<char[]>(size)};
  while (piece.size < size) {
    const ssize_t got =
        pread(file, piece.data.get() + piece.size, size - piece.size, at + static_cast<off_t>(piece.size));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw std::system_error(errno, std::generic_category(), "pread");
    if (got == 0) break;
    piece.size += static_cast<std::size_t>(got);
  }
  return piece;
}

std::size_t entries_alike(std::string_view entries, std::size_t entry_bytes, std::string_view keys) {
  std::size_t count = 0;
  while ((count + 1) * entry_bytes <= entries.size() && (count + 1) * kKeyBytes <= keys.size() &&
         entries.substr(count * entry_bytes, kKeyBytes) == keys.substr(count * kKeyBytes, kKeyBytes))
    ++count;
  return count;
}

std::size_t entries_alike(int file, off_t at, std::size_t entry_bytes, std::string_view keys) {
  const std::size_t count = keys.size() / kKeyBytes;
  if (count == 0) return 0;
  const Piece last = read_piece(file, at + static_cast<off_t>((count - 1) * entry_bytes), kKeyBytes);
  if (last.view() == keys.substr((count - 1) * kKeyBytes, kKeyBytes)) return count;
  return entries_alike(read_piece(file, at, count * entry_bytes).view(), entry_bytes, keys);
}

std::string entry_offsets(std::string_view entries, std::size_t entry_bytes, std::string_view keys,
                          std::string_view tokens, std::size_t token_bytes) {
  check_entries(entry_bytes, token_bytes);
  const std::size_t tokens_at = kKeyBytes + kWord, offsets_at = tokens_at + token_bytes;
  const std::size_t body_bytes = entry_bytes - kWord, alike = entries_alike(entries, entry_bytes, keys);
  std::string found;
  found.reserve(alike * (body_bytes - offsets_at));
  for (std::size_t i = 0; i < alike && (i + 1) * token_bytes <= tokens.size(); ++i) {
    const std::string_view entry = entries.substr(i * entry_bytes, entry_bytes), body = entry.substr(0, body_bytes);
    if (body.substr(tokens_at, token_bytes) != tokens.substr(i * token_bytes, token_bytes) ||
        word_at(entry, body_bytes) != checksum(body))
      break;
    found += body.substr(offsets_at);
  }
  return found;
}

std::string entry_offsets(int file, off_t at, std::size_t entry_bytes, std::string_view keys, std::string_view tokens,
                          std::size_t token_bytes) {
  check_entries(entry_bytes, token_bytes);
  const std::size_t total = keys.size() / kKeyBytes, most = std::max<std::size_t>(1, kPieceBytes / entry_bytes);
  std::string found;
  for (std::size_t first = 0, count = 0; first < total; first += count) {
    count = std::min(most, total - first);
    const Piece piece = read_piece(file, at + static_cast<off_t>(first * entry_bytes), count * entry_bytes);
    const std::string_view rest = tokens.substr(std::min(tokens.size(), first * token_bytes));
    const std::string some =
        entry_offsets(piece.view(), entry_bytes, keys.substr(first * kKeyBytes, count * kKeyBytes), rest, token_bytes);
    found += some;
    if (some.size() < count * (entry_bytes - kKeyBytes - 2 * kWord - token_bytes)) break;
  }
  return found;
}

}  // namespace vattn
