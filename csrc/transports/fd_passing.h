// Passing an open file from one process of this host to others over an abstract Unix socket, which
// has no file that could be left behind and is invisible to other network namespaces.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/descriptor.h"

namespace pycomm {

/// Returns a string that is equal for processes that may share memory: same machine
/// (transports/process.h), same user, and same network namespace. Whether they do share it shows
/// when one passes the other a file. Ranks in different network namespaces count as different
/// hosts, and could not connect to each other's socket anyway.
std::string host_id();
/// Topic under which ranks publish it.
constexpr char kHostIdTopic[] = "shm/host";

/// An owned file descriptor, closed on destruction.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(beyond_streams(fd)) {}
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;

  int get() const { return fd_; }
  int release();

 private:
  int fd_;
};

/// A server that passes a file to every process that connects, knows the name and runs as our user.
class FdServer {
 public:
  /// Listens on a name that cannot be guessed. Throws Error.
  FdServer();
  const std::string& name() const { return name_; }
  /// Serves one process that connects within `limit`. Returns true if it has served one. Throws
  /// Error if there is no descriptor for it.
  bool serve(int fd, Milliseconds limit);

 private:
  std::string name_;
  FileDescriptor listener_;
};

/// Receives the file from the server of this name. Throws Error with the reason, and whatever
/// `interrupt_check` throws, which is called now and then during the wait.
FileDescriptor receive_fd(
    const std::string& name, Deadline deadline,
    const std::function<void()>& interrupt_check = [] {});

}  // namespace pycomm
