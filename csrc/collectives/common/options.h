// Arguments of a group and of its operations: options, and buckets whose parts have codecs.
#pragma once
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "codecs/base/codec.h"
#include "codecs/base/feedback.h"
#include "core/env.h"
#include "core/op.h"
#include "core/types.h"

namespace pycomm {

/// Largest size in bytes by which a pointer can be moved. No buffer is larger, and no size in bytes
/// wraps below it.
constexpr size_t kLargestBuffer = PTRDIFF_MAX;

/// Group whose ranks create another one.
class ParentGroup {
 public:
  virtual int size() const = 0;
  /// The error that the group failed with, or null.
  virtual std::exception_ptr over() const = 0;
  /// True if a rank is known to be gone.
  virtual bool lost(int rank) const = 0;
  /// True if some of its ranks are joined by a network.
  virtual bool uses_network() const = 0;

 protected:
  ~ParentGroup() = default;
};

/// Options of a group: those of core/option_table.h, whose defaults are the environment's, and what
/// is not set from there.
struct CommunicatorOptions : GroupOptions {
  CommunicatorOptions() : GroupOptions(env()) {}

  std::string group = "default";  ///< unique in the store
  Milliseconds timeout = env().timeout;
  /// Purpose of the group, for the trace, and its members' numbers among all processes; empty: as
  /// in the group.
  std::string description;
  std::vector<int> global_ranks;
  /// A group that these ranks are in already, and their numbers there: a rank that dies there while
  /// this group is created is missed at once. Only used to create the group.
  const ParentGroup* parent = nullptr;
  std::vector<int> parent_ranks;
  /// Called regularly while this rank waits for the others to join; an exception from it ends the
  /// rendezvous.
  std::function<void()> interrupt;
  /// Bytes of the pieces in which channels pipeline, for tests, so that small inputs take many
  /// segments.
  size_t segment_bytes = 0;  ///< 0: chosen by size
  /// Number of the node of each rank, for tests. Ranks of different nodes share no memory and talk
  /// by TCP. Empty: the actual nodes.
  std::vector<int> nodes;
  /// Number of the site of each rank, for tests, instead of what round trips say. Empty: the actual
  /// sites.
  std::vector<int> sites;
};

/// Part of a bucket that has a codec and feedback of its own: one parameter's gradient. Blocks
/// never straddle pieces.
struct Piece {
  size_t offset = 0;  ///< in the bucket, in elements; pieces ascend and cover the bucket
  size_t numel = 0;
  const Codec* codec = nullptr;
  uint32_t tensor = 0;  ///< number of the parameter, equal on all ranks; names random numbers
  /// Residual of what this rank sends: memory of `numel` values, in reduce_scatter_coded of as many
  /// for each rank.
  feedback::Feedback worker;
  /// Residual of what this rank sends back for the elements that it owns. Only the owned part is
  /// touched.
  feedback::Feedback owner;
};

/// Floats that a coded operation reads and writes: float32, float16 or bfloat16. It computes in
/// float32 and rounds a result once.
struct Values {
  void* data = nullptr;
  size_t size = 0;  ///< elements
  DType dtype = DType::float32;

  uint8_t* at(size_t element) const {
    return static_cast<uint8_t*>(data) + element * size_of(dtype);
  }
};

struct CodedArgs {
  Values data;
  Span<const Piece> pieces;
  bool average = true;  ///< the float32 sum is divided once by the number of ranks
  /// Some rank may keep a residual of what it sends back as an owner. Equal on all ranks. Without
  /// any, every rank can do what owners do.
  bool owner_residuals = true;
  uint64_t seed = 0;  ///< equal on all ranks; the rank is mixed in
  uint32_t step = 0;
};

}  // namespace pycomm
