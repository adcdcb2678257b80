// Tensors of the device as tensors of the host over the same bytes, and back.

#pragma once

#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/as_strided_native.h>

#include <unordered_map>
#include <vector>

namespace ledger {

inline bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kLedger;
}

inline at::Tensor new_tensor(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype, DeviceIndex device) {
  const OnDevice on(device);
  return at::Tensor(at::detail::empty_strided_generic(
      size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype));
}

// Tensors of the device as tensors of the host over the same bytes, and back.
class Crossing {
 public:
  at::Tensor to_host(const at::Tensor& tensor) {
    if (!is_ours(tensor)) {
      return tensor;
    }
    device = tensor.device().index();
    const auto& storage = tensor.storage();
    auto [found, is_new] = owners_.try_emplace(storage.unsafeGetStorageImpl());
    if (is_new) {
      c10::DataPtr data(storage.mutable_data(), Device(DeviceType::CPU));
      found->second = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data));
    }
    auto host = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = host.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      impl->set_wrapped_number(true);
    }
    originals_.emplace_back(tensor, host);
    return host;
  }

  at::Tensor to_device(const at::Tensor& host) const {
    if (!host.defined() || host.device().type() != DeviceType::CPU) {
      return host;
    }
    for (const auto& [original, other] : originals_) {
      if (other.is_same(host)) {
        return original;
      }
    }
    for (const auto& [original, other] : originals_) {
      if (other.storage().is_alias_of(host.storage())) { // a view
        return at::native::as_strided_tensorimpl(original, host.sizes(), host.strides(), host.storage_offset());
      }
    }
    auto made = new_tensor(host.sizes(), host.strides(), host.scalar_type(), device);
    Crossing().to_host(made).copy_(host);
    return made;
  }

  DeviceIndex device = -1;

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> owners_;
  std::vector<std::pair<at::Tensor, at::Tensor>> originals_;
};

} // namespace ledger
