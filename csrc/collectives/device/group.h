// DeviceGroup: ranks of one host whose data lie on GPUs. Collectives are kernels that read and
// write each other's memory through peer pointers (docs/algorithms.md, "On a GPU").
// Calls queue kernels on the caller's stream and return; nothing waits, nothing is allocated, so
// they can be captured in a CUDA graph. All ranks make the same calls in the same order; those of
// one rank must follow each other, so on several streams by events. Results are those of
// Communicator, bit for bit.
//
// A rank of the CPU (Device::cpu) runs the same kernels on the calling thread, over shared memory:
// what is tested there is what runs on a GPU without peer access.
#pragma once
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "collectives/common/collective.h"
#include "collectives/common/options.h"
#include "collectives/device/calls.h"
#include "collectives/group/failure.h"
#include "core/device.h"
#include "core/fork_guard.h"
#include "core/notice.h"
#include "transports/device/peer_workspace.h"
#include "transports/store.h"

namespace pycomm {

namespace device {

/// How many thread blocks the groups of a process may start on a GPU.
///
/// Kernels of ranks wait for each other, so they must run at once, and on each GPU groups may start
/// theirs in another order: if the blocks of some groups fill it, those of another group would wait
/// for blocks that wait for them. So all groups of a process share the capacity of a GPU, and a
/// block that is given to one group is not given to another while the first lives.
class PYCOMM_API BlockShare {
 public:
  /// Takes at most `most` blocks of `room` on GPU `index`. Groups after the first take at most half
  /// of what is left, so that later ones find some, and at least 1: with none they could do
  /// nothing.
  BlockShare(int index, int room, int most);
  ~BlockShare();
  BlockShare(const BlockShare&) = delete;
  BlockShare& operator=(const BlockShare&) = delete;

  int count() const { return count_; }
  /// Returns all blocks but `count`.
  void shrink(int count);

 private:
  const int index_;
  int count_;
};

}  // namespace device

struct DeviceGroupOptions {
  std::string group = "default";  ///< unique in the store
  Milliseconds timeout = env().timeout;
  /// Memory in which ranks share their data: "device" (peer access between GPUs), "host" (host
  /// memory that kernels reach), or "auto": device if all ranks reach each other, which is probed.
  std::string memory = "auto";
  /// Size of the memory that each rank shares, of exact collectives and of those with codecs;
  /// payloads of one tensor that cannot be cut must fit in the latter.
  size_t staging_bytes = kStagingBytes;
  size_t coded_bytes = kCodedBytes;
  static constexpr size_t kStagingBytes = size_t{32} << 20, kCodedBytes = size_t{64} << 20;
  /// Thread blocks of a collective; 0: chosen so that those of all ranks on a GPU run at once,
  /// since they wait for each other.
  int blocks = 0;
  /// Called regularly while a rank waits for the rendezvous; an exception from it ends the
  /// rendezvous: a signal, or the failure of the group that this one is for.
  std::function<void()> interrupt_check = [] {};
  std::string secret = env().secret;  ///< that was given to all ranks
};

class PYCOMM_API DeviceGroup {
 public:
  /// Runs the rendezvous with the other ranks. `index` is our GPU, or -1 for the CPU. Throws
  /// Timeout with the ranks that did not join, Error if ranks share no memory or their options
  /// differ, and what interrupt_check throws.
  DeviceGroup(std::shared_ptr<Store> store, int rank, int size, int index,
              DeviceGroupOptions options = {});
  /// The caller has synchronized with its streams, and peers no longer work with this rank.
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int index() const { return index_; }
  /// Human-readable summary, such as "4 ranks: peer access, 32 blocks".
  std::string describe() const;
  void set_timeout(Milliseconds timeout) { timeout_ = timeout.count(); }

  /// Runs a collective. Buffers are memory of our GPU. Bad arguments throw Error at once; all other
  /// errors are reported by check(). `algo` of a reduction without parts is "auto", "one_shot" or
  /// "two_shot". Work queued after a barrier starts when all ranks have reached it.
  void run(const Collective& call, Stream stream, const std::string& algo = "auto");

  // Collectives with codecs; dtypes and pieces as those of Communicator. Feedback is of a kind that
  // has_kernels() (codecs/base/feedback.h), in memory of our GPU. `found_inf`, in memory of our
  // GPU, becomes 1 if a value of the result is Inf or NaN on any rank, else stays as it was; null:
  // it is not computed.

  /// Returns the most bytes of the payload of what a codec cannot cut.
  size_t most_payload_bytes() const { return place_bytes(); }
  /// Returns how much scratch memory the stream of such an operation must provide. Throws Error if
  /// the operation is not possible: because of its feedback, or since a tensor that cannot be cut
  /// does not fit in coded_bytes. The answer is the same on all ranks.
  size_t coded_scratch_bytes(Op op, const CodedArgs& args) const;
  /// Runs one; `op` and `out` as in Communicator::run_coded().
  void run_coded(Op op, const CodedArgs& args, void* out, Stream stream,
                 float* found_inf = nullptr);

  /// Throws the error that a kernel has reported since the start, if any: Timeout that names the
  /// rank it waited for and the operation, WireMismatch, or the error of a notice.
  /// After that the group has failed. Never waits; any thread.
  void check();
  /// Ends every running and later operation on all ranks with the notice's error. Any thread, any
  /// time.
  void abort(const Notice& notice) noexcept;
  /// Does so with PeerLost, unless the rank has left in order or the group has failed already: its
  /// process is gone, and kernels may wait for it.
  void lose(int rank) noexcept;

 private:
  class Coded;  // device/coded.cpp

  DeviceGroup(const Rendezvous& rendezvous, int index, DeviceGroupOptions options);
  int choose_blocks(const Rendezvous& rendezvous);

  /// Begins an operation: checks the stream and the group, and gives the operation its number.
  device::DeviceCall begin(OpTag tag, Stream stream);
  void move(const device::MoveCall& call, int blocks, Stream stream);
  void reduce(const OpTag& tag, device::ReduceAlgo algo, const device::Runs& in, void* out,
              double factor, Stream stream);
  device::ReduceAlgo choose(size_t bytes) const;
  /// Overwrites a result, and sets the flag, if an operation before has failed when the stream gets
  /// there.
  void spoil_if_broken(void* result, size_t bytes, float* found_inf, Stream stream);
  /// Queues a barrier of all ranks on the stream, with nothing to move.
  void arrive_wait(const device::DeviceCall& call, Stream stream);
  /// Returns the blocks that this many bytes are worth.
  int blocks_for(size_t bytes) const;

  /// Memory that rank r shares in operations with codecs: it is after its slots.
  uint8_t* coded(int r) const {
    return workspace_.pointers().data[r] + 2 * slot_bytes_ * static_cast<size_t>(slots_);
  }
  /// Bytes of the place of a payload there: each rank has one for each owner, and two more.
  size_t place_bytes() const {
    constexpr size_t kAlign = 256;
    return options_.coded_bytes / static_cast<size_t>(size_ + 2) / kAlign * kAlign;
  }

  CallCheck check(Op op) const { return {rank_, size_, op}; }
  std::exception_ptr kernel_error() const;
  std::string called(uint64_t seq) const;
  void leave() noexcept;

  const ForkGuard fork_{};
  const int rank_, size_, index_;
  const DeviceGroupOptions options_;
  PeerWorkspace workspace_;
  std::optional<device::BlockShare> share_;  ///< of a GPU that is ours alone
  const int slots_;
  const size_t slot_bytes_;
  std::atomic<Milliseconds::rep> timeout_;
  Failure failure_;
  feedback::Scratch scratch_;  ///< on the CPU; one is enough, since one call is made at a time
  mutable std::mutex mutex_;   // protects what follows
  uint64_t seq_ = 0;
  std::array<OpTag, 256> recent_;
};

}  // namespace pycomm
