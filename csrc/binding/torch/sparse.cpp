// Sparse all-reduce (COO tensors): each rank brings its own indices and gets the sum over all
// ranks, as for the gradients of sparse embeddings. A part of _c10d.
#include "binding/torch/backend.h"
#include "core/arithmetic.h"

namespace pycomm::torch_binding {
namespace {

/// Returns the number of entries, of sparse dimensions, and the sizes. All but the first must be
/// equal.
std::vector<int64_t> header_of(const at::Tensor& coalesced) {
  std::vector<int64_t> header = {coalesced._nnz(), coalesced.sparse_dim()};
  const auto sizes = coalesced.sizes();
  header.insert(header.end(), sizes.begin(), sizes.end());
  return header;
}

/// Gathers `mine` of all ranks, which differs between them in the length of dimension `dim` only.
Tensors gather_uneven(Communicator& comm, const at::Tensor& mine, int64_t dim,
                      const std::vector<int64_t>& lengths, Milliseconds timeout) {
  Tensors theirs;
  for (const int64_t length : lengths) {
    std::vector<int64_t> sizes = mine.sizes().vec();
    sizes[dim] = length;
    theirs.push_back(at::empty(sizes, mine.options()));
  }
  const Flat in(mine);
  comm.all_gather(in.in(), FlatList(theirs).out(), Elements(mine).dtype, timeout);
  return theirs;
}

void all_reduce(Communicator& comm, const at::Tensor& tensor, Milliseconds timeout) {
  const at::Tensor mine = tensor.coalesce();
  const std::vector<int64_t> header = header_of(mine);
  std::vector<int64_t> headers(header.size() * comm.size());
  comm.all_gather(header.data(), headers.data(), header.size(), DType::int64, timeout);

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
               [=](Communicator& comm) { all_reduce(comm, tensor, call.timeout); });
}

}  // namespace pycomm::torch_binding
