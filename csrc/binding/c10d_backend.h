// The "pycomm" process group: one c10d::Backend for CPU tensors over a Communicator. A part of
// c10d.cpp.
//
// Synchronous operations run on the caller's thread, asynchronous ones in order on the group's own.
#pragma once
#include <torch/csrc/jit/python/python_ivalue.h>

#include <atomic>
#include <mutex>

#include "binding/c10d_arguments.h"
#include "binding/c10d_work.h"
#include "collectives/queue.h"

namespace pycomm::torch_binding {

using WorkPtr = intrusive_ptr<c10d::Work>;

class Backend final : public c10d::Backend {
 public:
  /// `group` must be new in the store.
  Backend(const intrusive_ptr<c10d::Store>& store, int rank, int size,
          intrusive_ptr<BackendOptions> options, const std::string& group)
      : c10d::Backend(rank, size), arguments_{rank, size}, options_(std::move(options)) {
    with_python_errors([&] {
      CommunicatorOptions communicator = options_->communicator;
      communicator.group = group;
      communicator.timeout = options_->timeout;
      communicator_ = std::make_shared<Communicator>(std::make_shared<TorchStore>(store), rank,
                                                     size, communicator);
    });
  }
  ~Backend() override { shutdown(); }

  const std::string getBackendName() const override { return "pycomm"; }
  intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  std::string describe() { return communicator()->describe(); }
  uint64_t wire_bytes() { return communicator()->wire_bytes(); }
  uint64_t sent_bytes() { return communicator()->sent_bytes(); }

  // ----------------------------------------------------------- one to all

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    const Call call("broadcast", OpType::BROADCAST, opts);
    const at::Tensor tensor = arguments_.only(call, tensors);
    const int root = static_cast<int>(opts.rootRank);
    return issue(call, {tensor}, [=](Communicator& comm) {
      const Flat data(tensor);
      const Elements elements(tensor);
      comm.broadcast(data.out(), elements.count(tensor), elements.dtype, root, call.timeout);
      data.finish();
    });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override {
    const Call call("scatter", OpType::SCATTER, opts);
    const at::Tensor output = arguments_.only(call, outputs);
    const int root = static_cast<int>(opts.rootRank);
    const Tensors parts = root == rank_ ? arguments_.one_per_rank(call, inputs, output) : Tensors();
    return issue(call, {output}, [=](Communicator& comm) {
      const FlatList in(parts);
      const Flat out(output);
      const Elements elements(output);
      comm.scatter(in.in(), out.out(), elements.count(output), elements.dtype, root, call.timeout);
      out.finish();
    });
  }

  // ----------------------------------------------------------- all to one

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    const Call call("reduce", OpType::REDUCE, opts);
    const at::Tensor tensor = arguments_.only(call, tensors);
    const auto [dtype, reduction] = arguments_.reducible(call, tensor, opts.reduceOp);
    const int root = static_cast<int>(opts.rootRank);
    return issue(call, {tensor}, [=, dtype = dtype, reduction = reduction](Communicator& comm) {
      const Flat data(tensor);
      comm.reduce(data.in(), root == comm.rank() ? data.out() : nullptr, data.numel(), dtype,
                  reduction.op, root, reduction.factor, call.timeout);
      if (root == comm.rank()) data.finish();
    });
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override {
    const Call call("gather", OpType::GATHER, opts);
    const at::Tensor input = arguments_.only(call, inputs);
    const int root = static_cast<int>(opts.rootRank);
    const Tensors parts = root == rank_ ? arguments_.one_per_rank(call, outputs, input) : Tensors();
    return issue(call, parts, [=](Communicator& comm) {
      const Flat in(input);
      const FlatList out(parts);
      const Elements elements(input);
      comm.gather(in.in(), elements.count(input), out.out(), elements.dtype, root, call.timeout);
      out.finish();
    });
  }

  // ----------------------------------------------------------- all to all

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    const Call call("all_reduce", OpType::ALLREDUCE, opts);
    const at::Tensor tensor = arguments_.only(call, tensors);
    const auto [dtype, reduction] = arguments_.reducible(call, tensor, opts.reduceOp);
    return issue(call, {tensor}, [=, dtype = dtype, reduction = reduction](Communicator& comm) {
      const Flat data(tensor);
      comm.all_reduce(data.out(), data.numel(), dtype, reduction.op, reduction.factor,
                      call.timeout);
      data.finish();
    });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override {
    const Call call("all_reduce_coalesced", OpType::ALLREDUCE_COALESCED, opts);
    if (tensors.empty()) arguments_.fail(call, "needs at least one tensor");
    const auto [dtype, reduction] = arguments_.reducible(call, tensors[0], opts.reduceOp);
    for (const at::Tensor& t : tensors) arguments_.same_dtype(call, t, tensors[0]);
    return issue(call, tensors,
                 [=, list = tensors, dtype = dtype, reduction = reduction](Communicator& comm) {
                   const at::Tensor packed = pack(list);
                   comm.all_reduce(packed.mutable_data_ptr(), packed.numel(), dtype, reduction.op,
                                   reduction.factor, call.timeout);
                   unpack(packed, list);
                 });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override {
    const Call call("all_gather", OpType::ALLGATHER, opts);
    const at::Tensor input = arguments_.only(call, inputs);
    const Tensors parts = arguments_.one_per_rank(call, outputs, input, /*equal=*/false);
    if (parts[rank_].numel() != input.numel())
      arguments_.fail(
          call, "part " + std::to_string(rank_) + " of the output has another size than the input");
    return issue(call, parts, [=](Communicator& comm) {
      const Flat in(input);
      const FlatList out(parts);
      comm.all_gather(in.in(), out.out(), Elements(input).dtype, call.timeout);
      out.finish();
    });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override {
    const Call call("all_gather_single", OpType::_ALLGATHER_BASE, opts);
    return all_gather_each(call, {output}, {input});
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    const Call call("all_gather_single_coalesced", OpType::COALESCED, opts);
    return all_gather_each(call, outputs, inputs);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    const Call call("reduce_scatter", OpType::REDUCE_SCATTER, opts);
    const at::Tensor output = arguments_.only(call, outputs);
    const Tensors parts = arguments_.one_per_rank(call, inputs, output, /*equal=*/false);
    if (parts[rank_].numel() != output.numel())
      arguments_.fail(
          call, "part " + std::to_string(rank_) + " of the input has another size than the output");
    const auto [dtype, reduction] = arguments_.reducible(call, output, opts.reduceOp);
    return issue(call, {output}, [=, dtype = dtype, reduction = reduction](Communicator& comm) {
      const FlatList in(parts);
      const Flat out(output);
      comm.reduce_scatter(in.in(), out.out(), dtype, reduction.op, reduction.factor, call.timeout);
      out.finish();
    });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override {
    const Call call("reduce_scatter_single", OpType::_REDUCE_SCATTER_BASE, opts);
    return reduce_scatter_each(call, {output}, {input}, opts.reduceOp);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    const Call call("reduce_scatter_single_coalesced", OpType::REDUCE_SCATTER_TENSOR_COALESCED,
                    opts);
    return reduce_scatter_each(call, outputs, inputs, opts.reduceOp);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override {
    const Call call("all_to_all_single", OpType::ALLTOALL_BASE, opts);
    arguments_.check(call, output);
    arguments_.same_dtype(call, input, output);
    const std::vector<size_t> send = arguments_.rows(call, input, input_splits, "input");
    const std::vector<size_t> recv = arguments_.rows(call, output, output_splits, "output");
    return issue(call, {output}, [=, out_tensor = output, in_tensor = input](Communicator& comm) {
      const Flat in(in_tensor), out(out_tensor);
      const DType dtype = Elements(in_tensor).dtype;
      comm.all_to_all(cut(in.in(), send, dtype), cut(out.out(), recv, dtype), dtype, call.timeout);
      out.finish();
    });
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    const Call call("all_to_all", OpType::ALLTOALL, opts);
    if (outputs.empty()) arguments_.fail(call, "needs one output per rank, got none");
    const Tensors out_parts = arguments_.one_per_rank(call, {outputs}, outputs[0], false);
    const Tensors in_parts = arguments_.one_per_rank(call, {inputs}, outputs[0], false);
    return issue(call, outputs, [=](Communicator& comm) {
      const FlatList in(in_parts), out(out_parts);
      comm.all_to_all(in.in(), out.out(), Elements(in_parts[0]).dtype, call.timeout);
      out.finish();
    });
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    const Call call("barrier", OpType::BARRIER, opts);
    return issue(call, {}, [=](Communicator& comm) { comm.barrier(call.timeout); });
  }

  void monitoredBarrier(const c10d::BarrierOptions& opts, bool) override {
    barrier(opts)->wait();  // its Timeout names the ranks that did not come
  }

  /// Float32 all-reduce with codecs and feedback; 16-bit floats are converted on the way. The
  /// future holds the tensor; Work::finite tells, once complete, whether no value is Inf or NaN.
  /// Needs the GIL to be called.
  intrusive_ptr<Work> compressed_all_reduce(const at::Tensor& tensor,
                                            std::shared_ptr<const Layout> layout, int side,
                                            uint64_t seed, uint32_t step, bool average) {
    c10d::AllreduceOptions opts;
    const Call call("compressed all_reduce", OpType::ALLREDUCE, opts);
    arguments_.check(call, tensor);
    if (!tensor.is_floating_point() || tensor.element_size() > 4)
      arguments_.fail(call, std::string("takes float32 and 16-bit floats, not ") +
                                tensor.dtype().name().data());
    if (layout->numel() != static_cast<size_t>(tensor.numel()))
      arguments_.fail(call, "the bucket has " + std::to_string(tensor.numel()) +
                                " values, its layout " + std::to_string(layout->numel()));
    if (side != 0 && side != 1) arguments_.fail(call, "side is 0 or 1");

    auto work = new_work(call, {tensor});
    // What a comm hook's future must hold: a Python object.
    const c10::TypePtr object = c10::PyObjectType::get();
    work->set_value(torch::jit::toIValue(py::cast(tensor), object), object);
    auto comm = communicator();
    enqueue(work, [=, raw = work.get()] {
      const at::Tensor values = tensor.to(at::kFloat).contiguous();
      const std::vector<Piece> pieces = layout->pieces(side);
      CodedArgs args;
      args.data = {values.mutable_data_ptr<float>(), layout->numel()};
      args.pieces = {pieces.data(), pieces.size()};
      args.average = average;
      args.seed = seed;
      args.step = step;
      raw->set_finite(comm->all_reduce_coded(args));
      if (!values.is_same(tensor)) tensor.copy_(values);
    });
    return work;
  }

  // ------------------------------------------------------- point to point

  WorkPtr send(Tensors& tensors, int dst, int tag) override {
    return post("send", OpType::SEND, tensors, dst, tag);
  }
  WorkPtr recv(Tensors& tensors, int src, int tag) override {
    return post("recv", OpType::RECV, tensors, src, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return post("recv", OpType::RECVANYSOURCE, tensors, -1, tag);
  }

  // -------------------------------------------------------- administration

  void setTimeout(Milliseconds timeout) override {
    options_->timeout = timeout;
    communicator()->set_timeout(timeout);
  }
  void setSequenceNumberForGroup() override {}  // all ranks count from 0
  uint64_t getSequenceNumberForGroup() override { return seq_; }
  c10d::ErrorType getError() override { return error_; }

  bool supportsSplitting() const override { return true; }
  intrusive_ptr<c10d::Backend> split(const intrusive_ptr<c10d::Store>& store,
                                     const std::vector<int>& ranks,
                                     const intrusive_ptr<c10d::Backend::Options>& opts) override {
    const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
    if (mine == ranks.end()) return nullptr;
    auto options = c10::dynamic_intrusive_pointer_cast<BackendOptions>(opts);
    if (!options) options = c10::make_intrusive<BackendOptions>(*options_);
    return c10::make_intrusive<Backend>(store, static_cast<int>(mine - ranks.begin()),
                                        static_cast<int>(ranks.size()), options,
                                        options->group_name);
  }

  void abort() override {
    if (auto comm = open_communicator())
      comm->abort("rank " + std::to_string(rank_) + " called abort()");
  }
  /// Finishes what was issued and leaves. Idempotent.
  void shutdown() override {
    std::optional<py::gil_scoped_release> release;  // callbacks of queued work may need it
    if (Py_IsInitialized() && PyGILState_Check()) release.emplace();
    const std::lock_guard<std::mutex> lock(shutdown_mutex_);
    auto comm = open_communicator();
    if (!comm) return;
    queue_.reset();
    // Futures of receives that nobody sends to would wait for their whole deadline.
    if (*peer_waits_ > 0) {
      comm->abort("rank " + std::to_string(rank_) + " left while sends or receives were under way");
    }
    posted_.clear();
    peer_waiter_.reset();
    const std::lock_guard<std::mutex> close(communicator_mutex_);
    communicator_.reset();
  }

 private:
  // --------------------------------------------------------------- issuing

  intrusive_ptr<Work> new_work(const Call& call, Tensors outputs) {
    return c10::make_intrusive<Work>(rank_, call.type, call.name, ++seq_, std::move(outputs));
  }

  /// Runs op(communicator) now or on the group's thread. Tensors live as long as `op`.
  template <typename F>
  WorkPtr issue(const Call& call, Tensors outputs, F op) {
    auto work = new_work(call, std::move(outputs));
    auto comm = communicator();
    if (call.async) {
      work->make_future();
      enqueue(work, [comm, op = std::move(op)] { op(*comm); });
      return work;
    }
    with_python_errors([&] {
      queue_->run([&] {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        noting_errors([&] { op(*comm); });
      });
    });
    work->complete();
    return work;
  }

  /// Runs `op` on the group's thread. A callback of another operation is there already: what it
  /// issues runs at once, so that it comes before all later operations on every rank.
  template <typename F>
  void enqueue(intrusive_ptr<Work> work, F op) {
    auto run = [this, work = std::move(work), op = std::move(op)] {
      std::exception_ptr error;
      try {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        noting_errors(op);
      } catch (...) {
        error = as_python(std::current_exception());
      }
      work->complete(error);
    };
    if (queue_->inside()) return run();
    queue_->submit(std::move(run));
  }

  WorkPtr post(const char* name, OpType type, Tensors& tensors, int peer, int tag) {
    const Call call(name, type, c10d::BarrierOptions());
    const at::Tensor tensor = arguments_.only(call, tensors);
    auto comm = communicator();
    return with_python_errors([&]() -> WorkPtr {
      const Flat flat(tensor);
      auto request = type == OpType::SEND ? comm->send(flat.in(), flat.bytes(), peer, tag)
                                          : comm->recv(flat.out(), flat.bytes(), peer, tag);
      auto work = c10::make_intrusive<PeerWork>(rank_, type, name, tensor, flat, std::move(request),
                                                peer_waiter_, peer_waits_);
      // Its buffer must outlive the request, whether or not the caller keeps the work.
      const std::lock_guard<std::mutex> lock(posted_mutex_);
      posted_.erase(std::remove_if(posted_.begin(), posted_.end(),
                                   [](const auto& posted) { return posted->done(); }),
                    posted_.end());
      posted_.push_back(work);
      return work;
    });
  }

  template <typename F>
  void noting_errors(F&& op) {
    try {
      op();
    } catch (const Timeout&) {
      error_ = c10d::ErrorType::TIMEOUT;
      throw;
    } catch (const PeerLost&) {
      error_ = c10d::ErrorType::REMOTE_ERROR;
      throw;
    } catch (const Error&) {
      error_ = c10d::ErrorType::COMM_ERROR;
      throw;
    }
  }

  std::shared_ptr<Communicator> open_communicator() {
    const std::lock_guard<std::mutex> lock(communicator_mutex_);
    return communicator_;
  }
  std::shared_ptr<Communicator> communicator() {
    auto comm = open_communicator();
    if (!comm) raise(arguments_.here() + "the process group is shut down");
    return comm;
  }

  WorkPtr all_gather_each(const Call& call, const Tensors& outputs, const Tensors& inputs) {
    arguments_.pair_up(call, outputs, inputs);
    return issue(call, outputs, [=](Communicator& comm) {
      for (size_t i = 0; i < inputs.size(); i++) {
        const Flat in(inputs[i]), out(outputs[i]);
        const Elements elements(inputs[i]);
        comm.all_gather(in.in(), out.out(), elements.count(inputs[i]), elements.dtype,
                        call.timeout);
        out.finish();
      }
    });
  }

  WorkPtr reduce_scatter_each(const Call& call, const Tensors& outputs, const Tensors& inputs,
                              const c10d::ReduceOp& op) {
    arguments_.pair_up(call, inputs, outputs);
    std::vector<std::pair<DType, Reduction>> how;
    for (const at::Tensor& t : outputs) how.push_back(arguments_.reducible(call, t, op));
    return issue(call, outputs, [=](Communicator& comm) {
      for (size_t i = 0; i < inputs.size(); i++) {
        const Flat in(inputs[i]), out(outputs[i]);
        const auto& [dtype, reduction] = how[i];
        comm.reduce_scatter(in.in(), out.out(), out.numel(), dtype, reduction.op, reduction.factor,
                            call.timeout);
        out.finish();
      }
    });
  }

  const Arguments arguments_;
  intrusive_ptr<BackendOptions> options_;
  std::mutex communicator_mutex_, shutdown_mutex_, posted_mutex_;
  std::shared_ptr<Communicator> communicator_;  ///< null after shutdown
  std::atomic<uint64_t> seq_{0};
  std::atomic<c10d::ErrorType> error_{c10d::ErrorType::SUCCESS};
  std::unique_ptr<Queue> queue_ = std::make_unique<Queue>();
  std::vector<intrusive_ptr<PeerWork>> posted_;  ///< that may not be complete
  std::shared_ptr<Queue> peer_waiter_ = std::make_shared<Queue>();
  std::shared_ptr<std::atomic<int>> peer_waits_ = std::make_shared<std::atomic<int>>(0);
};

}  // namespace pycomm::torch_binding
