// Failure: the first error of a group. After it every rank stores it, and every later call throws
// it again.
//
// When a rank dies in the middle of an operation:
//   1. Transports notice it: on its host that its process has ended (FailureDetector of
//      transports/shm), elsewhere that a rank of that host says so, or that its port refuses
//      connections (transports/tcp/connect: Connector::retry gives up, Control::refused marks it,
//      and Control::check throws). PeerLost is made by lost() and error_of() (core/notice.h), with
//      the rank, its address, and how it is known.
//   2. Over channels ChannelMesh::check() lets an operation go on that needs nothing more of the
//      dead rank; over shared memory Window asks the FailureDetector itself.
//   3. Communicator::Impl::run() catches the error; its over() calls end(), which asks all ranks
//      what they are doing, stores the error with that table, and sends it to all
//      (Transport::abort).
//   4. Waits of the others throw Aborted, of which end() makes the same error (from_notice).
//   5. The caller gets it by rethrow_in(), and so does every later call; binding/core/errors.h and
//      binding/torch/work.h make it Python's.
// Kernels among the GPUs of a host are ended by DeviceGroup::lose() (device/group.h).
#pragma once
#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/op.h"

namespace pycomm {

class ChannelMesh;
class Trace;
enum class Lane : uint8_t;

class Failure {
 public:
  bool happened() const { return happened_.load(std::memory_order_acquire); }
  /// Text of the error; empty if there is none.
  std::string text() const;
  /// Keeps the first error; later ones are its consequences.
  void set(std::exception_ptr error);
  /// Null if there is none.
  std::exception_ptr error() const { return happened() ? first_ : nullptr; }
  void rethrow() const {
    if (happened()) std::rethrow_exception(first_);
  }
  /// Throws the error to a caller of `call`, which the error then names. There must be an error.
  [[noreturn]] void rethrow_in(const OpTag& call, int rank) const;
  /// Called with an error in flight that no rank can recover from: tells all ranks. Afterwards
  /// there is an error. `lane` is the one that the caller drives; what `advice` returns is added to
  /// the text of calls that differ.
  void end(ChannelMesh& mesh, Lane lane, Trace& trace, const std::function<std::string()>& advice);
  /// Ends every running and later operation on all ranks with `reason`. Any thread, any time.
  void abort(ChannelMesh& mesh, Trace& trace, const std::string& reason) noexcept;

 private:
  std::atomic<bool> happened_{false};
  mutable std::mutex mutex_;
  std::exception_ptr first_;
  std::string added_;  ///< to what rethrow_in() throws, on this rank only
};

/// Formats ranks, given in order, as "ranks 0-2, 4".
std::string rank_list(const std::vector<int>& ranks);

/// State of every rank, one line each. Any thread.
std::string describe_ranks(ChannelMesh& mesh);

}  // namespace pycomm
