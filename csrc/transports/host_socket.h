// Host socket: a Unix socket with an abstract name that nobody can guess. It has no file that could
// be left behind, and only processes of the same running kernel and network namespace can connect
// to it, as long as its process lives. It passes open files on to such processes.
#pragma once
#include <functional>
#include <string>

#include "core/deadline.h"
#include "transports/fd.h"

namespace pycomm {

class HostSocket {
 public:
  /// Listens. Throws Error.
  HostSocket();
  const std::string& name() const { return name_; }
  /// Passes the file to one process of our user that connects within `limit`. Returns true if it
  /// has. Throws Error if there is no descriptor for it.
  bool serve(int fd, Milliseconds limit) const;

 private:
  std::string name_;
  Fd listener_;  // not in forked children, which would keep it open
};

/// Receives the file from the socket of this name. Throws Error with the reason, and whatever
/// `interrupt_check` throws, which is called now and then during the wait.
Fd receive_fd(
    const std::string& name, Deadline deadline,
    const std::function<void()>& interrupt_check = [] {});

/// Returns a string that is equal for processes of one host: same machine (transports/process.h)
/// and same network namespace. Ranks in different network namespaces count as different
/// hosts, and could not connect to each other's socket anyway.
std::string host_id();
/// Returns a string that is equal for processes of one host and user that see each other by the
/// same process numbers, and so may share memory: others could not tell when one of them dies.
/// Whether they do share it shows when one passes the other a file.
std::string sharers_id();
/// Topic under which ranks publish it.
constexpr char kSharersTopic[] = "shm/host";

}  // namespace pycomm
