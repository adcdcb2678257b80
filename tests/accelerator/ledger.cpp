// A device that keeps books: what tests of device code run on where no GPU is.
//
// Its memory is the host's and its kernels are the CPU's, called on the same bytes. Its own are what a device has beside
// kernels: two of them in a process, an allocator that rounds, caches, counts and runs out, generators, streams, events,
// the autograd engine's thread, autocast. Everything is done when a call returns; whoever waits is counted.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <unordered_map>

// What <ATen/autocast_mode.h> says too, with all of ATen's operators.
namespace at::autocast {
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
TORCH_API ScalarType get_autocast_dtype(c10::DeviceType device_type);
} // namespace at::autocast

namespace ledger {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr DeviceType kLedger = DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr size_t kRounding = 512;
constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

thread_local DeviceIndex current_device = 0;
std::atomic<int64_t> synchronizations{0};

// ---------------------------------------------------------------------------------------------------------- memory

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
  void recordStream(const c10::DataPtr&, Stream) override {}
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

Allocator& allocator() {
  static auto* the = new Allocator; // outlives every tensor
  return *the;
}

void Allocator::release(void* data) {
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

void resize_storage(const c10::Storage& storage, size_t count) {
  const OnDevice on(storage.device().index());
  c10::DataPtr data = allocator().allocate(count);
  if (const size_t kept = std::min(count, storage.nbytes())) {
    std::memcpy(data.get(), storage.data(), kept);
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(count);
}

// ------------------------------------------------------------------------------------------------ streams, events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Clock = std::chrono::steady_clock;

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
  bool queryStream(const Stream&) const override {
    return true;
  }
  void synchronizeStream(const Stream&) const override {
    ++synchronizations;
  }
  void synchronizeDevice(DeviceIndex) const override {
    ++synchronizations;
  }
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Clock::time_point;
    }
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {
    ++synchronizations;
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    const auto from = *static_cast<Clock::time_point*>(first), to = *static_cast<Clock::time_point*>(second);
    return std::chrono::duration<double, std::milli>(to - from).count();
  }

  static thread_local std::array<c10::StreamId, kDevices> streams;
  static std::atomic<c10::StreamId> num_streams;
};

thread_local std::array<c10::StreamId, kDevices> Guard::streams{};
std::atomic<c10::StreamId> Guard::num_streams{0};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ------------------------------------------------------------------------------------------------------ generators

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

const at::Generator& default_generator(DeviceIndex device) {
  static auto* generators = new std::array<at::Generator, kDevices>{
      at::make_generator<GeneratorImpl>(DeviceIndex(0)), at::make_generator<GeneratorImpl>(DeviceIndex(1))};
  return generators->at(device < 0 ? current_device : device);
}

at::Generator host_generator(const at::Generator& generator) {
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

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kLedger;
}

at::Tensor new_tensor(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype, DeviceIndex device) {
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
  if (!non_blocking && is_ours(self) != is_ours(target)) {
    ++synchronizations;
  }
  Crossing crossing;
  const at::AutoDispatchBelowADInplaceOrView below;
  crossing.to_host(target).copy_(crossing.to_host(self));
  return target;
}

at::Scalar local_scalar(const at::Tensor& self) {
  ++synchronizations;
  return Crossing().to_host(self).item();
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups) {
  Crossing crossing;
  const at::AutoDispatchBelowADInplaceOrView below;
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
  library.def("num_out_of_memory(int device) -> int", [](int64_t device) {
    return ledger::allocator().getDeviceStats(device).num_ooms;
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
