// Processes of this machine that are not connected with us: one can say who it is, and others can
// see whether it still runs.
#pragma once
#include <sys/types.h>

#include <string>

namespace pycomm {

/// Names this process, never again another one. Empty if /proc does not show it.
std::string process_name();

/// A process as it has named itself.
class Process {
 public:
  /// Of one that we cannot see, because it is on another machine or in another PID namespace, or
  /// that is our own, nothing is ever known.
  explicit Process(const std::string& name);

  /// It has ended, however it did.
  bool died() const;
  pid_t id() const { return id_; }

 private:
  pid_t id_ = 0;  ///< 0: not seen
  std::string birth_;
};

}  // namespace pycomm
