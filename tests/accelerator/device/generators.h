// Generators of the device, whose numbers the CPU's kernels draw.

#pragma once

#include "devices.h"

#include <ATen/CPUGeneratorImpl.h>

#include <array>

namespace ledger {

struct GeneratorImpl final : c10::GeneratorImpl {
  explicit GeneratorImpl(DeviceIndex device)
      : c10::GeneratorImpl(Device(kLedger, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        on_host(at::detail::createCPUGenerator()) {}

  void set_current_seed(uint64_t seed) override {
    on_host.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    on_host.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return on_host.get_offset();
  }
  uint64_t current_seed() const override {
    return on_host.current_seed();
  }
  uint64_t seed() override {
    return on_host.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    on_host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return on_host.unsafeGetGeneratorImpl()->get_state();
  }

  at::Generator on_host; // the CPU's kernels draw from it

 private:
  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device().index());
    copy->set_state(*get_state());
    return copy;
  }
};

inline const at::Generator& default_generator(DeviceIndex device) {
  static auto* generators = new std::array<at::Generator, kDevices>{
      at::make_generator<GeneratorImpl>(DeviceIndex(0)), at::make_generator<GeneratorImpl>(DeviceIndex(1))};
  return generators->at(device < 0 ? current_device : device);
}

inline at::Generator host_generator(const at::Generator& generator) {
  return static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl())->on_host;
}

struct DrawsFromDevice { // kernels that are given no generator draw from the CPU's own
  explicit DrawsFromDevice(DeviceIndex device)
      : device_state(host_generator(default_generator(device))), host(at::detail::getDefaultCPUGenerator()) {
    host_state = host.unsafeGetGeneratorImpl()->get_state();
    host.unsafeGetGeneratorImpl()->set_state(*device_state.unsafeGetGeneratorImpl()->get_state());
  }
  ~DrawsFromDevice() {
    device_state.unsafeGetGeneratorImpl()->set_state(*host.unsafeGetGeneratorImpl()->get_state());
    host.unsafeGetGeneratorImpl()->set_state(*host_state);
  }
  at::Generator device_state, host;
  c10::intrusive_ptr<c10::TensorImpl> host_state;
};

} // namespace ledger
