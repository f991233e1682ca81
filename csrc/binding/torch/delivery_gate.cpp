// The ends of holds: torch/delivery_gate.h. A part of _c10d.
#include "binding/torch/delivery_gate.h"

#include <c10/core/DeviceGuard.h>

#include <cstring>
#include <system_error>
#include <thread>

#include "binding/torch/device.h"

namespace pycomm::torch_binding {

DeliveryGate::DeliveryGate(c10::Device device) : device_(device), word_(pinned({1}, at::kInt)) {
  finish({0, {}});
}

void DeliveryGate::put(End end) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (waiting_.empty() && is_fetched(end)) return finish(end);
  waiting_.push_back(std::move(end));
  if (waiting_.size() > 1) return;
  try {
    std::thread([self = shared_from_this()] { self->serve(); }).detach();
  } catch (const std::system_error&) {  // there are no more threads: this one waits
    lock.unlock();
    serve();
  }
}

bool DeliveryGate::is_fetched(const End& end) const {
  try {
    // Otherwise CUDA would make this thread a user of the first device, too.
    const c10::DeviceGuard on(device_);
    for (const auto& event : end.failed.fetched)
      if (!event->query()) return false;
  } catch (...) {  // the device has failed, and nothing runs there any more
  }
  return true;
}

void DeliveryGate::finish(const End& end) {
  for (const at::Tensor& result : end.failed.results)
    if (result.nbytes()) std::memset(result.mutable_data_ptr(), 0xFF, result.nbytes());
  __atomic_store_n(static_cast<uint32_t*>(word_.mutable_data_ptr()), end.number, __ATOMIC_RELEASE);
}

void DeliveryGate::serve() {
  // Destroyed at last, when no stream waits any more: their destructors call the driver.
  std::vector<End> ended;
  for (Backoff backoff;; backoff.wait()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (!waiting_.empty() && is_fetched(waiting_.front())) {
      finish(waiting_.front());
      ended.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
    if (waiting_.empty()) return;
  }
}

}  // namespace pycomm::torch_binding
