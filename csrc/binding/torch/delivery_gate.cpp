// The ends of holds: torch/delivery_gate.h. A part of _c10d.
#include "binding/torch/delivery_gate.h"

#include <c10/core/DeviceGuard.h>

#include <cstring>
#include <system_error>

#include "binding/torch/device.h"

namespace pycomm::torch_binding {

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
  } catch (const std::system_error&) {  // there are no more threads: this one waits
    later();
  }
}

bool DeliveryGate::is_fetched(const FailedDelivery& failed) const {
  try {
    // Otherwise CUDA would make this thread a user of the first device, too.
    const c10::DeviceGuard on(device_);
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

}  // namespace pycomm::torch_binding
