#include "transports/fd_passing.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <system_error>

#include "core/error.h"
#include "transports/abstract_address.h"
#include "transports/process.h"

namespace pycomm {
namespace {

constexpr Milliseconds kStep(40);  // of a wait, between two interrupt checks
constexpr Milliseconds kLongest = std::chrono::hours(24);  // that poll() can count

[[noreturn]] void throw_errno(const std::string& what) {
  const int error = errno;
  throw Error("shm: cannot " + what + ": " + std::generic_category().message(error) +
              (error == EMFILE ? "; raise the limit of open files (ulimit -n)" : ""));
}

std::string random_name() {
  uint8_t bytes[16];
  if (::getrandom(bytes, sizeof bytes, 0) != sizeof bytes) throw_errno("get random bytes");
  std::string name = "pycomm-";
  for (const uint8_t byte : bytes) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  return name;
}

bool same_user(int socket) {
  ucred peer = {};
  socklen_t length = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         peer.uid == ::geteuid();
}

/// A message of one byte that carries one descriptor.
struct Message {
  char byte = 0;
  iovec part = {&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header = {};

  Message() {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
  }
  Message(const Message&) = delete;
};

bool send_fd(int socket, int fd) {
  Message message;
  cmsghdr* item = CMSG_FIRSTHDR(&message.header);
  item->cmsg_level = SOL_SOCKET;
  item->cmsg_type = SCM_RIGHTS;
  item->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(item), &fd, sizeof fd);
  return ::sendmsg(socket, &message.header, MSG_NOSIGNAL) == 1;
}

}  // namespace

std::string host_id() {
  struct stat network = {};
  ::stat("/proc/self/ns/net", &network);
  return machine_name() + "/" + std::to_string(network.st_dev) + "/" +
         std::to_string(network.st_ino) + "/" + std::to_string(::geteuid());
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = other.release();
  }
  return *this;
}

int FileDescriptor::release() {
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

FdServer::FdServer()
    : name_(random_name()), listener_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  if (listener_.get() < 0) throw_errno("make a Unix socket");
  const AbstractAddress address(name_);
  if (::bind(listener_.get(), address.get(), address.length) != 0 ||
      ::listen(listener_.get(), SOMAXCONN) != 0) {
    throw_errno("listen on an abstract Unix socket");
  }
}

bool FdServer::serve(int fd, Milliseconds limit) {
  pollfd wanted = {listener_.get(), POLLIN, 0};
  if (::poll(&wanted, 1, static_cast<int>(std::min(limit, kLongest).count())) <= 0) return false;
  const FileDescriptor peer(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  // The peer would stay in the queue, and each further call would find it there.
  if (peer.get() < 0 && (errno == EMFILE || errno == ENFILE)) throw_errno("accept a peer");
  return peer.get() >= 0 && same_user(peer.get()) && send_fd(peer.get(), fd);
}

FileDescriptor receive_fd(const std::string& name, Deadline deadline,
                          const std::function<void()>& interrupt_check) {
  const FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket.get() < 0) throw_errno("make a Unix socket");
  const AbstractAddress address(name);
  if (::connect(socket.get(), address.get(), address.length) != 0) {
    throw_errno("connect to the rank that made the shared memory");
  }
  if (!same_user(socket.get()))
    throw Error("shm: the shared memory belongs to another user; start all ranks as one user");
  pollfd wanted = {socket.get(), POLLIN, 0};
  const auto step = [&] { return static_cast<int>(std::min(deadline.left(), kStep).count()); };
  while (::poll(&wanted, 1, step()) <= 0) {
    if (deadline.expired()) {
      throw Error("shm: the rank that made the shared memory did not pass it on within " +
                  std::to_string(deadline.limit().count()) + " ms; look at that rank's own log");
    }
    interrupt_check();
  }
  Message message;
  const ssize_t bytes = ::recvmsg(socket.get(), &message.header, MSG_CMSG_CLOEXEC);
  if (bytes < 0) throw_errno("receive the shared memory");
  if (bytes == 0)
    throw Error(
        "shm: the rank that made the shared memory closed the connection; look at its own log");
  const cmsghdr* item = CMSG_FIRSTHDR(&message.header);
  if (!item || item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) {
    throw Error((message.header.msg_flags & MSG_CTRUNC) != 0
                    ? "shm: cannot receive the shared memory: too many open files; raise the limit "
                      "of open files (ulimit -n)"
                    : "shm: the rank that made the shared memory sent no file; install the same "
                      "pycomm on all ranks");
  }
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(item), sizeof fd);
  return FileDescriptor(fd);
}

}  // namespace pycomm
