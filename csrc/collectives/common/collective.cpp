#include "collectives/common/collective.h"

#include <algorithm>
#include <cstdint>
#include <vector>

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
  if (!has_in_parts()) check.buffer(call.in.data(), call.in.numel(0), element);
  if (!has_out_parts()) check.buffer(call.out.data(), call.out.numel(0), element);
  return call;
}

bool Collective::overwrites(int rank, int ranks) const {
  struct Range {
    uintptr_t begin, end;
    bool brought;
  };
  const int ins = has_in_parts() ? ranks : 1, outs = has_out_parts() ? ranks : 1;
  const auto for_each = [&](const auto& visit) {
    const auto add = [&](const auto& part, bool brought) {
      const auto begin = reinterpret_cast<uintptr_t>(part.data);
      if (part.size > 0) visit(Range{begin, begin + part.size, brought});
    };
    const Span<uint8_t> own = out[outs > 1 ? rank : 0];
    for (int r = 0; r < ins; r++) {
      const Span<const uint8_t> mine = in[r];
      const bool in_place =
          (ins == 1 || r == rank) && mine.data == own.data && mine.size == own.size;
      if (!in_place) add(mine, true);
    }
    for (int r = 0; r < outs; r++) add(out[r], false);
  };
  Range all[2] = {{UINTPTR_MAX, 0, false}, {UINTPTR_MAX, 0, true}};
  for_each([&](const Range& range) {
    Range& whole = all[range.brought];
    whole = {std::min(whole.begin, range.begin), std::max(whole.end, range.end), range.brought};
  });
  if (all[0].begin >= all[1].end || all[1].begin >= all[0].end) return false;  // as mostly
  std::vector<Range> ranges;
  for_each([&](const Range& range) { ranges.push_back(range); });
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  uintptr_t ends[2] = {};  // the furthest until now
  for (const Range& range : ranges) {
    if (range.begin < ends[!range.brought]) return true;
    ends[range.brought] = std::max(ends[range.brought], range.end);
  }
  return false;
}

std::string Collective::own_mismatch(int rank) const {
  const bool has_part =
      is_rooted() ? sizes_differ(op) && rank == root : has_in_parts() || has_out_parts();
  const size_t brings = has_part ? in.numel(has_in_parts() ? rank : 0) : 0;
  const size_t gets = has_part ? out.numel(has_out_parts() ? rank : 0) : 0;
  if (brings == gets) return "";
  return "has " + std::to_string(brings) + " elements for itself but expects " +
         std::to_string(gets) + ": give both the same size";
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
