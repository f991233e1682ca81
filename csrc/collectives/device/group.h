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
#include <functional>
#include <memory>
#include <string>

#include "collectives/common/collective.h"
#include "collectives/common/options.h"
#include "core/notice.h"
#include "transports/store.h"

namespace pycomm {

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
  /// Start of the barrier count, for tests, so that it soon passes 2^32.
  uint32_t first_barrier = 0;
  /// Called regularly while a rank waits for the rendezvous; an exception from it ends the
  /// rendezvous: a signal, or the failure of the group that this one is for.
  std::function<void()> interrupt_check = [] {};
  std::string secret = env().secret;  ///< that was given to all ranks
};

/// Size of the largest group: a host has eight or sixteen GPUs.
constexpr int kMaxDeviceRanks = 16;

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

  int rank() const;
  int size() const;
  int index() const;
  /// Human-readable summary, such as "4 ranks: peer access, 32 blocks".
  std::string describe() const;
  void set_timeout(Milliseconds timeout);

  /// Runs a collective. Buffers are memory of our GPU. Bad arguments throw Error at once; all other
  /// errors are reported by check(). `algo` of an all-reduce is "auto", "one_shot" or "two_shot".
  /// Work queued after a barrier starts when all ranks have reached it.
  void run(const Collective& call, Stream stream, const std::string& algo = "auto");

  // Collectives with codecs; dtypes and pieces as those of Communicator. Feedback is of a kind that
  // has_kernels() (codecs/base/feedback.h), in memory of our GPU. `found_inf`, in memory of our
  // GPU, becomes 1 if a value of the result is Inf or NaN on any rank, else stays as it was; null:
  // it is not computed.

  /// Returns the most bytes of the payload of what a codec cannot cut.
  size_t most_payload_bytes() const;
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
  void check() const;
  /// Ends every running and later operation on all ranks with the notice's error. Any thread, any
  /// time.
  void abort(const Notice& notice) noexcept;
  /// Does so with PeerLost, unless the rank has left in order or the group has failed already: its
  /// process is gone, and kernels may wait for it.
  void lose(int rank) noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pycomm
