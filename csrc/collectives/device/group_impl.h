// Implementation of DeviceGroup, of device/group.cpp and device/coded.cpp.
#pragma once
#include <array>
#include <atomic>
#include <mutex>
#include <optional>

#include "collectives/device/blocks.h"
#include "collectives/device/calls.h"
#include "collectives/device/group.h"
#include "collectives/group/failure.h"
#include "core/device.h"
#include "core/fork_guard.h"
#include "transports/device/peer_workspace.h"

namespace pycomm {

class DeviceGroup::Impl {
 public:
  class Coded;  // device/coded.cpp

  Impl(const Rendezvous& rendezvous, int index, DeviceGroupOptions options);
  ~Impl();

  int rank() const { return rank_; }
  int size() const { return size_; }
  int index() const { return index_; }
  std::string describe() const;
  void set_timeout(Milliseconds timeout) { timeout_ = timeout.count(); }

  /// Begins an operation: checks the stream and the group, and gives the operation its number.
  device::DeviceCall begin(OpTag tag, Stream stream);
  void move(const device::MoveCall& call, int blocks, Stream stream);
  void reduce(device::ReduceCall call, const OpTag& tag, double factor, Stream stream);
  void all_reduce(void* data, const OpTag& tag, device::ReduceAlgo algo, double factor,
                  Stream stream);
  device::ReduceAlgo choose(size_t bytes) const;
  /// Overwrites a result, and sets the flag, if an operation before has failed when the stream gets
  /// there.
  void spoil_if_broken(void* result, size_t bytes, float* found_inf, Stream stream);
  /// Queues a barrier of all ranks on the stream, with nothing to move.
  void arrive_wait(const device::DeviceCall& call, Stream stream);

  /// Memory that rank r shares in operations with codecs: it is after its slots.
  uint8_t* coded(int r) const { return workspace_.pointers().data[r] + exact_bytes(); }
  size_t coded_bytes() const { return options_.coded_bytes; }
  /// Bytes of the place of a payload there: each rank has one for each owner, and two more.
  size_t place_bytes() const {
    constexpr size_t kAlign = 256;
    return coded_bytes() / static_cast<size_t>(size_ + 2) / kAlign * kAlign;
  }
  /// Scratch for feedback on the CPU. One is enough, since one call is made at a time.
  feedback::Scratch& scratch() { return scratch_; }

  /// Returns the blocks that this many bytes are worth; for a call whose size is not known to all
  /// ranks, the most.
  int blocks_for(size_t bytes) const;
  int most_blocks() const { return slots_; }

  void check();
  void abort(const Notice& notice) noexcept;
  void lose(int rank) noexcept;

  CallCheck check(Op op) const { return {rank_, size_, op}; }

 private:
  size_t exact_bytes() const { return 2 * slot_bytes_ * static_cast<size_t>(slots_); }
  int choose_blocks(const Rendezvous& rendezvous);
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
  feedback::Scratch scratch_;
  mutable std::mutex mutex_;  // protects what follows
  uint64_t seq_ = 0;
  std::array<OpTag, 256> recent_;
};

}  // namespace pycomm
