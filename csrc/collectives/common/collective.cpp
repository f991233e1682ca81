#include "collectives/common/collective.h"

#include "collectives/common/options.h"
#include "core/crc32c.h"
#include "core/error.h"

namespace pycomm {

void CallCheck::fail(const std::string& what) const {
  throw Error("rank " + std::to_string(rank_) + ": " + name(op_) + " " + what);
}

void CallCheck::dtype(DType dtype) const {
  if (static_cast<int>(dtype) >= kDTypes) fail("got an unknown dtype");
}

void CallCheck::rank(const char* what, int number) const {
  if (number >= 0 && number < ranks_) return;
  fail(std::string("got ") + what + " " + std::to_string(number) + " in a group of " +
       std::to_string(ranks_));
}

void CallCheck::buffer(const void* data, size_t numel, size_t element_bytes) const {
  if (!data && numel > 0) fail("got no buffer for " + std::to_string(numel) + " elements");
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (numel > kLargestBuffer / element_bytes || address > UINTPTR_MAX - numel * element_bytes) {
    fail("got " + std::to_string(numel) + " elements, which no memory holds");
  }
}

template <typename T>
void CallCheck::parts(const BasicParts<T>& parts, size_t element_bytes) const {
  if (!parts.is_list()) {  // parts of one buffer
    const auto ranks = static_cast<size_t>(ranks_);
    if (parts.numel(0) > kLargestBuffer / ranks) {
      fail("got " + std::to_string(parts.numel(0)) + " elements for each of " +
           std::to_string(ranks) + " ranks, which no memory holds");
    }
    return buffer(parts.data(), parts.numel(0) * ranks, element_bytes);
  }
  if (parts.listed() != static_cast<size_t>(ranks_)) {
    fail("needs one part per rank, " + std::to_string(ranks_) + ", and got " +
         std::to_string(parts.listed()));
  }
  size_t left = kLargestBuffer / element_bytes;
  for (int r = 0; r < ranks_; r++) {
    buffer(parts[r].data, parts.numel(r), element_bytes);
    if (parts.numel(r) > left) fail("got parts that no memory holds together");
    left -= parts.numel(r);
  }
}
template void CallCheck::parts(const Parts&, size_t) const;
template void CallCheck::parts(const ConstParts&, size_t) const;

Collective Collective::all_reduce(void* data, size_t numel, const Fold& fold) {
  Collective call{Op::all_reduce, fold.dtype, {data, numel}, {data, numel}, fold.op};
  call.in = call.in.of(size_of(fold.dtype));
  call.out = call.out.of(size_of(fold.dtype));
  call.divisor = fold.divisor;
  return call;
}

Collective Collective::broadcast(void* data, size_t bytes, int root) {
  Collective call{Op::broadcast, DType::uint8, {data, bytes}, {data, bytes}};
  call.root = root;
  return call;
}

size_t Collective::bytes(int ranks) const {
  const size_t numel = has_in_parts()    ? in.total(ranks)
                       : has_out_parts() ? out.total(ranks)
                                         : in.numel(0);
  return numel * size_of(dtype);
}

Collective Collective::checked(int rank, int ranks) const {
  const CallCheck check(rank, ranks, op);
  if (op < Op::all_reduce || op > Op::barrier) check.fail("is no collective");
  check.dtype(dtype);
  if (reduces()) check_reducible(dtype, redop);
  if (is_rooted()) check.rank("root", root);
  if ((op == Op::all_reduce || op == Op::broadcast) && in.data() != out.data()) {
    check.fail("works in place, and got an input and an output");
  }
  const size_t element = size_of(dtype);
  const bool reads = op != Op::scatter || rank == root;
  const bool writes = (op != Op::gather && op != Op::reduce) || rank == root;
  if (has_in_parts() && reads) check.parts(in, element);
  if (has_out_parts() && writes) check.parts(out, element);
  Collective call = *this;
  if (!is_rooted()) call.root = -1;
  call.in = reads ? in.of(element) : ConstParts();
  call.out = writes ? out.of(element) : Parts();
  // One buffer beside parts of which all ranks know the sizes has that of our part.
  if (op == Op::all_gather) call.in = ConstParts(in.data(), out.numel(rank)).of(element);
  if (op == Op::reduce_scatter) call.out = Parts(out.data(), in.numel(rank)).of(element);
  if (!has_in_parts()) check.buffer(call.in.data(), call.in.numel(0), element);
  if (!has_out_parts()) check.buffer(call.out.data(), call.out.numel(0), element);
  return call;
}

std::string Collective::own_mismatch(int rank) const {
  const bool copies = op == Op::all_to_all || (sizes_differ(op) && rank == root);
  const size_t brings = copies ? in.numel(has_in_parts() ? rank : 0) : 0;
  const size_t gets = copies ? out.numel(has_out_parts() ? rank : 0) : 0;
  if (brings == gets) return "";
  return "has " + std::to_string(brings) + " elements for itself but expects " +
         std::to_string(gets);
}

OpTag Collective::tag(int ranks) const {
  if (op == Op::scatter) return make_tag(op, out.numel(0), dtype, redop, root);
  if (op == Op::all_to_all) return make_tag(op, in.total(ranks), dtype, redop);
  if (op != Op::all_gather && op != Op::reduce_scatter) {
    return make_tag(op, in.numel(0), dtype, redop, root);
  }
  const auto numel = [this](int r) { return has_in_parts() ? in.numel(r) : out.numel(r); };
  if (has_in_parts() ? in.even(ranks) : out.even(ranks)) {
    return make_tag(op, numel(0), dtype, redop);
  }
  OpTag tag = make_tag(op, has_in_parts() ? in.total(ranks) : out.total(ranks), dtype, redop);
  std::string label = "parts of ";
  for (int r = 0; r < ranks; r++) {
    const uint64_t size = numel(r);
    tag.codec = crc32c({reinterpret_cast<const uint8_t*>(&size), sizeof size}, tag.codec);
    label += (r == 0 ? "" : ",") + std::to_string(size);
  }
  label.copy(tag.label, sizeof tag.label - 1);
  return tag;
}

}  // namespace pycomm
