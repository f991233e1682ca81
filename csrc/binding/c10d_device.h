// Collectives on device tensors by way of the host: copies to pinned memory, the collective there,
// copies back, all in the order of the caller's stream. Only what c10 offers for every device is
// used, so this compiles against a torch without CUDA. A part of _c10d.
//
//   caller's stream  ... kernels | event                                     | wait() ...
//   fetch stream                 | wait, copies to the host | event          |
//   group's thread                                          | the collective |
//   deliver stream               | hold ..............................       | copies back, event
//
// The hold (core/stream_hold.h) lets all of this be queued when the operation is issued, so that
// wait() is a matter of streams. On devices without one, the copies back are queued by the group's
// thread, and wait() blocks its caller until then.
#pragma once
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <functional>
#include <thread>

#include "binding/c10d_arguments.h"
#include "core/stream_hold.h"

namespace pycomm::torch_binding {

/// For waits by looking: often at first, since most are short, and then others may run.
class Patience {
 public:
  void wait() {
    if (++looks_ <= kEager) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

 private:
  static constexpr int kEager = 200;
  int looks_ = 0;
};

class Backend;    // c10d_backend.h
class PeerRoute;  // c10d_peers.h

/// How a group treats device tensors.
struct DeviceOptions {
  /// "auto": among accelerators of one host by kernels, else by way of the host; or "host".
  std::string path = "auto";
  /// wait() blocks the host until the collective is done, and raises its error.
  bool blocking_wait = false;
};

// What older versions of torch do not tell.

/// What the device's own library knows the stream by; null if torch does not tell.
template <typename S>
auto native_handle(const S& stream, int) -> decltype(stream.native_handle()) {
  return stream.native_handle();
}
template <typename S>
void* native_handle(const S&, long) {
  return nullptr;
}

/// From torch 2.12 on; before, the device's library complains by itself.
template <typename G>
auto is_capturing(const G& guard, c10::Stream stream, int)
    -> decltype(guard.isStreamCapturing(stream)) {
  return guard.isStreamCapturing(stream);
}
template <typename G>
bool is_capturing(const G&, c10::Stream, long) {
  return false;
}

/// Whether a graph captures what is queued on the device's current stream.
bool is_capturing(c10::Device device);

/// How streams of a type of device are held; null if nobody knows.
StreamHold stream_hold(c10::DeviceType type);
/// For devices other than CUDA's, by whoever brings them.
void set_stream_hold(c10::DeviceType type, StreamHold hold);

/// A tensor of a device, and the pinned memory of its size on the host.
struct Mirror {
  at::Tensor device, host;
};

/// Copies of parts of this size take long enough to be worth their events.
constexpr size_t kDevicePartBytes = size_t{4} << 20;

/// A part of an operation: what it reads is fetched, then the host does its share, then what it has
/// written is delivered. While one part is on the network, the next is fetched and the last
/// delivered.
struct DevicePart {
  std::vector<Mirror> reads, writes;
  std::function<void(Communicator&)> op;
};

/// The tensors of one call as the host sees them: CPU tensors themselves, and for device tensors
/// pinned memory that will be filled from them, brought back into them, or both.
///
/// Where a route among the devices is open, tensors are themselves.
class Staging {
 public:
  enum class By { any, host };
  Staging(const Backend& backend, const Call& call, By by = By::any)
      : backend_(backend), call_(call), by_(by) {}

  at::Tensor in(const at::Tensor& t) { return mirror(t, true, false); }
  /// Written as a whole.
  at::Tensor out(const at::Tensor& t) { return mirror(t, false, true); }
  at::Tensor in_out(const at::Tensor& t) { return mirror(t, true, true); }
  Tensors in(const Tensors& list) { return mirrors(list, true, false); }
  Tensors out(const Tensors& list) { return mirrors(list, false, true); }
  Tensors in_out(const Tensors& list) { return mirrors(list, true, true); }
  /// The call comes after what is queued on this device, though it moves no tensor of it.
  void follow(c10::Device device) { device_ = device; }

  bool on_device() const { return device_ && !device_->is_cpu(); }
  c10::Device device() const { return *device_; }
  const std::vector<Mirror>& reads() const { return reads_; }
  const std::vector<Mirror>& writes() const { return writes_; }
  /// Null if the data go by way of the host.
  const std::shared_ptr<PeerRoute>& peers() const { return peers_; }
  /// The tensors that go by it.
  const Tensors& used() const { return used_; }

 private:
  at::Tensor mirror(const at::Tensor& t, bool reads, bool writes);
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

/// A group's streams on one device. Whoever issues an operation does it under a lock of the group.
class DeviceLane {
 public:
  explicit DeviceLane(c10::Device device);
  ~DeviceLane();
  DeviceLane(const DeviceLane&) = delete;

  c10::Stream current() const { return guard_.getStream(device_); }
  c10::Device device() const { return device_; }
  /// Whether deliveries can be queued before there is something to deliver.
  bool can_hold() const { return hold_ != nullptr; }

  /// The memory of these is used on `stream`: it is not given to others before that is over.
  void keep(const Tensors& tensors, c10::Stream stream) const;
  /// Later fetches come after all deliveries that are queued.
  void follow_deliveries();
  /// Later fetches come after this.
  void follow(const c10::Event& event) { event.block(fetch_); }
  /// What is queued from here on comes after what is queued on the current stream.
  void begin();
  /// The same of the deliver stream alone. A graph that captures the current stream captures this
  /// one too, and would miss the end of another.
  void begin_delivery();
  /// Queues copies to the host, and an event behind them.
  std::shared_ptr<c10::Event> fetch(const std::vector<Mirror>& reads);
  /// Queues that the deliver stream waits for open() of the number that this returns.
  uint32_t hold();
  /// Lets everything up to this hold run. Any thread, in the order of the holds.
  void open(uint32_t number) { __atomic_store_n(word(), number, __ATOMIC_RELEASE); }
  /// Queues copies from the host on the deliver stream.
  void deliver(const std::vector<Mirror>& writes);
  c10::Stream deliver_stream() const { return deliver_; }

 private:
  uint32_t* word() const { return static_cast<uint32_t*>(word_.mutable_data_ptr()); }

  const c10::Device device_;
  const c10::impl::VirtualGuardImpl guard_;
  const c10::Stream fetch_, deliver_;
  at::Tensor word_;  ///< the number of the last hold that was opened
  uint32_t holds_ = 0;
  StreamHold hold_;
};

}  // namespace pycomm::torch_binding
