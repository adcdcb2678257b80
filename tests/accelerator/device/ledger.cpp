// A device that keeps books: what tests of device code run on where no GPU is.
//
// Its memory is the host's and its kernels are the CPU's, called on the same bytes. Its own are what a device has beside
// kernels: two of them in a process, an allocator that rounds, caches, counts and runs out, generators, streams, events,
// the autograd engine's thread, autocast. A kernel's results are there when the call returns, but the device can be made
// to be busy with it for longer, and whoever waits for that is counted.

#include "crossing.h"
#include "generators.h"
#include "memory.h"
#include "streams.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

// What <ATen/autocast_mode.h> says too, with all of ATen's operators.
namespace at::autocast {
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
TORCH_API ScalarType get_autocast_dtype(c10::DeviceType device_type);
} // namespace at::autocast
namespace ledger {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return kDevices;
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    current_device = device;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(device < 0 ? current_device : device);
  }
  at::Device getDeviceFromPtr(void*) const override {
    return {kLedger, current_device};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t count) const override {
    resize_storage(storage, count);
  }
};

const bool is_registered = [] {
  c10::SetAllocator(kLedger, &allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// --------------------------------------------------------------------------------------------------------- kernels

const at::Tensor& resize_tensor(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() != size) {
    impl->set_sizes_contiguous(size);
  }
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  const size_t needed = at::detail::computeStorageNbytes(
      impl->sizes(), impl->strides(), impl->dtype().itemsize(), impl->storage_offset());
  if (impl->numel() && needed > impl->unsafe_storage().nbytes()) {
    resize_storage(impl->unsafe_storage(), needed);
  }
  return self;
}

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  Crossing crossing;
  std::vector<std::pair<at::Tensor, at::Tensor>> outputs; // which a kernel may resize
  bool is_given_generator = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      const at::Tensor tensor = value.toTensor();
      at::Tensor host = crossing.to_host(tensor);
      if (is_ours(tensor) && arguments[i].is_out()) {
        host = at::empty_like(host);
        outputs.emplace_back(tensor, host);
      }
      value = host;
    } else if (value.isTensorList()) {
      auto list = value.toTensorList();
      c10::List<at::Tensor> hosts;
      for (const at::Tensor& tensor : list) {
        hosts.push_back(crossing.to_host(tensor));
      }
      value = hosts;
    } else if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorList();
      c10::List<std::optional<at::Tensor>> hosts;
      for (const std::optional<at::Tensor>& tensor : list) {
        hosts.push_back(tensor ? std::optional(crossing.to_host(*tensor)) : std::nullopt);
      }
      value = hosts;
    } else if (value.isDevice() && value.toDevice().type() == kLedger) {
      crossing.device = value.toDevice().index();
      value = Device(DeviceType::CPU);
    }
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "generator") {
      c10::IValue& value = (*stack)[first + i];
      value = host_generator(value.isGenerator() ? value.toGenerator() : default_generator(crossing.device));
      is_given_generator = true;
    }
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::optional<DrawsFromDevice> draws;
    if (!is_given_generator && op.hasTag(at::Tag::nondeterministic_seeded)) {
      draws.emplace(crossing.device);
    }
    op.callBoxed(stack);
  }
  occupy(crossing.device < 0 ? current_device : crossing.device);
  for (const auto& [tensor, host] : outputs) {
    resize_tensor(tensor, host.sizes(), std::nullopt);
    Crossing().to_host(tensor).copy_(host);
  }
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      const at::Tensor host = value.toTensor();
      const auto output = std::find_if(
          outputs.begin(), outputs.end(), [&](const auto& pair) { return pair.second.is_same(host); });
      value = output == outputs.end() ? crossing.to_device(host) : output->first;
    } else if (value.isTensorList()) {
      auto list = value.toTensorList();
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& host : list) {
        tensors.push_back(crossing.to_device(host));
      }
      value = tensors;
    }
  }
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const OnDevice on(device.has_value() ? device->index() : -1);
  return at::Tensor(at::detail::empty_generic(
      size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(c10::get_default_dtype_as_scalartype()), format));
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  return new_tensor(
      size, stride, dtype.value_or(c10::get_default_dtype_as_scalartype()), device.has_value() ? device->index() : -1);
}

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  const size_t needed =
      at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), impl->dtype().itemsize(), offset);
  if (impl->numel() && needed > impl->unsafe_storage().nbytes()) {
    resize_storage(impl->unsafe_storage(), needed);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {size}, {});
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  Crossing crossing;
  const at::AutoDispatchBelowADInplaceOrView below;
  crossing.to_host(target).copy_(crossing.to_host(self));
  occupy(crossing.device);
  if (!non_blocking && is_ours(self) != is_ours(target)) {
    wait_until(end_of_work(crossing.device));
  }
  return target;
}

at::Scalar local_scalar(const at::Tensor& self) {
  wait_until(end_of_work(self.device().index()));
  return Crossing().to_host(self).item();
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups) {
  Crossing crossing;
  const at::AutoDispatchBelowADInplaceOrView below;
  occupy(input.device().index());
  return crossing.to_device(at::convolution(
      crossing.to_host(input), crossing.to_host(weight),
      bias.has_value() ? std::optional(crossing.to_host(*bias)) : std::nullopt, stride, padding, dilation, transposed,
      output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  Crossing crossing;
  const at::AutoDispatchBelowADInplaceOrView below;
  occupy(input.device().index());
  const int64_t num_outputs = transposed ? weight.size(1) * groups : weight.size(0);
  const auto [of_input, of_weight, of_bias] = at::convolution_backward(
      crossing.to_host(gradient), crossing.to_host(input), crossing.to_host(weight), at::IntArrayRef{num_outputs},
      stride, padding, dilation, transposed, output_padding, groups, wanted);
  return {crossing.to_device(of_input), crossing.to_device(of_weight), crossing.to_device(of_bias)};
}

// -------------------------------------------------------------------------------------------------------- autocast

void cast(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::ScalarType to) {
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::DispatchKey::AutocastPrivateUse1);
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor() && value.toTensor().defined()) {
      value = at::autocast::cached_cast(to, value.toTensor(), kLedger);
    }
  }
  op.callBoxed(stack);
}

void lower(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast(op, stack, at::autocast::get_autocast_dtype(kLedger));
}

void raise(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast(op, stack, at::kFloat);
}

} // namespace ledger

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&ledger::on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &ledger::empty);
  library.impl("empty_strided", &ledger::empty_strided);
  library.impl("as_strided", &ledger::as_strided);
  library.impl("resize_", &ledger::resize_tensor);
  library.impl("set_.source_Storage_storage_offset", &ledger::set_storage);
  library.impl("set_.source_Storage", &ledger::set_whole_storage);
  library.impl("_copy_from", &ledger::copy_from);
  library.impl("_local_scalar_dense", &ledger::local_scalar);
  library.impl("convolution_overrideable", &ledger::convolution);
  library.impl("convolution_backward_overrideable", &ledger::convolution_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (const char* name :
       {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "conv_transpose2d.input",
        "scaled_dot_product_attention"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&ledger::lower>());
  }
  for (const char* name :
       {"layer_norm", "group_norm", "softmax.int", "log_softmax.int", "cross_entropy_loss", "mse_loss", "nll_loss",
        "exp", "log", "pow.Tensor_Scalar"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&ledger::raise>());
  }
}

TORCH_LIBRARY(ledger, library) {
  library.def("set_limit(int device, int bytes) -> ()", [](int64_t device, int64_t bytes) {
    ledger::allocator().set_limit(device, bytes);
  });
  library.def("shrink(int divisor) -> ()", [](int64_t divisor) { ledger::divisor = divisor; });
  library.def("set_fraction(int device, float fraction) -> ()", [](int64_t device, double fraction) {
    ledger::allocator().set_fraction(device, fraction);
  });
  library.def("fraction(int device) -> float", [](int64_t device) { return ledger::allocator().fraction(device); });
  library.def("num_out_of_memory(int device) -> int", [](int64_t device) {
    return ledger::allocator().getDeviceStats(device).num_ooms;
  });
  library.def("set_kernel_time(float seconds) -> ()", [](double seconds) {
    ledger::kernel_time = std::chrono::duration_cast<ledger::Clock::duration>(std::chrono::duration<double>(seconds));
  });
  library.def("num_devices() -> int", []() -> int64_t { return ledger::kDevices; });
  library.def("num_synchronizations() -> int", []() -> int64_t { return ledger::synchronizations; });
  library.def("random_state(int device) -> Tensor", [](int64_t device) {
    return at::Tensor(ledger::default_generator(device).unsafeGetGeneratorImpl()->get_state());
  });
  library.def("set_random_state(int device, Tensor state) -> ()", [](int64_t device, const at::Tensor& state) {
    at::Generator(ledger::default_generator(device)).unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
  });
  library.def("seed(int device, int seed) -> ()", [](int64_t device, int64_t seed) {
    at::Generator(ledger::default_generator(device)).set_current_seed(seed);
  });
}
