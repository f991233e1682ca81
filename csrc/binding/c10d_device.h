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
class Staging {
 public:
  Staging(const Arguments& arguments, const Call& call) : arguments_(arguments), call_(call) {}

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

 private:
  at::Tensor mirror(const at::Tensor& t, bool reads, bool writes);
  Tensors mirrors(const Tensors& list, bool reads, bool writes) {
    Tensors hosts;
    hosts.reserve(list.size());
    for (const at::Tensor& t : list) hosts.push_back(mirror(t, reads, writes));
    return hosts;
  }

  const Arguments& arguments_;
  const Call& call_;
  std::optional<c10::Device> device_;
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

  /// Later fetches come after this.
  void follow(const c10::Event& event) { event.block(fetch_); }
  /// What is queued from here on comes after what is queued on the current stream.
  void begin();
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
  /// The memory of these is used on `stream`: it is not given to others before that is over.
  void keep(const std::vector<Mirror>& mirrors, c10::Stream stream) const;

  const c10::Device device_;
  const c10::impl::VirtualGuardImpl guard_;
  const c10::Stream fetch_, deliver_;
  at::Tensor word_;  ///< the number of the last hold that was opened
  uint32_t holds_ = 0;
  StreamHold hold_;
};

}  // namespace pycomm::torch_binding
