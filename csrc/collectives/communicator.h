// Communicator: a group of ranks and its collectives. A call blocks until this rank's part is done
// and runs on the caller's thread, one call at a time (queue.h has the in-order thread for async
// callers).
//
// Every element is reduced by one owner, in rank order (on several nodes: node by node), so all
// ranks end with the same bits whatever the message size, bucket layout, segmenting or arrival.
#pragma once
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "collectives/common/collective.h"
#include "collectives/common/options.h"
#include "collectives/common/transfer.h"
#include "core/deadline.h"
#include "core/env.h"
#include "core/op.h"
#include "core/trace.h"
#include "core/types.h"
#include "transports/shm/heap.h"
#include "transports/store.h"

namespace pycomm {

class PYCOMM_API Communicator final : public ParentGroup {
 public:
  /// Runs the rendezvous with the other ranks. Throws Timeout with the ranks that did not join.
  Communicator(std::shared_ptr<Store> store, int rank, int size, CommunicatorOptions options = {});
  /// Closes the group; peers that still wait for this rank get PeerLost.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const;
  int size() const override;
  Milliseconds timeout() const;
  void set_timeout(Milliseconds timeout);
  /// Node of each rank if collectives go node by node, else empty.
  std::vector<int> levels() const;
  /// Begin of each rank's share of a coded all-reduce in 65536 parts, and 65536, if shares are not
  /// equal; else empty. They are those of nodes where collectives go node by node.
  std::vector<uint32_t> shares() const;
  /// Human-readable summary, such as "2 ranks: shm to 1".
  std::string describe() const;
  /// Returns which algorithm a collective takes now, and why, in words. `bytes`: of the longest
  /// buffer of a rank; `coded`: what it encodes, without data; null: nothing.
  std::string explain(Op op, size_t bytes, const CodedArgs* coded = nullptr) const;
  /// Names of its transports: "shm", "tcp", both, or none in a group of one rank.
  std::vector<std::string> transports() const;
  /// Bytes that this rank has handed to TCP, and to any transport, since the start.
  uint64_t wire_bytes() const;
  uint64_t sent_bytes() const;

  /// Allocates memory that peers on this host read and write in place, so that collectives on it
  /// copy nothing if all ranks' buffers are of this kind. It is ordinary memory where ranks share
  /// none. Aligned to 64 bytes or more. It may be used and freed after the communicator is gone.
  std::shared_ptr<void> allocate(size_t bytes);
  /// Heap behind allocate(), or null; for allocators that free by address.
  std::shared_ptr<SharedHeap> heap() const;

  // Collectives. A timeout of 0 means the group's. After an error in the middle of one, every rank
  // gets an error and the group has failed: all later calls throw that error again.

  /// Runs a collective. A `reduce_scatter` gets the reduced part of this rank, an `all_gather` the
  /// input of rank r as part r: part r has one size on all ranks, but parts may differ. In an
  /// `all_to_all`, a `gather` and a `scatter` only the two ranks of a part know its size. Where the
  /// part that a rank has for itself has two sizes, which other ranks may not see, the group ends.
  void run(const Collective& call, Milliseconds timeout = {});
  void barrier(Milliseconds timeout = {}) { run({Op::barrier, DType::uint8}, timeout); }
  /// Gathers `bytes` of each rank, by which ranks agree on the path of tensors on accelerators. A
  /// rank that makes another call meanwhile, since its tensors are on the CPU, is told so.
  void exchange_paths(const void* in, void* out, size_t bytes);

  /// Runs an operation with codecs, and returns true if every value of the result is finite (the
  /// same answer on all ranks), also as 16 bits. An all-reduce works on `args.data`, `out` is
  /// ignored. A reduce_scatter, its first half: `args.data` has a row for each rank, laid out as
  /// the pieces say, and `out`, of the same dtype, gets the sum or average of our rows; it may be
  /// our row of the data.
  bool run_coded(Op op, const CodedArgs& args, void* out = nullptr, Milliseconds timeout = {});

  // Point to point. Messages are matched by (peer, tag) in order of posting, on a lane of its own.

  using Request = pycomm::Transfer;
  std::shared_ptr<Request> send(const void* data, size_t bytes, int dst, int tag = 0);
  /// `src` -1 receives from any rank.
  std::shared_ptr<Request> recv(void* data, size_t bytes, int src, int tag = 0);

  /// Ends all sends and receives on this rank alone: waits for requests that are not done throw,
  /// and no more can be posted. No thread waits any more when it returns. It is for a group that is
  /// about to be destroyed while other threads wait. Callable from any thread that does not hold a
  /// lock that they need.
  void end_requests();

  /// Recent operations of this rank. Any thread.
  const Trace& trace() const;
  /// Notes an operation in the trace when it is issued, for callers that queue operations. Any
  /// thread. Returns the number of the record.
  uint64_t note_issued(const OpTag& tag);
  /// Notes that the calling thread issues a collective, which another one may run.
  void note_caller();
  /// Links the next collective to the record `issued`; 0: the next collective has no record. Called
  /// by the thread that then makes the call.
  void resume(uint64_t issued);

  /// Ends every running and later operation on all ranks with `reason`. Any thread, any time.
  void abort(const std::string& reason) noexcept;

  // State of the group, as seen by other groups of its ranks. Any thread.

  /// The error that the group failed with, as far as this rank knows; null if it has not failed.
  std::exception_ptr over() const override;
  /// True if the rank's process is gone.
  bool lost(int rank) const override;
  bool uses_network() const override;
  /// State of every rank, as in the text of a Timeout: the ranks to blame come first, each line
  /// after a line break. Takes a moment if a rank does not answer.
  std::string describe_ranks() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pycomm
