// What devices there are, which is current, until when each is busy, and how often the host has waited for one.

#pragma once

#include <c10/core/Device.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>

namespace ledger {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr DeviceType kLedger = DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;

inline thread_local DeviceIndex current_device = 0;
inline std::atomic<int64_t> synchronizations{0};

// A kernel has its results at once, but its device is busy with it for that long after the call has returned.
using Clock = std::chrono::steady_clock;
inline std::atomic<Clock::duration> kernel_time{Clock::duration::zero()};
inline std::array<std::atomic<Clock::time_point>, kDevices> busy_until{};

inline Clock::time_point end_of_work(DeviceIndex device) {
  return std::max(Clock::now(), busy_until.at(device).load());
}

inline void occupy(DeviceIndex device) {
  busy_until.at(device) = end_of_work(device) + kernel_time.load();
}

inline void wait_until(Clock::time_point end) {
  ++synchronizations;
  std::this_thread::sleep_until(end);
}

} // namespace ledger
