// Peer routes: collectives on the tensors of accelerators that share a host. Kernels read and write
// the peers' memory, and nothing goes through the host. A part of _c10d.
#pragma once
#include <deque>

#include "binding/torch/device.h"
#include "collectives/device/group.h"
#include "core/trace.h"

namespace pycomm::torch_binding {

/// Returns the value that this rank publishes before a route is opened. It is equal on all ranks
/// that can have one.
std::string peer_host(c10::Device device);

/// A route with those calls of a Communicator that operations use. They queue work on the current
/// stream.
class PeerRoute {
 public:
  /// The use of a route: operations on data as they are, or with codecs.
  enum class Kind { exact, coded };
  /// Opens the route; all ranks together. Throws Error if they share no memory, and whatever
  /// `interrupt_check` throws, which is called now and then during waits.
  PeerRoute(std::shared_ptr<Store> store, int rank, int size, const std::string& group,
            c10::Device device, Kind kind, Milliseconds timeout, std::shared_ptr<Trace> trace,
            std::function<void()> interrupt_check, const std::string& secret);
  /// Waits for queued work first.
  ~PeerRoute();
  PeerRoute(const PeerRoute&) = delete;

  int rank() const { return group_.rank(); }
  c10::Device device() const { return device_; }
  std::string describe() const { return group_.describe(); }

  int size() const { return group_.size(); }
  void run(const Collective& call, Milliseconds);

  /// Returns the most bytes of the payload of what a codec cannot cut.
  size_t most_payload_bytes() const { return group_.most_payload_bytes(); }
  /// Runs an operation with codecs; see DeviceGroup.
  void run_coded(Op op, const CodedArgs& args, void* out, float* found_inf);

  /// Sets the operation that is queued last, which is done at an event. The trace shows it as one
  /// of a separate group, whose numbers are those of this route.
  void set_last(OpTag tag, std::shared_ptr<c10::Event> event);
  void set_timeout(Milliseconds timeout) { group_.set_timeout(timeout); }
  /// Throws the errors of the work so far.
  void check();
  /// Calls op(*this), which queues an operation on the current stream. `captured`: in a graph,
  /// whose replays nobody sees.
  void call(const std::function<void(PeerRoute&)>& op, bool captured);
  /// Ends the operations that are under way, if there are any: the process of a rank is gone.
  void lose(int rank) noexcept;
  void abort(const std::string& reason) noexcept {
    group_.abort(plain_notice(reason, group_.rank()));
  }

 private:
  /// Tells the trace which operations have ended.
  void look();

  /// Returns the current stream. Kernels of the host run when the stream reaches them.
  Stream stream() const;

  const c10::Device device_;
  DeviceGroup group_;
  std::shared_ptr<c10::Event> last_;
  const std::shared_ptr<Trace> trace_;
  struct UnderWay {
    uint64_t record;
    std::shared_ptr<c10::Event> done;
  };
  std::mutex under_way_mutex_;
  std::deque<UnderWay> under_way_;
  bool calling_ = false, captured_ = false;
  uint64_t seq_ = 0;
};

}  // namespace pycomm::torch_binding
