// Transfer: a send or receive that proceeds without its caller.
#pragma once
#include <memory>

#include "core/deadline.h"
#include "core/types.h"

namespace pycomm {

/// A posted send or receive. The buffer must stay until wait() returns or throws.
class PYCOMM_API Transfer {
 public:
  virtual ~Transfer() = default;
  /// True once wait() does not wait: also when the group has failed or is closed, and it throws.
  virtual bool done() = 0;
  /// Throws Timeout, PeerLost or Error. A timeout of 0 means the group's.
  virtual void wait(Milliseconds timeout = {}) = 0;
  /// The sender, for receives from any source.
  virtual int source() const = 0;
  /// Keeps what the buffer needs until the request is done or its group is over, whether or not a
  /// caller waits. The thread that moves the bytes releases it.
  virtual void keep(std::shared_ptr<void> thing) = 0;
};

}  // namespace pycomm
