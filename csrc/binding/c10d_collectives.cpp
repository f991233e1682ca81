// Collectives of the "pycomm" process group on dense tensors. A part of _c10d.
#include "binding/c10d_backend.h"

namespace pycomm::torch_binding {

// ------------------------------------------------------------------ one to all

WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Call call("pycomm:broadcast", OpType::BROADCAST, opts);
  const at::Tensor tensor = arguments_.only(call, tensors);
  const int root = static_cast<int>(opts.rootRank);
  return issue(call, {tensor}, [=](Communicator& comm) {
    const Flat data(tensor);
    const Elements elements(tensor);
    comm.broadcast(data.out(), elements.count(tensor), elements.dtype, root, call.timeout);
    data.finish();
  });
}

WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ScatterOptions& opts) {
  const Call call("pycomm:scatter", OpType::SCATTER, opts);
  const at::Tensor output = arguments_.only(call, outputs);
  const int root = static_cast<int>(opts.rootRank);
  Tensors parts;
  if (root == rank_) parts = arguments_.one_per_rank(call, inputs, output, "input");
  return issue(call, {output}, [=](Communicator& comm) {
    const FlatList in(parts);
    const Flat out(output);
    const Elements elements(output);
    comm.scatter(in.in(), out.out(), elements.count(output), elements.dtype, root, call.timeout);
    out.finish();
  });
}

// ------------------------------------------------------------------ all to one

WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const Call call("pycomm:reduce", OpType::REDUCE, opts);
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

WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::GatherOptions& opts) {
  const Call call("pycomm:gather", OpType::GATHER, opts);
  const at::Tensor input = arguments_.only(call, inputs);
  const int root = static_cast<int>(opts.rootRank);
  Tensors parts;
  if (root == rank_) parts = arguments_.one_per_rank(call, outputs, input, "output");
  return issue(call, parts, [=](Communicator& comm) {
    const Flat in(input);
    const FlatList out(parts);
    const Elements elements(input);
    comm.gather(in.in(), elements.count(input), out.out(), elements.dtype, root, call.timeout);
    out.finish();
  });
}

// ------------------------------------------------------------------ all to all

WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
  const Call call("pycomm:all_reduce", OpType::ALLREDUCE, opts);
  const at::Tensor tensor = arguments_.only(call, tensors);
  const auto [dtype, reduction] = arguments_.reducible(call, tensor, opts.reduceOp);
  return issue(call, {tensor}, [=, dtype = dtype, reduction = reduction](Communicator& comm) {
    const Flat data(tensor);
    comm.all_reduce(data.out(), data.numel(), dtype, reduction.op, reduction.factor, call.timeout);
    data.finish();
  });
}

WorkPtr Backend::allreduce_coalesced(Tensors& tensors,
                                     const c10d::AllreduceCoalescedOptions& opts) {
  const Call call("pycomm:all_reduce_coalesced", OpType::ALLREDUCE_COALESCED, opts);
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

WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                           const c10d::AllgatherOptions& opts) {
  const Call call("pycomm:all_gather", OpType::ALLGATHER, opts);
  const at::Tensor input = arguments_.only(call, inputs);
  const Tensors parts = arguments_.one_per_rank(call, outputs, input, "output");
  return issue(call, parts, [=](Communicator& comm) {
    const Flat in(input);
    const FlatList out(parts);
    comm.all_gather(in.in(), out.out(), Elements(input).dtype, call.timeout);
    out.finish();
  });
}

WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& opts) {
  const Call call("pycomm:all_gather_coalesced", OpType::ALLGATHER_COALESCED, opts);
  // Torch has a list of tensors for each rank; here each tensor has a list of ranks.
  std::vector<Tensors> parts(inputs.size());
  Tensors all;
  for (const Tensors& of_rank : outputs) {
    if (of_rank.size() != inputs.size())
      arguments_.fail(call, "needs as many outputs of each rank as inputs, got " +
                                std::to_string(of_rank.size()) + " and " +
                                std::to_string(inputs.size()));
    for (size_t i = 0; i < inputs.size(); i++) parts[i].push_back(of_rank[i]);
    all.insert(all.end(), of_rank.begin(), of_rank.end());
  }
  for (size_t i = 0; i < inputs.size(); i++)
    arguments_.one_per_rank(call, {parts[i]}, inputs[i], "output");
  return issue(call, all, [=, inputs = inputs](Communicator& comm) {
    for (size_t i = 0; i < inputs.size(); i++) {
      const Flat in(inputs[i]);
      const FlatList out(parts[i]);
      comm.all_gather(in.in(), out.out(), Elements(inputs[i]).dtype, call.timeout);
      out.finish();
    }
  });
}

WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::AllgatherOptions& opts) {
  const Call call("pycomm:all_gather_single", OpType::_ALLGATHER_BASE, opts);
  return all_gather_each(call, {output}, {input});
}

WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& opts) {
  const Call call("pycomm:all_gather_single_coalesced", OpType::COALESCED, opts);
  return all_gather_each(call, outputs, inputs);
}

WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                const c10d::ReduceScatterOptions& opts) {
  const Call call("pycomm:reduce_scatter", OpType::REDUCE_SCATTER, opts);
  const at::Tensor output = arguments_.only(call, outputs);
  const Tensors parts = arguments_.one_per_rank(call, inputs, output, "input");
  const auto [dtype, reduction] = arguments_.reducible(call, output, opts.reduceOp);
  return issue(call, {output}, [=, dtype = dtype, reduction = reduction](Communicator& comm) {
    const FlatList in(parts);
    const Flat out(output);
    comm.reduce_scatter(in.in(), out.out(), dtype, reduction.op, reduction.factor, call.timeout);
    out.finish();
  });
}

WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::ReduceScatterOptions& opts) {
  const Call call("pycomm:reduce_scatter_single", OpType::_REDUCE_SCATTER_BASE, opts);
  return reduce_scatter_each(call, {output}, {input}, opts.reduceOp);
}

WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::ReduceScatterOptions& opts) {
  const Call call("pycomm:reduce_scatter_single_coalesced", OpType::REDUCE_SCATTER_TENSOR_COALESCED,
                  opts);
  return reduce_scatter_each(call, outputs, inputs, opts.reduceOp);
}

WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                               std::vector<int64_t>& output_splits,
                               std::vector<int64_t>& input_splits,
                               const c10d::AllToAllOptions& opts) {
  const Call call("pycomm:all_to_all_single", OpType::ALLTOALL_BASE, opts);
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

WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  const Call call("pycomm:all_to_all", OpType::ALLTOALL, opts);
  if (outputs.empty()) arguments_.fail(call, "needs one output per rank, got none");
  const Tensors out_parts = arguments_.one_per_rank(call, {outputs}, outputs[0]);
  const Tensors in_parts = arguments_.one_per_rank(call, {inputs}, outputs[0]);
  return issue(call, outputs, [=](Communicator& comm) {
    const FlatList in(in_parts), out(out_parts);
    comm.all_to_all(in.in(), out.out(), Elements(in_parts[0]).dtype, call.timeout);
    out.finish();
  });
}

WorkPtr Backend::barrier(const c10d::BarrierOptions& opts) {
  const Call call("pycomm:barrier", OpType::BARRIER, opts);
  return issue(call, {}, [=](Communicator& comm) { comm.barrier(call.timeout); });
}

WorkPtr Backend::all_gather_each(const Call& call, const Tensors& outputs, const Tensors& inputs) {
  arguments_.pair_up(call, outputs, inputs);
  return issue(call, outputs, [=](Communicator& comm) {
    for (size_t i = 0; i < inputs.size(); i++) {
      const Flat in(inputs[i]), out(outputs[i]);
      const Elements elements(inputs[i]);
      comm.all_gather(in.in(), out.out(), elements.count(inputs[i]), elements.dtype, call.timeout);
      out.finish();
    }
  });
}

WorkPtr Backend::reduce_scatter_each(const Call& call, const Tensors& outputs,
                                     const Tensors& inputs, const c10d::ReduceOp& op) {
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

}  // namespace pycomm::torch_binding
