// An allocator that rounds, keeps what was freed, counts, and runs out beyond a limit.

#pragma once

#include "devices.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

namespace ledger {

constexpr size_t kRounding = 512;
constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

struct Book {
  size_t limit = size_t(1) << 40;
  c10::CachingDeviceAllocator::DeviceStats stats;
  std::multimap<size_t, void*> cached;
};

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t count) override {
    const Device device(kLedger, current_device);
    if (count == 0) {
      return {nullptr, nullptr, &release, device};
    }
    const size_t size = (count + kRounding - 1) / kRounding * kRounding;
    std::lock_guard<std::mutex> lock(mutex_);
    Book& book = books_.at(current_device);
    void* data = nullptr;
    if (auto found = book.cached.find(size); found != book.cached.end()) {
      data = found->second;
      book.cached.erase(found);
    } else {
      auto& reserved = book.stats.reserved_bytes[kAll];
      if (size_t(reserved.current) + size > book.limit) {
        empty(book);
      }
      if (size_t(reserved.current) + size > book.limit) {
        ++book.stats.num_ooms;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "LEDGER out of memory. Tried to allocate ", size, " bytes; ", device, " has ",
            book.limit, ", of which ", reserved.current, " are allocated.");
      }
      data = std::aligned_alloc(kRounding, size);
      TORCH_CHECK(data != nullptr, "the host has no ", size, " bytes for the ledger device");
      reserved.increase(size);
    }
    blocks_[data] = {current_device, size};
    book.stats.allocated_bytes[kAll].increase(size);
    return {data, data, &release, device};
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
      empty(book);
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
  }
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stats = books_.at(device).stats;
    stats.allocated_bytes[kAll].reset_peak();
    stats.reserved_bytes[kAll].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const Book& book = books_.at(device);
    const auto reserved = size_t(book.stats.reserved_bytes[kAll].current);
    return {book.limit > reserved ? book.limit - reserved : 0, book.limit};
  }
  void set_limit(DeviceIndex device, size_t limit) {
    std::lock_guard<std::mutex> lock(mutex_);
    books_.at(device).limit = limit;
  }

 private:
  struct Block {
    DeviceIndex device;
    size_t size;
  };

  static void empty(Book& book) {
    for (const auto& [size, data] : book.cached) {
      std::free(data);
      book.stats.reserved_bytes[kAll].decrease(size);
    }
    book.cached.clear();
  }

  std::mutex mutex_;
  std::array<Book, kDevices> books_;
  std::unordered_map<void*, Block> blocks_;
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
  const auto found = self.blocks_.find(data);
  const Block block = found->second;
  self.blocks_.erase(found);
  Book& book = self.books_.at(block.device);
  book.stats.allocated_bytes[kAll].decrease(block.size);
  book.cached.emplace(block.size, data);
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
