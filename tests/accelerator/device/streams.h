// Streams, of which a device works off one after the other, and events, which are times of a device.

#pragma once

#include "devices.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <chrono>

namespace ledger {

using c10::Stream;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return kLedger;
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return {kLedger, current_device};
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) {
      current_device = device.index();
    }
  }
  DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  Stream getStream(Device device) const override {
    const auto index = device.index() < 0 ? current_device : device.index();
    return Stream(Stream::UNSAFE, Device(kLedger, index), streams.at(index));
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(kLedger, device.index() < 0 ? current_device : device.index()));
  }
  Stream getNewStream(Device device, int = 0) const override {
    return Stream(Stream::UNSAFE, Device(kLedger, device.index() < 0 ? current_device : device.index()), ++num_streams);
  }
  Stream getStreamFromGlobalPool(Device device, bool = false) const override {
    return getNewStream(device);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    streams.at(stream.device_index()) = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    return busy_until.at(stream.device_index()).load() <= Clock::now();
  }
  void synchronizeStream(const Stream& stream) const override {
    wait_until(end_of_work(stream.device_index()));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    wait_until(end_of_work(device < 0 ? current_device : device));
  }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Clock::time_point;
    }
    *static_cast<Clock::time_point*>(*event) = end_of_work(stream.device_index());
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void* event) const override {
    return event == nullptr || *static_cast<Clock::time_point*>(event) <= Clock::now();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      wait_until(*static_cast<Clock::time_point*>(event));
    }
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    const auto from = *static_cast<Clock::time_point*>(first), to = *static_cast<Clock::time_point*>(second);
    return std::chrono::duration<double, std::milli>(to - from).count();
  }

  inline static thread_local std::array<c10::StreamId, kDevices> streams{};
  inline static std::atomic<c10::StreamId> num_streams{0};
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace ledger
