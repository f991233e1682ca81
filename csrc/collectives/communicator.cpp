// The public face: checks arguments, gives each call its number, has an algorithm run it, and makes
// sure that an error on one rank is an error on all.
#include <algorithm>

#include "collectives/communicator_impl.h"
#include "collectives/direct.h"
#include "collectives/dispatch.h"
#include "collectives/shared.h"
#include "core/crc32c.h"
#include "core/reduce.h"

namespace pycomm {
namespace {

/// For an op whose parts have the same sizes on all ranks. Uneven sizes are hashed into the tag.
template <typename T>
OpTag make_tag(Op op, const BasicParts<T>& parts, int ranks, DType dtype,
               ReduceOp redop = ReduceOp::sum) {
  if (parts.even(ranks)) return make_tag(op, parts.numel(0), dtype, redop);
  OpTag tag = make_tag(op, parts.total(ranks), dtype, redop);
  std::string label = "parts of ";
  for (int r = 0; r < ranks; r++) {
    const uint64_t numel = parts.numel(r);
    tag.codec = crc32c({reinterpret_cast<const uint8_t*>(&numel), sizeof numel}, tag.codec);
    label += (r == 0 ? "" : ",") + std::to_string(numel);
  }
  label.copy(tag.label, sizeof tag.label - 1);
  return tag;
}

Alike whole(void* data, size_t numel, DType dtype) {
  return {Parts(data, numel).of(size_of(dtype)), 1};
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Store> store, int rank, int size,
                           CommunicatorOptions options)
    : impl_(std::make_unique<Impl>(std::move(store), rank, size, std::move(options))) {}
Communicator::~Communicator() {
  // In a forked child nothing can be ended, so it is left as it is.
  if (impl_->in_child()) static_cast<void>(impl_.release());
}

int Communicator::rank() const { return impl_->rank(); }
int Communicator::size() const { return impl_->size(); }
Milliseconds Communicator::timeout() const { return impl_->timeout(); }
void Communicator::set_timeout(Milliseconds timeout) { impl_->set_timeout(timeout); }
std::vector<int> Communicator::levels() const { return impl_->levels(); }
std::string Communicator::describe() const { return impl_->mesh().describe(); }
uint64_t Communicator::wire_bytes() const { return impl_->mesh().wire_bytes(); }
uint64_t Communicator::sent_bytes() const { return impl_->mesh().sent_bytes(); }
bool Communicator::compares() const { return impl_->compares(); }
void Communicator::compare(const std::string& what, uint32_t digest) {
  impl_->compare(what, digest);
}
uint64_t Communicator::note_issued(const OpTag& tag) { return impl_->note_issued(tag); }
void Communicator::resume(uint64_t issued) { impl_->resume(issued); }
const Trace& Communicator::trace() const { return impl_->trace(); }
void Communicator::abort(const std::string& reason) noexcept { impl_->abort(reason); }
std::exception_ptr Communicator::over() const { return impl_->failure().error(); }
std::string Communicator::whereabouts() const { return pycomm::whereabouts(impl_->mesh()); }
bool Communicator::lost(int rank) const { return impl_->mesh().lost(rank); }
std::shared_ptr<SharedHeap> Communicator::heap() const { return impl_->mesh().heap(); }

std::shared_ptr<void> Communicator::allocate(size_t bytes) {
  if (auto heap = impl_->mesh().heap()) return allocate_shared(heap, bytes);
  constexpr size_t kAlign = 64;
  void* data =
      std::aligned_alloc(kAlign, (std::max<size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign);
  if (!data) throw Error("no memory for " + std::to_string(bytes) + " bytes");
  return {data, &std::free};
}

// ------------------------------------------------------------------ collectives that reduce

void Communicator::all_reduce(void* data, size_t numel, DType dtype, ReduceOp op, double factor,
                              Milliseconds timeout) {
  impl_->check_dtype(Op::all_reduce, dtype);
  check_reducible(dtype, op);
  impl_->check_buffer(Op::all_reduce, data, numel);
  OpTag tag = make_tag(Op::all_reduce, numel, dtype, op);
  const Alike result = whole(data, numel, dtype);
  if (Window* window = impl_->window()) {
    return impl_->run(
        tag, timeout,
        [&](const Deadline& deadline) { shared::all_reduce(*window, tag, data, factor, deadline); },
        result);
  }
  impl_->exchange(
      tag, timeout,
      [&](Exchange& ex) {
        dispatch::all_reduce(ex, impl_->algo(), data, numel, {dtype, op, factor});
      },
      result);
}

bool Communicator::all_reduce_coded(const CodedArgs& args, Milliseconds timeout) {
  impl_->check_buffer(Op::all_reduce, args.data.data, args.data.size);
  coded::check("all_reduce_coded", args, 1);
  const Alike result = whole(args.data.data, args.data.size, args.data.dtype);
  return impl_->exchange_coded(
      Op::all_reduce, args, timeout,
      [&](Exchange& ex) { return coded::all_reduce(ex, impl_->algo(), args); }, result);
}

bool Communicator::reduce_scatter_coded(const CodedArgs& args, void* out, Milliseconds timeout) {
  const auto ranks = static_cast<size_t>(size());
  impl_->check_buffer(Op::reduce_scatter, args.data.data, args.data.size);
  impl_->check_buffer(Op::reduce_scatter, out, args.data.size / ranks);
  coded::check("reduce_scatter_coded", args, ranks);
  return impl_->exchange_coded(Op::reduce_scatter, args, timeout,
                               [&](Exchange& ex) { return coded::reduce_scatter(ex, args, out); });
}

bool Communicator::all_gather_coded(const CodedArgs& args, void* out, Milliseconds timeout) {
  impl_->check_buffer(Op::all_gather, args.data.data, args.data.size);
  impl_->check_buffer(Op::all_gather, out, args.data.size);
  coded::check("all_gather_coded", args, 1);
  const Parts rows = Parts(out, args.data.size).of(size_of(args.data.dtype));
  return impl_->exchange_coded(Op::all_gather, args, timeout,
                               [&](Exchange& ex) { return coded::all_gather(ex, args, out); },
                               {rows, size()});
}

void Communicator::reduce_scatter(const ConstParts& in, void* out, DType dtype, ReduceOp op,
                                  double factor, Milliseconds timeout) {
  impl_->check_dtype(Op::reduce_scatter, dtype);
  check_reducible(dtype, op);
  impl_->check_parts(Op::reduce_scatter, in);
  impl_->check_buffer(Op::reduce_scatter, out, in.numel(rank()));
  OpTag tag = make_tag(Op::reduce_scatter, in, size(), dtype, op);
  const ConstParts parts = in.of(size_of(dtype));
  if (Window* window = impl_->window()) {
    return impl_->run(tag, timeout, [&](const Deadline& deadline) {
      shared::reduce_scatter(*window, tag, parts, out, factor, deadline);
    });
  }
  impl_->exchange(tag, timeout, [&](Exchange& ex) {
    dispatch::reduce_scatter(ex, impl_->algo(), parts, out, {dtype, op, factor});
  });
}

void Communicator::reduce(const void* in, void* out, size_t numel, DType dtype, ReduceOp op,
                          int root, double factor, Milliseconds timeout) {
  impl_->check_dtype(Op::reduce, dtype);
  check_reducible(dtype, op);
  impl_->check_rank(Op::reduce, "root", root);
  impl_->check_buffer(Op::reduce, in, numel);
  if (rank() == root) impl_->check_buffer(Op::reduce, out, numel);
  OpTag tag = make_tag(Op::reduce, numel, dtype, op, root);
  if (Window* window = impl_->window()) {
    return impl_->run(tag, timeout, [&](const Deadline& deadline) {
      shared::reduce(*window, tag, in, out, factor, deadline);
    });
  }
  impl_->exchange(tag, timeout, [&](Exchange& ex) {
    dispatch::reduce(ex, impl_->algo(), in, out, numel, {dtype, op, factor}, root);
  });
}

// ------------------------------------------------------------------ collectives that move

void Communicator::all_gather(const void* in, const Parts& out, DType dtype, Milliseconds timeout) {
  impl_->check_dtype(Op::all_gather, dtype);
  impl_->check_parts(Op::all_gather, out);
  impl_->check_buffer(Op::all_gather, in, out.numel(rank()));
  OpTag tag = make_tag(Op::all_gather, out, size(), dtype);
  const Parts parts = out.of(size_of(dtype));
  if (Window* window = impl_->window()) {
    return impl_->run(
        tag, timeout,
        [&](const Deadline& deadline) { shared::all_gather(*window, tag, in, parts, deadline); },
        {parts, size()});
  }
  impl_->exchange(tag, timeout,
                  [&](Exchange& ex) { dispatch::all_gather(ex, impl_->algo(), in, parts); },
                  {parts, size()});
}

void Communicator::all_to_all(const ConstParts& in, const Parts& out, DType dtype,
                              Milliseconds timeout) {
  impl_->check_dtype(Op::all_to_all, dtype);
  impl_->check_parts(Op::all_to_all, in);
  impl_->check_parts(Op::all_to_all, out);
  impl_->check_own(Op::all_to_all, in.numel(rank()), out.numel(rank()));
  OpTag tag = make_tag(Op::all_to_all, in.total(size()), dtype);
  if (Window* window = impl_->window()) {
    return impl_->run(tag, timeout, [&](const Deadline& deadline) {
      impl_->note_parts(in.total(size()), out.total(size()));
      shared::all_to_all(*window, tag, in, out, deadline);
    });
  }
  const size_t element = size_of(dtype);
  impl_->exchange(tag, timeout, [&](Exchange& ex) {
    impl_->note_parts(in.total(size()), out.total(size()));
    direct::all_to_all(ex, in.of(element), out.of(element));
  });
}

void Communicator::broadcast(void* data, size_t numel, DType dtype, int root,
                             Milliseconds timeout) {
  impl_->check_dtype(Op::broadcast, dtype);
  impl_->check_rank(Op::broadcast, "root", root);
  impl_->check_buffer(Op::broadcast, data, numel);
  OpTag tag = make_tag(Op::broadcast, numel, dtype, ReduceOp::sum, root);
  const Alike result = whole(data, numel, dtype);
  if (Window* window = impl_->window()) {
    return impl_->run(
        tag, timeout,
        [&](const Deadline& deadline) { shared::broadcast(*window, tag, data, deadline); }, result);
  }
  const size_t bytes = numel * size_of(dtype);
  impl_->exchange(
      tag, timeout,
      [&](Exchange& ex) { dispatch::broadcast(ex, impl_->algo(), data, bytes, root); }, result);
}

void Communicator::gather(const void* in, size_t numel, const Parts& out, DType dtype, int root,
                          Milliseconds timeout) {
  impl_->check_dtype(Op::gather, dtype);
  impl_->check_rank(Op::gather, "root", root);
  impl_->check_buffer(Op::gather, in, numel);
  if (rank() == root) {
    impl_->check_parts(Op::gather, out);
    impl_->check_own(Op::gather, numel, out.numel(root));
  }
  OpTag tag = make_tag(Op::gather, numel, dtype, ReduceOp::sum, root);
  if (Window* window = impl_->window()) {
    return impl_->run(tag, timeout, [&](const Deadline& deadline) {
      shared::gather(*window, tag, in, out, deadline);
    });
  }
  const size_t element = size_of(dtype);
  impl_->exchange(tag, timeout, [&](Exchange& ex) {
    direct::gather(ex, in, numel * element, out.of(element), root);
  });
}

void Communicator::scatter(const ConstParts& in, void* out, size_t numel, DType dtype, int root,
                           Milliseconds timeout) {
  impl_->check_dtype(Op::scatter, dtype);
  impl_->check_rank(Op::scatter, "root", root);
  impl_->check_buffer(Op::scatter, out, numel);
  if (rank() == root) {
    impl_->check_parts(Op::scatter, in);
    impl_->check_own(Op::scatter, in.numel(root), numel);
  }
  OpTag tag = make_tag(Op::scatter, numel, dtype, ReduceOp::sum, root);
  if (Window* window = impl_->window()) {
    return impl_->run(tag, timeout, [&](const Deadline& deadline) {
      shared::scatter(*window, tag, in, out, deadline);
    });
  }
  const size_t element = size_of(dtype);
  impl_->exchange(tag, timeout, [&](Exchange& ex) {
    direct::scatter(ex, in.of(element), out, numel * element, root);
  });
}

void Communicator::barrier(Milliseconds timeout) {
  OpTag tag = make_tag(Op::barrier, 0, DType::uint8);
  if (Window* window = impl_->window()) {
    return impl_->run(tag, timeout,
                      [&](const Deadline& deadline) { shared::barrier(*window, tag, deadline); });
  }
  impl_->exchange(tag, timeout, [&](Exchange& ex) { dispatch::barrier(ex, impl_->algo()); });
}

// ------------------------------------------------------------------ point to point

std::shared_ptr<Communicator::Request> Communicator::send(const void* data, size_t bytes, int dst,
                                                          int tag) {
  impl_->check_rank(Op::send, "destination", dst);
  impl_->check_buffer(Op::send, data, bytes);
  return impl_->point_to_point().send(data, bytes, dst, tag, impl_->timeout());
}

std::shared_ptr<Communicator::Request> Communicator::recv(void* data, size_t bytes, int src,
                                                          int tag) {
  if (src != -1) impl_->check_rank(Op::recv, "source", src);
  impl_->check_buffer(Op::recv, data, bytes);
  return impl_->point_to_point().recv(data, bytes, src, tag, impl_->timeout());
}

}  // namespace pycomm
