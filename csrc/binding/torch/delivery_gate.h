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

#include <deque>
#include <memory>
#include <mutex>
#include <vector>

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

  // Each ends the holds up to this number. Any thread, in the order of the holds. They take neither
  // the GIL nor the driver's lock: whoever has these may wait for the stream.

  /// The results are on the host.
  void open(uint32_t number) { put({number, {}}); }
  /// There are no results: overwrites them when nothing else writes there any more, with bytes that
  /// are NaN in every floating type, and no payload of a codec. Does not wait: if the copies from
  /// the device are not done, a thread does this later.
  void fail(uint32_t number, FailedDelivery failed) { put({number, std::move(failed)}); }

 private:
  struct End {
    uint32_t number;
    FailedDelivery failed;
  };
  void put(End end);
  bool is_fetched(const End& end) const;
  void finish(const End& end);
  void serve();

  const c10::Device device_;
  const at::Tensor word_;
  std::mutex mutex_;
  std::deque<End> waiting_;  ///< not empty: a thread serves them
};

}  // namespace pycomm::torch_binding
