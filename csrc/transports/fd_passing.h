// Hands an open file from one process of this host to others, over an abstract Unix socket: it has
// no file that could be left behind, and no other network namespace sees it.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/deadline.h"

namespace pycomm {

/// Equal for processes that may share memory: same running kernel, same user, and same network
/// namespace. Ranks in different ones stand for different hosts, and could not find each other's
/// socket anyway.
std::string host_id();

/// Closes on destruction.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;

  int get() const { return fd_; }
  int release();

 private:
  int fd_;
};

/// Gives a file to whoever connects, knows the name and runs as our user.
class FdServer {
 public:
  /// Listens on a name that nobody can guess. Throws Error.
  FdServer();
  const std::string& name() const { return name_; }
  /// Serves whoever comes within `limit`. Returns true if it has served anybody.
  bool serve(int fd, Milliseconds limit);

 private:
  std::string name_;
  FileDescriptor listener_;
};

/// The other side. Throws Error, with the reason.
FileDescriptor receive_fd(const std::string& name, Deadline deadline);

}  // namespace pycomm
