// The first error of a group. It ends the group: every rank stores it, and every later call throws
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
  /// Of the error; empty if there is none.
  std::string text() const;
  /// Keeps the first error; later ones are its echoes.
  void set(std::exception_ptr error);
  /// Null if there is none.
  std::exception_ptr error() const { return happened() ? first_ : nullptr; }
  void rethrow() const {
    if (happened()) std::rethrow_exception(first_);
  }
  /// Throws it to who hears of it in `call`, which the error then names. There must be one.
  [[noreturn]] void rethrow_in(const OpTag& call, int rank) const;

 private:
  std::atomic<bool> happened_{false};
  std::mutex mutex_;
  std::exception_ptr first_;
};

class Digests;
class Mesh;
enum class Lane : uint8_t;

/// `error` with what every rank is doing in its text, if it is one that ends a group because of
/// other ranks. May take a moment. `lane` is the one that the caller drives; `digests` those of its
/// calls, or null.
std::exception_ptr explained(const std::exception_ptr& error, Mesh& mesh, Lane lane,
                             const Digests* digests);

/// What every rank is doing, in lines. Any thread.
std::string whereabouts(Mesh& mesh);

/// What a rank tells its peers when it gives up: the kind of the error, then its text. Transports
/// carry it as plain words.
std::string to_reason(const std::exception_ptr& error);

/// The error behind `error`: if its text holds a peer's reason, an exception of the kind that the
/// peer had; otherwise `error` itself.
std::exception_ptr from_reason(const std::exception_ptr& error);

}  // namespace pycomm
