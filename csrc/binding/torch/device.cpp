// Streams and copies of device tensors. A part of _c10d.
#include "binding/torch/device.h"

#include <cstring>
#include <map>

#include "binding/torch/backend.h"
#include "core/device.h"
#include "core/env.h"

namespace pycomm::torch_binding {
namespace {

struct Abilities {
  std::mutex mutex;
  std::map<c10::DeviceType, DeviceAbilities> by_type = {
      {c10::DeviceType::CUDA, {cuda_stream_hold(), cuda_exchange_capture_mode()}}};
};

Abilities& all_abilities() {
  static Abilities abilities;
  return abilities;
}

}  // namespace

at::Tensor pinned(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, at::TensorOptions(dtype).pinned_memory(true));
}

DeviceAbilities abilities(c10::DeviceType type) {
  auto& all = all_abilities();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.by_type[type];
}

void set_abilities(c10::DeviceType type, const DeviceAbilities& abilities) {
  auto& all = all_abilities();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.by_type[type] = abilities;
}

bool is_capturing(c10::Device device) {
  const c10::DeviceGuard on(device);
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream stream = guard.getStream(device);
  if (!device.is_cuda() || !device::built()) return is_capturing(guard, stream, 0);
  return device::is_capturing({Device::cuda, native_handle(stream, 0)});
}

int exchange_capture_mode(c10::DeviceType type, int mode) {
  const auto exchange = abilities(type).exchange_capture_mode;
  if (exchange) exchange(&mode);
  return mode;
}

void stay_on(c10::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
  exchange_capture_mode(device.type(), kAsksEvents);
}

at::Tensor Staging::mirror(const at::Tensor& t, bool reads, bool writes) {
  const bool first = !device_;
  if (!first && *device_ != t.device())
    backend_.arguments().fail(call_, "all tensors must be on one device, got some on " +
                                         device_->str() + " and on " + t.device().str());
  device_ = t.device();
  if (t.is_cpu()) return t;
  if (first && by_ == By::any) peers_ = backend_.peers(t.device());
  if (peers_) return used_.emplace_back(t);
  if (first) refuse_capture();  // before memory is pinned, which no capture survives
  Mirror mirror{t, pinned(t.sizes(), t.scalar_type())};
  if (reads) reads_.push_back(mirror);
  if (writes) writes_.push_back(mirror);
  return mirror.host;
}

void Staging::refuse_capture() const {
  if (!device_->is_cpu() && is_capturing(*device_))
    backend_.arguments().fail(
        call_,
        "passes through host memory, so no graph can capture it; run it outside of the capture");
}

// ------------------------------------------------------------------ streams

DeliveryGate::DeliveryGate(c10::Device device) : device_(device), word_(pinned({1}, at::kInt)) {
  finish(0, {});
}

void DeliveryGate::end(uint32_t number, FailedDelivery failed) {
  if (late_.idle() && is_fetched(failed)) return finish(number, failed);
  const auto later = [self = shared_from_this(), number, failed = std::move(failed)] {
    for (Backoff backoff; !self->is_fetched(failed);) backoff.wait();
    self->finish(number, failed);
    self->ended_.push_back(failed);
  };
  try {
    late_.submit(later);
  } catch (const Error&) {  // there are no more threads: this one waits
    later();
  }
}

bool DeliveryGate::is_fetched(const FailedDelivery& failed) const {
  if (failed.fetched.empty()) return true;
  try {
    stay_on(device_);
    for (const auto& event : failed.fetched)
      if (!event->query()) return false;
  } catch (...) {  // the device has failed, and nothing runs there any more
  }
  return true;
}

void DeliveryGate::finish(uint32_t number, const FailedDelivery& failed) {
  for (const at::Tensor& result : failed.results)
    if (result.nbytes()) std::memset(result.mutable_data_ptr(), 0xFF, result.nbytes());
  __atomic_store_n(static_cast<uint32_t*>(word_.mutable_data_ptr()), number, __ATOMIC_RELEASE);
}

DeviceLane::DeviceLane(c10::Device device)
    : device_(device),
      guard_(device.type()),
      // Of high priority: else kernels of the group's would wait behind those of backward.
      fetch_(guard_.getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      deliver_(guard_.getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      gate_(std::make_shared<DeliveryGate>(device)),
      hold_(device_has_one_queue() ? nullptr : abilities(device.type()).hold) {
  const c10::StreamGuard on(deliver_);
  // A hold that is open already shows if this device supports any.
  void* stream = native_handle(deliver_, 0);
  if (hold_ && !(stream && hold_(stream, gate_->word(), 0))) hold_ = nullptr;
}

DeviceLane::~DeviceLane() {
  try {
    if (!hold_ || guard_.queryStream(deliver_)) return;
  } catch (...) {  // a failed device is treated as one that is not done
  }
  // The stream will still read the word, and nothing waits for it: the memory is left to it.
  new std::shared_ptr<DeliveryGate>(gate_);
}

void DeviceLane::keep(const Tensors& tensors, c10::Stream stream) const {
  for (const at::Tensor& t : tensors)
    if (t.numel()) guard_.recordDataPtrOnStream(t.storage().data_ptr(), stream);
}

void DeviceLane::follow_deliveries() {
  c10::Event queued(device_.type());
  queued.record(deliver_);
  follow(queued);
}

void DeviceLane::begin(bool delivers) {
  c10::Event issued(device_.type());
  issued.record(current());
  if (!delivers) issued.block(fetch_);
  issued.block(deliver_);  // queued work may still use the memory that will be written
}

std::shared_ptr<c10::Event> DeviceLane::fetch(const std::vector<Mirror>& reads) {
  const c10::StreamGuard on(fetch_);
  for (const auto& [device, host] : reads) {
    host.copy_(device, /*non_blocking=*/true);
    keep({device}, fetch_);
  }
  auto fetched = std::make_shared<c10::Event>(device_.type());
  fetched->record(fetch_);
  return fetched;
}

uint32_t DeviceLane::number_holds(size_t count) {
  const uint32_t first = holds_ + 1;
  holds_ += static_cast<uint32_t>(count);
  return first;
}

void DeviceLane::hold(uint32_t number) {
  const c10::StreamGuard on(deliver_);
  if (!hold_(native_handle(deliver_, 0), gate_->word(), number))
    throw Error("the stream of " + device_.str() +
                " accepts no more work; look for an earlier error of the device");
}

void DeviceLane::deliver(const std::vector<Mirror>& writes) {
  const c10::StreamGuard on(deliver_);
  for (const auto& [device, host] : writes) {
    device.copy_(host, /*non_blocking=*/true);
    keep({device}, deliver_);
  }
}

}  // namespace pycomm::torch_binding
