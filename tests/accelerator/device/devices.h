// What devices there are, which is current, and how often the host has waited for one.

#pragma once

#include <c10/core/Device.h>

#include <atomic>

namespace ledger {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr DeviceType kLedger = DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;

inline thread_local DeviceIndex current_device = 0;
inline std::atomic<int64_t> synchronizations{0};

} // namespace ledger
