// Tensors of device "cuda" in host memory, computed by the CPU kernels, for a CPU build of torch.
//
// What a GPU refuses is refused: operands on two devices, a tensor of another rank's device, a read
// behind the end of a storage, a stream that does not wait for what another has written, host memory
// that is read or overwritten before its copy is through. What costs time on a GPU is counted: waits
// of the host, operations, bytes copied. Numbers are those of the CPU kernels. The Python half is
// device.py.

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;
using c10::Storage;
using c10::Stream;

// ---- what is counted -----------------------------------------------------------------------------

struct Counts {
  std::atomic<int64_t> synchronizations{0}, operations{0}, to_device{0}, to_host{0};
  std::atomic<int64_t> peak{0}, own_allocated{0};
  std::atomic<int64_t>* allocated = &own_allocated;  // where other processes of the device read it
} counts;

// Inside a stand-in for one kernel nothing is counted but what it leaves allocated.
thread_local int kernel_depth = 0;

PyObject* on_synchronization = nullptr;  // called with a reason, to find out where hosts wait

void count_synchronization(const std::string& reason) {
  if (kernel_depth) return;
  counts.synchronizations++;
  if (!on_synchronization) return;
  pybind11::gil_scoped_acquire gil;
  pybind11::reinterpret_borrow<pybind11::object>(on_synchronization)(reason);
}

void count_operation() {
  if (!kernel_depth) counts.operations++;
}

void raise_peak() {
  if (kernel_depth) return;
  int64_t now = *counts.allocated, before = counts.peak;
  while (before < now && !counts.peak.compare_exchange_weak(before, now)) {
  }
}

// ---- streams: who has waited for whom ------------------------------------------------------------

// Vector clocks. Agent 0 is the host, the others are streams; `known[a][b]` is up to which of its
// operations agent a knows b to be through.
using Clock = std::vector<int64_t>;
using Agent = size_t;
constexpr Agent HOST = 0;

std::recursive_mutex order;  // of everything below, up to the allocator
std::vector<Clock> known{Clock{0}};
std::map<Agent, DeviceIndex> device_of_stream;
std::string defect;  // found where nothing can be raised, raised by the next operation

int64_t time_of(const Clock& clock, Agent agent) {
  return agent < clock.size() ? clock[agent] : 0;
}

void learn(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t agent = 0; agent < other.size(); agent++) {
    clock[agent] = std::max(clock[agent], other[agent]);
  }
}

Agent new_stream(DeviceIndex device) {
  std::lock_guard lock(order);
  known.emplace_back();
  device_of_stream[known.size() - 1] = device;
  return known.size() - 1;
}

DeviceIndex num_devices = 1;
thread_local DeviceIndex current_device = 0;
thread_local std::map<DeviceIndex, Agent> current_streams;

Agent default_stream(DeviceIndex device) {  // agents 1 to num_devices
  std::lock_guard lock(order);
  while (known.size() <= static_cast<size_t>(device) + 1) new_stream(known.size() - 1);
  return device + 1;
}

Agent current_stream(DeviceIndex device) {
  auto found = current_streams.find(device);
  return found == current_streams.end() ? default_stream(device) : found->second;
}

// The next operation of a stream: it comes after everything that the host has waited for.
int64_t advance(Agent stream) {
  auto& clock = known[stream];
  learn(clock, known[HOST]);
  if (clock.size() <= stream) clock.resize(stream + 1);
  return ++clock[stream];
}

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point at;
};

// ---- memory --------------------------------------------------------------------------------------

struct Access {
  Agent stream = HOST;
  int64_t time = 0;
};

// Bytes that a collective uses on its stream.
struct Range {
  Agent stream;
  int64_t time;
  int64_t begin, end;
  bool writes;
};

// What stands behind a CUDA storage: the CPU storage with its bytes, and who has used it.
struct Block {
  Storage bytes;
  int64_t size;
  Agent owner;  // the stream that allocated it, which gets the memory back
  Access write;
  std::map<Agent, int64_t> reads;
  std::set<Agent> recorded;  // streams that Tensor.record_stream named
  std::vector<Range> collectives;
  // by bytes, because a buffer's buckets are reduced while others are filled; freeing is no defect,
  // because torch keeps a collective's tensors until it is through
};

int64_t rounded(size_t size) { return (size + 511) / 512 * 512; }

constexpr int POISON = 0xFF;  // NaN in every floating-point type, -1 in every integer

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  *counts.allocated -= block->size;
  {
    std::lock_guard lock(order);
    auto uses = block->reads;
    uses[block->write.stream] = std::max(uses[block->write.stream], block->write.time);
    for (auto [stream, time] : uses) {
      if (stream == HOST || stream == block->owner || block->recorded.count(stream)) continue;
      if (time_of(known[block->owner], stream) >= time) continue;
      if (time_of(known[HOST], stream) >= time) continue;
      defect = "a tensor is freed while another stream may still use it: call record_stream, or let"
               " its own stream wait";
    }
  }
  delete block;
}

// The bytes of a CPU storage as device memory.
c10::DataPtr as_device_memory(const Storage& bytes, Device device) {
  auto* block = new Block{bytes, rounded(bytes.nbytes()), current_stream(device.index()), {}, {}, {}, {}};
  *counts.allocated += block->size;
  raise_peak();
  return {bytes.mutable_data(), block, &free_block, device};
}

Block* block_of(const Storage& storage) {
  auto& data = storage.data_ptr();
  return data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context()) : nullptr;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Device device(DeviceType::CUDA, current_device);
    if (size == 0) return {nullptr, device};
    Storage bytes(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), size, c10::GetDefaultCPUAllocator(), true));
    std::memset(bytes.mutable_data(), POISON, size);
    return as_device_memory(bytes, device);
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
} allocator;

std::map<const char*, size_t> pinned;  // start -> bytes

bool is_pinned(const void* pointer) {
  std::lock_guard lock(order);
  auto next = pinned.upper_bound(static_cast<const char*>(pointer));
  if (next == pinned.begin()) return false;
  auto [start, size] = *std::prev(next);
  return static_cast<const char*>(pointer) < start + size;
}

void pin(const void* start, size_t size) {
  std::lock_guard lock(order);
  pinned[static_cast<const char*>(start)] = size;
}

// A copy between pinned memory and the device that the host has not waited for. To the host its
// bytes arrive with the wait; to the device they are there, and the host must not touch its own.
struct Transfer {
  Access access;
  at::Tensor host, snapshot;
  bool to_host;
};
std::list<Transfer> transfers;

bool overlap(const at::Tensor& tensor, const char* start, size_t size) {
  auto& storage = tensor.storage();
  auto* begin = static_cast<const char*>(storage.data());
  return begin < start + size && start < begin + storage.nbytes();
}

bool same_bytes(const at::Tensor& left, const at::Tensor& right) {
  auto a = left.contiguous(), b = right.contiguous();
  return std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

void unpin(const void* start) {
  std::lock_guard lock(order);
  auto found = pinned.find(static_cast<const char*>(start));
  if (found == pinned.end()) return;
  for (auto& transfer : transfers) {
    if (overlap(transfer.host, found->first, found->second)) {
      defect = "pinned host memory is given back before a copy of it is through: synchronize first";
    }
  }
  pinned.erase(found);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto data = c10::GetDefaultCPUAllocator()->allocate(size);
    auto* start = data.get();
    pin(start, size);
    // torch's own allocator keeps freed memory until its copies are through: so do `transfers`.
    auto* holder = new c10::DataPtr(std::move(data));
    return {start, holder, [](void* context) {
              auto* held = static_cast<c10::DataPtr*>(context);
              {
                std::lock_guard lock(order);
                pinned.erase(static_cast<const char*>(held->get()));
              }
              delete held;
            },
            Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
} pinned_allocator;

// Bring what has been waited for to its end.
void land(const Clock& clock) {
  for (auto transfer = transfers.begin(); transfer != transfers.end();) {
    if (time_of(clock, transfer->access.stream) < transfer->access.time) {
      transfer++;
      continue;
    }
    c10::impl::ExcludeDispatchKeyGuard plain(
        c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView) |
        c10::DispatchKeySet(c10::DispatchKey::Python) |
        c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot));
    if (transfer->to_host) {
      transfer->host.copy_(transfer->snapshot);
    } else if (!same_bytes(transfer->host, transfer->snapshot)) {
      defect = "pinned host memory was written before its copy to the device was through:"
               " synchronize first";
    }
    transfer = transfers.erase(transfer);
  }
}

void wait_for_stream(Agent stream, const std::string& reason) {
  {
    std::lock_guard lock(order);
    learn(known[HOST], known[stream]);
    land(known[HOST]);
  }
  count_synchronization(reason);
}

void wait_for_device(DeviceIndex device, const std::string& reason) {
  {
    std::lock_guard lock(order);
    for (auto [stream, its_device] : device_of_stream) {
      if (its_device == device) learn(known[HOST], known[stream]);
    }
    land(known[HOST]);
  }
  count_synchronization(reason);
}

void raise_defect() {
  std::lock_guard lock(order);
  std::string found;
  std::swap(found, defect);
  TORCH_CHECK(found.empty(), found);
}

// ---- torch's interfaces to a device --------------------------------------------------------------

Stream as_stream(Agent stream, DeviceIndex device) {
  return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, device), stream);
}

Agent agent_of(const Stream& stream) {
  // a stream of torch's own making, such as the default one of a device, has the id 0
  return stream.id() ? stream.id() : default_stream(stream.device_index());
}

DeviceIndex index_of(Device device) {
  return device.has_index() ? device.index() : current_device;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current_device); }
  Device exchangeDevice(Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }
  void setDevice(Device device) const override { current_device = index_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = index_of(device);
  }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  Stream getStream(Device device) const override {
    auto index = index_of(device);
    return as_stream(current_stream(index), index);
  }
  Stream getDefaultStream(Device device) const override {
    auto index = index_of(device);
    return as_stream(default_stream(index), index);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    auto index = index_of(device);
    default_stream(num_devices - 1);
    return as_stream(new_stream(index), index);
  }
  Stream exchangeStream(Stream stream) const override {
    auto old = getStream(stream.device());
    current_streams[stream.device_index()] = agent_of(stream);
    return old;
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard lock(order);
    if (!*event) *event = new Event;
    auto* recorded = static_cast<Event*>(*event);
    recorded->clock = known[agent_of(stream)];
    recorded->at = std::chrono::steady_clock::now();
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(
               static_cast<Event*>(to)->at - static_cast<Event*>(from)->at)
        .count();
  }
  void block(void* event, const Stream& stream) const override {
    std::lock_guard lock(order);
    if (event) learn(known[agent_of(stream)], static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& stream) const override {
    wait_for_stream(agent_of(stream), "Stream.synchronize");
  }
  void synchronizeEvent(void* event) const override {
    {
      std::lock_guard lock(order);
      learn(known[HOST], static_cast<Event*>(event)->clock);
      land(known[HOST]);
    }
    count_synchronization("Event.synchronize");
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    wait_for_device(device, "synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    std::lock_guard lock(order);
    if (data.get_deleter() == &free_block) {
      static_cast<Block*>(data.get_context())->recorded.insert(agent_of(stream));
    }
  }
};
const Guard guard;
c10::impl::DeviceGuardImplRegistrar register_guard(DeviceType::CUDA, &guard);

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex deviceCount() const override { return num_devices; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { ::current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto old = ::current_device;
    if (device >= 0) ::current_device = device;
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(DeviceIndex device) const override { wait_for_device(device, "synchronize"); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  std::string showConfig() const override { return "fake CUDA"; }
};

// ---- one call of an operator: CUDA tensors go in as CPU tensors over the same bytes --------------

at::Tensor over(Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  auto tensor = at::Tensor(impl);
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  return tensor;
}

struct Call {
  std::vector<std::pair<Storage, Storage>> storages;  // CUDA, CPU
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;
  DeviceIndex device = current_device;

  Storage cpu_storage(const Storage& cuda) {
    for (auto& [ours, theirs] : storages) {
      if (ours.unsafeGetStorageImpl() == cuda.unsafeGetStorageImpl()) return theirs;
    }
    auto* keep_alive = new Storage(cuda);
    c10::DataPtr bytes(
        cuda.mutable_data(), keep_alive, [](void* held) { delete static_cast<Storage*>(held); },
        Device(DeviceType::CPU));
    storages.emplace_back(
        cuda, Storage(c10::make_intrusive<c10::StorageImpl>(
                  c10::StorageImpl::use_byte_size_t(), cuda.nbytes(), std::move(bytes),
                  c10::GetDefaultCPUAllocator(), true)));
    return storages.back().second;
  }

  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    device = tensor.device().index();
    for (auto& [ours, theirs] : tensors) {
      if (ours.is_same(tensor)) return theirs;
    }
    auto cpu = over(cpu_storage(tensor.storage()), c10::DispatchKey::CPU, tensor);
    tensors.emplace_back(tensor, cpu);
    return cpu;
  }

  at::Tensor to_cuda(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& [ours, theirs] : tensors) {
      if (theirs.is_same(tensor)) return ours;
    }
    for (auto& [ours, theirs] : storages) {
      if (theirs.unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) {
        return over(ours, c10::DispatchKey::CUDA, tensor);
      }
    }
    Storage cuda(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(),
        as_device_memory(tensor.storage(), Device(DeviceType::CUDA, device)), &allocator, true));
    storages.emplace_back(cuda, tensor.storage());
    return over(cuda, c10::DispatchKey::CUDA, tensor);
  }

  // What the CPU kernel did to its arguments, such as resize_ or set_, happens to ours.
  void write_back() {
    for (auto& [cuda, cpu] : storages) {
      if (cuda.nbytes() == cpu.nbytes() && cuda.data() == cpu.data()) continue;
      auto* impl = cuda.unsafeGetStorageImpl();
      impl->set_data_ptr_noswap(as_device_memory(cpu, Device(DeviceType::CUDA, device)));
      impl->set_nbytes(cpu.nbytes());
    }
    for (auto& [cuda, cpu] : tensors) {
      for (auto& [ours, theirs] : storages) {
        if (theirs.unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl() &&
            ours.unsafeGetStorageImpl() != cuda.storage().unsafeGetStorageImpl()) {
          cuda.unsafeGetTensorImpl()->set_storage_keep_dtype(ours);
        }
      }
      if (cuda.sizes() != cpu.sizes() || cuda.strides() != cpu.strides() ||
          cuda.storage_offset() != cpu.storage_offset()) {
        cuda.unsafeGetTensorImpl()->set_sizes_and_strides(
            cpu.sizes(), cpu.strides(), cpu.storage_offset());
      }
    }
  }

  IValue convert(const IValue& value, bool down) {
    auto one = [&](const at::Tensor& tensor) { return down ? to_cpu(tensor) : to_cuda(tensor); };
    if (value.isTensor()) return one(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> out;
      for (const at::Tensor tensor : value.toTensorList()) out.push_back(one(tensor));
      return out;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> out;
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        out.push_back(tensor ? std::optional<at::Tensor>(one(*tensor)) : std::nullopt);
      }
      return out;
    }
    if (value.isList() && !value.toListRef().empty() &&
        (value.toListRef()[0].isTensor() || value.toListRef()[0].isTensorList())) {
      auto in = value.toList();
      auto out = c10::impl::GenericList(in.elementType());
      for (const IValue item : in) out.push_back(convert(item, down));
      return out;
    }
    if (down && value.isStorage() && value.toStorage().device().is_cuda()) {
      return IValue(cpu_storage(value.toStorage()));
    }
    if (down && value.isDevice() && value.toDevice().is_cuda()) {
      device = index_of(value.toDevice());
      return IValue(Device(DeviceType::CPU));
    }
    return value;
  }
};

// ---- what a GPU refuses --------------------------------------------------------------------------

template <typename Function>
void each_tensor(const IValue& value, const Function& function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor tensor : value.toTensorList()) function(tensor);
  } else if (value.isOptionalTensorList()) {
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      if (tensor && tensor->defined()) function(*tensor);
    }
  } else if (value.isList()) {
    for (const IValue& item : value.toListRef()) each_tensor(item, function);
  }
}

using Names = std::unordered_set<std::string>;

bool takes_host_indices(const std::string& name) {
  static const Names names{"aten::index", "aten::index_put", "aten::index_put_",
                           "aten::_index_put_impl_", "aten::_unsafe_index"};
  return names.count(name);
}

void check_devices(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  const auto& name = op.schema().name();
  static const Names exempt{"aten::set_", "aten::_pin_memory", "aten::is_pinned",
                            "aten::_copy_from_and_resize"};
  if (exempt.count(name)) return;
  std::optional<Device> first;
  std::string host_tensor;
  for (size_t i = 0; i < arguments.size(); i++) {
    const bool may_be_on_host = i > 0 && takes_host_indices(name) && arguments[0].toTensor().is_cuda();
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (tensor.is_cuda()) {
        if (!first) first = tensor.device();
        TORCH_CHECK(*first == tensor.device(),
                    "Expected all tensors to be on the same device, but found at least two devices, ",
                    *first, " and ", tensor.device(), "! (", name, ")");
      } else if (tensor.is_cpu() && tensor.dim() > 0 && !may_be_on_host) {
        host_tensor = c10::str(tensor.sizes());  // a number on the host may go with any device
      }
    });
  }
  TORCH_CHECK(!first || host_tensor.empty(),
              "Expected all tensors to be on the same device, but found at least two devices, ", *first,
              " and cpu! (", name, ", a CPU tensor of shape ", host_tensor, ")");
}

// A tensor that reaches behind its storage reads somebody else's memory; after resize_(0) all of it.
void check_bounds(const at::Tensor& tensor) {
  if (!tensor.is_cuda() || tensor.numel() == 0) return;
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  TORCH_CHECK((last + 1) * static_cast<int64_t>(tensor.itemsize()) <=
                  static_cast<int64_t>(tensor.storage().nbytes()),
              "an illegal memory access: a tensor of shape ", tensor.sizes(), " and type ",
              tensor.dtype(), " in a storage of ", tensor.storage().nbytes(),
              " bytes; was it freed or offloaded?");
}

std::pair<int64_t, int64_t> bytes_of(const at::Tensor& tensor) {
  int64_t span = 1;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) span += (tensor.size(dim) - 1) * tensor.stride(dim);
  const int64_t begin = tensor.storage_offset() * tensor.itemsize();
  return {begin, begin + (tensor.numel() ? span * static_cast<int64_t>(tensor.itemsize()) : 0)};
}

// A stream's operation is to use a tensor: others that have written it must have been waited for.
void check_use(Block* block, const at::Tensor& tensor, bool writes, Agent stream, const std::string& name) {
  auto& clock = known[stream];
  auto check = [&](Agent other, int64_t time, const char* what) {
    TORCH_CHECK(other == HOST || other == stream || time_of(clock, other) >= time, name, " on stream ",
                stream, what, other, " without waiting for it: wait_stream or wait_event is missing");
  };
  check(block->write.stream, block->write.time, writes ? " overwrites what is written by stream "
                                                       : " reads what is written by stream ");
  if (writes) {
    for (auto [other, time] : block->reads) check(other, time, " overwrites what is read by stream ");
  }
  auto [begin, end] = bytes_of(tensor);
  for (auto& range : block->collectives) {
    if (range.begin >= end || begin >= range.end || !(writes || range.writes)) continue;
    check(range.stream, range.time, range.writes ? " uses what a collective writes on stream "
                                                 : " overwrites what a collective reads on stream ");
  }
  auto& done = known[block->owner];
  std::erase_if(block->collectives, [&](auto& range) { return time_of(done, range.stream) >= range.time; });
}

Block* block_of(const at::Tensor& tensor) {
  return tensor.is_cuda() ? block_of(tensor.storage()) : nullptr;
}

void use(const at::Tensor& tensor, bool writes, Agent stream, int64_t now, const std::string& name) {
  auto* block = block_of(tensor);
  if (!block) return;
  check_use(block, tensor, writes, stream, name);
  if (writes) {
    block->write = {stream, now};
    block->reads.clear();
  } else {
    block->reads[stream] = now;
  }
}

void use_arguments(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments,
                   DeviceIndex device) {
  std::lock_guard lock(order);
  const auto stream = current_stream(device);
  const auto now = advance(stream);
  for (size_t i = 0; i < arguments.size(); i++) {
    auto* alias = schema.arguments()[i].alias_info();
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      check_bounds(tensor);
      use(tensor, alias && alias->isWrite(), stream, now, schema.name());
    });
  }
}

// ---- which operators compute, and which make the host wait ---------------------------------------

// Views and their like change no byte and launch nothing.
bool computes(const c10::FunctionSchema& schema) {
  static const Names others{"aten::set_", "aten::resize_", "aten::is_pinned", "aten::is_set_to",
                            "aten::_local_scalar_dense"};
  if (others.count(schema.name())) return false;
  if (schema.returns().empty()) return true;
  auto* alias = schema.returns()[0].alias_info();
  return !alias || alias->isWrite();
}

// Operators whose result, or its size, the host must see; they stand in CUDA's own implementations.
bool makes_host_wait(const std::string& name, const std::vector<IValue>& arguments) {
  static const Names always{"aten::_local_scalar_dense", "aten::nonzero", "aten::equal",
                            "aten::masked_select", "aten::_unique2", "aten::unique_dim",
                            "aten::unique_consecutive", "aten::bincount", "aten::is_nonzero"};
  if (always.count(name)) return true;
  if (name == "aten::repeat_interleave") return arguments.size() > 1 && arguments.back().isNone();
  if (!takes_host_indices(name)) return false;
  const bool looks_for_nonzero = name != "aten::index";  // which calls aten::nonzero by itself
  bool waits = false;
  each_tensor(arguments[1], [&](const at::Tensor& index) {
    waits |= !index.is_cuda() || (looks_for_nonzero && index.scalar_type() == at::kBool);
  });
  return waits;
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_python(c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  op.callBoxed(stack);
}

std::vector<IValue> pop(torch::jit::Stack* stack, size_t count) {
  std::vector<IValue> values(stack->end() - count, stack->end());
  stack->resize(stack->size() - count);
  return values;
}

// Every operator of the CUDA key that has no kernel of its own below.
void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto arguments = pop(stack, schema.arguments().size());
  raise_defect();
  check_devices(op, arguments);
  Call call;
  for (auto& argument : arguments) stack->push_back(call.convert(argument, true));
  const bool waits = makes_host_wait(schema.name(), arguments);
  if (computes(schema) || waits) use_arguments(schema, arguments, call.device);
  if (computes(schema)) count_operation();
  if (waits) wait_for_stream(current_stream(call.device), schema.name());
  if (schema.name() == "aten::_local_scalar_dense" && !kernel_depth) {
    counts.to_host += arguments[0].toTensor().itemsize();
  }
  run_on_cpu(op, stack);
  call.write_back();
  for (auto& result : pop(stack, schema.returns().size())) {
    stack->push_back(call.convert(result, false));
  }
}

// ---- operators with a kernel of their own --------------------------------------------------------

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  raise_defect();
  Call call;
  auto to = call.to_cpu(self), from = call.to_cpu(source);
  const auto stream = current_stream(call.device);
  int64_t now;
  {
    std::lock_guard lock(order);
    now = advance(stream);
    check_bounds(self);
    check_bounds(source);
    use(source, false, stream, now, "copy_");
    use(self, true, stream, now, "copy_");
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (self.is_cuda() && source.is_cuda()) {
    count_operation();
    to.copy_(from);
    return self;
  }
  const auto& host = self.is_cuda() ? source : self;
  const int64_t bytes = self.numel() * self.itemsize();
  if (!kernel_depth) (self.is_cuda() ? counts.to_device : counts.to_host) += bytes;
  if (!non_blocking || !is_pinned(host.storage().data()) || kernel_depth) {
    // from pageable memory CUDA copies by way of a buffer of its own, for which it waits as well
    if (bytes) wait_for_stream(stream, self.is_cuda() ? "copy to the device" : "copy to the host");
    to.copy_(from);
    return self;
  }
  std::lock_guard lock(order);
  if (self.is_cuda()) {
    land(known[stream]);  // it may be the way back of what has just left on the same stream
    to.copy_(from);
    transfers.push_back({{stream, now}, from, from.clone(), false});
  } else {
    auto arrives = at::empty_like(to);
    arrives.copy_(from);
    if (self.is_non_overlapping_and_dense()) std::memset(to.mutable_data_ptr(), POISON, bytes);
    transfers.push_back({{stream, now}, to, arrives, true});
  }
  return self;
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  auto type = c10::scalarTypeToTypeMeta(
      dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const int64_t bytes = c10::multiply_integers(sizes) * type.itemsize();
  c10::DeviceGuard on(device.value_or(guard.getDevice()));
  TORCH_CHECK(current_device < num_devices, "CUDA error: invalid device ordinal");
  Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, &allocator, true));
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), type);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Contiguous && *format != at::MemoryFormat::Preserve) {
    tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return tensor;
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<Device> device, std::optional<bool> pin_memory) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  int64_t span = 1;
  for (size_t dim = 0; dim < sizes.size(); dim++) span += (sizes[dim] - 1) * strides[dim];
  if (c10::multiply_integers(sizes) == 0) span = 0;
  std::vector<c10::SymInt> flat{c10::SymInt(span)};
  auto tensor = empty(flat, dtype, layout, device, pin_memory, std::nullopt);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

// Products with a result of another type, which the CPU has no kernel for. CUDA takes 16-bit factors
// and a float32 result.
void check_product(const at::Tensor& left, const at::Tensor& right, at::ScalarType dtype) {
  const auto in = left.scalar_type();
  TORCH_CHECK(in == right.scalar_type() && left.is_cuda() && right.is_cuda() &&
                  (dtype == in || (dtype == at::kFloat && (in == at::kHalf || in == at::kBFloat16))),
              "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs");
}

at::Tensor& mm_as(const at::Tensor& left, const at::Tensor& right, at::ScalarType dtype, at::Tensor& out) {
  check_product(left, right, dtype);
  count_operation();
  kernel_depth++;
  at::mm_out(out, left.to(dtype), right.to(dtype));
  kernel_depth--;
  return out;
}

at::Tensor& addmm_as(const at::Tensor& self, const at::Tensor& left, const at::Tensor& right,
                     at::ScalarType dtype, const at::Scalar& beta, const at::Scalar& alpha,
                     at::Tensor& out) {
  check_product(left, right, dtype);
  count_operation();
  kernel_depth++;
  at::addmm_out(out, self.to(dtype), left.to(dtype), right.to(dtype), beta, alpha);
  kernel_depth--;
  return out;
}

void record_stream(at::Tensor& self, Stream stream) {
  guard.recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// UntypedStorage.resize_, whose own way to CUDA is not compiled in.
void resize_storage(const at::Tensor& tensor, int64_t size) {
  auto* impl = tensor.storage().unsafeGetStorageImpl();
  c10::DeviceGuard on(tensor.device());
  auto data = allocator.allocate(size);
  if (size && impl->nbytes()) std::memcpy(data.get(), impl->data(), std::min<size_t>(size, impl->nbytes()));
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(size);
}

// The stream on which a process group's collectives run on a device.
Agent collective_stream(const IValue& group, DeviceIndex device) {
  static std::map<std::pair<const void*, DeviceIndex>, Agent> streams;
  const void* key = group.toObject()->getSlot(0).toCapsule().get();
  auto [found, is_new] = streams.try_emplace({key, device}, 0);
  default_stream(num_devices - 1);
  if (is_new) found->second = new_stream(device);
  return found->second;
}

// Gloo's work, after which the stream that waits goes on; NCCL lets the host go on at once.
struct StreamWork final : c10d::Work {
  StreamWork(c10::intrusive_ptr<c10d::Work> inner, DeviceIndex device, Clock clock, bool is_barrier)
      : inner(std::move(inner)), device(device), clock(std::move(clock)), is_barrier(is_barrier) {}
  bool wait(std::chrono::milliseconds timeout) override {
    const bool success = inner->wait(timeout);
    {
      std::lock_guard lock(order);
      learn(known[current_stream(device)], clock);
    }
    if (is_barrier) wait_for_stream(current_stream(device), "barrier");
    return success;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override { return inner->isCompleted(); }
  bool isSuccess() const override { return inner->isSuccess(); }
  std::exception_ptr exception() const override { return inner->exception(); }
  int sourceRank() const override { return inner->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner->result(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner->getFuture(); }

  c10::intrusive_ptr<c10d::Work> inner;
  DeviceIndex device;
  Clock clock;
  bool is_barrier;
};

// A collective of NCCL: gloo's over the same bytes, with NCCL's demands, on a stream of its own that
// waits for the current one.
void collective(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const Names inputs{"input_tensors", "input_tensor", "input_list", "inputs", "input"};
  const auto& schema = op.schema();
  auto arguments = pop(stack, schema.arguments().size());
  raise_defect();
  Call call;
  for (auto& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      TORCH_CHECK(tensor.is_cuda(), schema.name(), ": No backend type associated with device type cpu");
      TORCH_CHECK(tensor.device().index() == current_device, schema.name(), " of a tensor on ",
                  tensor.device(), " by a rank of device ", static_cast<int>(current_device));
      TORCH_CHECK(tensor.is_contiguous(), schema.name(), ": Tensors must be contiguous");
    });
    stack->push_back(call.convert(argument, true));
  }
  Clock done;
  {
    std::lock_guard lock(order);
    const auto group = std::find_if(arguments.begin(), arguments.end(), [](auto& one) { return one.isObject(); });
    const auto stream = collective_stream(*group, call.device);
    learn(known[stream], known[current_stream(call.device)]);
    const auto now = advance(stream);
    for (size_t i = 0; i < arguments.size(); i++) {
      const bool writes = schema.name() != "c10d::send" && !inputs.count(schema.arguments()[i].name());
      each_tensor(arguments[i], [&](const at::Tensor& tensor) {
        auto* block = block_of(tensor);
        if (!block || !tensor.numel()) return;
        check_bounds(tensor);
        check_use(block, tensor, writes, stream, schema.name());
        auto [begin, end] = bytes_of(tensor);
        block->collectives.push_back({stream, now, begin, end, writes});
      });
    }
    done = known[stream];
  }
  count_operation();
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const bool is_barrier = schema.name() == "c10d::barrier";
  for (auto& result : pop(stack, schema.returns().size())) {
    if (!result.isObject()) {
      stack->push_back(call.convert(result, false));
      continue;
    }
    c10::intrusive_ptr<c10d::Work> work =
        c10::make_intrusive<StreamWork>(result.toCustomClass<c10d::Work>(), call.device, done, is_barrier);
    stack->push_back(IValue(std::move(work)));
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", &copy);
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("mm.dtype_out", &mm_as);
  library.impl("addmm.dtype_out", &addmm_as);
  library.impl("record_stream", &record_stream);
  // those that torch implements for all devices at once, over storages that it takes for its own
  for (auto name : {"set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor",
                    "set_", "resize_", "as_strided", "view", "_reshape_alias", "unfold",
                    "_local_scalar_dense", "embedding_dense_backward",
                    "_scaled_dot_product_flash_attention", "is_set_to", "view_as_real",
                    "view_as_complex"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute>());
  }
}

}  // namespace

namespace at {
namespace {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)
}
}  // namespace at

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(DeviceType::CUDA, &allocator, 100);
  module.def("set_device_count", [](int count) { num_devices = count; });
  module.def("set_device", [](int device) { current_device = device; });
  module.def("get_device", []() { return static_cast<int>(current_device); });
  module.def("resize_storage", &resize_storage);
  module.def("counts", []() {
    return std::map<std::string, int64_t>{{"synchronizations", counts.synchronizations},
                                          {"operations", counts.operations},
                                          {"to_device", counts.to_device},
                                          {"to_host", counts.to_host}};
  });
  module.def("memory", []() { return std::make_pair(counts.allocated->load(), counts.peak.load()); });
  module.def("count_allocated_at", [](int64_t address) {
    auto* shared = reinterpret_cast<std::atomic<int64_t>*>(address);
    *shared = counts.allocated->load();
    counts.allocated = shared;
  });
  module.def("reset_peak", []() { counts.peak = counts.allocated->load(); });
  module.def("on_synchronization", [](pybind11::object callback) {
    Py_XDECREF(on_synchronization);
    on_synchronization = callback.is_none() ? nullptr : callback.release().ptr();
  });
  module.def("enter_kernel", []() { kernel_depth++; });
  module.def("leave_kernel", []() {
    kernel_depth--;
    count_operation();
    raise_peak();
  });
  module.def("raise_defect", &raise_defect);
  module.def("default_stream", &default_stream);
  module.def("current_stream", &current_stream);
  module.def("set_stream", [](DeviceIndex device, Agent stream) { current_streams[device] = stream; });
  module.def("synchronize_device", [](int device) { wait_for_device(device, "torch.cuda.synchronize"); });
  module.def("pin", [](int64_t start, int64_t size) { pin(reinterpret_cast<void*>(start), size); });
  module.def("unpin", [](int64_t start) { unpin(reinterpret_cast<void*>(start)); });
  module.def("register_collectives", []() {  // once torch.distributed has registered its own
    static torch::Library library(torch::Library::IMPL, "c10d", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    for (auto name : {"broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_",
                      "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
                      "_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_",
                      "reduce_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "send", "recv_",
                      "recv_any_source_", "barrier"}) {
      library.impl(name, torch::CppFunction::makeFromBoxedFunction<&collective>());
    }
  });
}
