// Numbers of file descriptors.
#pragma once
#include <fcntl.h>
#include <unistd.h>

namespace pycomm {

/// Returns a descriptor that has none of the numbers of standard streams: in a process that has
/// closed its streams the kernel gives these to the next files, and whatever a library then prints
/// as a warning would be written to a socket or to shared memory. Takes one that the caller owns.
inline int beyond_streams(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int moved = ::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  if (moved < 0) return fd;  // no number is left
  ::close(fd);
  return moved;
}

}  // namespace pycomm
