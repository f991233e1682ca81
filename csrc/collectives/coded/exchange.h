// Exchange: how payloads move between the ranks of a coded operation. The schedule
// (coded/two_shot.h) is the same for all: channels (coded/channels.h), between nodes too
// (coded/coded.cpp), memory that the kernels of peers read (device/coded.cpp), and the caller's
// process group (binding/core/coded.cpp).
#pragma once
#include <functional>

#include "collectives/coded/layout.h"

namespace pycomm::coded {

/// What an operation exchanges.
struct Plan {
  BucketLayout owned;     ///< a chunk for each rank
  BucketLayout shown;     ///< one chunk, without an owner: all ranks get the payloads of all
  bool scatters = true;   ///< ranks send what they contribute to the chunks of owners
  bool gathers = true;    ///< owners send all ranks the result
  bool one_shot = false;  ///< of what is shown every rank makes the result, as its owner would
  /// What the ranks of our node have, by place, as `owned` is of ours: empty unless they work
  /// together (coded/coded.cpp). Some may have segments that we lack.
  std::vector<BucketLayout> places = {};

  /// Segments of an owner's chunk, here or at another place.
  size_t count(int owner) const;
  /// The most segments of a chunk, and of what is shown.
  size_t most() const;
};

/// Returns the plan of an all-reduce of `values`: chunks of what owners sum, and the rest, which
/// all ranks get; in one shot that is everything. Each segment has about so many values.
Plan all_reduce_plan(Span<const Piece> pieces, const PieceRuns& values, int ranks, bool one_shot,
                     size_t owned_segment, size_t shown_segment, const Shares& shares = {});

/// Returns the plan of a reduce-scatter of rows, one for each rank.
Plan reduce_scatter_plan(Span<const Piece> pieces, int ranks, size_t segment);

/// Payloads of some runs that have come from a rank: what is not read yet. A variable one needs
/// memory after it for its largest size.
struct Received {
  Span<const uint8_t> left;
  int sender;
};

/// What a payload is.
enum class Shot : uint8_t {
  contribution,  ///< to the owner of a chunk
  shown,         ///< to all ranks, and to be added up by each
  result,        ///< to all ranks, from the owner of a chunk
};

/// The exchange of one operation, with places for its payloads. Each rank puts its payloads of a
/// shot in the order of segments.
class PYCOMM_API Exchange {
 public:
  Exchange(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Exchange() = default;
  Exchange(const Exchange&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// The rank `steps` after ours; each rank begins with another peer, so that no rank is flooded.
  int after(int steps) const { return (rank_ + steps) % size_; }
  /// Number of a rank in the text of an error.
  virtual int member(int rank) const { return rank; }
  /// Segments of each chunk that have places at once.
  virtual size_t stage() const { return SIZE_MAX; }

  /// Returns the place of a payload of ours, of segment s: of a contribution to `owner`'s chunk.
  /// In one shot that of a `result` is memory for what is not sent.
  virtual uint8_t* room(Shot shot, int owner, size_t s) = 0;
  /// Sends the payload in that place, of so many bytes.
  virtual void put(Shot shot, int owner, size_t s, size_t bytes) = 0;
  /// Called when this rank has put all contributions of a stage, and when it has put all else:
  /// moves them, where that does not happen by and by.
  virtual void flush(Shot shot) = 0;
  /// Makes the values of segment s of a chunk, before we encode them.
  virtual void make(int, size_t) {}
  /// Returns true once segment s of a rank's payloads has come: contributions to our chunk, what it
  /// shows, or its results. Our own have come once they are put and, if need be, flushed.
  virtual bool has(Shot shot, int rank, size_t s) = 0;
  /// Returns such a payload.
  virtual Span<const uint8_t> get(Shot shot, int rank, size_t s) = 0;
  /// Returns the results of segment s of that rank's chunks at all places of the plan.
  virtual Span<const Received> get_places(int, size_t) { return {}; }
  /// Lets payloads come until done() is true.
  virtual void wait(const std::function<bool()>& done) { done(); }

 private:
  const int rank_, size_;
};

}  // namespace pycomm::coded
