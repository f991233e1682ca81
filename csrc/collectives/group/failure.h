// Failure: the first error of a group. After it every rank stores it, and every later call throws
// it again.
#pragma once
#include <atomic>
#include <exception>
#include <mutex>
#include <string>

#include "core/error.h"
#include "core/op.h"

namespace pycomm {

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
  /// Adds a sentence to what rethrow_in() throws, on this rank only.
  void add(const std::string& sentence);
  /// Throws the error to a caller of `call`, which the error then names. There must be an error.
  [[noreturn]] void rethrow_in(const OpTag& call, int rank) const;

 private:
  std::atomic<bool> happened_{false};
  mutable std::mutex mutex_;
  std::exception_ptr first_;
  std::string added_;
};

class ChannelMesh;
enum class Lane : uint8_t;

/// Returns `error` with the state of every rank in its text, if it is an error that ends a group
/// because of other ranks. May take a moment. `lane` is the one that the caller drives. `order`:
/// adds this to the text of calls that differ.
std::exception_ptr with_rank_states(const std::exception_ptr& error, ChannelMesh& mesh, Lane lane,
                                    const std::string& order);

/// State of every rank, one line each. Any thread.
std::string describe_ranks(ChannelMesh& mesh);

}  // namespace pycomm
