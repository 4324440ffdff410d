// Memory for packed weights: pieces of large chunks, for which the system is asked for huge pages. A step reads all of
// them once, and with pages of 4 KiB looking up where they lie costs 3 to 6% of it (docs/lab-log.md).
#pragma once
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace octavo {

class WeightChunk {
 public:
  static constexpr size_t kHugePage = size_t{2} << 20, kUsualBytes = size_t{64} << 20;

  explicit WeightChunk(size_t bytes) : size_((bytes + kHugePage - 1) / kHugePage * kHugePage) {
    data_ = static_cast<uint8_t*>(std::aligned_alloc(kHugePage, size_));
    if (!data_) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    madvise(data_, size_, MADV_HUGEPAGE);  // where it cannot be had, pages are small
#endif
  }
  ~WeightChunk() { std::free(data_); }
  WeightChunk(const WeightChunk&) = delete;
  WeightChunk& operator=(const WeightChunk&) = delete;

  // 64-byte aligned, never initialised; null where there is no room.
  void* take(size_t bytes) {
    const size_t begin = used_, end = begin + (bytes + 63) / 64 * 64;
    if (end > size_) return nullptr;
    used_ = end;
    return data_ + begin;
  }

 private:
  uint8_t* data_;
  size_t size_, used_ = 0;
};

struct WeightPiece {
  std::shared_ptr<WeightChunk> chunk;  // lives as long as a piece of it
  void* data;
};

// Hands out pieces one behind the other, to who holds the GIL. It keeps no chunk alive itself.
class WeightMemory {
 public:
  WeightPiece take(size_t bytes) {
    auto chunk = last_.lock();
    void* data = chunk ? chunk->take(bytes) : nullptr;
    if (!data) {
      chunk = std::make_shared<WeightChunk>(bytes > WeightChunk::kUsualBytes ? bytes : WeightChunk::kUsualBytes);
      data = chunk->take(bytes);
      last_ = chunk;
    }
    return {std::move(chunk), data};
  }

 private:
  std::weak_ptr<WeightChunk> last_;
};

}  // namespace octavo
