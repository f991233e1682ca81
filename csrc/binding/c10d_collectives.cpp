// Collectives of the "pycomm" process group on dense tensors. A part of _c10d.
#include "binding/c10d_backend.h"

namespace pycomm::torch_binding {

// ------------------------------------------------------------------ one to all

WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Call call("pycomm:broadcast", OpType::BROADCAST, opts);
  const at::Tensor& given = arguments_.only(call, tensors);
  const int root = static_cast<int>(opts.rootRank);
  Staging staging(*this, call);
  const at::Tensor tensor = root == rank_ ? staging.in(given) : staging.out(given);
  return issue(call, tensors, staging, [=](auto& comm) {
    const Flat data(tensor);
    const Elements elements(tensor);
    comm.broadcast(data.out(), elements.count(tensor), elements.dtype, root, call.timeout);
    data.finish();
  });
}

WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ScatterOptions& opts) {
  const Call call("pycomm:scatter", OpType::SCATTER, opts);
  Staging staging(*this, call);
  const at::Tensor output = staging.out(arguments_.only(call, outputs));
  const int root = static_cast<int>(opts.rootRank);
  Tensors parts;
  if (root == rank_) parts = staging.in(arguments_.one_per_rank(call, inputs, outputs[0], "input"));
  return issue(call, outputs, staging, [=](auto& comm) {
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
  const at::Tensor& given = arguments_.only(call, tensors);
  const auto [dtype, reduction] = arguments_.reducible(call, given, opts.reduceOp);
  const int root = static_cast<int>(opts.rootRank);
  Staging staging(*this, call);
  const at::Tensor tensor = root == rank_ ? staging.in_out(given) : staging.in(given);
  return issue(call, tensors, staging, [=, dtype = dtype, reduction = reduction](auto& comm) {
    const Flat data(tensor);
    comm.reduce(data.in(), root == comm.rank() ? data.out() : nullptr, data.numel(), dtype,
                reduction.op, root, reduction.factor, call.timeout);
    if (root == comm.rank()) data.finish();
  });
}

WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::GatherOptions& opts) {
  const Call call("pycomm:gather", OpType::GATHER, opts);
  Staging staging(*this, call);
  const at::Tensor input = staging.in(arguments_.only(call, inputs));
  const int root = static_cast<int>(opts.rootRank);
  Tensors parts;
  if (root == rank_) parts = arguments_.one_per_rank(call, outputs, inputs[0], "output");
  return issue(call, parts, staging, [=, parts = staging.out(parts)](auto& comm) {
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
  Staging staging(*this, call);
  const at::Tensor tensor = staging.in_out(arguments_.only(call, tensors));
  const auto [dtype, reduction] = arguments_.reducible(call, tensor, opts.reduceOp);
  if (staging.on_device() && !staging.peers() && tensor.nbytes() >= 2 * kDevicePartBytes)
    return all_reduce_in_parts(call, tensors[0], tensor, dtype, reduction);
  return issue(call, tensors, staging, [=, dtype = dtype, reduction = reduction](auto& comm) {
    const Flat data(tensor);
    comm.all_reduce(data.out(), data.numel(), dtype, reduction.op, reduction.factor, call.timeout);
    data.finish();
  });
}

WorkPtr Backend::all_reduce_in_parts(const Call& call, const at::Tensor& tensor,
                                     const at::Tensor& host, DType dtype,
                                     const Reduction& reduction) {
  // Ranks must cut alike, whatever the strides: a tensor with gaps is copied as a whole.
  const bool whole = !tensor.is_contiguous();
  const at::Tensor from = host.view(-1), to = whole ? tensor : tensor.view(-1);
  const auto step = static_cast<int64_t>(kDevicePartBytes / tensor.element_size());
  std::vector<DevicePart> parts;
  for (int64_t at = 0; at < from.numel(); at += step) {
    const at::Tensor part = from.narrow(0, at, std::min(step, from.numel() - at));
    DevicePart& cut = parts.emplace_back();
    if (!whole) cut.reads = cut.writes = {{to.narrow(0, at, part.numel()), part}};
    cut.op = [=](Communicator& comm) {
      comm.all_reduce(part.mutable_data_ptr(), static_cast<size_t>(part.numel()), dtype,
                      reduction.op, reduction.factor, call.timeout);
    };
  }
  if (whole) parts.front().reads = parts.back().writes = {{tensor, host}};
  return noted(engine()->submit(call, {tensor}, tensor.device(), parts));
}

WorkPtr Backend::allreduce_coalesced(Tensors& tensors,
                                     const c10d::AllreduceCoalescedOptions& opts) {
  const Call call("pycomm:all_reduce_coalesced", OpType::ALLREDUCE_COALESCED, opts);
  if (tensors.empty()) arguments_.fail(call, "needs at least one tensor");
  const auto [dtype, reduction] = arguments_.reducible(call, tensors[0], opts.reduceOp);
  for (const at::Tensor& t : tensors) arguments_.same_dtype(call, t, tensors[0]);
  Staging staging(*this, call);
  const Tensors list = staging.in_out(tensors);
  return issue(call, tensors, staging, [=, dtype = dtype, reduction = reduction](auto& comm) {
    const at::Tensor packed = pack(list);
    comm.all_reduce(packed.mutable_data_ptr(), packed.numel(), dtype, reduction.op,
                    reduction.factor, call.timeout);
    unpack(packed, list);
  });
}

WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                           const c10d::AllgatherOptions& opts) {
  const Call call("pycomm:all_gather", OpType::ALLGATHER, opts);
  Staging staging(*this, call);
  const at::Tensor input = staging.in(arguments_.only(call, inputs));
  const Tensors given = arguments_.one_per_rank(call, outputs, inputs[0], "output");
  return issue(call, given, staging, [=, parts = staging.out(given)](auto& comm) {
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
  Staging staging(*this, call);
  const Tensors hosts = staging.in(inputs);
  for (Tensors& of_tensor : parts) of_tensor = staging.out(of_tensor);
  return issue(call, all, staging, [=, inputs = hosts](auto& comm) {
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
  Staging staging(*this, call);
  const at::Tensor output = staging.out(arguments_.only(call, outputs));
  const Tensors parts = staging.in(arguments_.one_per_rank(call, inputs, outputs[0], "input"));
  const auto [dtype, reduction] = arguments_.reducible(call, output, opts.reduceOp);
  return issue(call, outputs, staging, [=, dtype = dtype, reduction = reduction](auto& comm) {
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
  // Torch 2.11 has no type of its own for several.
  const Call call("pycomm:reduce_scatter_single_coalesced", OpType::_REDUCE_SCATTER_BASE, opts);
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
  Staging staging(*this, call);
  const at::Tensor from = staging.in(input), to = staging.out(output);
  return issue(call, {output}, staging, [=](auto& comm) {
    const Flat in(from), out(to);
    const DType dtype = Elements(from).dtype;
    comm.all_to_all(cut(in.in(), send, dtype), cut(out.out(), recv, dtype), dtype, call.timeout);
    out.finish();
  });
}

WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  const Call call("pycomm:all_to_all", OpType::ALLTOALL, opts);
  if (outputs.empty()) arguments_.fail(call, "needs one output per rank, got none");
  Staging staging(*this, call);
  const Tensors out_parts = staging.out(arguments_.one_per_rank(call, {outputs}, outputs[0]));
  const Tensors in_parts = staging.in(arguments_.one_per_rank(call, {inputs}, outputs[0]));
  return issue(call, outputs, staging, [=](auto& comm) {
    const FlatList in(in_parts), out(out_parts);
    comm.all_to_all(in.in(), out.out(), Elements(in_parts[0]).dtype, call.timeout);
    out.finish();
  });
}

WorkPtr Backend::barrier(const c10d::BarrierOptions& opts) {
  const Call call("pycomm:barrier", OpType::BARRIER, opts);
  Staging staging(*this, call);
  // Torch names the CPU where a group has it, whatever device the group works on.
  const auto used = engine()->used_device();
  if (opts.device && !opts.device->is_cpu()) {
    staging.follow(*opts.device);
  } else if (used) {
    staging.follow(*used);
  }
  return issue(call, {}, staging, [=](Communicator& comm) { comm.barrier(call.timeout); });
}

WorkPtr Backend::all_gather_each(const Call& call, const Tensors& outputs, const Tensors& inputs) {
  arguments_.pair_up(call, outputs, inputs);
  Staging staging(*this, call);
  const Tensors from = staging.in(inputs), to = staging.out(outputs);
  return issue(call, outputs, staging, [=](auto& comm) {
    for (size_t i = 0; i < from.size(); i++) {
      const Flat in(from[i]), out(to[i]);
      const Elements elements(from[i]);
      comm.all_gather(in.in(), out.out(), elements.count(from[i]), elements.dtype, call.timeout);
      out.finish();
    }
  });
}

WorkPtr Backend::reduce_scatter_each(const Call& call, const Tensors& outputs,
                                     const Tensors& inputs, const c10d::ReduceOp& op) {
  arguments_.pair_up(call, inputs, outputs);
  std::vector<std::pair<DType, Reduction>> how;
  for (const at::Tensor& t : outputs) how.push_back(arguments_.reducible(call, t, op));
  Staging staging(*this, call);
  const Tensors from = staging.in(inputs), to = staging.out(outputs);
  return issue(call, outputs, staging, [=](auto& comm) {
    for (size_t i = 0; i < from.size(); i++) {
      const Flat in(from[i]), out(to[i]);
      const auto& [dtype, reduction] = how[i];
      comm.reduce_scatter(in.in(), out.out(), out.numel(), dtype, reduction.op, reduction.factor,
                          call.timeout);
      out.finish();
    }
  });
}

}  // namespace pycomm::torch_binding
