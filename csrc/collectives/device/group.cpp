#include "collectives/device/group.h"

#include "collectives/device/group_impl.h"
#include "core/crc32c.h"
#include "core/reduce.h"
#include "transports/rendezvous.h"

namespace pycomm {
namespace {

using device::MoveCall;
using device::ReduceAlgo;
using device::ReduceCall;
using device::Runs;

Rendezvous rendezvous(std::shared_ptr<Store> store, int rank, int size,
                      const DeviceGroupOptions& options) {
  Rendezvous result =
      make_rendezvous(std::move(store), options.group, rank, size, options.secret, options.timeout);
  result.interrupt_check = options.interrupt_check;
  return result;
}

/// Makes a tag for parts. Their sizes are the same on all ranks, and hashed into the tag.
template <typename T>
OpTag make_tag(Op op, const BasicParts<T>& parts, int ranks, DType dtype,
               ReduceOp redop = ReduceOp::sum) {
  OpTag tag = make_tag(op, parts.total(ranks), dtype, redop);
  for (int r = 0; r < ranks; r++) {
    const uint64_t numel = parts.numel(r);
    tag.codec = crc32c({reinterpret_cast<const uint8_t*>(&numel), sizeof numel}, tag.codec);
  }
  return tag;
}

uint8_t* bytes_of(const void* data) { return static_cast<uint8_t*>(const_cast<void*>(data)); }

/// Makes runs of parts. Kernels only read what was const.
template <typename T>
Runs runs_of(const BasicParts<T>& parts, int ranks, DType dtype) {
  Runs runs{};
  const BasicParts<T> sized = parts.of(size_of(dtype));
  for (int r = 0; r < ranks; r++) {
    runs.data[r] = bytes_of(sized[r].data);
    runs.bytes[r] = sized[r].size;
  }
  return runs;
}

Runs one_run(const void* data, size_t bytes) {
  Runs runs{};
  runs.data[0] = bytes_of(data);
  runs.bytes[0] = bytes;
  return runs;
}

}  // namespace

void DeviceGroup::Impl::all_reduce(void* data, const OpTag& tag, ReduceAlgo algo, double factor,
                                   Stream stream) {
  if (tag.numel == 0) return check();
  OpTag hashed = tag;
  hashed.codec = static_cast<uint32_t>(algo);
  ReduceCall call{};
  call.call = begin(hashed, stream);
  call.algo = algo;
  call.in = one_run(data, tag.numel * size_of(tag.dtype));
  call.out = bytes_of(data);
  call.root = -1;
  reduce(call, tag, factor, stream);
}

// -------------------------------------------------------------------------------- calls

DeviceGroup::DeviceGroup(std::shared_ptr<Store> store, int rank, int size, int index,
                         DeviceGroupOptions options)
    : impl_(std::make_unique<Impl>(rendezvous(std::move(store), rank, size, options), index,
                                   options)) {}
DeviceGroup::~DeviceGroup() = default;

int DeviceGroup::rank() const { return impl_->rank(); }
int DeviceGroup::size() const { return impl_->size(); }
int DeviceGroup::index() const { return impl_->index(); }
std::string DeviceGroup::describe() const { return impl_->describe(); }
void DeviceGroup::set_timeout(Milliseconds timeout) { impl_->set_timeout(timeout); }
size_t DeviceGroup::most_payload_bytes() const { return impl_->place_bytes(); }
void DeviceGroup::check() const { impl_->check(); }
void DeviceGroup::abort(const Notice& notice) noexcept { impl_->abort(notice); }
void DeviceGroup::lose(int rank) noexcept { impl_->lose(rank); }

void DeviceGroup::all_reduce(void* data, size_t numel, DType dtype, ReduceOp op, Stream stream,
                             double factor, const std::string& algo) {
  check_reducible(dtype, op);
  ReduceAlgo chosen = algo == "one_shot" ? ReduceAlgo::one_shot : ReduceAlgo::two_shot;
  if (algo == "auto") {
    chosen = impl_->choose(numel * size_of(dtype));
  } else if (algo != "one_shot" && algo != "two_shot") {
    impl_->fail(Op::all_reduce,
                "has no algorithm \"" + algo + "\" on a GPU; use one of auto, one_shot, two_shot");
  }
  impl_->all_reduce(data, make_tag(Op::all_reduce, numel, dtype, op), chosen, factor, stream);
}

void DeviceGroup::reduce_scatter(const ConstParts& in, void* out, DType dtype, ReduceOp op,
                                 Stream stream, double factor) {
  check_reducible(dtype, op);
  const OpTag tag = make_tag(Op::reduce_scatter, in, size(), dtype, op);
  if (tag.numel == 0) return impl_->check();
  ReduceCall call{};
  call.algo = ReduceAlgo::scatter;
  call.call = impl_->begin(tag, stream);
  call.in = runs_of(in, size(), dtype);
  call.out = bytes_of(out);
  call.root = -1;
  impl_->reduce(call, tag, factor, stream);
}

void DeviceGroup::reduce(const void* in, void* out, size_t numel, DType dtype, ReduceOp op,
                         int root, Stream stream, double factor) {
  check_reducible(dtype, op);
  impl_->check_rank(Op::reduce, "root", root);
  const OpTag tag = make_tag(Op::reduce, numel, dtype, op, root);
  if (numel == 0) return impl_->check();
  const size_t bytes = numel * size_of(dtype);
  ReduceCall call{};
  call.algo = impl_->choose(bytes);
  call.call = impl_->begin(tag, stream);
  call.in = one_run(in, bytes);
  call.out = bytes_of(out);
  call.root = root;
  impl_->reduce(call, tag, factor, stream);
}

void DeviceGroup::all_gather(const void* in, const Parts& out, DType dtype, Stream stream) {
  impl_->check_dtype(Op::all_gather, dtype);
  const OpTag tag = make_tag(Op::all_gather, out, size(), dtype);
  if (tag.numel == 0) return impl_->check();
  MoveCall call{};
  call.call = impl_->begin(tag, stream);
  call.in = one_run(in, out.numel(rank()) * size_of(dtype));
  call.runs = 1;
  call.out = runs_of(out, size(), dtype);
  impl_->move(call, impl_->blocks_for(call.out.longest()), stream);
}

void DeviceGroup::all_to_all(const ConstParts& in, const Parts& out, DType dtype, Stream stream) {
  impl_->check_dtype(Op::all_to_all, dtype);
  MoveCall call{};
  call.call = impl_->begin(make_tag(Op::all_to_all, in.total(size()), dtype), stream);
  call.in = runs_of(in, size(), dtype);
  call.runs = size();
  call.out = runs_of(out, size(), dtype);
  impl_->move(call, impl_->most_blocks(), stream);
}

void DeviceGroup::broadcast(void* data, size_t numel, DType dtype, int root, Stream stream) {
  impl_->check_dtype(Op::broadcast, dtype);
  impl_->check_rank(Op::broadcast, "root", root);
  const OpTag tag = make_tag(Op::broadcast, numel, dtype, ReduceOp::sum, root);
  if (numel == 0) return impl_->check();
  const size_t bytes = numel * size_of(dtype);
  MoveCall call{};
  call.call = impl_->begin(tag, stream);
  call.runs = 1;
  if (rank() == root) {
    call.in = one_run(data, bytes);
  } else {
    call.out.data[root] = bytes_of(data);
    call.out.bytes[root] = bytes;
  }
  impl_->move(call, impl_->blocks_for(bytes), stream);
}

void DeviceGroup::gather(const void* in, size_t numel, const Parts& out, DType dtype, int root,
                         Stream stream) {
  impl_->check_dtype(Op::gather, dtype);
  impl_->check_rank(Op::gather, "root", root);
  MoveCall call{};
  call.call = impl_->begin(make_tag(Op::gather, numel, dtype, ReduceOp::sum, root), stream);
  call.in = one_run(in, numel * size_of(dtype));
  call.runs = 1;
  if (rank() == root) call.out = runs_of(out, size(), dtype);
  impl_->move(call, impl_->most_blocks(), stream);
}

void DeviceGroup::scatter(const ConstParts& in, void* out, size_t numel, DType dtype, int root,
                          Stream stream) {
  impl_->check_dtype(Op::scatter, dtype);
  impl_->check_rank(Op::scatter, "root", root);
  MoveCall call{};
  call.call = impl_->begin(make_tag(Op::scatter, numel, dtype, ReduceOp::sum, root), stream);
  call.runs = size();
  if (rank() == root) call.in = runs_of(in, size(), dtype);
  call.out.data[root] = bytes_of(out);
  call.out.bytes[root] = numel * size_of(dtype);
  impl_->move(call, impl_->most_blocks(), stream);
}

void DeviceGroup::barrier(Stream stream) {
  impl_->arrive_wait(impl_->begin(make_tag(Op::barrier, 0, DType::uint8), stream), stream);
}

}  // namespace pycomm
