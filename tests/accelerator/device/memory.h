// Memory by the rules of PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp): sizes are rounded to 512 bytes,
// small and large ones come from pools of their own, segments are taken whole, split, merged again, and handed back
// unused ones only when memory runs out, which it does beyond a limit.

#pragma once

#include "devices.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <unordered_map>

namespace ledger {

constexpr size_t kMiB = size_t(1) << 20;
constexpr size_t kRounding = 512;
inline std::atomic<size_t> divisor{1}; // of all but the rounding: a small device then has a large one's proportions

inline size_t largest_small() {
  return kMiB / divisor;
}
inline size_t small_segment() {
  return 2 * kMiB / divisor;
}
inline size_t large_segment() {
  return 20 * kMiB / divisor;
}
inline size_t least_own_segment() { // from here on a segment of its own size
  return 10 * kMiB / divisor;
}
inline size_t own_rounding() {
  return 2 * kMiB / divisor;
}
constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

inline size_t rounded(size_t count, size_t unit) {
  return (count + unit - 1) / unit * unit;
}

struct Block {
  DeviceIndex device;
  size_t size;
  char* data;
  size_t segment = 0; // which of all that were ever taken: unlike an address it is the same in every process
  size_t requested = 0;
  bool is_free = false;
  Block* before = nullptr; // in its segment
  Block* after = nullptr;

  bool is_whole() const {
    return before == nullptr && after == nullptr;
  }
};

struct Tighter {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->size, a->segment, a->data) < std::tie(b->size, b->segment, b->data);
  }
};

using Pool = std::set<Block*, Tighter>;

struct Book {
  size_t total = size_t(1) << 40;
  double fraction = 1.0; // that the process may take
  size_t limit() const {
    return size_t(fraction * double(total));
  }
  c10::CachingDeviceAllocator::DeviceStats stats;
  Pool small, large;
};

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t count) override {
    const Device device(kLedger, current_device);
    if (count == 0) {
      return {nullptr, nullptr, &release, device};
    }
    const size_t size = rounded(count, kRounding);
    std::lock_guard<std::mutex> lock(mutex_);
    Book& book = books_.at(current_device);
    Pool& pool = pool_of(book, size);
    Block* block = take_free(pool, size);
    if (block == nullptr) {
      block = take_segment(book, size);
    }
    const size_t rest = block->size - size;
    if (size <= largest_small() ? rest >= kRounding : rest > largest_small()) {
      split(pool, block, size);
    }
    in_use_[block->data] = block;
    block->requested = count;
    book.stats.allocated_bytes[kAll].increase(block->size);
    book.stats.requested_bytes[kAll].increase(count);
    return {block->data, block->data, &release, device};
  }

  static void release(void* data);

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& book : books_) {
      give_up_unused(book);
    }
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return books_.at(device).stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = books_.at(device).stats;
    stats.allocated_bytes[kAll].reset_accumulated();
    stats.reserved_bytes[kAll].reset_accumulated();
    stats.requested_bytes[kAll].reset_accumulated();
  }
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = books_.at(device).stats;
    stats.allocated_bytes[kAll].reset_peak();
    stats.reserved_bytes[kAll].reset_peak();
    stats.requested_bytes[kAll].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const Book& book = books_.at(device);
    const auto reserved = size_t(book.stats.reserved_bytes[kAll].current);
    return {book.total > reserved ? book.total - reserved : 0, book.total};
  }
  void set_limit(DeviceIndex device, size_t limit) {
    std::lock_guard<std::mutex> lock(mutex_);
    books_.at(device).total = limit;
  }
  void set_fraction(DeviceIndex device, double fraction) {
    std::lock_guard<std::mutex> lock(mutex_);
    books_.at(device).fraction = fraction;
  }
  double fraction(DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return books_.at(device).fraction;
  }

 private:
  static Pool& pool_of(Book& book, size_t size) {
    return size <= largest_small() ? book.small : book.large;
  }

  static Block* take_free(Pool& pool, size_t size) {
    Block least{0, size, nullptr, 0};
    const auto found = pool.lower_bound(&least);
    if (found == pool.end()) {
      return nullptr;
    }
    Block* block = *found;
    pool.erase(found);
    block->is_free = false;
    return block;
  }

  Block* take_segment(Book& book, size_t size) {
    const size_t whole = size <= largest_small() ? small_segment()
        : size < least_own_segment()              ? large_segment()
                                               : rounded(size, own_rounding());
    auto& reserved = book.stats.reserved_bytes[kAll];
    if (size_t(reserved.current) + whole > book.limit()) {
      give_up_unused(book);
    }
    if (size_t(reserved.current) + whole > book.limit()) {
      ++book.stats.num_ooms;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "LEDGER out of memory. Tried to allocate ", size, " bytes; ",
          Device(kLedger, current_device), " has ", book.limit(), ", of which ", reserved.current, " are reserved and ",
          book.stats.allocated_bytes[kAll].current, " allocated.");
    }
    auto* data = static_cast<char*>(std::aligned_alloc(kRounding, whole));
    TORCH_CHECK(data != nullptr, "the host has no ", whole, " bytes for the ledger device");
    reserved.increase(whole);
    return new Block{current_device, whole, data, ++num_segments_};
  }

  static void split(Pool& pool, Block* block, size_t size) {
    auto* rest = new Block{block->device, block->size - size, block->data + size, block->segment, 0, true, block};
    rest->after = block->after;
    if (rest->after != nullptr) {
      rest->after->before = rest;
    }
    block->after = rest;
    block->size = size;
    pool.insert(rest);
  }

  static void merge(Pool& pool, Block* block, Block* neighbour) { // the neighbour becomes a part of the block
    if (neighbour == nullptr || !neighbour->is_free) {
      return;
    }
    pool.erase(neighbour);
    if (block->before == neighbour) {
      block->data = neighbour->data;
      block->before = neighbour->before;
      if (block->before != nullptr) {
        block->before->after = block;
      }
    } else {
      block->after = neighbour->after;
      if (block->after != nullptr) {
        block->after->before = block;
      }
    }
    block->size += neighbour->size;
    delete neighbour;
  }

  static void give_up_unused(Book& book) {
    for (Pool* pool : {&book.small, &book.large}) {
      for (auto next = pool->begin(); next != pool->end();) {
        Block* block = *next;
        if (!block->is_whole()) {
          ++next;
          continue;
        }
        next = pool->erase(next);
        book.stats.reserved_bytes[kAll].decrease(block->size);
        std::free(block->data);
        delete block;
      }
    }
  }

  std::mutex mutex_;
  std::array<Book, kDevices> books_;
  std::unordered_map<void*, Block*> in_use_;
  size_t num_segments_ = 0;
};

inline Allocator& allocator() {
  static auto* the = new Allocator; // outlives every tensor
  return *the;
}

inline void Allocator::release(void* data) {
  if (data == nullptr) {
    return;
  }
  auto& self = allocator();
  std::lock_guard<std::mutex> lock(self.mutex_);
  const auto found = self.in_use_.find(data);
  Block* block = found->second;
  self.in_use_.erase(found);
  Book& book = self.books_.at(block->device);
  book.stats.allocated_bytes[kAll].decrease(block->size);
  book.stats.requested_bytes[kAll].decrease(block->requested);
  Pool& pool = pool_of(book, block->size);
  block->is_free = true;
  merge(pool, block, block->before);
  merge(pool, block, block->after);
  pool.insert(block);
}

struct OnDevice { // an allocation goes to the current device
  explicit OnDevice(DeviceIndex device) : before(current_device) {
    if (device >= 0) {
      current_device = device;
    }
  }
  ~OnDevice() {
    current_device = before;
  }
  DeviceIndex before;
};

inline void resize_storage(const c10::Storage& storage, size_t count) {
  const OnDevice on(storage.device().index());
  c10::DataPtr data = allocator().allocate(count);
  if (const size_t kept = std::min(count, storage.nbytes())) {
    std::memcpy(data.get(), storage.data(), kept);
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(count);
}

} // namespace ledger
