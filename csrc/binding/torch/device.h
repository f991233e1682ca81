// Device collectives through the host: copies to pinned memory, the collective there, copies back,
// all in the order of the caller's stream. Only calls that c10 offers for every device are used, so
// this compiles against a torch without CUDA. A part of _c10d.
//
//   caller's stream  ... kernels | event                                     | wait() ...
//   fetch stream                 | wait, copies to the host | event          |
//   group's thread                                          | the collective |
//   deliver stream               | hold ..............................       | copies back, event
//
// The hold (core/stream_hold.h) lets all of this be queued when the operation is issued, so that
// wait() blocks streams only: FSDP2 waits for each operation at once, and so do hooks between the
// two shots of a compressed one. The group's thread has the operation first, so a driver that lets
// the caller wait for a copy behind the hold delays nothing but that caller. On devices without
// holds the group's thread queues the copies back, and wait() blocks its caller until then.
//
// Where only streams wait, a failed operation must leave no values that look like a result: see
// DeliveryGate.
#pragma once
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <functional>
#include <memory>

#include "binding/torch/arguments.h"
#include "collectives/queue.h"
#include "core/stream_hold.h"

namespace pycomm::torch_binding {

class Backend;    // torch/backend.h
class PeerRoute;  // torch/peers.h

// Queries that older versions of torch do not have.

/// Returns the stream's handle in the device's own library; null if torch does not have it.
template <typename S>
auto native_handle(const S& stream, int) -> decltype(stream.native_handle()) {
  return stream.native_handle();
}
template <typename S>
void* native_handle(const S&, long) {
  return nullptr;
}

/// Available from torch 2.12 on; before, the device's library reports the error itself.
template <typename G>
auto is_capturing(const G& guard, c10::Stream stream, int)
    -> decltype(guard.isStreamCapturing(stream)) {
  return guard.isStreamCapturing(stream);
}
template <typename G>
bool is_capturing(const G&, c10::Stream, long) {
  return false;
}

/// True if a graph captures the device's current stream.
bool is_capturing(c10::Device device);

/// Sets what this thread may ask of devices while any thread captures a graph, by CUDA's numbers,
/// and returns what it was. As torch begins captures, who asks for an event would end them.
int exchange_capture_mode(c10::DeviceType type, int mode);
constexpr int kAsksEvents = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

/// Makes a device the current one of a thread of ours, from now on, which may ask it anything while
/// others capture graphs. CUDA makes a context on the current device for what a thread asks, and on
/// the one to which a thread returns: threads that stayed on the first device would take some of
/// its memory for each rank.
void stay_on(c10::Device device);

/// Guard that makes a device the current one while what uses it is destroyed, for the same reason.
/// Never throws: the device may have failed, or be that of the parent of a forked child.
class DisposalGuard {
 public:
  explicit DisposalGuard(std::optional<c10::Device> device) noexcept {
    try {
      if (device) guard_.reset_device(*device);
    } catch (...) {
    }
  }

 private:
  c10::OptionalDeviceGuard guard_;
};

/// What devices of a type can do, beside what c10 offers for every device.
struct DeviceAbilities {
  StreamHold hold = nullptr;  ///< how their streams are held; null: it is not known
  ExchangeCaptureMode exchange_capture_mode = nullptr;  ///< null: there is no such mode
  bool host_addressable = false;  ///< the host uses their memory as its own: it runs their kernels
};
DeviceAbilities abilities(c10::DeviceType type);
/// Sets them for devices other than CUDA's; their extension calls this.
void set_abilities(c10::DeviceType type, const DeviceAbilities& abilities);

/// Returns contiguous memory of the host that devices copy to and from without a wait.
at::Tensor pinned(at::IntArrayRef sizes, at::ScalarType dtype);

/// A tensor of a device, and the pinned memory of its size on the host.
struct Mirror {
  at::Tensor device, host;
};

/// Copies of parts of this size take long enough to be worth their events.
constexpr size_t kDevicePartBytes = size_t{4} << 20;

/// A part of an operation: its inputs are fetched, the host does its share, and its outputs are
/// delivered. While one part is on the network, the next is fetched and the last delivered.
struct DevicePart {
  std::vector<Mirror> reads, writes;
  std::function<void(Communicator&)> op;
};

/// The tensors of one call as the host sees them: CPU tensors themselves, and for device tensors
/// pinned memory that will be filled from them, copied back into them, or both.
///
/// If a route among the devices is open, tensors stand for themselves.
class Staging {
 public:
  enum class By { any, host };
  Staging(const Backend& backend, const Call& call, By by = By::any)
      : backend_(backend), call_(call), by_(by) {}

  at::Tensor in(const at::Tensor& t) { return mirror(t, true, false); }
  /// Returns the host's tensor for one that is written as a whole.
  at::Tensor out(const at::Tensor& t) { return mirror(t, false, true); }
  at::Tensor in_out(const at::Tensor& t) { return mirror(t, true, true); }
  Tensors in(const Tensors& list) { return mirrors(list, true, false); }
  Tensors out(const Tensors& list) { return mirrors(list, false, true); }
  Tensors in_out(const Tensors& list) { return mirrors(list, true, true); }
  /// Orders the call after the work that is queued on this device, though it moves no tensor of it.
  void follow(c10::Device device) {
    device_ = device;
    refuse_capture();
  }

  bool on_device() const { return device_ && !device_->is_cpu(); }
  c10::Device device() const { return *device_; }
  const std::vector<Mirror>& reads() const { return reads_; }
  const std::vector<Mirror>& writes() const { return writes_; }
  /// Returns the route, or null if the data go through the host.
  const std::shared_ptr<PeerRoute>& peers() const { return peers_; }
  /// Returns the tensors that use the route.
  const Tensors& used() const { return used_; }

 private:
  at::Tensor mirror(const at::Tensor& t, bool reads, bool writes);
  void refuse_capture() const;
  Tensors mirrors(const Tensors& list, bool reads, bool writes) {
    Tensors hosts;
    hosts.reserve(list.size());
    for (const at::Tensor& t : list) hosts.push_back(mirror(t, reads, writes));
    return hosts;
  }

  const Backend& backend_;
  const Call& call_;
  const By by_;
  std::optional<c10::Device> device_;
  std::shared_ptr<PeerRoute> peers_;
  Tensors used_;
  std::vector<Mirror> reads_, writes_;
};

/// The results of a failed operation that a device waits for.
struct FailedDelivery {
  std::vector<std::shared_ptr<c10::Event>> fetched;  ///< after each copy into the results
  std::vector<at::Tensor> results;                   ///< on the host
};

/// Ends the holds of a deliver stream, in their order, and never before what the
/// stream then copies to the device is a result, or says that there is none.
///
/// The pinned memory of an operation has two writers: the copy from the device, which runs when the
/// caller's stream reaches it, and the group's thread. While an operation is fine, they follow each
/// other. One that fails, at its deadline for example, may have a copy still to come. So its
/// results are overwritten when all its copies are done, and only then its hold ends:
///
///   caller's stream  ... kernels that take long ............... | event
///   fetch stream                                                | copy to the host | event
///   group's thread       deadline: the operation fails                             |
///   gate                                                                           | overwrite,
///   open deliver stream       hold ....................................................... | copy
///   back
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

/// A group's streams on one device. Operations are issued under a lock of the group.
class DeviceLane {
 public:
  explicit DeviceLane(c10::Device device);
  ~DeviceLane();
  DeviceLane(const DeviceLane&) = delete;

  c10::Stream current() const { return guard_.getStream(device_); }
  c10::Device device() const { return device_; }
  /// True if deliveries can be queued before there is something to deliver.
  bool can_hold() const { return hold_ != nullptr; }

  /// Keeps the memory of these tensors, which `stream` uses, from reuse before that is over.
  void keep(const Tensors& tensors, c10::Stream stream) const;
  /// Orders later fetches after all queued deliveries.
  void follow_deliveries();
  /// Orders later fetches after this event.
  void follow(const c10::Event& event) { event.block(fetch_); }
  /// Orders later work of the lane after the work that is queued on the current stream.
  /// `delivers`: that of the deliver stream alone. A graph that captures the current stream
  /// captures this one too, and would miss the end of another.
  void begin(bool delivers = false);
  /// Queues copies to the host, and an event after them.
  std::shared_ptr<c10::Event> fetch(const std::vector<Mirror>& reads);
  /// Numbers so many holds, in the order in which they are queued, and returns the first.
  uint32_t number_holds(size_t count);
  /// Makes the deliver stream wait until the gate has reached a number.
  void hold(uint32_t number);
  /// Returns what ends the holds of this lane. It may outlive the lane.
  const std::shared_ptr<DeliveryGate>& gate() const { return gate_; }
  /// Queues copies from the host on the deliver stream.
  void deliver(const std::vector<Mirror>& writes);
  c10::Stream deliver_stream() const { return deliver_; }

 private:
  const c10::Device device_;
  const c10::impl::VirtualGuardImpl guard_;
  const c10::Stream fetch_, deliver_;
  const std::shared_ptr<DeliveryGate> gate_;
  uint32_t holds_ = 0;
  StreamHold hold_;
};

}  // namespace pycomm::torch_binding
