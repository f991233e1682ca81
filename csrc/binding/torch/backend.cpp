// The "pycomm" process group: torch/backend.h. A part of _c10d.
#include "binding/torch/backend.h"

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/jit/python/python_ivalue.h>

#include "core/arithmetic.h"
#include "transports/seal.h"

namespace pycomm::torch_binding {

// ------------------------------------------------------------------ a new group

Backend::Backend(const std::shared_ptr<TorchStore>& store, int rank, int size,
                 intrusive_ptr<BackendOptions> options, const std::string& group,
                 const Parent& parent)
    : c10d::Backend(rank, size),
      arguments_{rank, size},
      store_(store->torch_store()),
      group_(group),
      options_(std::move(options)) {
  if (options_->enable_reconfigure) {
    open_ = std::make_shared<OpenGroup>(nullptr);
    open_endpoint();
    return;
  }
  CommunicatorOptions communicator = communicator_options();
  communicator.group = group;
  for (const uint64_t r : options_->global_ranks_in_group) {
    communicator.global_ranks.push_back(static_cast<int>(r));
  }
  if (parent.engine) {
    communicator.parent = &parent.engine->comm();
    communicator.parent_ranks = parent.ranks;
  }
  open_ = std::make_shared<OpenGroup>(
      std::make_shared<Engine>(store, rank, size, communicator, options_->device_path));
}

CommunicatorOptions Backend::communicator_options() const {
  CommunicatorOptions communicator = options_->communicator;
  communicator.timeout = unwrapped(options_->timeout);
  communicator.description = options_->group_desc;
  return communicator;
}

void Backend::raise_not_open() const {
  if (endpoint_ && !open_->ended())
    raise(arguments_.here() +
          "the process group has no members yet: it was made with enable_reconfigure; call "
          "reconfigure() with the handles of all ranks first");
  raise(arguments_.here() + "the process group is shut down");
}

namespace {

/// Joins the straggler monitor, in which ranks compare their figures through the group's store.
/// They do not keep the store alive: when its groups are gone, the port of its server must be free.
void join_straggler_monitor(Backend& backend, const std::shared_ptr<OpenGroup>& group,
                            const std::string& secret) {
  const auto locked = [weak = std::weak_ptr<OpenGroup>(group),
                       first = std::weak_ptr<Engine>(group->engine()), secret] {
    const auto open = weak.lock();
    const auto engine = first.lock();
    // After reconfigure() there is another monitor for the new members.
    auto store = engine && open && open->engine() == engine ? engine->store() : nullptr;
    if (store) return SealedStore(store, Seal(key_of_secret(secret), engine->group()));
    throw std::runtime_error("the store is gone");
  };
  const auto put = [locked](const std::string& key, const std::string& value) {
    SealedStore store = locked();
    const GilReleased release;
    store.set(key, value);
  };
  const auto look = [locked](const std::string& key) -> std::optional<std::string> {
    SealedStore store = locked();
    const GilReleased release;
    return store.find(key);
  };
  py::module_::import("pycomm.straggler")
      .attr("join")(backend.trace(), py::cpp_function(put), py::cpp_function(look));
}

// A store outlives its groups, and values that an older group of this name left there must not be
// read by this one. So each rank counts its groups there. A group whose ranks are in another one
// already needs no round trip for that: the parent's name is unique, and all ranks of the group
// have made equally many groups of this name from that parent.
std::string unique_name(TorchStore& store, const std::string& name, int rank,
                        const Parent& parent) {
  if (parent.engine) {
    const std::string& group = parent.engine->group();
    return name + "/" + group + "." +
           std::to_string(parent.engine->count_child(name, parent.ranks));
  }
  const int64_t count = store.add(name + ": groups of rank " + std::to_string(rank), 1);
  return name + "/" + std::to_string(count);
}

}  // namespace

intrusive_ptr<Backend> Backend::make(const intrusive_ptr<c10d::Store>& store, int rank, int size,
                                     intrusive_ptr<BackendOptions> options, const std::string& name,
                                     const Parent& parent) {
  const auto known =
      parent.engine ? parent.engine->store()->round_trip() : std::chrono::microseconds(0);
  const auto requests = std::make_shared<TorchStore>(store, known);
  const bool later = options->enable_reconfigure;  // the store may not be that of all its members
  const std::string unique = later ? name : unique_name(*requests, name, rank, parent);
  auto backend =
      c10::make_intrusive<Backend>(requests, rank, size, std::move(options), unique, parent);
  OpenGroups::all().add(backend->open_);
  if (later) return backend;
  const GilAcquired gil;
  join_straggler_monitor(*backend, backend->open_, backend->options_->communicator.secret);
  return backend;
}

// ------------------------------------------------------------------ collectives

namespace {

/// Returns a collective without its buffers that moves tensors like t.
Collective moving(Op op, const at::Tensor& t, int root = -1) {
  Collective how{op, Elements(t).dtype};
  how.root = root;
  return how;
}

template <typename T>
BasicParts<T> side(const c10::SmallVector<BasicPart<T>, 8>& list, bool parts) {
  if (parts || list.empty()) return Span<const BasicPart<T>>(list.data(), list.size());
  return {list[0].data, list[0].numel};
}

/// Runs a collective from some tensors to others: one for each rank where the op has parts, else
/// one.
template <typename Comm>
void run_lists(Comm& comm, Collective how, const Tensors& from, const Tensors& to,
               Milliseconds timeout) {
  const FlatList inputs(from), outputs(to);
  const auto in = inputs.in();
  const auto out = outputs.out();
  how.in = side(in, how.has_in_parts());
  how.out = side(out, how.has_out_parts());
  comm.run(how, timeout);
  outputs.finish();
}

/// Runs one from a tensor to another; each has parts of one size, or is one.
template <typename Comm>
void run_one(Comm& comm, Collective how, const at::Tensor& from, const at::Tensor& to,
             Milliseconds timeout) {
  const Flat in(from), out(to);
  const auto ranks = static_cast<size_t>(comm.size());
  how.in = {in.in(), Elements(from).count(from) / (how.has_in_parts() ? ranks : 1)};
  how.out = {out.out(), Elements(to).count(to) / (how.has_out_parts() ? ranks : 1)};
  comm.run(how, timeout);
  out.finish();
}

/// Runs one in a tensor, which is its input and its output.
template <typename Comm>
void run_in_place(Comm& comm, Collective how, const at::Tensor& tensor, Milliseconds timeout) {
  const Flat data(tensor);
  const size_t numel = Elements(tensor).count(tensor);
  how.in = {data.in(), numel};
  const bool writes = how.op != Op::reduce || how.root == comm.rank();
  if (writes) how.out = {data.out(), numel};
  comm.run(how, timeout);
  if (writes) data.finish();
}

}  // namespace

// Lists that all ranks pass, and whose parts have one size, are wrong on all of them or on none.
// Other ranks cannot check a root's list, or parts that differ, and to compare them first would
// cost a round trip.
void Backend::own_part(const Call& call, bool even, int64_t in, int64_t out) const {
  if (in == out) return;
  const std::string sizes = " has " + std::to_string(in) + " values in the input and " +
                            std::to_string(out) + " in the output";
  if (!even && size_ > 1)
    engine()->abort(std::string("refused its ") + call.name + ", whose part for itself" + sizes);
  arguments_.fail(call, "the part for this rank itself" + sizes);
}

// ------------------------------------------------------------------ one to all

WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Call call("pycomm:broadcast", OpType::BROADCAST, opts, Op::broadcast);
  const at::Tensor& given = arguments_.only_written(call, tensors);
  const int root = arguments_.root(call, opts);
  arguments_.check_root_tensor(call, opts.rootTensor);
  Staging staging(*this, call);
  const at::Tensor tensor = root == rank_ ? staging.in(given) : staging.out(given);
  return issue(call, tensors, staging, [=, how = moving(Op::broadcast, given, root)](auto& comm) {
    run_in_place(comm, how, tensor, call.timeout);
  });
}

WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ScatterOptions& opts) {
  const Call call("pycomm:scatter", OpType::SCATTER, opts, Op::scatter);
  const at::Tensor& given = arguments_.only_written(call, outputs);
  const int root = arguments_.root(call, opts);
  Tensors parts;
  if (root == rank_) {
    parts = arguments_.one_per_rank(call, inputs, given);
    own_part(call, false, parts[rank_].numel(), given.numel());
  }
  return issue_lists(call, moving(Op::scatter, given, root), parts, outputs);
}

// ------------------------------------------------------------------ all to one

WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const Call call("pycomm:reduce", OpType::REDUCE, opts, Op::reduce);
  const int root = arguments_.root(call, opts);
  arguments_.check_root_tensor(call, opts.rootTensor);
  const at::Tensor& given =
      root == rank_ ? arguments_.only_written(call, tensors) : arguments_.only(call, tensors);
  const Collective how = arguments_.reducing(call, given, opts.reduceOp, root);
  Staging staging(*this, call);
  const at::Tensor tensor = root == rank_ ? staging.in_out(given) : staging.in(given);
  return issue(call, tensors, staging,
               [=](auto& comm) { run_in_place(comm, how, tensor, call.timeout); });
}

WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::GatherOptions& opts) {
  const Call call("pycomm:gather", OpType::GATHER, opts, Op::gather);
  const at::Tensor& given = arguments_.only(call, inputs);
  const int root = arguments_.root(call, opts);
  Tensors parts;
  if (root == rank_) {
    parts = arguments_.one_per_rank(call, outputs, given);
    own_part(call, false, given.numel(), parts[rank_].numel());
    arguments_.check_written(call, parts);
  }
  return issue_lists(call, moving(Op::gather, given, root), inputs, parts);
}

// ------------------------------------------------------------------ all to all

WorkPtr Backend::issue_lists(const Call& call, const Collective& how, const Tensors& inputs,
                             const Tensors& outputs) {
  Staging staging(*this, call);
  return issue(call, outputs, staging,
               [how, timeout = call.timeout, from = staging.in(inputs), to = staging.out(outputs)](
                   auto& comm) { run_lists(comm, how, from, to, timeout); });
}

WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
  const Call call("pycomm:all_reduce", OpType::ALLREDUCE, opts, Op::all_reduce);
  const at::Tensor& given = arguments_.only_written(call, tensors);
  const Collective how = arguments_.reducing(call, given, opts.reduceOp);
  Staging staging(*this, call);
  const at::Tensor tensor = staging.in_out(given);
  if (staging.on_device() && !staging.peers() && tensor.nbytes() >= 2 * kDevicePartBytes)
    return all_reduce_in_parts(call, tensors[0], tensor, how);
  auto work = issue(call, tensors, staging,
                    [=](auto& comm) { run_in_place(comm, how, tensor, call.timeout); });
  if (call.async && buckets_->has(given)) wait_after_backward(work->getFuture());
  return work;
}

WorkPtr Backend::all_reduce_in_parts(const Call& call, const at::Tensor& tensor,
                                     const at::Tensor& host, const Collective& how) {
  // Ranks must cut alike, whatever the strides: a tensor with gaps is copied as a whole.
  const bool whole = !tensor.is_contiguous();
  const at::Tensor from = host.view(-1), to = whole ? tensor : tensor.view(-1);
  const auto step = static_cast<int64_t>(kDevicePartBytes / tensor.element_size());
  std::vector<DevicePart> parts;
  for (int64_t at = 0; at < from.numel(); at += step) {
    const at::Tensor part = from.narrow(0, at, std::min(step, from.numel() - at));
    DevicePart& cut = parts.emplace_back();
    if (!whole) cut.reads = cut.writes = {{to.narrow(0, at, part.numel()), part}};
    cut.op = [=](Communicator& comm) { run_in_place(comm, how, part, call.timeout); };
  }
  if (whole) parts.front().reads = parts.back().writes = {{tensor, host}};
  return noted(engine()->submit(call, {tensor}, tensor.device(), parts));
}

WorkPtr Backend::allreduce_coalesced(Tensors& tensors,
                                     const c10d::AllreduceCoalescedOptions& opts) {
  const Call call("pycomm:all_reduce_coalesced", OpType::ALLREDUCE_COALESCED, opts, Op::all_reduce);
  if (tensors.empty()) arguments_.fail(call, "needs at least one tensor");
  arguments_.check_written(call, tensors, tensors);
  for (const at::Tensor& t : tensors) arguments_.same_dtype(call, t, tensors[0]);
  const Collective how = arguments_.reducing(call, tensors[0], opts.reduceOp);
  Staging staging(*this, call);
  const Tensors list = staging.in_out(tensors);
  return issue(call, tensors, staging, [=](auto& comm) {
    const at::Tensor packed = pack(list);
    run_in_place(comm, how, packed, call.timeout);
    unpack(packed, list);
  });
}

WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                           const c10d::AllgatherOptions& opts) {
  const Call call("pycomm:all_gather", OpType::ALLGATHER, opts, Op::all_gather);
  const at::Tensor& given = arguments_.only(call, inputs);
  const Tensors list = arguments_.one_per_rank(call, outputs, given);
  arguments_.check_written(call, list);
  own_part(call, Arguments::equal(list), given.numel(), list[rank_].numel());
  return issue_lists(call, moving(Op::all_gather, given), inputs, list);
}

WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& opts) {
  const Call call("pycomm:all_gather_coalesced", OpType::ALLGATHER_COALESCED, opts, Op::all_gather);
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
  arguments_.check_written(call, all);
  for (size_t i = 0; i < inputs.size(); i++) {
    arguments_.check(call, inputs[i]);
    arguments_.one_per_rank(call, {parts[i]}, inputs[i]);
    own_part(call, Arguments::equal(parts[i]), inputs[i].numel(), parts[i][rank_].numel());
  }
  Staging staging(*this, call);
  const Tensors hosts = staging.in(inputs);
  for (Tensors& of_tensor : parts) of_tensor = staging.out(of_tensor);
  return issue(call, all, staging, [=, inputs = hosts](auto& comm) {
    for (size_t i = 0; i < inputs.size(); i++)
      run_lists(comm, moving(Op::all_gather, inputs[i]), {inputs[i]}, parts[i], call.timeout);
  });
}

WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::AllgatherOptions& opts) {
  const Call call("pycomm:all_gather_single", OpType::_ALLGATHER_BASE, opts, Op::all_gather);
  return issue_each(call, {output}, {input});
}

WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllgatherOptions& opts) {
  const Call call("pycomm:all_gather_single_coalesced", OpType::COALESCED, opts, Op::all_gather);
  return issue_each(call, outputs, inputs);
}

WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                const c10d::ReduceScatterOptions& opts) {
  const Call call("pycomm:reduce_scatter", OpType::REDUCE_SCATTER, opts, Op::reduce_scatter);
  const at::Tensor& given = arguments_.only_written(call, outputs);
  const Tensors list = arguments_.one_per_rank(call, inputs, given);
  const Collective how = arguments_.reducing(call, given, opts.reduceOp);
  own_part(call, Arguments::equal(list), list[rank_].numel(), given.numel());
  return issue_lists(call, how, list, outputs);
}

WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::ReduceScatterOptions& opts) {
  const Call call("pycomm:reduce_scatter_single", OpType::_REDUCE_SCATTER_BASE, opts,
                  Op::reduce_scatter);
  return issue_each(call, {output}, {input}, opts.reduceOp);
}

WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                 const c10d::ReduceScatterOptions& opts) {
  // Torch 2.11 has no type of its own for several.
  const Call call("pycomm:reduce_scatter_single_coalesced", OpType::_REDUCE_SCATTER_BASE, opts,
                  Op::reduce_scatter);
  return issue_each(call, outputs, inputs, opts.reduceOp);
}

WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                               std::vector<int64_t>& output_splits,
                               std::vector<int64_t>& input_splits,
                               const c10d::AllToAllOptions& opts) {
  const Call call("pycomm:all_to_all_single", OpType::ALLTOALL_BASE, opts, Op::all_to_all);
  arguments_.check_written(call, output);
  arguments_.same_dtype(call, input, output);
  const std::vector<size_t> send = arguments_.rows(call, input, input_splits, "input");
  const std::vector<size_t> recv = arguments_.rows(call, output, output_splits, "output");
  own_part(call, Arguments::equal(send) && Arguments::equal(recv), send[rank_], recv[rank_]);
  Staging staging(*this, call);
  const at::Tensor from = staging.in(input), to = staging.out(output);
  return issue(call, {output}, staging, [=](auto& comm) {
    const Flat in(from), out(to);
    const DType dtype = Elements(from).dtype;
    const std::vector<ConstPart> sent = cut(in.in(), send, dtype);
    const std::vector<Part> received = cut(out.out(), recv, dtype);
    comm.run({Op::all_to_all, dtype, sent, received}, call.timeout);
    out.finish();
  });
}

WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  const Call call("pycomm:all_to_all", OpType::ALLTOALL, opts, Op::all_to_all);
  if (outputs.empty()) arguments_.fail(call, "needs one output per rank, got none");
  arguments_.check_written(call, outputs);
  arguments_.one_per_rank(call, {outputs}, outputs[0]);
  arguments_.one_per_rank(call, {inputs}, outputs[0]);
  own_part(call, Arguments::equal(inputs) && Arguments::equal(outputs), inputs[rank_].numel(),
           outputs[rank_].numel());
  return issue_lists(call, moving(Op::all_to_all, outputs[0]), inputs, outputs);
}

WorkPtr Backend::barrier(const c10d::BarrierOptions& opts) {
  const Call call("pycomm:barrier", OpType::BARRIER, opts);
  Staging staging(*this, call);
  // Torch names the CPU where a group has it, and else a type without a number, whatever device the
  // group works on.
  const auto used = engine()->used_device();
  const bool named = opts.device && !opts.device->is_cpu();
  if (named && opts.device->has_index()) {
    staging.follow(*opts.device);
  } else if (used) {
    staging.follow(*used);
  } else if (named) {
    staging.follow(c10::impl::VirtualGuardImpl(opts.device->type()).getDevice());
  }
  return issue(call, {}, staging, [=](Communicator& comm) { comm.barrier(call.timeout); });
}

WorkPtr Backend::issue_each(const Call& call, const Tensors& outputs, const Tensors& inputs,
                            const c10d::ReduceOp& redop) {
  const bool scatters = call.op == Op::reduce_scatter;
  const Tensors& parts = scatters ? outputs : inputs;
  arguments_.pair_up(call, scatters ? inputs : outputs, parts);
  arguments_.check_written(call, outputs, inputs);
  std::vector<Collective> how;
  for (const at::Tensor& t : parts)
    how.push_back(scatters ? arguments_.reducing(call, t, redop) : moving(call.op, t));
  Staging staging(*this, call);
  const Tensors from = staging.in(inputs), to = staging.out(outputs);
  return issue(call, outputs, staging, [=](auto& comm) {
    for (size_t i = 0; i < how.size(); i++) run_one(comm, how[i], from[i], to[i], call.timeout);
  });
}

// ------------------------------------------------------------------ sparse all-reduce

// Each rank brings its own indices and gets the sum over all ranks, as for the gradients of sparse
// embeddings.

namespace {

/// Gathers `mine` of all ranks, which differs between them in the length of dimension `dim` only.
Tensors gather_uneven(Communicator& comm, const at::Tensor& mine, int64_t dim,
                      const std::vector<int64_t>& lengths, Milliseconds timeout) {
  Tensors theirs;
  for (const int64_t length : lengths) {
    std::vector<int64_t> sizes = mine.sizes().vec();
    sizes[dim] = length;
    theirs.push_back(at::empty(sizes, mine.options()));
  }
  run_lists(comm, moving(Op::all_gather, mine), {mine}, theirs, timeout);
  return theirs;
}

void sparse_all_reduce(Communicator& comm, const at::Tensor& tensor, Milliseconds timeout) {
  const at::Tensor mine = tensor.coalesce();
  std::vector<int64_t> header = {mine._nnz(), mine.sparse_dim()};
  header.insert(header.end(), mine.sizes().begin(), mine.sizes().end());
  std::vector<int64_t> headers(header.size() * comm.size());
  comm.run({Op::all_gather,
            DType::int64,
            {header.data(), header.size()},
            {headers.data(), header.size()}},
           timeout);

  std::vector<int64_t> entries;
  for (int r = 0; r < comm.size(); r++) {
    const auto theirs = headers.begin() + r * header.size();
    entries.push_back(*theirs);
    if (!std::equal(header.begin() + 1, header.end(), theirs + 1))
      throw WireMismatch("rank " + std::to_string(comm.rank()) +
                         ": sparse all_reduce: its tensor has another shape, or other sparse "
                         "dimensions, than that of rank " +
                         std::to_string(r));
  }
  const Tensors indices = gather_uneven(comm, mine._indices(), 1, entries, timeout);
  const Tensors values = gather_uneven(comm, mine._values(), 0, entries, timeout);
  // All ranks have the same entries in the same order, so the sums have the same bits.
  const DefaultArithmetic arithmetic;
  const at::Tensor all = at::_sparse_coo_tensor_unsafe(at::cat(indices, 1), at::cat(values, 0),
                                                       tensor.sizes(), mine.options());
  tensor.copy_(all.coalesce());
}

}  // namespace

WorkPtr Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const Call call("pycomm:sparse_all_reduce", OpType::_ALLREDUCE_SPARSE, opts);
  if (tensors.size() != 1)
    arguments_.fail(call, "takes one tensor, got " + std::to_string(tensors.size()));
  const at::Tensor tensor = tensors[0];
  if (!tensor.is_sparse() || !tensor.device().is_cpu())
    arguments_.fail(call, "takes a sparse COO tensor on the CPU");
  if (opts.reduceOp != c10d::ReduceOp::SUM) arguments_.fail(call, "can only sum");
  return issue(call, {tensor}, Staging(*this, call),
               [=](Communicator& comm) { sparse_all_reduce(comm, tensor, call.timeout); });
}

// ------------------------------------------------------------------ compressed collectives

namespace {

/// Checks that a tensor has float32 or 16-bit floats, this many values, and the residuals' device.
void check_values(const Arguments& arguments, const Call& call, const at::Tensor& tensor,
                  const Layout& layout, const char* role, size_t numel) {
  arguments.check(call, tensor);
  const at::ScalarType type = tensor.scalar_type();
  if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16)
    arguments.fail(
        call, std::string("takes float32 and 16-bit floats, not ") + tensor.dtype().name().data());
  if (static_cast<size_t>(tensor.numel()) != numel)
    arguments.fail(call, std::string(role) + " has " + std::to_string(tensor.numel()) +
                             " values, and by its layout " + std::to_string(numel));
  if (!layout.is_on(tensor.device()))
    arguments.fail(call, std::string(role) + " is on " + tensor.device().str() +
                             ", and its residuals are elsewhere");
}

/// One call: from the tensors of `input` to those of `output`, the same in an all-reduce.
struct CodedCall {
  Op op;
  at::Tensor output, input;
  std::shared_ptr<const Layout> layout;
  std::vector<Piece> pieces;
  CodedStep step;

  /// Calls run(args, address of the result).
  template <typename Run>
  void with_args(const Run& run) const {
    CodedArgs args;
    args.pieces = {pieces.data(), pieces.size()};
    args.average = step.average;
    args.owner_residuals = layout->owner_residuals();
    args.seed = step.seed;
    args.step = step.step;
    const bool alike = input.scalar_type() == output.scalar_type();
    const at::ScalarType type = alike ? input.scalar_type() : at::kFloat;
    const Flat to(output, type);
    const Flat from = op == Op::all_reduce ? to : Flat(input, type);
    args.data = {from.out(), from.numel(), *find_dtype(type)};
    run(args, to.out());
    to.finish();
  }
};

}  // namespace

std::string Backend::why_no_peers(c10::Device device) {
  const auto engine = this->engine();
  const std::string why = engine->peers(device).why;
  return why.empty() ? engine->peers(device, PeerRoute::Kind::coded).why : why;
}

size_t Backend::most_payload_bytes(c10::Device device) {
  const auto route = engine()->peers(device, PeerRoute::Kind::coded).route;
  return route ? route->most_payload_bytes() : 0;
}

intrusive_ptr<Work> Backend::compressed(Op op, const at::Tensor& output, const at::Tensor& input,
                                        const std::shared_ptr<const Layout>& layout,
                                        const CodedStep& step) {
  const c10d::AllreduceOptions options;  // an asynchronous call, with the group's timeout
  const bool scatters = op == Op::reduce_scatter;
  const Call call =
      scatters ? Call("pycomm:compressed reduce_scatter", OpType::_REDUCE_SCATTER_BASE, options, op)
               : Call("pycomm:compressed all_reduce", OpType::ALLREDUCE, options, op);
  const size_t row = layout->numel(), ranks = static_cast<size_t>(size_);
  check_values(arguments_, call, output, *layout, scatters ? "output" : "the bucket", row);
  check_values(arguments_, call, input, *layout, "input", scatters ? ranks * row : row);
  if (scatters && layout->rows() != ranks)
    arguments_.fail(call, "the layout has residuals of " + std::to_string(layout->rows()) +
                              " rows; make it as Layout(" + std::to_string(ranks) + ")");
  arguments_.check_written(call, output);
  std::vector<Piece> pieces;
  try {
    pieces = layout->of(step.sides);
  } catch (const Error& error) {
    arguments_.fail(call, error.what());
  }
  const auto engine = this->engine();
  const CodedCall coded_call{op, output, input, layout, std::move(pieces), step};
  if (!output.is_cpu()) {
    const auto route = engine->peers(output.device()).route
                           ? engine->peers(output.device(), PeerRoute::Kind::coded).route
                           : nullptr;
    if (!route)
      arguments_.fail(call, "on " + output.device().str() +
                                " needs ranks that reach each other's memory: encode there and "
                                "exchange the payloads, as pycomm's hooks do");
    const at::Tensor found_inf =
        at::zeros({1}, at::TensorOptions(at::kFloat).device(output.device()));
    Tensors used = {output, input, found_inf};
    used.insert(used.end(), layout->residuals().begin(), layout->residuals().end());
    auto work = engine->submit(call, {output}, route, used, [&](PeerRoute& peers) {
      coded_call.with_args([&](const CodedArgs& args, void* out) {
        peers.run_coded(op, args, out, found_inf.mutable_data_ptr<float>());
      });
    });
    work->set_found_inf(found_inf);
    return work;
  }
  auto work = engine->make_work(true, call, {output});
  // A comm hook's future must hold a Python object.
  const c10::TypePtr object = c10::PyObjectType::get();
  work->set_value(torch::jit::toIValue(py::cast(output), object), object);
  engine->submit(work, [coded_call, raw = work.get()](Communicator& comm) {
    coded_call.with_args([&](const CodedArgs& args, void* out) {
      raw->set_finite(comm.run_coded(coded_call.op, args, out));
    });
  });
  return work;
}

// ------------------------------------------------------------------ sends and receives

WorkPtr Backend::send(Tensors& tensors, int dst, int tag) {
  return post("pycomm:send", OpType::SEND, tensors, dst, tag);
}
WorkPtr Backend::recv(Tensors& tensors, int src, int tag) {
  return post("pycomm:recv", OpType::RECV, tensors, src, tag);
}
WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  return post("pycomm:recvAnySource", OpType::RECVANYSOURCE, tensors, -1, tag);
}

WorkPtr Backend::post(const char* title, OpType type, Tensors& tensors, int peer, int tag) {
  const Call call(title, type, c10d::BarrierOptions());
  const bool sends = type == OpType::SEND;
  const at::Tensor& tensor =
      sends ? arguments_.only(call, tensors) : arguments_.only_written(call, tensors);
  if (type != OpType::RECVANYSOURCE)
    arguments_.check_peer(call, sends ? "the destination" : "the source", peer);
  if (tag < 0) arguments_.fail(call, "the tag is " + std::to_string(tag) + ", but tags begin at 0");
  if (tensor.is_cpu()) return noted(engine()->post(call, tensor, peer, tag));
  Staging staging(*this, call, Staging::By::host);
  const at::Tensor host = sends ? staging.in(tensor) : staging.out(tensor);
  return noted(engine()->post(call, tensor, staging, host, peer, tag));
}

// ------------------------------------------------------------------ several as one

void Backend::startCoalescing() {
  const std::lock_guard<std::mutex> lock(coalesced_mutex_);
  coalesced_.clear();
  coalescing_ = true;
}

WorkPtr Backend::endCoalescing() {
  const std::lock_guard<std::mutex> lock(coalesced_mutex_);
  coalescing_ = false;
  if (coalesced_.empty()) return nullptr;
  return c10::make_intrusive<CoalescedWork>(rank_, std::exchange(coalesced_, {}));
}

WorkPtr Backend::noted(WorkPtr work) {
  InterpreterEnd::stay_if_begun();  // torch's binding asks for the GIL next
  if (coalescing_) {
    const std::lock_guard<std::mutex> lock(coalesced_mutex_);
    coalesced_.push_back(work);
  }
  return work;
}

// ------------------------------------------------------------------ groups from groups

Parent Backend::as_parent(const std::vector<int>& ranks) const {
  const bool ours =
      std::all_of(ranks.begin(), ranks.end(), [this](int r) { return r >= 0 && r < size_; });
  return ours ? Parent{open_->engine(), ranks} : Parent{};
}

/// Returns a copy of the caller's options, or of our own. Torch's default timeout means that the
/// caller named none, so ours applies.
intrusive_ptr<BackendOptions> Backend::options_for(const intrusive_ptr<Options>& given) const {
  const auto* ours = dynamic_cast<const BackendOptions*>(given.get());
  auto options = c10::make_intrusive<BackendOptions>(ours ? *ours : *options_);
  if (options->timeout == kBackendDefaultTimeout) options->timeout = options_->timeout;
  return options;
}

intrusive_ptr<Backend> Backend::made_from_this(const intrusive_ptr<c10d::Store>& store, int rank,
                                               int size, const intrusive_ptr<Options>& given,
                                               const Parent& parent) {
  const auto options = options_for(given);
  options->enable_reconfigure = false;  // its members are those of now
  const auto fresh = c10::static_intrusive_pointer_cast<Backend>(fresh_.lock());
  fresh_.reset();
  if (fresh && fresh->open_->engine() && fresh->options_->group_name == options->group_name) {
    return fresh;
  }
  auto made = with_python_errors(
      [&] { return make(store, rank, size, options, options->group_name, parent); });
  fresh_ = c10::weak_intrusive_ptr<c10d::Backend>(intrusive_ptr<c10d::Backend>(made));
  return made;
}

intrusive_ptr<c10d::Backend> Backend::split(const intrusive_ptr<c10d::Store>& store,
                                            const std::vector<int>& ranks,
                                            const intrusive_ptr<Options>& opts) {
  const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
  if (mine == ranks.end()) return nullptr;
  return made_from_this(store, static_cast<int>(mine - ranks.begin()),
                        static_cast<int>(ranks.size()), opts, as_parent(ranks));
}

intrusive_ptr<c10d::Backend> Backend::merge(const intrusive_ptr<c10d::Store>& store,
                                            const intrusive_ptr<Options>& opts, const int& rank,
                                            const int& size) {
  return made_from_this(store, rank, size, opts);
}

intrusive_ptr<c10d::Backend> Backend::shrink(const std::vector<int64_t>& ranks_to_exclude,
                                             int shrink_flags, const intrusive_ptr<Options>& opts) {
  constexpr int kAbort = 1;  // dist.SHRINK_ABORT
  if (shrink_flags & kAbort) abort();
  if (endpoint_)
    raise(arguments_.here() +
          "shrink: this group was made with enable_reconfigure; call reconfigure() with the "
          "handles of the ranks that stay");
  const auto options = options_for(opts);
  const auto old_ranks = options_->global_ranks_in_group;
  options->global_ranks_in_group.clear();
  options->group_name = group_ + "/shrunk without";
  int rank = -1, size = 0;
  std::vector<int> kept;
  for (int r = 0; r < size_; r++) {
    if (std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), r) != ranks_to_exclude.end()) {
      options->group_name += " " + std::to_string(r);
      continue;
    }
    if (r == rank_) rank = size;
    kept.push_back(r);
    // Torch names the ranks of all groups but the default one.
    options->global_ranks_in_group.push_back(old_ranks.empty() ? r : old_ranks[r]);
    size++;
  }
  if (rank < 0) raise(arguments_.here() + "shrink: this rank is one of those to exclude");
  return with_python_errors([&] {
    try {
      return make(store_, rank, size, options, options->group_name, as_parent(kept));
    } catch (const PeerLost& lost) {
      if (lost.rank < 0 || lost.rank >= size) throw;
      Notice notice = to_notice(std::current_exception(), rank);
      notice.rank = kept[lost.rank];  // for the next call
      notice.ranks.clear();
      notice.text += "; it is rank " + std::to_string(notice.rank) +
                     " of the group that shrinks: exclude it, too";
      throw_error(notice);
    }
  });
}

// ------------------------------------------------------------------ waiting for all ranks

void Backend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const auto engine = this->engine();
  with_python_errors(
      [&] { engine->ending_if_interrupted([&] { wait_for_all(*engine, opts, wait_all_ranks); }); });
}

void Backend::wait_for_all(const Engine& engine, const c10d::BarrierOptions& opts,
                           bool wait_all_ranks) {
  // The barrier uses the store, not our own channels: it is for finding out why a group is stuck.
  const auto limit = unwrapped(opts.timeout < Milliseconds(0) ? options_->timeout : opts.timeout);
  const std::string in_time = " in " + std::to_string(limit.count()) + " ms";
  const std::string key =
      engine.group() + "/monitored barrier " + std::to_string(++monitored_barriers_);
  const auto arrival_key = [&](int rank) { return key + "/" + std::to_string(rank); };
  const auto verdict = key + "/verdict";
  const std::string good = "all ranks arrived";
  const WithoutGil without_gil;
  if (!open_->engine()) raise_not_open();
  SealedStore store(engine.store(),
                    Seal(key_of_secret(options_->communicator.secret), engine.group()));

  if (rank_ > 0) {
    store.set(arrival_key(rank_), "here");
    std::string text;
    try {
      // This wait is longer than rank 0's, which may have come after us, to receive its verdict.
      text = store.get(verdict, Deadline::after(limit + Milliseconds(2000)));
    } catch (const Timeout&) {
      text = "rank 0 did not come" + in_time;
    }
    if (text == good) return;
    raise<Timeout>(arguments_.here() + "Rank " + std::to_string(rank_) +
                   " successfully reached monitoredBarrier, but received errors while waiting for "
                   "send/recv from rank 0. Please check rank 0 logs for faulty rank. Original "
                   "exception: " +
                   text);
  }

  const Deadline deadline = Deadline::after(limit);
  std::string missing;
  int count = 0;
  for (int r = 1; r < size_ && (wait_all_ranks || count == 0); r++) {
    try {
      store.get(arrival_key(r), deadline);
    } catch (const Timeout&) {
      missing += (count++ ? ", " : "") + std::to_string(r);
    } catch (const Interrupted& e) {
      store.set(verdict, std::string("rank 0 was interrupted: ") + e.what());
      throw;
    }
  }
  std::string text = good;
  if (limit.count() == 0 && size_ > 1) {
    text = "Rank 0 timed out in monitoredBarrier after 0 ms";
  } else if (count > 0) {
    text = (wait_all_ranks ? "Ranks " : "Rank ") + missing + " failed to pass monitoredBarrier" +
           in_time;
  }
  store.set(verdict, text);
  if (text != good) raise<Timeout>(arguments_.here() + text);
}

// ------------------------------------------------------------------ new members in place

void Backend::open_endpoint() {
  endpoint_ = std::make_unique<tcp::Endpoint>(group_, communicator_options());
}

std::string Backend::handle() const {
  if (!endpoint_)
    raise(arguments_.here() +
          "the process group cannot be reconfigured; make it with enable_reconfigure=True");
  return endpoint_->handle().text();
}

bool Backend::is_gone(const std::string& handle) const {
  const WithoutGil without_gil;
  return with_python_errors([&] {
    const tcp::Handle parsed = tcp::Handle::parse(handle);
    return tcp::is_gone(parsed, communicator_options().secret, &check_signals);
  });
}

void Backend::form(int64_t uuid, const std::vector<std::string>& handles, Milliseconds timeout) {
  handle();  // raises in a group that has none
  const WithoutGil without_gil;
  with_python_errors([&] {
    open_->check_process(arguments_.here() + "reconfigure");
    const std::unique_lock<std::mutex> alone(forming_, std::try_to_lock);
    if (!alone.owns_lock())
      throw Error(arguments_.here() + "reconfigure: another thread reconfigures this group now");
    if (open_->ended()) raise_not_open();
    const auto former = open_->engine();
    if (former && former->runs_here())
      throw Error(arguments_.here() +
                  "reconfigure: this is a callback of an operation of the group, which must end "
                  "first; call it from another thread");
    CommunicatorOptions communicator = communicator_options();
    const Milliseconds limit = timeout.count() > 0 ? unwrapped(timeout) : communicator.timeout;
    tcp::GroupFormation formation(*endpoint_, uuid, handles, communicator.secret, limit,
                                  &check_signals);
    try {
      form(formation, uuid, communicator, limit, former);
      formation.end();
    } catch (const std::exception& error) {
      formation.end(error.what());
      throw;
    }
  });
  const GilAcquired gil;
  join_straggler_monitor(*this, open_, options_->communicator.secret);
}

void Backend::form(tcp::GroupFormation& formation, int64_t uuid, CommunicatorOptions communicator,
                   Milliseconds limit, const std::shared_ptr<Engine>& former) {
  if (former) {
    former->end_within(std::min(kGrace, limit / 4), "reconfigures the group in the middle");
    former->drain();
  }
  const int rank = formation.rank(), size = formation.size();
  const auto store = size > 1 ? formation.store() : nullptr;
  communicator.group = group_ + "/members " + std::to_string(uuid);
  communicator.timeout = limit;
  communicator.interrupt = [&] { formation.check_members(); };
  auto engine = std::make_shared<Engine>(store, rank, size, communicator, options_->device_path);
  engine->set_timeout(unwrapped(options_->timeout));
  if (!open_->replace(std::move(engine))) raise_not_open();
  ++formed_;
  arguments_ = {rank, size};
  monitored_barriers_ = 0;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  rank_ = rank;
  size_ = size;
#else
  const_cast<int&>(rank_) = rank;  // see set_shape_of()
  const_cast<int&>(size_) = size;
#endif
}

void Backend::set_shape_of(c10d::ProcessGroup& group) const {
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  static_cast<void>(group);  // it asks its backend
#else
  // Torch 2.14 removed the const of these members of a backend, and lets the group ask its backend,
  // so that they may change. Older versions read them from memory at each call of getRank() and
  // getSize(), which their library compiles for any object, so a write is seen.
  struct Shape : c10d::ProcessGroup {
    static void set(c10d::ProcessGroup& group, int rank, int size) {
      const_cast<int&>(group.*(&Shape::rank_)) = rank;
      const_cast<int&>(group.*(&Shape::size_)) = size;
    }
  };
  Shape::set(group, rank_, size_);
#endif
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
intrusive_ptr<c10d::Work> Backend::reconfigure(const c10d::ReconfigureOptions& opts) {
  std::vector<std::string> handles;
  if (const auto* list = std::get_if<std::vector<std::string>>(&opts.handles)) {
    handles = *list;
  } else {  // ranks are ours to choose
    const auto& set = std::get<std::unordered_set<std::string>>(opts.handles);
    handles.assign(set.begin(), set.end());
    std::sort(handles.begin(), handles.end());
  }
  form(opts.uuid, handles, opts.timeout.value_or(Milliseconds(0)));
  c10d::BarrierOptions none;
  const Call call("pycomm:reconfigure", OpType::BARRIER, none);
  auto work = c10::make_intrusive<Work>(rank_, call, 0, Tensors());
  work->complete();
  return work;
}
#endif

// ------------------------------------------------------------------ memory

namespace {

/// Returns shared memory while there is room for it; other memory may be slower, but not wrong.
std::shared_ptr<void> memory_of(Engine& engine, size_t bytes) {
  if (bytes > kLargestBuffer) throw std::bad_alloc();
  try {
    return engine.comm().allocate(bytes);
  } catch (const Error&) {
    constexpr size_t kAlign = 64;
    void* memory = std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
    if (!memory) throw std::bad_alloc();
    return std::shared_ptr<void>(memory, std::free);
  }
}

}  // namespace

at::Tensor Backend::allocate(int64_t size, const at::TensorOptions& options, bool for_bucket) {
  if (!options.device().is_cpu())
    raise(arguments_.here() +
          "allocate_tensor: it allocates CPU tensors only; ask torch for others");
  const size_t itemsize = options.dtype().itemsize();
  if (size < 0 || static_cast<size_t>(size) > kLargestBuffer / itemsize)
    raise(arguments_.here() + "allocate_tensor: cannot make a tensor of " + std::to_string(size) +
          " values");
  const size_t bytes = static_cast<size_t>(size) * itemsize;
  auto memory = memory_of(*engine(), std::max<size_t>(bytes, 1));
  if (!for_bucket) return at::from_blob(memory.get(), {size}, [memory](void*) {}, options);
  buckets_->add(memory.get());
  // A hook of DDP may make its bucket larger, as torch's batched_powerSGD_hook does.
  return at::for_blob(memory.get(), {size})
      .deleter([memory, buckets = buckets_](void*) { buckets->remove(memory.get()); })
      .options(options)
      .resizeable_storage()
      .allocator(c10::GetCPUAllocator())
      .make_tensor();
}

namespace {

/// True if torch's reducer wants real numbers for a bucket of complex parameters. It views what it
/// allocates itself as real, but in some versions not what a backend has allocated. So it is
/// tested, once, by making a reducer.
bool reducer_wants_reals(Backend& backend) {
  static std::atomic<int> known{-1};
  thread_local bool asking = false;
  if (asking) return false;  // the test needs the reducer to get complex memory
  if (known < 0) {
    const GilAcquired gil;
    asking = true;
    try {
      const auto self = intrusive_ptr<Backend>::unsafe_reclaim_from_nonowning(&backend);
      known = py::module_::import("pycomm.backend")
                  .attr("reducer_wants_reals")(py::cast(self))
                  .cast<bool>();
    } catch (...) {
      asking = false;
      throw;
    }
    asking = false;
  }
  return known > 0;
}

}  // namespace

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  const at::Tensor tensor = allocate(size, options, true);
  if (!tensor.is_complex() || !reducer_wants_reals(*this)) return tensor;
  return at::view_as_real(tensor).reshape({-1});
}

// ------------------------------------------------------------------ state and end

void Backend::setTimeout(Milliseconds timeout) {
  options_->timeout = timeout;
  if (endpoint_ && !open_->engine()) return;  // it counts from the first reconfigure() on
  engine()->set_timeout(unwrapped(timeout));
}

c10d::ErrorType Backend::getError() { return open_->error(); }

void Backend::abort() {
  if (const auto engine = open_->engine()) engine->abort("called abort()");
}

void Backend::shutdown() {
  if (const auto interrupted = open_->shutdown()) leave_with(interrupted);
}

namespace {

/// Lets Python's main thread raise it soon. For destructors, which cannot throw.
void raise_later(const Interrupted& interrupted) {
  try {
    std::rethrow_exception(interrupted.cause);
  } catch (py::error_already_set& raised) {
    const GilAcquired gil;
    auto* const exception = py::object(raised.value()).release().ptr();
    const auto raise = [](void* held) {
      auto* const exception = static_cast<PyObject*>(held);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception);
      Py_DECREF(exception);
      return -1;
    };
    if (Py_AddPendingCall(raise, exception) != 0) Py_DECREF(exception);  // 32 others are pending
  }
}

}  // namespace

Backend::~Backend() {
  try {
    if (const auto interrupted = open_->shutdown()) std::rethrow_exception(interrupted);
  } catch (const Interrupted& interrupted) {
    raise_later(interrupted);
  }
}

}  // namespace pycomm::torch_binding
