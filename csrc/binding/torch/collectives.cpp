// Collectives of the "pycomm" process group on dense tensors. A part of _c10d.
#include "binding/torch/backend.h"

namespace pycomm::torch_binding {
namespace {

/// Makes the comparison for Arguments::must_compare(). Among devices the call has checked this
/// rank's part alone.
void compare_sizes(Communicator& comm, Op op, const at::Tensor& own, const FlatList& parts,
                   Milliseconds timeout, ReduceOp redop = ReduceOp::sum) {
  const Elements elements(own);
  comm.compare_sizes(op, elements.count(own), parts.numels(), elements.dtype, redop, timeout);
}
void compare_sizes(PeerRoute&, Op, const at::Tensor&, const FlatList&, Milliseconds,
                   ReduceOp = ReduceOp::sum) {}

}  // namespace

// Lists that all ranks pass, and whose parts have one size, are wrong on all of them or on none.
// Other ranks cannot check a root's list, or parts that differ, and to compare them first would
// cost an all_to_all a round trip.
void Backend::end_others(const Call& call, int64_t in, int64_t out) const {
  if (in == out || size_ == 1) return;
  engine()->abort(std::string("refused its ") + call.name + ", whose part for itself has " +
                  std::to_string(in) + " values in the input and " + std::to_string(out) +
                  " in the output");
}

// ------------------------------------------------------------------ one to all

WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Call call("pycomm:broadcast", OpType::BROADCAST, opts);
  const at::Tensor& given = arguments_.only_written(call, tensors);
  const int root = arguments_.root(call, opts);
  arguments_.check_root_tensor(call, opts.rootTensor);
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
  const at::Tensor& given = arguments_.only_written(call, outputs);
  const int root = arguments_.root(call, opts);
  Tensors parts;
  if (root == rank_) {
    parts = arguments_.one_per_rank(call, inputs, given);
    end_others(call, parts[rank_].numel(), given.numel());
    arguments_.own_part(call, parts, given, "input");
  }
  Staging staging(*this, call);
  const at::Tensor output = staging.out(given);
  return issue(call, outputs, staging, [=, from = staging.in(parts)](auto& comm) {
    const FlatList in(from);
    const Flat out(output);
    const Elements elements(output);
    comm.scatter(in.in(), out.out(), elements.count(output), elements.dtype, root, call.timeout);
    out.finish();
  });
}

// ------------------------------------------------------------------ all to one

WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const Call call("pycomm:reduce", OpType::REDUCE, opts);
  const int root = arguments_.root(call, opts);
  arguments_.check_root_tensor(call, opts.rootTensor);
  const at::Tensor& given =
      root == rank_ ? arguments_.only_written(call, tensors) : arguments_.only(call, tensors);
  const auto [dtype, reduction] = arguments_.reducible(call, given, opts.reduceOp);
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
  const at::Tensor& given = arguments_.only(call, inputs);
  const int root = arguments_.root(call, opts);
  Tensors parts;
  if (root == rank_) {
    parts = arguments_.one_per_rank(call, outputs, given);
    end_others(call, given.numel(), parts[rank_].numel());
    arguments_.own_part(call, parts, given, "output");
    arguments_.check_written(call, parts);
  }
  Staging staging(*this, call);
  const at::Tensor input = staging.in(given);
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
  const at::Tensor& given = arguments_.only_written(call, tensors);
  const auto [dtype, reduction] = arguments_.reducible(call, given, opts.reduceOp);
  Staging staging(*this, call);
  const at::Tensor tensor = staging.in_out(given);
  const bool cuts = options_->device.path != "mixed";  // other ranks' tensors may be on the CPU
  if (cuts && staging.on_device() && !staging.peers() && tensor.nbytes() >= 2 * kDevicePartBytes)
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
  arguments_.check_written(call, tensors);
  for (const at::Tensor& t : tensors) arguments_.same_dtype(call, t, tensors[0]);
  const auto [dtype, reduction] = arguments_.reducible(call, tensors[0], opts.reduceOp);
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
  const at::Tensor& given = arguments_.only(call, inputs);
  const Tensors list = arguments_.one_per_rank(call, outputs, given);
  arguments_.check_written(call, list);
  const bool compare = arguments_.must_compare(call, list, given, "output");
  Staging staging(*this, call);
  const at::Tensor input = staging.in(given);
  if (staging.peers()) arguments_.own_part(call, list, given, "output");
  return issue(call, list, staging, [=, parts = staging.out(list)](auto& comm) {
    const Flat in(input);
    const FlatList out(parts);
    if (compare) compare_sizes(comm, Op::all_gather, input, out, call.timeout);
    comm.all_gather(in.in(), out.out(), Elements(input).dtype, call.timeout);
    out.finish();
  });
}

WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& opts) {
  const Call call("pycomm:all_gather_coalesced", OpType::ALLGATHER_COALESCED, opts);
  if (inputs.empty()) arguments_.fail(call, "needs at least one tensor");
  if (static_cast<int>(outputs.size()) != size_)
    arguments_.fail(call, "needs a list of outputs for each of " + std::to_string(size_) +
                              " ranks, got " + std::to_string(outputs.size()));
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
  std::vector<size_t> compared;
  for (size_t i = 0; i < inputs.size(); i++) {
    arguments_.check(call, inputs[i]);
    arguments_.one_per_rank(call, {parts[i]}, inputs[i]);
    arguments_.check_written(call, parts[i]);
    if (arguments_.must_compare(call, parts[i], inputs[i], "output")) compared.push_back(i);
  }
  Staging staging(*this, call);
  const Tensors hosts = staging.in(inputs);
  for (size_t i = 0; staging.peers() && i < inputs.size(); i++)
    arguments_.own_part(call, parts[i], inputs[i], "output");
  for (Tensors& of_tensor : parts) of_tensor = staging.out(of_tensor);
  return issue(call, all, staging, [=, inputs = hosts](auto& comm) {
    for (const size_t i : compared)
      compare_sizes(comm, Op::all_gather, inputs[i], FlatList(parts[i]), call.timeout);
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
  const at::Tensor& given = arguments_.only_written(call, outputs);
  const Tensors list = arguments_.one_per_rank(call, inputs, given);
  const auto [dtype, reduction] = arguments_.reducible(call, given, opts.reduceOp);
  const bool compare = arguments_.must_compare(call, list, given, "input");
  Staging staging(*this, call);
  const at::Tensor output = staging.out(given);
  if (staging.peers()) arguments_.own_part(call, list, given, "input");
  return issue(call, outputs, staging,
               [=, parts = staging.in(list), dtype = dtype, reduction = reduction](auto& comm) {
                 const FlatList in(parts);
                 const Flat out(output);
                 if (compare)
                   compare_sizes(comm, Op::reduce_scatter, output, in, call.timeout, reduction.op);
                 comm.reduce_scatter(in.in(), out.out(), dtype, reduction.op, reduction.factor,
                                     call.timeout);
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
  arguments_.check_written(call, output);
  arguments_.same_dtype(call, input, output);
  const std::vector<size_t> send = arguments_.rows(call, input, input_splits, "input");
  const std::vector<size_t> recv = arguments_.rows(call, output, output_splits, "output");
  if (!Arguments::equal(send) || !Arguments::equal(recv))
    end_others(call, static_cast<int64_t>(send[rank_]), static_cast<int64_t>(recv[rank_]));
  arguments_.own_part(call, send[rank_], recv[rank_]);
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
  arguments_.check_written(call, outputs);
  arguments_.one_per_rank(call, {outputs}, outputs[0]);
  arguments_.one_per_rank(call, {inputs}, outputs[0]);
  if (!Arguments::equal(inputs) || !Arguments::equal(outputs))
    end_others(call, inputs[rank_].numel(), outputs[rank_].numel());
  arguments_.own_part(call, static_cast<size_t>(inputs[rank_].numel()),
                      static_cast<size_t>(outputs[rank_].numel()));
  Staging staging(*this, call);
  const Tensors out_parts = staging.out(outputs), in_parts = staging.in(inputs);
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
  arguments_.check_written(call, outputs);
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
  arguments_.check_written(call, outputs);
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
