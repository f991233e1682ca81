// Public face of the collectives: checks arguments, numbers each call, runs an algorithm for it,
// and makes sure that an error on one rank is an error on all.
#include <algorithm>
#include <cstdio>
#include <numeric>

#include "collectives/algorithms/dispatch.h"
#include "collectives/common/contribution.h"
#include "collectives/communicator_impl.h"
#include "core/crc32c.h"
#include "core/reduce.h"

namespace pycomm {
namespace {

void add_sizes(OpTag& tag, std::string label, const std::vector<size_t>& sizes) {
  for (size_t r = 0; r < sizes.size(); r++) {
    const uint64_t numel = sizes[r];
    tag.codec = crc32c({reinterpret_cast<const uint8_t*>(&numel), sizeof numel}, tag.codec);
    label += (r == 0 ? "" : ",") + std::to_string(numel);
  }
  label.copy(tag.label, sizeof tag.label - 1);
}

/// True if an op's parts have the same sizes on all ranks. Uneven sizes are hashed into the tag.
template <typename T>
OpTag make_tag(Op op, const BasicParts<T>& parts, int ranks, DType dtype,
               ReduceOp redop = ReduceOp::sum) {
  if (parts.even(ranks)) return make_tag(op, parts.numel(0), dtype, redop);
  OpTag tag = make_tag(op, parts.total(ranks), dtype, redop);
  std::vector<size_t> sizes;
  for (int r = 0; r < ranks; r++) sizes.push_back(parts.numel(r));
  add_sizes(tag, "parts of ", sizes);
  return tag;
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Store> store, int rank, int size,
                           CommunicatorOptions options)
    : impl_(std::make_unique<Impl>(std::move(store), rank, size, std::move(options))) {}
Communicator::~Communicator() {
  // A forked child cannot end anything, so the implementation is left as it is.
  if (impl_->in_child()) static_cast<void>(impl_.release());
}

int Communicator::rank() const { return impl_->rank(); }
int Communicator::size() const { return impl_->size(); }
Milliseconds Communicator::timeout() const { return impl_->timeout(); }
void Communicator::set_timeout(Milliseconds timeout) { impl_->set_timeout(timeout); }
std::vector<int> Communicator::levels() const { return impl_->levels(); }
std::vector<uint32_t> Communicator::shares() const { return impl_->shares(); }
std::string Communicator::describe() const { return impl_->mesh().describe(); }
std::vector<std::string> Communicator::transports() const { return impl_->mesh().transports(); }
uint64_t Communicator::wire_bytes() const { return impl_->mesh().wire_bytes(); }
uint64_t Communicator::sent_bytes() const { return impl_->mesh().sent_bytes(); }
void Communicator::note_caller() { impl_->note_caller(); }
uint64_t Communicator::note_issued(const OpTag& tag) { return impl_->note_issued(tag); }
void Communicator::resume(uint64_t issued) { impl_->resume(issued); }
const Trace& Communicator::trace() const { return impl_->trace(); }
void Communicator::abort(const std::string& reason) noexcept { impl_->abort(reason); }
std::exception_ptr Communicator::over() const { return impl_->failure().error(); }
std::string Communicator::describe_ranks() const {
  impl_->check_process("describe_ranks");
  return pycomm::describe_ranks(impl_->mesh());
}
bool Communicator::lost(int rank) const { return impl_->mesh().lost(rank); }

std::string Communicator::explain(Op op, size_t bytes, const CodedArgs* coded) const {
  return impl_->explain(op, bytes, coded);
}

bool Communicator::uses_network() const { return impl_->mesh().slowest() == Medium::tcp; }
std::shared_ptr<SharedHeap> Communicator::heap() const { return impl_->mesh().heap(); }

std::shared_ptr<const KeptHeaps> Communicator::kept_heaps() const {
  return impl_->mesh().kept_heaps();
}

std::shared_ptr<void> Communicator::allocate(size_t bytes) {
  impl_->check_process("allocate");
  const std::string bytes_text = std::to_string(bytes) + " bytes; allocate fewer";
  const std::string here = "rank " + std::to_string(rank()) + ": ";
  if (bytes > kLargestBuffer) throw Error(here + "no memory holds " + bytes_text);
  if (auto heap = impl_->mesh().heap()) return allocate_shared(heap, bytes);
  constexpr size_t kAlign = 64;
  void* data =
      std::aligned_alloc(kAlign, (std::max<size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign);
  if (!data) throw Error(here + "no memory is left for " + bytes_text);
  return {data, &std::free};
}

// ------------------------------------------------------------------ collectives that reduce

void Communicator::all_reduce(void* data, size_t numel, DType dtype, ReduceOp op, double factor,
                              Milliseconds timeout) {
  impl_->check_dtype(Op::all_reduce, dtype);
  check_reducible(dtype, op);
  impl_->check_buffer(Op::all_reduce, data, numel, size_of(dtype));
  OpTag tag = make_tag(Op::all_reduce, numel, dtype, op);
  const Contribution ours(dtype, op, factor);
  impl_->collective(tag, timeout, [&](const dispatch::Route& route) {
    ours.in_place(data, numel);
    dispatch::all_reduce(route, data, numel, {dtype, op});
  });
}

bool Communicator::all_reduce_coded(const CodedArgs& args, Milliseconds timeout) {
  impl_->check_buffer(Op::all_reduce, args.data.data, args.data.size, size_of(args.data.dtype));
  coded::check("all_reduce_coded", args, 1);
  return impl_->exchange_coded(Op::all_reduce, args, timeout, [&](CollectiveContext& context) {
    return coded::all_reduce(context, impl_->algo(), args);
  });
}

bool Communicator::reduce_scatter_coded(const CodedArgs& args, void* out, Milliseconds timeout) {
  const auto ranks = static_cast<size_t>(size());
  impl_->check_buffer(Op::reduce_scatter, args.data.data, args.data.size, size_of(args.data.dtype));
  impl_->check_buffer(Op::reduce_scatter, out, args.data.size / ranks, size_of(args.data.dtype));
  coded::check("reduce_scatter_coded", args, ranks);
  return impl_->exchange_coded(Op::reduce_scatter, args, timeout, [&](CollectiveContext& context) {
    return coded::reduce_scatter(context, args, out);
  });
}

bool Communicator::all_gather_coded(const CodedArgs& args, void* out, Milliseconds timeout) {
  impl_->check_buffer(Op::all_gather, args.data.data, args.data.size, size_of(args.data.dtype));
  impl_->check_parts(Op::all_gather, Parts(out, args.data.size), size_of(args.data.dtype));
  coded::check("all_gather_coded", args, 1);
  return impl_->exchange_coded(Op::all_gather, args, timeout, [&](CollectiveContext& context) {
    return coded::all_gather(context, args, out);
  });
}

void Communicator::reduce_scatter(const ConstParts& in, void* out, DType dtype, ReduceOp op,
                                  double factor, Milliseconds timeout) {
  impl_->check_dtype(Op::reduce_scatter, dtype);
  check_reducible(dtype, op);
  impl_->check_parts(Op::reduce_scatter, in, size_of(dtype));
  impl_->check_buffer(Op::reduce_scatter, out, in.numel(rank()), size_of(dtype));
  OpTag tag = make_tag(Op::reduce_scatter, in, size(), dtype, op);
  Contribution ours(dtype, op, factor);
  impl_->collective(tag, timeout, [&](const dispatch::Route& route) {
    dispatch::reduce_scatter(route, ours.of(in, size()), out, {dtype, op});
  });
}

void Communicator::reduce(const void* in, void* out, size_t numel, DType dtype, ReduceOp op,
                          int root, double factor, Milliseconds timeout) {
  impl_->check_dtype(Op::reduce, dtype);
  check_reducible(dtype, op);
  impl_->check_rank(Op::reduce, "root", root);
  impl_->check_buffer(Op::reduce, in, numel, size_of(dtype));
  if (rank() == root) impl_->check_buffer(Op::reduce, out, numel, size_of(dtype));
  OpTag tag = make_tag(Op::reduce, numel, dtype, op, root);
  Contribution ours(dtype, op, factor);
  void* result = rank() == root ? out : nullptr;
  impl_->collective(tag, timeout, [&](const dispatch::Route& route) {
    dispatch::reduce(route, ours.of(in, numel, result), out, numel, {dtype, op}, root);
  });
}

// ------------------------------------------------------------------ collectives that move

void Communicator::all_gather(const void* in, const Parts& out, DType dtype, Milliseconds timeout) {
  impl_->check_dtype(Op::all_gather, dtype);
  impl_->check_parts(Op::all_gather, out, size_of(dtype));
  impl_->check_buffer(Op::all_gather, in, out.numel(rank()), size_of(dtype));
  OpTag tag = make_tag(Op::all_gather, out, size(), dtype);
  const Parts parts = out.of(size_of(dtype));
  impl_->collective(tag, timeout,
                    [&](const dispatch::Route& route) { dispatch::all_gather(route, in, parts); });
}

void Communicator::exchange_paths(const void* in, void* out, size_t bytes) {
  OpTag tag = make_tag(Op::all_gather, bytes, DType::uint8);
  std::snprintf(tag.label, sizeof tag.label, "%s", kPathsLabel);
  const Parts parts = Parts(out, bytes).of(1);
  impl_->collective(tag, {},
                    [&](const dispatch::Route& route) { dispatch::all_gather(route, in, parts); });
}

void Communicator::all_to_all(const ConstParts& in, const Parts& out, DType dtype,
                              Milliseconds timeout) {
  impl_->check_dtype(Op::all_to_all, dtype);
  impl_->check_parts(Op::all_to_all, in, size_of(dtype));
  impl_->check_parts(Op::all_to_all, out, size_of(dtype));
  impl_->check_own(Op::all_to_all, in.numel(rank()), out.numel(rank()),
                   !in.even(size()) || !out.even(size()));
  OpTag tag = make_tag(Op::all_to_all, in.total(size()), dtype);
  const size_t element = size_of(dtype);
  impl_->collective(tag, timeout, [&](const dispatch::Route& route) {
    impl_->note_parts(in.total(size()), out.total(size()));
    dispatch::all_to_all(route, in.of(element), out.of(element));
  });
}

void Communicator::broadcast(void* data, size_t numel, DType dtype, int root,
                             Milliseconds timeout) {
  impl_->check_dtype(Op::broadcast, dtype);
  impl_->check_rank(Op::broadcast, "root", root);
  impl_->check_buffer(Op::broadcast, data, numel, size_of(dtype));
  OpTag tag = make_tag(Op::broadcast, numel, dtype, ReduceOp::sum, root);
  const size_t bytes = numel * size_of(dtype);
  impl_->collective(tag, timeout, [&](const dispatch::Route& route) {
    dispatch::broadcast(route, data, bytes, root);
  });
}

void Communicator::gather(const void* in, size_t numel, const Parts& out, DType dtype, int root,
                          Milliseconds timeout) {
  impl_->check_dtype(Op::gather, dtype);
  impl_->check_rank(Op::gather, "root", root);
  impl_->check_buffer(Op::gather, in, numel, size_of(dtype));
  if (rank() == root) {
    impl_->check_parts(Op::gather, out, size_of(dtype));
    impl_->check_own(Op::gather, numel, out.numel(root), true);
  }
  OpTag tag = make_tag(Op::gather, numel, dtype, ReduceOp::sum, root);
  const size_t element = size_of(dtype);
  impl_->collective(tag, timeout, [&](const dispatch::Route& route) {
    dispatch::gather(route, in, numel * element, out.of(element), root);
  });
}

void Communicator::scatter(const ConstParts& in, void* out, size_t numel, DType dtype, int root,
                           Milliseconds timeout) {
  impl_->check_dtype(Op::scatter, dtype);
  impl_->check_rank(Op::scatter, "root", root);
  impl_->check_buffer(Op::scatter, out, numel, size_of(dtype));
  if (rank() == root) {
    impl_->check_parts(Op::scatter, in, size_of(dtype));
    impl_->check_own(Op::scatter, in.numel(root), numel, true);
  }
  OpTag tag = make_tag(Op::scatter, numel, dtype, ReduceOp::sum, root);
  const size_t element = size_of(dtype);
  impl_->collective(tag, timeout, [&](const dispatch::Route& route) {
    dispatch::scatter(route, in.of(element), out, numel * element, root);
  });
}

void Communicator::barrier(Milliseconds timeout) {
  OpTag tag = make_tag(Op::barrier, 0, DType::uint8);
  impl_->collective(tag, timeout, [](const dispatch::Route& route) { dispatch::barrier(route); });
}

void Communicator::compare_sizes(Op op, size_t own, const std::vector<size_t>& parts, DType dtype,
                                 ReduceOp redop, Milliseconds timeout) {
  if (parts.size() != static_cast<size_t>(size())) {
    impl_->fail(op, "needs one part per rank, " + std::to_string(size()) + ", and got " +
                        std::to_string(parts.size()));
  }
  impl_->check_dtype(op, dtype);
  // Ranks whose lists differ read about the call that they made, so this one is named after it; its
  // messages are whole elements of every dtype.
  struct alignas(16) Message {
    uint64_t own = 0;
  };
  const Message mine{own};
  std::vector<Message> theirs(parts.size());
  OpTag tag = make_tag(op, std::accumulate(parts.begin(), parts.end(), size_t{0}), dtype, redop);
  add_sizes(tag, "parts of ", parts);
  const Parts out = Parts(theirs.data(), sizeof mine / size_of(dtype)).of(size_of(dtype));
  impl_->collective(tag, timeout,
                    [&](const dispatch::Route& route) { dispatch::all_gather(route, &mine, out); });
  for (int r = 0; r < size(); r++) {
    if (theirs[r].own == parts[r]) continue;
    impl_->fail(op, "has a part of " + std::to_string(parts[r]) + " elements for rank " +
                        std::to_string(r) + " in its list, but rank " + std::to_string(r) +
                        " brings " + std::to_string(theirs[r].own));
  }
}

// ------------------------------------------------------------------ point to point

std::shared_ptr<Communicator::Request> Communicator::send(const void* data, size_t bytes, int dst,
                                                          int tag) {
  impl_->check_process("send");
  impl_->check_rank(Op::send, "destination", dst);
  impl_->check_buffer(Op::send, data, bytes, 1);
  return impl_->point_to_point().send(data, bytes, dst, tag, impl_->timeout());
}

std::shared_ptr<Communicator::Request> Communicator::recv(void* data, size_t bytes, int src,
                                                          int tag) {
  impl_->check_process("recv");
  if (src != -1) impl_->check_rank(Op::recv, "source", src);
  impl_->check_buffer(Op::recv, data, bytes, 1);
  return impl_->point_to_point().recv(data, bytes, src, tag, impl_->timeout());
}

void Communicator::end_requests() { impl_->point_to_point().close(); }

}  // namespace pycomm
