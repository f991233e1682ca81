// OpTag: identifies a rank's operation. Every collective carries it; it is checked against the
// peers' tags and printed in every error.
#pragma once
#include <string>

#include "core/types.h"

namespace pycomm {

/// Operations. The numbers travel on the wire: append, never renumber.
enum class Op : uint8_t {
  none,
  all_reduce,
  reduce_scatter,
  all_gather,
  all_to_all,
  broadcast,
  reduce,
  gather,
  scatter,
  barrier,
  send,
  recv,
};

/// Tag of one collective call, on which all its ranks must agree. Plain bytes: it travels as it is.
struct OpTag {
  uint64_t seq = 0;    ///< number of the call in its group, from 1
  uint64_t numel = 0;  ///< elements as the caller counts them; see sizes_differ()
  uint32_t codec = 0;  ///< hash of codecs, options and layout; 0 if none; see peer_tag()
  Op op = Op::none;
  DType dtype = DType::float32;
  ReduceOp redop = ReduceOp::sum;
  uint8_t reserved = 0;
  int32_t root = -1;    ///< root rank of a rooted op, else -1
  char label[36] = {};  ///< codec in words ("int4,block=128"), zero-terminated

  /// Hash that is equal on all ranks that make the same call; never 0.
  PYCOMM_API uint32_t hash() const;
};
static_assert(sizeof(OpTag) == 64, "OpTag travels as one cache line");

inline OpTag make_tag(Op op, size_t numel, DType dtype, ReduceOp redop = ReduceOp::sum,
                      int root = -1) {
  OpTag tag;
  tag.op = op;
  tag.numel = numel;
  tag.dtype = dtype;
  tag.redop = redop;
  tag.root = root;
  return tag;
}

/// True for ops whose ranks have sizes of their own: `numel` of their tags is for people, and each
/// message's size is checked on arrival.
inline bool sizes_differ(Op op) {
  return op == Op::all_to_all || op == Op::gather || op == Op::scatter;
}

/// Label of the exchange by which ranks agree on the path of tensors on accelerators.
constexpr char kPathsLabel[] = "path of device tensors";

PYCOMM_API const char* name(Op op);
PYCOMM_API const char* name(DType dtype);
PYCOMM_API const char* name(ReduceOp op);
PYCOMM_API size_t size_of(DType dtype);

/// "all_reduce #12 (sum of 1000 float32, int4,block=128)", "recv of 80 bytes from rank 1 (tag 7)".
PYCOMM_API std::string describe(const OpTag& tag);
/// Describes it with the digest of its codecs, if it has any: for two tags that may differ in
/// nothing else.
PYCOMM_API std::string describe_fully(const OpTag& tag);

/// Tag of a send to a rank or a recv from it, -1 for any; it is for people and does not travel with
/// data.
PYCOMM_API OpTag peer_tag(Op op, uint64_t bytes, int peer, int tag);

}  // namespace pycomm
