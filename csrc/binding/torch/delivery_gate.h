// DeliveryGate: ends the holds of a deliver stream, in their order, and never before what the
// stream then copies to the device is a result, or says that there is none. A part of _c10d.
//
// The pinned memory of an operation has two writers: the copy from the device, which runs when the
// caller's stream reaches it, and the group's thread. While an operation is fine, they follow each
// other. One that fails, at its deadline for example, may have a copy still to come. So its results
// are overwritten when all its copies are done, and only then its hold ends:
//
//   caller's stream  ... kernels that take long ............... | event
//   fetch stream                                                | copy to the host | event
//   group's thread       deadline: the operation fails                             |
//   gate                                                                           | overwrite,
//   open deliver stream       hold ....................................................... | copy
//   back
#pragma once
#include <ATen/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <memory>
#include <vector>

#include "collectives/queue.h"

namespace pycomm::torch_binding {

/// The results of a failed operation that a device waits for.
struct FailedDelivery {
  std::vector<std::shared_ptr<c10::Event>> fetched;  ///< after each copy into the results
  std::vector<at::Tensor> results;                   ///< on the host
};

class DeliveryGate : public std::enable_shared_from_this<DeliveryGate> {
 public:
  explicit DeliveryGate(c10::Device device);

  /// The number of the last hold that has ended, in memory that the device reads.
  const uint32_t* word() const { return static_cast<const uint32_t*>(word_.const_data_ptr()); }

  // Each ends the holds up to this number. By one thread after the other, in the order of the
  // holds. They take neither the GIL nor the driver's lock: whoever has these may wait for the
  // stream.

  /// The results are on the host.
  void open(uint32_t number) { end(number, {}); }
  /// There are no results: overwrites them when nothing else writes there any more, with bytes that
  /// are NaN in every floating type, and no payload of a codec. Does not wait: if the copies from
  /// the device are not done, a thread does this later.
  void fail(uint32_t number, FailedDelivery failed) { end(number, std::move(failed)); }

 private:
  void end(uint32_t number, FailedDelivery failed);
  bool is_fetched(const FailedDelivery& failed) const;
  void finish(uint32_t number, const FailedDelivery& failed);

  const c10::Device device_;
  const at::Tensor word_;
  /// What `late_` has ended, until the stream waits for nothing: destructors call the driver.
  std::vector<FailedDelivery> ended_;
  Queue late_;  ///< ends holds whose results are still written
};

}  // namespace pycomm::torch_binding
