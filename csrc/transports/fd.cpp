// Owned file descriptors.
#include "transports/fd.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <mutex>
#include <set>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace pycomm {
namespace {

// The descriptors that children must not keep. The kernel closes descriptors on exec, but not on
// fork.
class Registry {
 public:
  static Registry& get() {
    static Registry* registry = new Registry;  // outlives every owner of a descriptor
    return *registry;
  }

  void add(int fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    fds_.insert(fd);
  }

  void close(int fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    fds_.erase(fd);
    ::close(fd);
  }

  void forget(int fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    fds_.erase(fd);
  }

 private:
  Registry() {
    ::pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); },
                     [] { get().forget_all(); });
  }

  // Runs in the child, before anything else. The numbers stay taken: their owners still exist here,
  // and will close them.
  void forget_all() {
    const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    for (const int fd : fds_) {
      if (null < 0 || ::dup3(null, fd, O_CLOEXEC) < 0) ::close(fd);
    }
    if (null >= 0) ::close(null);
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::set<int> fds_;
};

}  // namespace

int beyond_streams(int fd) {
  if (fd < 0 || fd > STDERR_FILENO) return fd;
  const int moved = ::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  if (moved < 0) return fd;  // no number is left
  ::close(fd);
  return moved;
}

Fd::Fd(int fd, Scope scope) : fd_(beyond_streams(fd)) {
  if (fd_ >= 0 && scope == Scope::process) Registry::get().add(fd_);
}

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void Fd::reset() {
  if (fd_ >= 0) Registry::get().close(fd_);
  fd_ = -1;
}

int Fd::release() {
  if (fd_ >= 0) Registry::get().forget(fd_);
  return std::exchange(fd_, -1);
}

std::string error_text(int error) {
  std::string text = std::generic_category().message(error);
  if (error == ENFILE) text += ": the machine's limit is fs.file-max (sysctl)";
  if (error != EMFILE) return text;
  rlimit limit = {};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return text + ": the process has no descriptor left of the " + std::to_string(limit.rlim_cur) +
         " that RLIMIT_NOFILE allows it; raise it (ulimit -n), or close files";
}

void throw_errno(const std::string& what) { throw Error(what + ": " + error_text(errno)); }

}  // namespace pycomm
