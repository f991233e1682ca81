#include "transports/host_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "core/error.h"
#include "transports/process.h"
#include "transports/seal.h"

namespace pycomm {
namespace {

constexpr Milliseconds kStep(40);  // of a wait, between two interrupt checks
constexpr Milliseconds kLongest = std::chrono::hours(24);  // that poll() can count

Fd make_socket(int flags = SOCK_NONBLOCK) {
  return Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0));
}

/// Calls bind() or connect() with an abstract name.
template <typename Call>
int with_name(const Call& call, const Fd& socket, const std::string& name) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const size_t bytes = std::min(name.size(), sizeof address.sun_path - 1);
  std::memcpy(address.sun_path + 1, name.data(), bytes);
  return call(socket.get(), reinterpret_cast<const sockaddr*>(&address),
              static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes));
}

/// True if the process at the other end is one of our user.
bool same_user(const Fd& socket) {
  ucred peer = {};
  socklen_t length = sizeof peer;
  const bool known = ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0;
  return known && peer.uid == ::geteuid();
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

bool send_fd(const Fd& socket, int fd) {
  Message message;
  cmsghdr* item = CMSG_FIRSTHDR(&message.header);
  item->cmsg_level = SOL_SOCKET;
  item->cmsg_type = SCM_RIGHTS;
  item->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(item), &fd, sizeof fd);
  return ::sendmsg(socket.get(), &message.header, MSG_NOSIGNAL) == 1;
}

}  // namespace

std::string host_id() {
  struct stat network = {};
  ::stat("/proc/self/ns/net", &network);
  return machine_name() + "/" + std::to_string(network.st_dev) + "/" +
         std::to_string(network.st_ino);
}

std::string sharers_id() {
  struct stat numbers = {};
  ::stat("/proc/self/ns/pid", &numbers);
  return host_id() + "/" + std::to_string(numbers.st_ino) + "/" + std::to_string(::geteuid());
}

HostSocket::HostSocket() : name_("pycomm-" + random_secret()), listener_(make_socket()) {
  if (!listener_) throw_errno("shm: cannot make a Unix socket");
  if (with_name(::bind, listener_, name_) != 0 || ::listen(listener_.get(), SOMAXCONN) != 0) {
    throw_errno("shm: cannot listen on an abstract Unix socket");
  }
}

bool HostSocket::serve(int fd, Milliseconds limit) const {
  pollfd wanted = {listener_.get(), POLLIN, 0};
  if (::poll(&wanted, 1, static_cast<int>(std::min(limit, kLongest).count())) <= 0) return false;
  const Fd peer(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  // The peer would stay in the queue, and each further call would find it there.
  if (!peer && lacks_descriptor(errno)) throw_errno("shm: cannot accept a peer");
  return peer && same_user(peer) && send_fd(peer, fd);
}

Fd receive_fd(const std::string& name, Deadline deadline,
              const std::function<void()>& interrupt_check) {
  const Fd socket = make_socket(0);  // it waits where many others do
  if (!socket) throw_errno("shm: cannot make a Unix socket");
  if (with_name(::connect, socket, name) != 0) {
    throw_errno("shm: cannot connect to the rank that made the shared memory");
  }
  if (!same_user(socket))
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
  if (bytes < 0) throw_errno("shm: cannot receive the shared memory");
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
  return Fd(fd);
}

}  // namespace pycomm
