// Collectives on the tensors of accelerators that share a host: kernels read and write the peers'
// memory, and nothing goes by way of the host. A part of _c10d.
#pragma once
#include <deque>

#include "binding/c10d_device.h"
#include "collectives/device_group.h"
#include "core/trace.h"

namespace pycomm::torch_binding {

/// For devices other than CUDA's, whose memory the host reads and writes as its own: the kernels
/// are the host's.
void set_host_addressable(c10::DeviceType type, bool addressable);

/// What one rank says of itself before a route is opened, equal on all ranks that can have one.
std::string peer_host(c10::Device device);

/// Has the calls of a Communicator that operations use. They queue work on the current stream.
class PeerRoute {
 public:
  /// What it is for: operations on data as they are, or with codecs.
  enum class Kind { exact, coded };
  /// All ranks together. Throws Error if they share no memory.
  PeerRoute(std::shared_ptr<Store> store, int rank, int size, const std::string& group,
            c10::Device device, Kind kind, Milliseconds timeout, std::shared_ptr<Trace> trace);
  /// Lets what is queued end first.
  ~PeerRoute();
  PeerRoute(const PeerRoute&) = delete;

  int rank() const { return group_.rank(); }
  c10::Device device() const { return device_; }
  std::string describe() const { return group_.describe(); }

  void all_reduce(void* data, size_t numel, DType dtype, ReduceOp op, double factor, Milliseconds) {
    group_.all_reduce(data, numel, dtype, op, stream(), factor);
  }
  void reduce_scatter(const ConstParts& in, void* out, DType dtype, ReduceOp op, double factor,
                      Milliseconds) {
    group_.reduce_scatter(in, out, dtype, op, stream(), factor);
  }
  void reduce_scatter(const void* in, void* out, size_t numel, DType dtype, ReduceOp op,
                      double factor, Milliseconds) {
    group_.reduce_scatter(ConstParts(in, numel), out, dtype, op, stream(), factor);
  }
  void all_gather(const void* in, const Parts& out, DType dtype, Milliseconds) {
    group_.all_gather(in, out, dtype, stream());
  }
  void all_gather(const void* in, void* out, size_t numel, DType dtype, Milliseconds) {
    group_.all_gather(in, Parts(out, numel), dtype, stream());
  }
  void all_to_all(const ConstParts& in, const Parts& out, DType dtype, Milliseconds) {
    group_.all_to_all(in, out, dtype, stream());
  }
  void broadcast(void* data, size_t numel, DType dtype, int root, Milliseconds) {
    group_.broadcast(data, numel, dtype, root, stream());
  }
  void reduce(const void* in, void* out, size_t numel, DType dtype, ReduceOp op, int root,
              double factor, Milliseconds) {
    group_.reduce(in, out, numel, dtype, op, root, stream(), factor);
  }
  void gather(const void* in, size_t numel, const Parts& out, DType dtype, int root, Milliseconds) {
    group_.gather(in, numel, out, dtype, root, stream());
  }
  void scatter(const ConstParts& in, void* out, size_t numel, DType dtype, int root, Milliseconds) {
    group_.scatter(in, out, numel, dtype, root, stream());
  }

  /// Whether such an operation can be, and with codecs of this route's kind.
  bool can_code(Op op, const CodedArgs& args) const;
  /// Calls op(group, stream) with the scratch memory of an operation with codecs.
  void code(Op op, const CodedArgs& args, const std::function<void(DeviceGroup&, Stream)>& call);

  /// What is queued last: an operation that is done at an event. The trace shows it, as one of a
  /// group of its own, whose numbers are those of this route.
  void set_last(OpTag tag, std::shared_ptr<c10::Event> event);
  void set_timeout(Milliseconds timeout) { group_.set_timeout(timeout); }
  /// Throws what has failed so far.
  void check() const;
  void abort(const std::string& reason) noexcept { group_.abort(reason); }

 private:
  /// Tells the trace what has ended.
  void look();

  /// The current one. Kernels of the host run when it has come to them.
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
  uint64_t seq_ = 0;
};

}  // namespace pycomm::torch_binding
