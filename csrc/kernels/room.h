// Memory for intermediate results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace vattn::kernels {

constexpr std::size_t kAlign = 64;

constexpr std::size_t aligned(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// One piece of memory, kept between calls by the thread that calls.
class Room {
 public:
  std::byte* reserve(std::size_t bytes) {
    if (bytes > size_) {
      data_.reset();
      size_ = 0;
      data_.reset(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kAlign})));
      size_ = bytes;
    }
    return data_.get();
  }

 private:
  struct Delete {
    void operator()(std::byte* data) const { ::operator delete(data, std::align_val_t{kAlign}); }
  };
  std::unique_ptr<std::byte, Delete> data_;
  std::size_t size_ = 0;
};

}  // namespace vattn::kernels
