// Backend: the "pycomm" process group, one c10d::Backend for CPU and device tensors over a
// Communicator. A part of _c10d.
#pragma once
#include <torch/version.h>

#include <set>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "binding/core/trace_records.h"
#include "binding/torch/arguments.h"
#include "binding/torch/engine.h"
#include "binding/torch/layout.h"
#include "binding/torch/open_group.h"
#include "transports/tcp/endpoint/group_formation.h"

namespace pycomm::torch_binding {

/// The options that users pass as `pg_options`.
struct BackendOptions final : c10d::Backend::Options {
  explicit BackendOptions(Milliseconds timeout) : c10d::Backend::Options("pycomm", timeout) {}
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  /// Torch clones the options of a group for those that are made from it.
  intrusive_ptr<c10d::Backend::Options> clone() const override {
    return c10::make_intrusive<BackendOptions>(*this);
  }
#endif

  CommunicatorOptions communicator;  ///< its group and timeout are the base class's
  /// The data path of device tensors. "auto": kernels among accelerators of one host, otherwise the
  /// host; or "host".
  std::string device_path = "auto";
#ifndef C10D_BACKEND_HAS_RECONFIGURE
  bool enable_reconfigure = false;  ///< newer versions of torch have this in the base class
#endif
};

/// A group that already contains the ranks of a new one, and their numbers there. May be empty.
struct Parent {
  std::shared_ptr<Engine> engine;
  std::vector<int> ranks;
};

/// The buckets that torch's reducer has allocated from a group. Any thread.
class Buckets {
 public:
  void add(const void* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    memory_.insert(memory);
  }
  void remove(const void* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    memory_.erase(memory);
  }
  bool has(const at::Tensor& tensor) const {
    if (!tensor.is_cpu() || !tensor.has_storage()) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    return memory_.count(tensor.storage().data()) > 0;
  }

 private:
  mutable std::mutex mutex_;
  std::set<const void*> memory_;
};

class Backend final : public c10d::Backend {
 public:
  /// `group` must be new in the store.
  Backend(const std::shared_ptr<TorchStore>& store, int rank, int size,
          intrusive_ptr<BackendOptions> options, const std::string& group, const Parent& parent);
  ~Backend() override;

  /// Makes a group whose threads end before the interpreter does.
  static intrusive_ptr<Backend> make(const intrusive_ptr<c10d::Store>& store, int rank, int size,
                                     intrusive_ptr<BackendOptions> options,
                                     const std::string& group, const Parent& parent = {});
  /// Returns this group as the parent of one with these of its ranks, if it is open.
  Parent as_parent(const std::vector<int>& ranks) const;

  const std::string getBackendName() const override { return "pycomm"; }
  /// Returns a copy, since torch writes the names of new groups into it.
  intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<BackendOptions>(*options_);
  }
  const Arguments& arguments() const { return arguments_; }
  /// Returns the route among the devices, or null where their data go through the host.
  std::shared_ptr<PeerRoute> peers(c10::Device device) const {
    return engine()->peers(device).route;
  }
  std::vector<int> levels() { return engine()->comm().levels(); }
  std::vector<uint32_t> shares() { return engine()->comm().shares(); }
  std::string describe() { return engine()->describe(); }
  std::vector<std::string> transports() { return engine()->comm().transports(); }
  py::dict trace() { return trace_records(engine()->comm().trace()); }
  /// Throws the error of operations on device tensors, for which only streams may have waited.
  void check() { engine()->check(); }
  uint64_t wire_bytes() { return engine()->comm().wire_bytes(); }
  uint64_t sent_bytes() { return engine()->comm().sent_bytes(); }

  // Collectives on lists of tensors, one per rank:

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override;

  // Collectives on one tensor, or on several that are treated alike:

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  /// Waits for all ranks. Rank 0 names the missing ranks, all of them or the first. The group stays
  /// usable.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // Compressed collectives, with codecs and feedback, on float32 and 16-bit floats, which are
  // rounded once. The future holds the output; Work::finite tells, once complete, if no value of it
  // is Inf or NaN on any rank. Callers must hold the GIL.

  /// Returns why kernels on this device cannot run them, or "" if they can: they reach the memory
  /// of the peers' devices. The first time all ranks ask together.
  std::string why_no_peers(c10::Device device);
  /// Returns the most bytes of the payload of what a codec cannot cut, where kernels can run them.
  size_t most_payload_bytes(c10::Device device);
  /// Runs an all_reduce of `output`, which is also `input`, or a reduce_scatter, whose layout is
  /// that of a row of `input`, which has one for each rank, and so do its residuals.
  intrusive_ptr<Work> compressed(Op op, const at::Tensor& output, const at::Tensor& input,
                                 const std::shared_ptr<const Layout>& layout,
                                 const CodedStep& step);

  /// Waits for a future of this group's operations; see Engine::wait_after_backward().
  void wait(Future& future) {
    if (const auto engine = open_->engine()) engine->wait(future);
  }
  void wait_after_backward(const intrusive_ptr<Future>& future) {
    if (const auto engine = open_->engine()) engine->wait_after_backward(future);
  }

  // Point-to-point operations. Between start and end, all are issued and none is waited for.

  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // Group operations.

  bool supportsSplitting() const override { return true; }
  intrusive_ptr<c10d::Backend> split(const intrusive_ptr<c10d::Store>& store,
                                     const std::vector<int>& ranks,
                                     const intrusive_ptr<Options>& opts) override;
  intrusive_ptr<c10d::Backend> merge(const intrusive_ptr<c10d::Store>& store,
                                     const intrusive_ptr<Options>& opts, const int& rank,
                                     const int& size) override;
  bool supportsShrinking() const override { return true; }
  /// Makes a group of the remaining ranks, which all call this, also after an error has ended this
  /// group.
  intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& ranks_to_exclude,
                                      int shrink_flags,
                                      const intrusive_ptr<Options>& opts) override;

  // Reconfiguration: the members of a group change, and it stays the same
  // object. Groups are made so by the option enable_reconfigure; they have no members at first.

  /// What others need to form a group with this process.
  std::string handle() const;
  /// Whether the process of a handle of this group has ended, as far as its machine tells at once.
  bool is_gone(const std::string& handle) const;
  /// Forms the group of the processes with these handles, in this order. All of them call it, with
  /// the same new uuid. Operations that were issued before end first, or are aborted. If it throws,
  /// the group is as it was, and may be reconfigured with another uuid.
  void form(int64_t uuid, const std::vector<std::string>& handles, Milliseconds timeout);
  /// How often the members have been set by form(); 0 in a group that keeps its members.
  int64_t formed() const { return formed_; }
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bool supportsReconfigure() const override { return endpoint_ != nullptr; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override { return handle(); }
  intrusive_ptr<c10d::Work> reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif

  void setTimeout(Milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}  // all ranks count from 0
  uint64_t getSequenceNumberForGroup() override { return engine()->seq(); }
  c10d::ErrorType getError() override;

  /// Allocates memory that peers on this host reach in place: collectives on it copy nothing.
  at::Tensor allocate(int64_t size, const at::TensorOptions& options, bool for_bucket = false);
  /// Does the same for torch's reducer, which calls this for the buckets of DDP. Returns real
  /// numbers for complex ones, twice as many, if the reducer wants that.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  /// Torch passes the index of a device only; the CPU has none.
  bool supportsTensorAlloc(c10::DeviceIndex index) override { return index < 0; }

  /// Ends all operations on all ranks. Any thread, any time, more than once.
  void abort() override;
  /// Finishes the collectives that were issued and leaves. Any thread, more than once.
  void shutdown() override;
  /// In newer versions of torch the rank and the size of a group are those of its backend, and may
  /// change. This changes them in a group of an older version.
  void set_shape_of(c10d::ProcessGroup& group) const;

 private:
  /// Runs op(communicator) now or on the group's thread. The tensors live as long as `op`, which
  /// uses the tensors that `staging` returned for them.
  template <typename F>
  WorkPtr issue(const Call& call, Tensors outputs, const Staging& staging, F op) {
    const auto engine = this->engine();
    if constexpr (std::is_invocable_v<F, PeerRoute&>)
      if (staging.peers())
        return noted(engine->submit(call, std::move(outputs), staging.peers(), staging.used(), op));
    if (staging.on_device())
      return noted(engine->submit(call, std::move(outputs), staging.device(),
                                  {{staging.reads(), staging.writes(), std::move(op)}}));
    if (!call.async && !coalescing_) return engine->run(call, std::move(outputs), op);
    auto work = engine->make_work(true, call, std::move(outputs));
    work->make_future();
    engine->submit(work, std::move(op));
    return noted(work);
  }
  /// Runs an all-reduce of a large tensor of a device in parts.
  WorkPtr all_reduce_in_parts(const Call& call, const at::Tensor& tensor, const at::Tensor& host,
                              const Collective& how);
  /// Checks that the part that this rank has for itself has one size in the input and the output.
  /// Unless all parts are even, other ranks may not see that it has not, and the group ends: they
  /// get an error instead of waiting until the deadline.
  void own_part(const Call& call, bool even, int64_t in, int64_t out) const;
  /// Runs a collective from some tensors to others: one for each rank where the op has parts, else
  /// one.
  WorkPtr issue_lists(const Call& call, const Collective& how, const Tensors& inputs,
                      const Tensors& outputs);
  /// Runs an all_gather or a reduce_scatter from each tensor to another.
  WorkPtr issue_each(const Call& call, const Tensors& outputs, const Tensors& inputs,
                     const c10d::ReduceOp& redop = {});
  WorkPtr post(const char* title, OpType type, Tensors& tensors, int peer, int tag);
  /// Notes the work, so that endCoalescing() waits for it, and returns it.
  WorkPtr noted(WorkPtr work);

  std::shared_ptr<Engine> engine() const {
    auto engine = open_->engine();
    if (!engine) raise_not_open();
    if (open_->in_child())
      with_python_errors([&] { open_->check_process(arguments_.here() + "the process group"); });
    return engine;
  }
  [[noreturn]] void raise_not_open() const;
  void wait_for_all(const Engine& engine, const c10d::BarrierOptions& opts, bool wait_all_ranks);
  void open_endpoint();
  void form(tcp::GroupFormation& formation, int64_t uuid, CommunicatorOptions communicator,
            Milliseconds limit, const std::shared_ptr<Engine>& former);
  /// Returns the options of our communicators, all but the name and the members.
  CommunicatorOptions communicator_options() const;
  intrusive_ptr<BackendOptions> options_for(const intrusive_ptr<Options>& given) const;
  /// Returns a group of some of our ranks. Torch asks for it twice, for the CPU and for CUDA, and
  /// one backend serves both: the first call makes it, the second returns it.
  intrusive_ptr<Backend> made_from_this(const intrusive_ptr<c10d::Store>& store, int rank, int size,
                                        const intrusive_ptr<Options>& given,
                                        const Parent& parent = {});

  Arguments arguments_;
  const intrusive_ptr<c10d::Store> store_;
  const std::string group_;  ///< its name in the store
  const intrusive_ptr<BackendOptions> options_;
  const std::shared_ptr<Buckets> buckets_ = std::make_shared<Buckets>();
  std::shared_ptr<OpenGroup> open_;
  std::mutex forming_;                       ///< held while the group is formed anew
  std::unique_ptr<tcp::Endpoint> endpoint_;  ///< null in a group that cannot be reconfigured
  std::atomic<int64_t> formed_{0};
  int monitored_barriers_ = 0;
  c10::weak_intrusive_ptr<c10d::Backend> fresh_{intrusive_ptr<c10d::Backend>()};

  std::mutex coalesced_mutex_;
  std::atomic<bool> coalescing_{false};
  std::vector<WorkPtr> coalesced_;
};

}  // namespace pycomm::torch_binding
