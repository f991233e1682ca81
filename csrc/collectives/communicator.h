// A group of ranks and what they can do together. Calls block until this rank's part is done; they
// run on the caller's thread, one at a time (queue.h has the in-order thread for async callers).
//
// Every element is reduced by one owner, in rank order (on several nodes: node by node), so all
// ranks end with the same bits whatever the message size, bucket layout, segmenting or arrival.
#pragma once
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "codecs/codec.h"
#include "codecs/feedback.h"
#include "collectives/parts.h"
#include "core/deadline.h"
#include "core/env.h"
#include "core/op.h"
#include "core/trace.h"
#include "core/types.h"
#include "transports/shared_heap.h"
#include "transports/store.h"

namespace pycomm {

class Communicator;

/// How a group talks. Defaults are the environment's (core/env.h).
struct CommunicatorOptions {
  std::string group = "default";  ///< unique in the store
  Milliseconds timeout = env().timeout;
  std::string transport = env().transport;  ///< "auto", "shm", "tcp" or "local" (threads)
  std::string algo = env().algo;            ///< one of kAlgoNames
  int sockets = env().sockets;
  std::string checksum = env().checksum;  ///< "auto", "payload" or "header"
  std::string check = env().check;        ///< "none" or "results"
  std::string interface = env().interface;
  double link_bytes_per_second = env().link_bytes_per_second;
  std::string secret = env().secret;
  bool tls = env().tls;  ///< TCP connections are encrypted
  /// For the trace: what the group is for, and its members' numbers among all processes; empty: as
  /// in the group.
  std::string description;
  std::vector<int> global_ranks;
  int trace_size = env().trace_size;  ///< operations that the group remembers
  /// A group that these ranks are in already, and their numbers there: who dies there while this
  /// group is made is missed at once. Only used to make the group.
  const Communicator* parent = nullptr;
  std::vector<int> parent_ranks;
  /// Called now and then while this rank waits for the others; what it throws ends the meeting.
  std::function<void()> interrupt;
  /// For tests: pieces in which channels pipeline, so that small inputs take many segments.
  size_t segment_bytes = 0;  ///< 0: chosen by size
  /// For tests: number of the node of each rank. Ranks of different nodes share no memory and talk
  /// by TCP. Empty: as it is.
  std::vector<int> nodes;
};

/// A part of a bucket that has a codec and feedback of its own: one parameter's gradient. Blocks
/// never straddle pieces.
struct Piece {
  size_t offset = 0;  ///< in the bucket, in elements; pieces ascend and cover the bucket
  size_t numel = 0;
  const Codec* codec = nullptr;
  uint32_t tensor = 0;  ///< number of the parameter, equal on all ranks; names random numbers
  /// Error of what this rank sends: memory of `numel` values, in reduce_scatter_coded of as many
  /// for each rank.
  feedback::Feedback worker;
  /// Error of what this rank sends back for the elements that it owns. Only the owned part is
  /// touched.
  feedback::Feedback owner;
  /// Of EF21: the result is added to this, float32 [numel], on every rank.
  feedback::Memory mean;
};

/// Floats that a coded operation reads and writes: float32, float16 or bfloat16. It reckons in
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
  uint64_t seed = 0;    ///< equal on all ranks; the rank is mixed in
  uint32_t step = 0;
};

class PYCOMM_API Communicator {
 public:
  /// Meets the other ranks. Throws Timeout with the ranks that did not come.
  Communicator(std::shared_ptr<Store> store, int rank, int size, CommunicatorOptions options = {});
  /// Leaves; peers that still wait for us get PeerLost.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const;
  int size() const;
  Milliseconds timeout() const;
  void set_timeout(Milliseconds timeout);
  /// The node of each rank, if collectives go node by node; else empty.
  std::vector<int> levels() const;
  /// "2 ranks: shm to 1" and the like, for people.
  std::string describe() const;
  /// Bytes that this rank has handed to TCP, and to anything, since the start.
  uint64_t wire_bytes() const;
  uint64_t sent_bytes() const;

  /// Memory that peers on this host read and write in place, so that collectives on it copy nothing
  /// if all ranks' buffers are of this kind; ordinary memory where ranks share none. Aligned to 64
  /// bytes or more. It may be used and let go of after the communicator is gone.
  std::shared_ptr<void> allocate(size_t bytes);
  /// The heap behind allocate(), or null: for allocators that free by address.
  std::shared_ptr<SharedHeap> heap() const;

  // Collectives. A timeout of 0 means the group's. After an error in the middle of one, every rank
  // gets an error and the group is over: all later calls throw that error again.

  void all_reduce(void* data, size_t numel, DType dtype, ReduceOp op, double factor = 1.0,
                  Milliseconds timeout = {});
  /// All-reduce with codecs. Returns true if every value of the result is finite (the same answer
  /// on all ranks), also as 16 bits.
  bool all_reduce_coded(const CodedArgs& args, Milliseconds timeout = {});
  /// The first half of it: `args.data` has a row for each rank, laid out as the pieces say, and
  /// `out`, of the same dtype, gets the sum or average of our rows. It may be our row of the data.
  bool reduce_scatter_coded(const CodedArgs& args, void* out, Milliseconds timeout = {});
  /// Row r of `out` gets what rank r has encoded of its row, `args.data`, also on rank r itself.
  /// `args.data` may be our row of `out`.
  bool all_gather_coded(const CodedArgs& args, void* out, Milliseconds timeout = {});
  /// `out` gets the reduced part of this rank. Part r has one size on all ranks, but parts may
  /// differ.
  void reduce_scatter(const ConstParts& in, void* out, DType dtype, ReduceOp op,
                      double factor = 1.0, Milliseconds timeout = {});
  void reduce_scatter(const void* in, void* out, size_t numel, DType dtype, ReduceOp op,
                      double factor = 1.0, Milliseconds timeout = {}) {
    reduce_scatter(ConstParts(in, numel), out, dtype, op, factor, timeout);
  }
  /// Part r of `out` gets the `in` of rank r, which has its size: equal on all ranks, but parts may
  /// differ. `in` may be our part of `out`.
  void all_gather(const void* in, const Parts& out, DType dtype, Milliseconds timeout = {});
  void all_gather(const void* in, void* out, size_t numel, DType dtype, Milliseconds timeout = {}) {
    all_gather(in, Parts(out, numel), dtype, timeout);
  }
  /// Part r of `in` goes to rank r, which expects as many elements; all sizes may differ.
  void all_to_all(const ConstParts& in, const Parts& out, DType dtype, Milliseconds timeout = {});
  void broadcast(void* data, size_t numel, DType dtype, int root, Milliseconds timeout = {});
  /// `out` is written at the root only; elsewhere it may be null.
  void reduce(const void* in, void* out, size_t numel, DType dtype, ReduceOp op, int root,
              double factor = 1.0, Milliseconds timeout = {});
  /// Part r of the root's `out` gets the `numel` elements of rank r; sizes may differ. Elsewhere
  /// `out` is not looked at.
  void gather(const void* in, size_t numel, const Parts& out, DType dtype, int root,
              Milliseconds timeout = {});
  void gather(const void* in, void* out, size_t numel, DType dtype, int root,
              Milliseconds timeout = {}) {
    gather(in, numel, Parts(out, numel), dtype, root, timeout);
  }
  /// `out` gets this rank's part of the root's `in`: `numel` elements. Elsewhere `in` is not looked
  /// at.
  void scatter(const ConstParts& in, void* out, size_t numel, DType dtype, int root,
               Milliseconds timeout = {});
  void scatter(const void* in, void* out, size_t numel, DType dtype, int root,
               Milliseconds timeout = {}) {
    scatter(ConstParts(in, numel), out, numel, dtype, root, timeout);
  }
  void barrier(Milliseconds timeout = {});

  /// With the check "results": the next operation fails on all ranks if `digest`, which is not 0,
  /// differs among them; the error calls it `what`. It replaces the one before. All ranks call this
  /// between the same two operations.
  void compare(const std::string& what, uint32_t digest);
  /// Whether the group makes that check.
  bool compares() const;

  // Point to point: matched by (peer, tag) in order of posting, on a lane of its own.

  /// A posted send or receive. The buffer must stay until wait() returns or throws.
  class PYCOMM_API Request {
   public:
    virtual ~Request() = default;
    virtual bool done() = 0;
    /// Throws Timeout, PeerLost or Error. A timeout of 0 means the group's.
    virtual void wait(Milliseconds timeout = {}) = 0;
    /// Who sent it; for receives from any source.
    virtual int source() const = 0;
  };
  std::shared_ptr<Request> send(const void* data, size_t bytes, int dst, int tag = 0);
  /// `src` -1 receives from any rank.
  std::shared_ptr<Request> recv(void* data, size_t bytes, int src, int tag = 0);

  /// The recent operations of this rank. Any thread.
  const Trace& trace() const;
  /// For callers that queue operations: notes one in the trace when it is issued, from any thread.
  uint64_t note_issued(const OpTag& tag);
  /// The next collective is the one so noted; 0: is not. By the thread that then calls it.
  void resume(uint64_t issued);

  /// Ends every running and later operation on all ranks with `reason`. Any thread, any time.
  void abort(const std::string& reason) noexcept;

  // What is known of the group, to other groups of its ranks. Any thread.

  /// Why it is over, as far as this rank has taken notice; null if it is not.
  std::exception_ptr over() const;
  /// The rank's process is gone.
  bool lost(int rank) const;
  /// What every rank is doing, as in the text of a Timeout: those to blame first, each line after a
  /// line break. Takes a moment if a rank does not answer.
  std::string whereabouts() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pycomm
